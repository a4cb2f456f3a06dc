// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "runtime/shards.h"
#include "runtime/task.h"

// Virtual time for a whole program. Whatever links virtual_time.cc has a steady_clock and a
// system_clock that stand still but for World::RunFor, timers of Asio included, and so runs the
// code of the daemons (Deadline, Periodic, AsyncEvent, Clock::System) as fast as its work allows
// and in the same order each time. One thread: code that uses a BlockingPool or waits on a
// condition variable has no place in it. CPU time (CLOCK_PROCESS_CPUTIME_ID) stays real.
namespace dsec::runtime::testing {

// The time that the program has, since the start of steady_clock; it begins at an hour.
MonoTime VirtualNow();

// Processes of a simulation: an event loop each, run in turns by the calling thread. A process that
// is paused runs nothing, as one that was sent SIGSTOP; its timers are late when it goes on.
class World {
 public:
  using Process = size_t;
  // The least step of time: timers are that late at most.
  explicit World(std::chrono::nanoseconds step = std::chrono::milliseconds(1));
  // Drops every suspended coroutine, in no particular order.
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  Process Add();
  Executor at(Process process) const;
  void Pause(Process process);
  void Continue(Process process);
  // Its coroutines are dropped where they stand, nothing of it runs again: kill -9. What its
  // objects hold must be owned elsewhere until then.
  void Kill(Process process);

  // Runs what is ready, then moves time on by a step, until `time` has passed.
  void RunFor(std::chrono::nanoseconds time);
  // Until `done` holds, looked at after each step; false when `most` has passed before.
  bool RunUntil(const std::function<bool()>& done, std::chrono::nanoseconds most);
  // Runs a task in a process and the world until it has ended. kDeadlineExceeded "test.too_long".
  template <typename T>
  Result<T> Await(Process process, Task<T> task,
                  std::chrono::nanoseconds most = std::chrono::minutes(10)) {
    auto result = std::make_shared<std::optional<Result<T>>>();
    internal::StartDetached(at(process), Into<T>(std::move(task), result));
    if (!RunUntil([&] { return result->has_value(); }, most)) {
      return Error(Code::kDeadlineExceeded, "test.too_long", "the task has not ended");
    }
    return *std::move(*result);
  }

 private:
  struct Loop;
  template <typename T>
  static boost::asio::awaitable<void> Into(Task<T> task,
                                           std::shared_ptr<std::optional<Result<T>>> result) {
    auto value = co_await internal::Caught(std::move(task));
    result->emplace(std::move(value));
  }
  void RunReady();

  const std::chrono::nanoseconds step_;
  std::vector<std::unique_ptr<Loop>> loops_;
};

}  // namespace dsec::runtime::testing

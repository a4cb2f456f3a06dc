// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/async_event.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::edge {

// A line in front of something scarce: only its head tries. One lane a project, each in order of
// arrival; the lanes are served in turn, so that many of one project do not hold up a few of
// another. Thread-safe; those who wait stay on their own shards.
class FairQueue {
 public:
  // Takes the thing, or says why not: kResourceExhausted means "wait", any other code ends the
  // wait. Called with the queue's lock held, on the shard of the one who waits.
  using Take = std::function<Result<void>()>;

  // One who waits. Made on the shard where Enter will run.
  class Ticket {
   public:
    explicit Ticket(runtime::Executor executor, std::string lane = {})
        : executor_(std::move(executor)), lane_(std::move(lane)) {}
    // Ends the wait with kCancelled "queue.cancelled", now or when it begins. On the ticket's
    // shard.
    void Cancel();

   private:
    friend class FairQueue;
    const runtime::Executor executor_;
    const std::string lane_;
    runtime::AsyncEvent wake_;
    bool cancelled_ = false;
  };

  // The head tries again after `retry` at the latest even when nobody pokes: for things whose
  // return nobody announces. `max_waiting` is that of one lane; all together are four times as
  // many.
  FairQueue(std::string_view full_reason, size_t max_waiting, std::chrono::milliseconds retry)
      : full_reason_(full_reason), max_waiting_(max_waiting), retry_(retry) {}

  // Ok when `take` was. At the deadline the last refusal of `take`; kResourceExhausted with
  // full_reason when too many wait.
  runtime::Task<void> Enter(std::shared_ptr<Ticket> ticket, Take take, runtime::Deadline deadline);
  // The thing may be there again. Any thread.
  void Poke();
  size_t waiting() const;
  // Wakes nobody any more: for the end, when the shards of those who wait may be gone before them.
  void Close();

 private:
  class InLine;
  static void Wake(const std::shared_ptr<Ticket>& ticket);
  void WakeHeadLocked();
  const std::shared_ptr<Ticket>& HeadLocked() const { return lanes_.at(turns_.front()).front(); }
  Error RefusalLocked() const;

  const std::string_view full_reason_;
  const size_t max_waiting_;
  const std::chrono::milliseconds retry_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::map<std::string, std::deque<std::shared_ptr<Ticket>>> lanes_;  // none is empty
  std::deque<std::string> turns_;  // the lanes, the next to be served in front
  size_t waiting_ = 0;
  std::optional<Error> refusal_;  // what the head was told last
};

}  // namespace dsec::edge

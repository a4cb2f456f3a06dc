// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "runtime/task.h"

namespace dsec::runtime {

// Runs a coroutine again and again on one shard, one period after the start of the last run and
// never two at once; a run that takes longer than the period drops the runs it covered. The first
// run comes one period after construction.
class Periodic {
 public:
  Periodic(Executor executor, std::string name, std::chrono::nanoseconds period,
           std::function<boost::asio::awaitable<void>()> run);
  // Stop. What a run under way uses must outlive that run: await Join first.
  ~Periodic();
  Periodic(const Periodic&) = delete;
  Periodic& operator=(const Periodic&) = delete;

  // No run starts after the one under way. Any thread.
  void Stop();
  // Stop, and return when no run is under way. Any shard, but not from within a run.
  boost::asio::awaitable<void> Join();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace dsec::runtime

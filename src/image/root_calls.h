// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/result.h"

// Calls on a file system that may not answer: a cluster file system in trouble holds a thread in
// open(2), read(2), fcntl(2) or even close(2) for as long as it likes, and no signal ends that.
namespace dsec::image {

// kUnavailable "layer.unreachable": the root of the layer store does not answer; try again later.
Error Unreachable(std::string_view what);
// Of a failed call on something below the root: what says that the file system is in trouble, and
// not that something is missing or wrong, becomes "layer.unreachable".
Error RootError(Error error);

// The result of a call on another thread, for those that have joined: it is gone with the last of
// them, so that nothing of it ends later on the thread of the call.
template <typename T>
class Pending {
 public:
  void Join() {
    const std::lock_guard lock(mutex_);
    ++waiters_;
  }
  void Set(Result<T> result) {
    std::optional<Result<T>> unwanted;
    {
      const std::lock_guard lock(mutex_);
      (waiters_ > 0 ? result_ : unwanted).emplace(std::move(result));
    }
    done_.notify_all();
  }
  // Once after each Join. nullopt: not within `patience`.
  std::optional<Result<T>> Wait(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    done_.wait_for(lock, patience, [&] { return result_.has_value(); });
    if (--waiters_ > 0) return result_;
    return std::exchange(result_, std::nullopt);
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  size_t waiters_ = 0;
  std::optional<Result<T>> result_;
};

// Runs each call on a thread that has no other call: one that waits for work, else a new one.
// Thread-safe. A call that never returns keeps what it has captured for ever: captures must own
// what they use.
class RootThreads {
 public:
  explicit RootThreads(size_t limit);
  // Calls under way go on.
  ~RootThreads();
  RootThreads(const RootThreads&) = delete;
  RootThreads& operator=(const RootThreads&) = delete;

  // False: so many are under way that this one was not begun.
  bool Start(std::function<void()> call);
  // Waits until none is under way; false after `patience`.
  bool Wait(std::chrono::milliseconds patience) const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

// Runs calls one after the other on one thread. Thread-safe. Captures must own what they use.
class RootLane {
 public:
  RootLane();
  // What waits is dropped; a call under way is left behind with what it has captured.
  ~RootLane();
  RootLane(const RootLane&) = delete;
  RootLane& operator=(const RootLane&) = delete;

  // The result, or "layer.unreachable" after `patience`, or at once when the thread has been with
  // one call for that long. The call is not made at all if nobody waits for it any more.
  template <typename T>
  Result<T> Run(std::function<Result<T>()> call, std::chrono::milliseconds patience) {
    auto pending = std::make_shared<Pending<T>>();
    pending->Join();
    auto run = [call = std::move(call), waiter = std::weak_ptr<Pending<T>>(pending)] {
      if (waiter.expired()) return;
      auto result = call();
      if (const auto still = waiter.lock()) still->Set(std::move(result));
    };
    if (!Add(std::move(run), patience)) return Unreachable("it has not answered for a while");
    auto result = pending->Wait(patience);
    if (!result) return Unreachable("no answer in time");
    return *std::move(result);
  }
  // The same for nobody: made whenever its turn comes. How many may wait is the caller's affair.
  void Post(std::function<void()> call);

 private:
  struct State;
  bool Add(std::function<void()> run, std::chrono::milliseconds patience);
  const std::shared_ptr<State> state_;
};

}  // namespace dsec::image

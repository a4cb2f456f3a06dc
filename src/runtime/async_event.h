// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::runtime {

// A flag that coroutines of one shard wait for. Every call must be made on that shard (tests and
// set-up before the shard uses it aside). Destroying it wakes its waiters with kCancelled
// "task.cancelled".
class AsyncEvent {
 public:
  AsyncEvent() = default;
  ~AsyncEvent();
  AsyncEvent(const AsyncEvent&) = delete;
  AsyncEvent& operator=(const AsyncEvent&) = delete;

  // Wakes everyone who waits now, even if Reset follows at once, and lets later waiters pass until
  // Reset.
  void Set();
  void Reset() { set_ = false; }
  bool is_set() const { return set_; }

  // Ok once set; kDeadlineExceeded "deadline.exceeded"; kCancelled "task.cancelled".
  Task<void> Wait(Deadline deadline);
  // Until set or destroyed, whatever happens to the waiting coroutine.
  boost::asio::awaitable<void> WaitUncancelled();

 private:
  struct Waiter;
  enum class Wake;
  void WakeAll(Wake how);

  bool set_ = false;
  Waiter* first_ = nullptr;
};

// Ok when the deadline has come; kCancelled "task.cancelled".
Task<void> SleepUntil(Deadline deadline);

}  // namespace dsec::runtime

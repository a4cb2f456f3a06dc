// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "os/unique_fd.h"

namespace dsec::sandbox {

// Closes descriptors on a thread of its own. For those of detached mounts: the close unmounts, and
// each unmount waits for a grace period of RCU (namespace_unlock in fs/namespace.c), 0.1 ms and
// more, which a create would pay for every layer. Thread-safe.
class FdCloser {
 public:
  FdCloser() : thread_([this] { Main(); }) {}
  // Returns when all is closed.
  ~FdCloser();
  FdCloser(const FdCloser&) = delete;
  FdCloser& operator=(const FdCloser&) = delete;

  // In the order given; at once, by the caller, when the thread is far behind.
  void Close(std::vector<os::UniqueFd> fds);

 private:
  void Main();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::vector<os::UniqueFd>> waiting_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace dsec::sandbox

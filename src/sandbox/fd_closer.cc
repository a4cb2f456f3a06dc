// SPDX-License-Identifier: Apache-2.0
#include "sandbox/fd_closer.h"

#include <utility>

namespace dsec::sandbox {
namespace {

constexpr size_t kMaxWaiting = 256;

}  // namespace

FdCloser::~FdCloser() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void FdCloser::Close(std::vector<os::UniqueFd> fds) {
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() >= kMaxWaiting) return;  // `fds` go with the caller
    waiting_.push_back(std::move(fds));
  }
  changed_.notify_one();
}

void FdCloser::Main() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    auto batch = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    for (os::UniqueFd& fd : batch) fd.Reset();
    lock.lock();
  }
}

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#include "edge/semaphore.h"

namespace dsec::edge {

runtime::Task<Semaphore::Permit> Semaphore::Acquire(std::shared_ptr<FairQueue::Ticket> ticket,
                                                    runtime::Deadline deadline) {
  FairQueue::Take take = [this] { return Take(); };
  auto entered = co_await queue_.Enter(std::move(ticket), std::move(take), deadline);
  if (!entered.ok()) co_return std::move(entered).error();
  co_return Permit(this);
}

Result<void> Semaphore::Take() {
  std::lock_guard lock(mutex_);
  if (permits_ == 0) {
    return Error(Code::kResourceExhausted, reason_, "the node is busy and others wait as well");
  }
  --permits_;
  return Ok();
}

void Semaphore::Return() {
  {
    std::lock_guard lock(mutex_);
    ++permits_;
  }
  queue_.Poke();
}

}  // namespace dsec::edge

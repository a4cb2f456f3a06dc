// SPDX-License-Identifier: Apache-2.0
#include "edge/fair_queue.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

namespace dsec::edge {

// A place in the line, left on destruction (the coroutine may be dropped while it waits).
class FairQueue::InLine {
 public:
  InLine(FairQueue& queue, std::shared_ptr<Ticket> ticket)
      : queue_(queue), ticket_(std::move(ticket)) {}
  InLine(const InLine&) = delete;
  InLine& operator=(const InLine&) = delete;
  ~InLine() {
    std::lock_guard lock(queue_.mutex_);
    auto& line = queue_.line_;
    const auto it = std::find(line.begin(), line.end(), ticket_);
    const bool head = it == line.begin();
    line.erase(it);
    if (head) queue_.WakeHeadLocked();
  }

 private:
  FairQueue& queue_;
  const std::shared_ptr<Ticket> ticket_;
};

void FairQueue::Ticket::Cancel() {
  cancelled_ = true;
  wake_.Set();
}

runtime::Task<void> FairQueue::Enter(std::shared_ptr<Ticket> ticket, Take take,
                                     runtime::Deadline deadline) {
  const auto cancelled = [] {
    return Error(Code::kCancelled, "queue.cancelled", "the wait was given up");
  };
  if (ticket->cancelled_) co_return cancelled();
  std::optional<InLine> place;
  {
    std::lock_guard lock(mutex_);
    if (line_.empty()) {
      auto taken = take();
      if (taken.ok() || taken.error().code() != Code::kResourceExhausted) co_return taken;
      refusal_ = std::move(taken).error();
    }
    if (deadline.Expired()) co_return RefusalLocked();
    if (line_.size() >= max_waiting_) {
      co_return Error(Code::kResourceExhausted, full_reason_,
                      fmt::format("{} requests wait already", line_.size()));
    }
    line_.push_back(ticket);
    place.emplace(*this, ticket);
  }
  while (true) {
    bool head = false;
    {
      std::lock_guard lock(mutex_);
      head = line_.front() == ticket;
    }
    auto woken = co_await ticket->wake_.Wait(
        head ? deadline.Sooner(runtime::Deadline::After(retry_)) : deadline);
    if (!woken.ok() && woken.error().code() == Code::kCancelled) co_return woken;
    if (ticket->cancelled_) co_return cancelled();
    ticket->wake_.Reset();
    std::lock_guard lock(mutex_);
    if (line_.front() == ticket) {
      auto taken = take();
      if (taken.ok() || taken.error().code() != Code::kResourceExhausted) co_return taken;
      refusal_ = std::move(taken).error();
    }
    if (deadline.Expired()) co_return RefusalLocked();
  }
}

Error FairQueue::RefusalLocked() const {
  // There is one: whoever waits stands behind a head that was refused.
  return refusal_.value_or(Error(Code::kResourceExhausted, full_reason_, "others wait already"));
}

void FairQueue::Poke() {
  std::lock_guard lock(mutex_);
  WakeHeadLocked();
}

void FairQueue::Close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
}

void FairQueue::WakeHeadLocked() {
  if (!line_.empty() && !closed_) Wake(line_.front());
}

void FairQueue::Wake(const std::shared_ptr<Ticket>& ticket) {
  boost::asio::post(ticket->executor_, [ticket] { ticket->wake_.Set(); });
}

size_t FairQueue::waiting() const {
  std::lock_guard lock(mutex_);
  return line_.size();
}

}  // namespace dsec::edge

// SPDX-License-Identifier: Apache-2.0
#include "edge/fair_queue.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

namespace dsec::edge {
namespace {

// Lanes of full length that fit together.
constexpr size_t kLanesFull = 4;

}  // namespace

// A place in the line, left on destruction (the coroutine may be dropped while it waits).
class FairQueue::InLine {
 public:
  InLine(FairQueue& queue, std::shared_ptr<Ticket> ticket)
      : queue_(queue), ticket_(std::move(ticket)) {}
  InLine(const InLine&) = delete;
  InLine& operator=(const InLine&) = delete;
  ~InLine() {
    std::lock_guard lock(queue_.mutex_);
    const bool head = queue_.HeadLocked() == ticket_;
    const auto lane = queue_.lanes_.find(ticket_->lane_);
    auto& line = lane->second;
    line.erase(std::find(line.begin(), line.end(), ticket_));
    --queue_.waiting_;
    auto& turns = queue_.turns_;
    const auto turn = std::find(turns.begin(), turns.end(), ticket_->lane_);
    if (line.empty()) {
      queue_.lanes_.erase(lane);
      turns.erase(turn);
    } else if (served_) {
      turns.erase(turn);
      turns.push_back(ticket_->lane_);
    }
    if (head) queue_.WakeHeadLocked();
  }
  // It got what it stood here for: the next turn is that of another lane.
  void Served() { served_ = true; }

 private:
  FairQueue& queue_;
  const std::shared_ptr<Ticket> ticket_;
  bool served_ = false;
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
    if (waiting_ == 0) {
      auto taken = take();
      if (taken.ok() || taken.error().code() != Code::kResourceExhausted) co_return taken;
      refusal_ = std::move(taken).error();
    }
    if (deadline.Expired()) co_return RefusalLocked();
    const auto lane = lanes_.find(ticket->lane_);
    const size_t before = lane == lanes_.end() ? 0 : lane->second.size();
    if (before >= max_waiting_ || waiting_ / kLanesFull >= max_waiting_) {
      co_return Error(Code::kResourceExhausted, full_reason_,
                      fmt::format("{} requests wait already", std::max(before, waiting_)));
    }
    if (lane == lanes_.end()) turns_.push_back(ticket->lane_);
    lanes_[ticket->lane_].push_back(ticket);
    ++waiting_;
    place.emplace(*this, ticket);
  }
  while (true) {
    bool head = false;
    {
      std::lock_guard lock(mutex_);
      head = HeadLocked() == ticket;
    }
    auto woken = co_await ticket->wake_.Wait(
        head ? deadline.Sooner(runtime::Deadline::After(retry_)) : deadline);
    if (!woken.ok() && woken.error().code() == Code::kCancelled) co_return woken;
    if (ticket->cancelled_) co_return cancelled();
    ticket->wake_.Reset();
    std::lock_guard lock(mutex_);
    if (HeadLocked() == ticket) {
      auto taken = take();
      if (taken.ok()) place->Served();
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
  if (waiting_ > 0 && !closed_) Wake(HeadLocked());
}

void FairQueue::Wake(const std::shared_ptr<Ticket>& ticket) {
  boost::asio::post(ticket->executor_, [ticket] { ticket->wake_.Set(); });
}

size_t FairQueue::waiting() const {
  std::lock_guard lock(mutex_);
  return waiting_;
}

}  // namespace dsec::edge

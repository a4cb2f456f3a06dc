// SPDX-License-Identifier: Apache-2.0
#include "runtime/async_event.h"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace dsec::runtime {
namespace {

Error Cancelled() { return Error(Code::kCancelled, "task.cancelled", "the task was cancelled"); }

}  // namespace

enum class AsyncEvent::Wake { kNone, kSet, kDestroyed };

// Lives in the frame of Wait, linked into its event while `event` is not null. A timer is what Asio
// offers to suspend a coroutine with a deadline: waking is cancelling it.
struct AsyncEvent::Waiter {
  Waiter(AsyncEvent* owner, const Executor& executor)
      : event(owner), timer(executor), next(owner->first_) {
    if (next != nullptr) next->previous = this;
    owner->first_ = this;
  }
  ~Waiter() { Unlink(); }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  void Unlink() {
    if (event == nullptr) return;
    (previous != nullptr ? previous->next : event->first_) = next;
    if (next != nullptr) next->previous = previous;
    event = nullptr;
  }

  AsyncEvent* event;
  boost::asio::steady_timer timer;
  Waiter* next;
  Waiter* previous = nullptr;
  Wake wake = Wake::kNone;
};

AsyncEvent::~AsyncEvent() { WakeAll(Wake::kDestroyed); }

void AsyncEvent::Set() {
  set_ = true;
  WakeAll(Wake::kSet);
}

void AsyncEvent::WakeAll(Wake how) {
  while (first_ != nullptr) {
    Waiter& waiter = *first_;
    waiter.Unlink();
    waiter.wake = how;
    waiter.timer.cancel();
  }
}

Task<void> AsyncEvent::Wait(Deadline deadline) {
  const auto cancellation = co_await boost::asio::this_coro::cancellation_state;
  if (cancellation.cancelled() != boost::asio::cancellation_type::none) co_return Cancelled();
  if (set_) co_return Ok();
  Waiter waiter(this, co_await boost::asio::this_coro::executor);
  waiter.timer.expires_at(deadline.at());
  const auto [error] =
      co_await waiter.timer.async_wait(boost::asio::as_tuple(boost::asio::use_awaitable));
  // `this` may be gone.
  if (waiter.wake == Wake::kSet) co_return Ok();
  if (waiter.wake == Wake::kDestroyed || error) co_return Cancelled();
  co_return Error(Code::kDeadlineExceeded, "deadline.exceeded", "the deadline has passed");
}

boost::asio::awaitable<void> AsyncEvent::WaitUncancelled() {
  if (set_) co_return;
  Waiter waiter(this, co_await boost::asio::this_coro::executor);
  waiter.timer.expires_at(Deadline::Never().at());
  // The empty slot in place of the coroutine's: no signal reaches this wait.
  (void)co_await waiter.timer.async_wait(boost::asio::bind_cancellation_slot(
      boost::asio::cancellation_slot(), boost::asio::as_tuple(boost::asio::use_awaitable)));
}

Task<void> SleepUntil(Deadline deadline) {
  AsyncEvent never;
  auto woken = co_await never.Wait(deadline);
  if (woken.error().code() == Code::kDeadlineExceeded) co_return Ok();
  co_return std::move(woken);
}

}  // namespace dsec::runtime

// SPDX-License-Identifier: Apache-2.0
#include "runtime/periodic.h"

#include <boost/asio/post.hpp>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "runtime/async_event.h"
#include "runtime/shards.h"

namespace dsec::runtime {

// The events are touched on `executor` alone.
struct Periodic::State {
  Executor executor;
  std::string name;
  std::chrono::nanoseconds period;
  std::function<boost::asio::awaitable<void>()> run;
  AsyncEvent stop;
  AsyncEvent ended;

  static boost::asio::awaitable<void> Loop(std::shared_ptr<State> state) {
    Deadline next = Deadline::After(state->period);
    for (;;) {
      auto waited = co_await state->stop.Wait(next);
      if (waited.ok() || waited.error().code() != Code::kDeadlineExceeded) break;
      try {
        co_await state->run();
      } catch (...) {
        const Error error = internal::CurrentException();
        log::Error("periodic.failed", {{"name", state->name}, {"error", error}});
      }
      // Runs that should have begun by now are dropped.
      const auto behind = std::chrono::steady_clock::now() - next.at();
      const auto periods = std::max<int64_t>(1, (behind + state->period) / state->period);
      next = Deadline::At(next.at() + periods * state->period);
    }
    state->ended.Set();
  }

  static Task<void> WaitEnded(std::shared_ptr<State> state) {
    state->stop.Set();
    co_await state->ended.WaitUncancelled();
    co_return Ok();
  }
};

Periodic::Periodic(Executor executor, std::string name, std::chrono::nanoseconds period,
                   std::function<boost::asio::awaitable<void>()> run)
    : state_(std::make_shared<State>()) {
  DSEC_CHECK(period.count() > 0);
  state_->executor = executor;
  state_->name = std::move(name);
  state_->period = period;
  state_->run = std::move(run);
  internal::StartDetached(executor, State::Loop(state_));
}

Periodic::~Periodic() { Stop(); }

void Periodic::Stop() {
  boost::asio::post(state_->executor, [state = state_] { state->stop.Set(); });
}

boost::asio::awaitable<void> Periodic::Join() {
  auto delivery =
      std::make_shared<internal::Delivery<void>>(co_await boost::asio::this_coro::executor);
  internal::StartDetached(state_->executor,
                          internal::RunInto<void>(State::WaitEnded(state_), delivery));
  co_await delivery->done.WaitUncancelled();
}

}  // namespace dsec::runtime

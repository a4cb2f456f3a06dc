// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/container/create_work.h"

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/async_event.h"
#include "sandbox/backend.h"

namespace dsec::sandbox {
namespace {

struct Waiter {
  runtime::Executor executor;
  std::shared_ptr<runtime::AsyncEvent> event;
};

struct Work {
  bool cancelled = false;
  std::vector<Waiter> waiters;
};

}  // namespace

struct CreateWorks::State {
  std::mutex mutex;
  std::map<std::string, Work> works;
};

class CreateWorks::TokenOf final : public Token {
 public:
  TokenOf(std::shared_ptr<State> state, std::string id)
      : state_(std::move(state)), id_(std::move(id)) {}
  ~TokenOf() override {
    std::unique_lock lock(state_->mutex);
    auto node = state_->works.extract(id_);
    lock.unlock();
    for (Waiter& waiter : node.mapped().waiters) {
      boost::asio::post(waiter.executor, [event = std::move(waiter.event)] { event->Set(); });
    }
  }
  Result<void> Check() const override {
    const std::lock_guard lock(state_->mutex);
    if (!state_->works.at(id_).cancelled) return Ok();
    return Error(Code::kCancelled, kRemovedReason, "the sandbox is being removed");
  }

 private:
  const std::shared_ptr<State> state_;
  const std::string id_;
};

CreateWorks::CreateWorks() : state_(std::make_shared<State>()) {}
CreateWorks::~CreateWorks() = default;

Result<std::shared_ptr<CreateWorks::Token>> CreateWorks::Begin(const std::string& id) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->works.try_emplace(id).second) {
    return Error(Code::kConflict, "create.under_way", fmt::format("{} is being worked on", id));
  }
  return std::shared_ptr<Token>(std::make_shared<TokenOf>(state_, id));
}

runtime::Task<void> CreateWorks::End(std::string id, runtime::Deadline deadline) {
  const auto event = std::make_shared<runtime::AsyncEvent>();
  const runtime::Executor executor = co_await boost::asio::this_coro::executor;
  {
    const std::lock_guard lock(state_->mutex);
    const auto work = state_->works.find(id);
    if (work == state_->works.end()) co_return Ok();
    work->second.cancelled = true;
    work->second.waiters.push_back({executor, event});
  }
  auto ended = co_await event->Wait(deadline);
  if (ended.ok() || ended.error().code() != Code::kDeadlineExceeded) co_return ended;
  co_return Error(Code::kDeadlineExceeded, "sandbox.stuck", "work on it does not end");
}

}  // namespace dsec::sandbox

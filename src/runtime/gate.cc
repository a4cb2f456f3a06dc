// SPDX-License-Identifier: Apache-2.0
#include "runtime/gate.h"

#include <boost/asio/post.hpp>

#include "base/check.h"
#include "runtime/shards.h"

namespace dsec::runtime {
namespace {

// Parameters are destroyed last to first: the work is gone before its pass is given back.
boost::asio::awaitable<void> Counted([[maybe_unused]] GatePass pass,
                                     boost::asio::awaitable<void> work) {
  co_await std::move(work);
}

}  // namespace

struct Gate::Waiter {
  Executor home;
  AsyncEvent empty;  // on `home` alone
};

Gate::~Gate() { DSEC_CHECK(count_ == 0); }

bool Gate::Enter() {
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  ++count_;
  return true;
}

void Gate::Leave() {
  std::vector<std::shared_ptr<Waiter>> waiters;
  {
    const std::lock_guard lock(mutex_);
    DSEC_CHECK(count_ > 0);
    if (--count_ == 0) waiters.swap(waiters_);
  }
  // The gate may be gone from here on.
  for (const auto& waiter : waiters) {
    boost::asio::post(waiter->home, [waiter] { waiter->empty.Set(); });
  }
}

boost::asio::awaitable<void> Gate::Close() {
  auto waiter = std::make_shared<Waiter>();
  waiter->home = co_await boost::asio::this_coro::executor;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    if (count_ == 0) co_return;
    waiters_.push_back(waiter);
  }
  co_await waiter->empty.WaitUncancelled();
}

bool Gate::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

size_t Gate::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

bool Spawn(Gate& gate, Executor executor, boost::asio::awaitable<void> work) {
  GatePass pass(gate);
  if (!pass) return false;
  internal::StartDetached(executor, Counted(std::move(pass), std::move(work)));
  return true;
}

void Running::Cancel() const {
  if (remote_) internal::CancelRemote(remote_);
}

Running SpawnCancellable(Gate& gate, Executor executor, boost::asio::awaitable<void> work) {
  GatePass pass(gate);
  if (!pass) return Running();
  return Running(internal::StartRemote(executor, Counted(std::move(pass), std::move(work))));
}

}  // namespace dsec::runtime

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <future>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/async_event.h"
#include "runtime/task.h"

namespace dsec::runtime {

// The event loops of a process: one thread and one single-threaded io_context each, nothing shared
// between them. Objects that hold sockets, timers or suspended coroutines of a shard must be gone
// before Shards is.
class Shards {
 public:
  explicit Shards(size_t count);
  // Stop, then destroys every suspended coroutine, in no particular order.
  ~Shards();
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;

  size_t size() const { return shards_.size(); }
  Executor at(size_t index) const;
  // The same key gives the same shard for the life of the process.
  Executor For(std::string_view key) const;
  // Leaves what is queued or suspended as it is and joins the threads. Idempotent; not from a
  // shard.
  void Stop();

 private:
  struct Shard;
  std::vector<std::unique_ptr<Shard>> shards_;
};

namespace internal {

// A coroutine that was started elsewhere and can be cancelled from any thread.
struct Remote;

// Starts `work` on `executor` under the rules of task.h. Any thread.
void StartDetached(const Executor& executor, boost::asio::awaitable<void> work);
std::shared_ptr<Remote> StartRemote(const Executor& executor, boost::asio::awaitable<void> work);
void CancelRemote(const std::shared_ptr<Remote>& remote);

// Logs the exception under way and makes it an error.
Error CurrentException();

// A result on its way between threads. `value` and `done` are touched on `home` alone.
template <typename T>
struct Delivery {
  explicit Delivery(Executor executor) : home(std::move(executor)) {}
  const Executor home;
  std::optional<Result<T>> value;
  AsyncEvent done;
};

// Any thread.
template <typename T>
void Deliver(std::shared_ptr<Delivery<T>> delivery, Result<T> value) {
  const Executor home = delivery->home;
  boost::asio::post(home, [delivery = std::move(delivery), value = std::move(value)]() mutable {
    delivery->value.emplace(std::move(value));
    delivery->done.Set();
  });
}

template <typename T>
Task<T> Caught(Task<T> task) {
  try {
    co_return co_await std::move(task);
  } catch (...) {
    co_return CurrentException();
  }
}

template <typename T>
boost::asio::awaitable<void> RunInto(Task<T> task, std::shared_ptr<Delivery<T>> delivery) {
  auto result = co_await Caught(std::move(task));
  Deliver(std::move(delivery), std::move(result));
}

template <typename T>
boost::asio::awaitable<void> RunInto(Task<T> task, std::promise<Result<T>> promise) {
  auto result = co_await Caught(std::move(task));
  promise.set_value(std::move(result));
}

}  // namespace internal

// Runs `task` on `executor` and resumes on the caller's. When the caller is cancelled it gets
// kCancelled at once and the task is cancelled on its own shard, where it ends in its own time.
template <typename T>
Task<T> On(Executor executor, Task<T> task) {
  const Executor home = co_await boost::asio::this_coro::executor;
  if (home == executor) co_return co_await std::move(task);
  const auto cancellation = co_await boost::asio::this_coro::cancellation_state;
  if (cancellation.cancelled() != boost::asio::cancellation_type::none) {
    co_return Error(Code::kCancelled, "task.cancelled", "the task was cancelled");
  }
  auto delivery = std::make_shared<internal::Delivery<T>>(home);
  auto remote = internal::StartRemote(executor, internal::RunInto<T>(std::move(task), delivery));
  auto waited = co_await delivery->done.Wait(Deadline::Never());
  if (!waited.ok()) {
    internal::CancelRemote(remote);
    co_return std::move(waited).error();
  }
  co_return std::move(*delivery->value);
}

// Runs `task` on `executor` while the calling thread, which must not be a shard, waits. kCancelled
// "task.cancelled" when the shards are destroyed first.
template <typename T>
Result<T> BlockOn(const Executor& executor, Task<T> task) {
  std::promise<Result<T>> promise;
  std::future<Result<T>> future = promise.get_future();
  internal::StartDetached(executor, internal::RunInto<T>(std::move(task), std::move(promise)));
  try {
    return future.get();
  } catch (const std::future_error&) {
    return Error(Code::kCancelled, "task.cancelled", "the shard ended before the task");
  }
}

}  // namespace dsec::runtime

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "runtime/deadline.h"
#include "runtime/shards.h"
#include "runtime/task.h"

namespace dsec::runtime {

// A fixed number of threads with a bounded queue, for calls that may block: mounts, cgroups, files.
// Calls that can hang get a pool of their own. Thread-safe. Must be destroyed before the shards
// whose coroutines use it. Metrics, labelled pool: dsec_pool_queued, dsec_pool_running,
// dsec_pool_refused_total, dsec_pool_wait_seconds.
class BlockingPool {
 public:
  BlockingPool(std::string name, size_t threads, size_t queue_limit);
  // Waits for the calls under way. Those still queued are not run: kUnavailable "pool.closed".
  ~BlockingPool();
  BlockingPool(const BlockingPool&) = delete;
  BlockingPool& operator=(const BlockingPool&) = delete;

  // Runs `function`, which returns a Result, on a thread of the pool. kResourceExhausted
  // "pool.full": the queue was full and it will never run. kDeadlineExceeded, kCancelled: this wait
  // has ended; unless it had ended before it began, the function still runs to its end, and its
  // result is destroyed. Function and captures are destroyed in the pool, before the caller
  // resumes.
  template <typename F>
  auto Run(F function, Deadline deadline) -> Task<typename std::invoke_result_t<F&>::value_type>;

 private:
  struct Job {
    virtual ~Job() = default;
    virtual void Run() = 0;
    virtual void Refuse(Error error) = 0;
  };
  template <typename F, typename T>
  struct JobOf;
  struct State;

  // On failure the job is gone.
  Result<void> Submit(std::unique_ptr<Job> job);

  const std::unique_ptr<State> state_;
};

template <typename F, typename T>
struct BlockingPool::JobOf final : Job {
  JobOf(F call, std::shared_ptr<internal::Delivery<T>> to)
      : function(std::move(call)), delivery(std::move(to)) {}

  void Run() override {
    Result<T> result = Call();
    function.reset();
    internal::Deliver(std::move(delivery), std::move(result));
  }
  void Refuse(Error error) override {
    function.reset();
    internal::Deliver(std::move(delivery), Result<T>(std::move(error)));
  }
  Result<T> Call() {
    try {
      return (*function)();
    } catch (...) {
      return internal::CurrentException();
    }
  }

  std::optional<F> function;
  std::shared_ptr<internal::Delivery<T>> delivery;
};

template <typename F>
auto BlockingPool::Run(F function, Deadline deadline)
    -> Task<typename std::invoke_result_t<F&>::value_type> {
  using T = typename std::invoke_result_t<F&>::value_type;
  const auto cancellation = co_await boost::asio::this_coro::cancellation_state;
  if (cancellation.cancelled() != boost::asio::cancellation_type::none) {
    co_return Error(Code::kCancelled, "task.cancelled", "the task was cancelled");
  }
  if (deadline.Expired()) {
    co_return Error(Code::kDeadlineExceeded, "deadline.exceeded", "the deadline has passed");
  }
  auto delivery =
      std::make_shared<internal::Delivery<T>>(co_await boost::asio::this_coro::executor);
  auto submitted = Submit(std::make_unique<JobOf<F, T>>(std::move(function), delivery));
  if (!submitted.ok()) co_return std::move(submitted).error();
  auto waited = co_await delivery->done.Wait(deadline);
  if (!delivery->value) co_return std::move(waited).error();
  co_return std::move(*delivery->value);
}

}  // namespace dsec::runtime

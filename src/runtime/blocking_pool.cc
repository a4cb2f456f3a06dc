// SPDX-License-Identifier: Apache-2.0
#include "runtime/blocking_pool.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/metrics.h"

namespace dsec::runtime {

struct BlockingPool::State {
  struct Entry {
    std::unique_ptr<Job> job;
    MonoTime queued_at;
  };

  State(std::string pool_name, size_t limit)
      : name(std::move(pool_name)),
        queue_limit(limit),
        queued(metrics::Registry::Global().GetGauge(
            "dsec_pool_queued", "Calls waiting for a thread of a blocking pool.",
            {{"pool", name}})),
        running(metrics::Registry::Global().GetGauge(
            "dsec_pool_running", "Calls under way in a blocking pool.", {{"pool", name}})),
        refused(metrics::Registry::Global().GetCounter(
            "dsec_pool_refused_total",
            "Calls refused because the queue of a blocking pool was full.", {{"pool", name}})),
        wait_seconds(metrics::Registry::Global().GetHistogram(
            "dsec_pool_wait_seconds", "Time that calls waited for a thread of a blocking pool.",
            metrics::LatencyBounds(), {{"pool", name}})) {}

  void Work() {
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    for (;;) {
      Entry entry;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return closed || !queue.empty(); });
        if (closed) return;
        entry = std::move(queue.front());
        queue.pop_front();
      }
      queued.Add(-1);
      running.Add(1);
      wait_seconds.Observe(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - entry.queued_at)
              .count());
      entry.job->Run();
      running.Add(-1);
    }
  }

  const std::string name;
  const size_t queue_limit;
  metrics::Gauge& queued;
  metrics::Gauge& running;
  metrics::Counter& refused;
  metrics::Histogram& wait_seconds;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Entry> queue;
  bool closed = false;
  std::vector<std::thread> threads;
};

BlockingPool::BlockingPool(std::string name, size_t threads, size_t queue_limit)
    : state_(std::make_unique<State>(std::move(name), queue_limit)) {
  DSEC_CHECK(threads > 0);
  for (size_t i = 0; i < threads; ++i) {
    state_->threads.emplace_back([state = state_.get()] { state->Work(); });
  }
}

BlockingPool::~BlockingPool() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
  }
  state_->changed.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  for (State::Entry& entry : state_->queue) {
    state_->queued.Add(-1);
    entry.job->Refuse(Error(Code::kUnavailable, "pool.closed",
                            fmt::format("pool {} is shutting down", state_->name)));
  }
}

Result<void> BlockingPool::Submit(std::unique_ptr<Job> job) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closed) {
      return Error(Code::kUnavailable, "pool.closed",
                   fmt::format("pool {} is shutting down", state_->name));
    }
    if (state_->queue.size() >= state_->queue_limit) {
      state_->refused.Add();
      return Error(Code::kResourceExhausted, "pool.full",
                   fmt::format("pool {} has {} calls waiting", state_->name, state_->queue.size()));
    }
    state_->queue.push_back({std::move(job), std::chrono::steady_clock::now()});
    state_->queued.Add(1);
  }
  state_->changed.notify_one();
  return Ok();
}

}  // namespace dsec::runtime

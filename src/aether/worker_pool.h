// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "aether/loop.h"
#include "base/result.h"

namespace dsec::aether {

// Threads for calls that may block: everything that touches the sandbox's file system. At most
// kThreads of them, started on demand and gone after a second without work, so an idle agent has
// none. A job that never returns (hung file system) holds its thread; when all are held, new jobs
// wait and then are refused, and the loop never notices.
class WorkerPool {
 public:
  static constexpr size_t kThreads = 4;
  static constexpr size_t kQueued = 128;

  static Result<std::unique_ptr<WorkerPool>> Create(Loop& loop);
  // Waits for running jobs.
  ~WorkerPool();

  // Runs `job` on a thread, then `done` with its result on the loop. kResourceExhausted
  // "agent.workers_busy" when full.
  template <typename T>
  Result<void> Run(std::function<T()> job, std::function<void(T)> done) {
    auto result = std::make_shared<std::optional<T>>();
    return Enqueue([result, job = std::move(job)] { result->emplace(job()); },
                   [result, done = std::move(done)] { done(std::move(**result)); });
  }
  size_t threads() const { return threads_.size(); }

 private:
  struct Task {
    std::function<void()> job;
    std::function<void()> done;
  };
  struct Thread {
    WorkerPool* pool = nullptr;
    pthread_t id = {};
    void* stack = nullptr;
    bool ended = false;  // guarded by mutex_
  };

  WorkerPool(Loop& loop, os::UniqueFd event);
  Result<void> Enqueue(std::function<void()> job, std::function<void()> done);
  Result<void> StartThread();
  void Work(Thread& self);
  void Collect();
  void Join(Thread& thread);
  void Wake();

  os::UniqueFd event_;
  FdWatch watch_;
  std::list<Thread> threads_;  // loop only

  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<Task> queue_;
  std::deque<std::function<void()>> finished_;
  size_t idle_ = 0;
  bool stopping_ = false;
};

}  // namespace dsec::aether

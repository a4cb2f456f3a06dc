// SPDX-License-Identifier: Apache-2.0
#include "aether/worker_pool.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "base/check.h"

namespace dsec::aether {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr std::chrono::milliseconds kIdleTime(1000);

}  // namespace

Result<std::unique_ptr<WorkerPool>> WorkerPool::Create(Loop& loop) {
  os::UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event.valid()) return Error::FromErrno(errno, "agent.eventfd", "eventfd");
  return std::unique_ptr<WorkerPool>(new WorkerPool(loop, std::move(event)));
}

WorkerPool::WorkerPool(Loop& loop, os::UniqueFd event)
    : event_(std::move(event)),
      watch_(loop, event_.get(), EPOLLIN, [this](uint32_t) { Collect(); }) {}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    queue_.clear();
  }
  work_.notify_all();
  for (Thread& thread : threads_) Join(thread);
}

Result<void> WorkerPool::Enqueue(std::function<void()> job, std::function<void()> done) {
  bool start = false;
  {
    std::lock_guard lock(mutex_);
    if (queue_.size() >= kQueued) {
      return Error(Code::kResourceExhausted, "agent.workers_busy",
                   fmt::format("{} file operations are waiting already", kQueued));
    }
    queue_.push_back({std::move(job), std::move(done)});
    start = idle_ < queue_.size() && threads_.size() < kThreads;
  }
  if (start) {
    Result<void> started = StartThread();
    if (!started.ok() && threads_.empty()) {
      std::lock_guard lock(mutex_);
      queue_.pop_back();
      return started;
    }
  }
  work_.notify_one();
  return Ok();
}

Result<void> WorkerPool::StartThread() {
  // A stack of our own: the C library would keep up to 40 MiB of them for reuse.
  void* stack = ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) return Error::FromErrno(errno, "agent.thread", "map a stack");
  pthread_attr_t attributes;
  DSEC_CHECK(::pthread_attr_init(&attributes) == 0);
  DSEC_CHECK(::pthread_attr_setstack(&attributes, stack, kStackBytes) == 0);
  Thread& thread = threads_.emplace_back();
  thread.pool = this;
  thread.stack = stack;
  int failure = ::pthread_create(
      &thread.id, &attributes,
      [](void* argument) -> void* {
        auto* self = static_cast<Thread*>(argument);
        self->pool->Work(*self);
        return nullptr;
      },
      &thread);
  ::pthread_attr_destroy(&attributes);
  if (failure != 0) {
    threads_.pop_back();
    ::munmap(stack, kStackBytes);
    return Error::FromErrno(failure, "agent.thread", "start a thread");
  }
  return Ok();
}

void WorkerPool::Work(Thread& self) {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    bool work = work_.wait_for(lock, kIdleTime, [this] { return stopping_ || !queue_.empty(); });
    --idle_;
    if (stopping_ || !work) break;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    task.job();
    task.job = nullptr;
    lock.lock();
    finished_.push_back(std::move(task.done));
    Wake();
  }
  self.ended = true;
  Wake();
}

void WorkerPool::Wake() {
  uint64_t one = 1;
  // Fails only when the counter is at its maximum, and then it is readable.
  [[maybe_unused]] ssize_t written = ::write(event_.get(), &one, sizeof(one));
}

void WorkerPool::Collect() {
  uint64_t count;
  [[maybe_unused]] ssize_t size = ::read(event_.get(), &count, sizeof(count));
  std::deque<std::function<void()>> finished;
  {
    std::lock_guard lock(mutex_);
    finished.swap(finished_);
    for (auto thread = threads_.begin(); thread != threads_.end();) {
      if (thread->ended) {
        Join(*thread);
        thread = threads_.erase(thread);
      } else {
        ++thread;
      }
    }
  }
  for (auto& done : finished) done();
}

void WorkerPool::Join(Thread& thread) {
  ::pthread_join(thread.id, nullptr);
  ::munmap(thread.stack, kStackBytes);
}

}  // namespace dsec::aether

// SPDX-License-Identifier: Apache-2.0
#include "image/root_calls.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <thread>

namespace dsec::image {
namespace {

// errno(3) of a server that is gone, does not answer or has lost its client.
constexpr std::array kTrouble = {EIO,        ENOTCONN,     ESTALE,   ETIMEDOUT,   EHOSTDOWN,
                                 EREMOTEIO,  EHOSTUNREACH, ENETDOWN, ENETUNREACH, ECONNREFUSED,
                                 ECONNRESET, ECONNABORTED, ENODEV,   ENXIO,       ENOLINK,
                                 ESHUTDOWN,  EAGAIN,       EINTR,    EPROTO};
// A thread without a call ends after so long.
constexpr std::chrono::seconds kIdle{10};

}  // namespace

Error Unreachable(std::string_view what) {
  return Error(Code::kUnavailable, "layer.unreachable",
               fmt::format("the root of the layer store cannot be reached: {}", what));
}

Error RootError(Error error) {
  if (std::ranges::find(kTrouble, error.sys_errno()) == kTrouble.end()) return error;
  return Unreachable(error.message()).WithErrno(error.sys_errno());
}

struct RootThreads::State {
  explicit State(size_t most) : limit(most) {}

  void Work(std::function<void()> call) {
    pthread_setname_np(pthread_self(), "layer_root");
    while (true) {
      call();
      call = nullptr;  // before anybody learns that this call is over
      std::unique_lock lock(mutex);
      --running;
      ended.notify_all();
      ++idle;
      work.wait_for(lock, kIdle, [&] { return closed || !queue.empty(); });
      --idle;
      if (queue.empty()) return;
      call = std::move(queue.front());
      queue.pop_front();
    }
  }

  const size_t limit;
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable ended;
  std::deque<std::function<void()>> queue;  // never more than `idle`
  size_t running = 0;                       // waiting calls included
  size_t idle = 0;
  bool closed = false;
};

RootThreads::RootThreads(size_t limit) : state_(std::make_shared<State>(limit)) {}

RootThreads::~RootThreads() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
  }
  state_->work.notify_all();
}

bool RootThreads::Start(std::function<void()> call) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->running >= state_->limit) return false;
    ++state_->running;
    if (state_->idle > state_->queue.size()) {
      state_->queue.push_back(std::move(call));
      call = nullptr;
    }
  }
  if (call == nullptr) {
    state_->work.notify_one();
    return true;
  }
  try {
    std::thread([state = state_, call = std::move(call)]() mutable {
      state->Work(std::move(call));
    }).detach();
    return true;
  } catch (const std::system_error&) {  // no room for a thread
    {
      const std::lock_guard lock(state_->mutex);
      --state_->running;
    }
    state_->ended.notify_all();
    return false;
  }
}

bool RootThreads::Wait(std::chrono::milliseconds patience) const {
  std::unique_lock lock(state_->mutex);
  return state_->ended.wait_for(lock, patience, [&] { return state_->running == 0; });
}

struct RootLane::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  std::optional<MonoTime> busy_since;
  bool closed = false;

  void Work() {
    pthread_setname_np(pthread_self(), "layer_catalog");
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return closed || !queue.empty(); });
      if (closed) return;
      auto run = std::move(queue.front());
      queue.pop_front();
      busy_since = Clock::System().Mono();
      lock.unlock();
      run();
      run = nullptr;
      lock.lock();
      busy_since.reset();
    }
  }
};

RootLane::RootLane() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { state->Work(); }).detach();
}

RootLane::~RootLane() {
  std::deque<std::function<void()>> dropped;
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
    dropped.swap(state_->queue);
  }
  state_->changed.notify_all();
}

bool RootLane::Add(std::function<void()> run, std::chrono::milliseconds patience) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->busy_since && Clock::System().Mono() - *state_->busy_since > patience) return false;
    state_->queue.push_back(std::move(run));
  }
  state_->changed.notify_all();
  return true;
}

void RootLane::Post(std::function<void()> call) {
  static_cast<void>(Add(std::move(call), std::chrono::hours(24 * 365)));
}

}  // namespace dsec::image

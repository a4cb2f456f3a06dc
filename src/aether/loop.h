// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::aether {

// The agent's only event loop: level-triggered epoll, timers and deferred calls. Everything in this
// folder except jobs of WorkerPool runs on its thread. Blocks in one epoll_pwait2 when there is
// nothing to do, so an idle agent never wakes up.
class Loop {
 public:
  using Handler = std::function<void(uint32_t events)>;
  using Callback = std::function<void()>;

  static Result<std::unique_ptr<Loop>> Create();
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Runs until Stop().
  void Run();
  // One turn: waits for events, at most until `limit`, and handles them.
  void Turn(MonoTime limit);
  void Stop() { stopped_ = true; }

  // Called at the end of the present turn, in order.
  void Post(Callback callback) { posted_.push_back(std::move(callback)); }
  // Called each time before the loop is about to sleep.
  void OnIdle(Callback callback) { on_idle_ = std::move(callback); }

  MonoTime now() const { return Clock::System().Mono(); }

 private:
  friend class FdWatch;
  friend class Timer;
  struct Registration {
    int fd = -1;
    uint32_t events = 0;  // 0: not in the epoll set
    Handler handler;
    bool dead = false;
  };

  explicit Loop(os::UniqueFd epoll) : epoll_(std::move(epoll)) {}
  void Update(Registration& registration, uint32_t events);
  void Retire(std::unique_ptr<Registration> registration);

  os::UniqueFd epoll_;
  std::multimap<MonoTime, Callback> timers_;
  std::vector<Callback> posted_;
  std::vector<std::unique_ptr<Registration>> retired_;  // freed at the end of the turn
  Callback on_idle_;
  bool stopped_ = false;
};

// Interest in a descriptor, which must outlive it. The handler may destroy its own FdWatch. Hang-up
// and error conditions are always reported while `events` is not 0.
class FdWatch {
 public:
  FdWatch() = default;
  FdWatch(Loop& loop, int fd, uint32_t events, Loop::Handler handler);
  FdWatch(FdWatch&&) noexcept = default;
  FdWatch& operator=(FdWatch&& other) noexcept;
  ~FdWatch() { Reset(); }

  bool active() const { return registration_ != nullptr; }
  // 0 pauses it.
  void Set(uint32_t events);
  void Reset();

 private:
  Loop* loop_ = nullptr;
  std::unique_ptr<Loop::Registration> registration_;
};

// One pending call. Destroying or resetting it cancels the call.
class Timer {
 public:
  Timer() = default;
  Timer(Loop& loop, MonoTime at, Loop::Callback callback);
  Timer(Timer&& other) noexcept;
  Timer& operator=(Timer&& other) noexcept;
  ~Timer() { Reset(); }

  bool armed() const { return loop_ != nullptr; }
  void Reset();

 private:
  struct Shared {
    Timer* owner;
  };
  Loop* loop_ = nullptr;
  std::multimap<MonoTime, Loop::Callback>::iterator position_;
  std::shared_ptr<Shared> shared_;  // tells the call where its Timer is now
};

}  // namespace dsec::aether

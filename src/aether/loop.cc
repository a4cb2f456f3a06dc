// SPDX-License-Identifier: Apache-2.0
#include "aether/loop.h"

#include <cerrno>
#include <utility>

#include "base/check.h"

namespace dsec::aether {
namespace {

constexpr int kEventsPerTurn = 64;

timespec ToTimespec(std::chrono::nanoseconds time) {
  auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  return {seconds.count(), (time - seconds).count()};
}

}  // namespace

Result<std::unique_ptr<Loop>> Loop::Create() {
  os::UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return Error::FromErrno(errno, "agent.epoll", "epoll_create1");
  return std::unique_ptr<Loop>(new Loop(std::move(epoll)));
}

Loop::~Loop() = default;

void Loop::Run() {
  while (!stopped_) Turn(MonoTime::max());
}

void Loop::Turn(MonoTime limit) {
  bool ready = !posted_.empty();
  if (!ready && on_idle_) on_idle_();
  MonoTime until = limit;
  if (!timers_.empty() && timers_.begin()->first < until) until = timers_.begin()->first;
  timespec timeout = {};
  if (!ready && until != MonoTime::max()) {
    MonoTime start = now();
    if (until > start) timeout = ToTimespec(until - start);
  }
  epoll_event events[kEventsPerTurn];
  bool forever = !ready && until == MonoTime::max();
  int count =
      ::epoll_pwait2(epoll_.get(), events, kEventsPerTurn, forever ? nullptr : &timeout, nullptr);
  DSEC_CHECK(count >= 0 || errno == EINTR);
  for (int i = 0; i < count; ++i) {
    auto* registration = static_cast<Registration*>(events[i].data.ptr);
    if (!registration->dead && registration->events != 0) registration->handler(events[i].events);
  }
  if (!timers_.empty()) {
    MonoTime time = now();
    while (!timers_.empty() && timers_.begin()->first <= time) {
      Callback callback = std::move(timers_.begin()->second);
      timers_.erase(timers_.begin());
      callback();
    }
  }
  std::vector<Callback> posted = std::exchange(posted_, {});
  for (Callback& callback : posted) callback();
  retired_.clear();
}

void Loop::Update(Registration& registration, uint32_t events) {
  if (registration.events == events) return;
  int operation = registration.events == 0 ? EPOLL_CTL_ADD
                  : events == 0            ? EPOLL_CTL_DEL
                                           : EPOLL_CTL_MOD;
  epoll_event event = {};
  event.events = events;
  event.data.ptr = &registration;
  // Fails only for a closed or unpollable descriptor, which is a mistake of the caller, or without
  // kernel memory.
  DSEC_CHECK(::epoll_ctl(epoll_.get(), operation, registration.fd, &event) == 0);
  registration.events = events;
}

void Loop::Retire(std::unique_ptr<Registration> registration) {
  Update(*registration, 0);
  registration->dead = true;
  retired_.push_back(std::move(registration));
}

FdWatch::FdWatch(Loop& loop, int fd, uint32_t events, Loop::Handler handler)
    : loop_(&loop), registration_(std::make_unique<Loop::Registration>()) {
  registration_->fd = fd;
  registration_->handler = std::move(handler);
  loop.Update(*registration_, events);
}

FdWatch& FdWatch::operator=(FdWatch&& other) noexcept {
  if (this != &other) {
    Reset();
    loop_ = other.loop_;
    registration_ = std::move(other.registration_);
  }
  return *this;
}

void FdWatch::Set(uint32_t events) {
  if (registration_ != nullptr) loop_->Update(*registration_, events);
}

void FdWatch::Reset() {
  if (registration_ != nullptr) loop_->Retire(std::move(registration_));
}

Timer::Timer(Loop& loop, MonoTime at, Loop::Callback callback)
    : loop_(&loop), shared_(std::make_shared<Shared>(this)) {
  position_ = loop.timers_.emplace(at, [shared = shared_, callback = std::move(callback)] {
    shared->owner->loop_ = nullptr;
    callback();
  });
}

Timer::Timer(Timer&& other) noexcept { *this = std::move(other); }

Timer& Timer::operator=(Timer&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  if (other.loop_ == nullptr) return *this;
  loop_ = std::exchange(other.loop_, nullptr);
  position_ = other.position_;
  shared_ = std::move(other.shared_);
  shared_->owner = this;
  return *this;
}

void Timer::Reset() {
  if (Loop* loop = std::exchange(loop_, nullptr); loop != nullptr) loop->timers_.erase(position_);
}

}  // namespace dsec::aether

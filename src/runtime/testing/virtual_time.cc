// SPDX-License-Identifier: Apache-2.0
#include "runtime/testing/virtual_time.h"

#include <errno.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include "base/check.h"

namespace {

// 2026-01-01T00:00:00Z, an hour after steady_clock began.
constexpr int64_t kWallBegin = 1'767'225'600'000'000'000 - 3'600'000'000'000;
int64_t virtual_ns = 3'600'000'000'000;

}  // namespace

// These stand in for those of the C++ library in the whole program.
namespace std::chrono {
inline namespace _V2 {

steady_clock::time_point steady_clock::now() noexcept {
  return time_point(nanoseconds(virtual_ns));
}
system_clock::time_point system_clock::now() noexcept {
  return time_point(duration_cast<duration>(nanoseconds(kWallBegin + virtual_ns)));
}

}  // namespace _V2
}  // namespace std::chrono

// Without a timerfd, which has real time, Asio looks at its timers by steady_clock at every poll.
extern "C" int timerfd_create(int, int) noexcept {
  errno = ENOSYS;
  return -1;
}

namespace dsec::runtime::testing {

MonoTime VirtualNow() { return std::chrono::steady_clock::now(); }

struct World::Loop {
  class Context : public boost::asio::io_context {
   public:
    Context() : io_context(1) {}
    void Shutdown() { shutdown(); }
  };
  Loop() : work(context.get_executor()) {}

  Context context;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work;
  bool paused = false;
  bool dead = false;
};

World::World(std::chrono::nanoseconds step) : step_(step) {}

World::~World() {
  for (const auto& loop : loops_) {
    if (!loop->dead) loop->context.Shutdown();
  }
}

World::Process World::Add() {
  loops_.push_back(std::make_unique<Loop>());
  return loops_.size() - 1;
}

Executor World::at(Process process) const {
  DSEC_CHECK(process < loops_.size());
  return loops_[process]->context.get_executor();
}

void World::Pause(Process process) { loops_.at(process)->paused = true; }

void World::Continue(Process process) { loops_.at(process)->paused = false; }

void World::Kill(Process process) {
  Loop& loop = *loops_.at(process);
  if (loop.dead) return;
  loop.dead = true;
  loop.context.Shutdown();
}

void World::RunReady() {
  for (size_t ran = 1; ran > 0;) {
    ran = 0;
    for (size_t i = 0; i < loops_.size(); ++i) {
      if (loops_[i]->paused || loops_[i]->dead) continue;
      ran += loops_[i]->context.poll();
    }
  }
}

void World::RunFor(std::chrono::nanoseconds time) {
  RunUntil([] { return false; }, time);
}

bool World::RunUntil(const std::function<bool()>& done, std::chrono::nanoseconds most) {
  const int64_t until = virtual_ns + most.count();
  while (true) {
    RunReady();
    if (done()) return true;
    if (virtual_ns >= until) return false;
    virtual_ns = std::min(until, virtual_ns + step_.count());
  }
}

}  // namespace dsec::runtime::testing

// SPDX-License-Identifier: Apache-2.0
#include "aether/counters.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "aether/cgroup.h"
#include "os/file.h"

namespace dsec::aether {
namespace {

// v1 signals an out-of-memory before it picks and counts the victim (mm/memcontrol-v1.c), and has
// no later event. The counter is looked at again after 1, 2, 4, ... ms.
constexpr int kRechecks = 10;

os::UniqueFd OpenOrNone(int dirfd, const char* name) {
  if (dirfd < 0) return os::UniqueFd();
  Result<os::UniqueFd> file = os::OpenAt(dirfd, name, O_RDONLY);
  return file.ok() ? std::move(file).value() : os::UniqueFd();
}

uint64_t ReadValue(const os::UniqueFd& file, std::string_view key) {
  if (!file.valid()) return 0;
  char text[4096];
  ssize_t size = ::pread(file.get(), text, sizeof(text), 0);
  return size <= 0 ? 0 : KernelValue({text, static_cast<size_t>(size)}, key);
}

}  // namespace

Counters::Counters(int code_v2, int memory_v1, int pids_v1, int cpu_v1)
    : oom_v1_(memory_v1 >= 0), cpu_v1_(cpu_v1 >= 0), memory_v1_(memory_v1) {
  oom_ =
      oom_v1_ ? OpenOrNone(memory_v1, "memory.oom_control") : OpenOrNone(code_v2, "memory.events");
  pids_ = OpenOrNone(pids_v1 >= 0 ? pids_v1 : code_v2, "pids.events");
  cpu_ = OpenOrNone(cpu_v1_ ? cpu_v1 : code_v2, "cpu.stat");
}

Counts Counters::Read() const {
  Counts counts;
  counts.oom_kills = ReadValue(oom_, "oom_kill");
  counts.forks_denied = ReadValue(pids_, "max");
  counts.throttled_usec = cpu_v1_ ? ReadValue(cpu_, "throttled_time") / 1000  // ns
                                  : ReadValue(cpu_, "throttled_usec");
  return counts;
}

bool Counters::WatchOom(Loop& loop, std::function<void()> on_pressure,
                        std::function<void()> on_kill) {
  if (!oom_v1_ || !oom_.valid()) return false;
  loop_ = &loop;
  on_pressure_ = std::move(on_pressure);
  on_kill_ = std::move(on_kill);
  event_.Reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_.valid()) return false;
  // cgroup-v1/memory.rst, "OOM control": "<event_fd> <fd of memory.oom_control>".
  Result<void> registered = os::WriteExisting(memory_v1_, "cgroup.event_control",
                                              fmt::format("{} {}", event_.get(), oom_.get()));
  if (!registered.ok()) {
    event_.Reset();
    return false;
  }
  last_kills_ = Read().oom_kills;
  watch_ = FdWatch(loop, event_.get(), EPOLLIN, [this](uint32_t) { OnOom(); });
  return true;
}

void Counters::OnOom() {
  uint64_t count;
  [[maybe_unused]] ssize_t size = ::read(event_.get(), &count, sizeof(count));
  on_pressure_();
  rechecks_ = 0;
  Recheck();
}

void Counters::Recheck() {
  uint64_t kills = Read().oom_kills;
  if (kills != last_kills_) {
    last_kills_ = kills;
    on_kill_();
  }
  if (rechecks_ >= kRechecks) return;
  recheck_ = Timer(*loop_, loop_->now() + std::chrono::milliseconds(1 << rechecks_++),
                   [this] { Recheck(); });
}

}  // namespace dsec::aether

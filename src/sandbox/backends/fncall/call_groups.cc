// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/call_groups.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "os/file.h"
#include "sandbox/isolators/control_file.h"

namespace dsec::sandbox {
namespace {

constexpr const char* kPeakV1 = "memory.max_usage_in_bytes";

bool Exists(int dir, const char* file) { return ::faccessat(dir, file, F_OK, 0) == 0; }

Result<void> Write(int dir, const char* file, std::string_view value) {
  return os::WriteExisting(dir, file, value).Context("write {} to {}", value, file);
}

}  // namespace

Result<CallGroups> CallGroups::Open(const SlotCgroups& groups) {
  CallGroups open;
  const auto directory = [&](const os::UniqueFd& v1) {
    return v1.valid() ? os::OpenAt(v1.get(), ".", O_RDONLY | O_DIRECTORY)
                      : os::OpenAt(groups.slot.get(), "code", O_RDONLY | O_DIRECTORY);
  };
  DSEC_TRY(open.memory_, directory(groups.memory));
  DSEC_TRY(open.pids_, directory(groups.pids));
  open.memory_v1_ = groups.memory.valid();
  // With v1 the runner is moved there, so that cells inherit it; with v2 it is beside "code".
  open.base_processes_ = open.own_processes_ = groups.pids.valid() ? 2 : 1;
  open.swap_bounded_ = Exists(open.memory_.get(),
                              open.memory_v1_ ? "memory.memsw.limit_in_bytes" : "memory.swap.max");
  if (!open.memory_v1_ && open.swap_bounded_)
    DSEC_TRY_VOID(Write(open.memory_.get(), "memory.swap.max", "0"));
  if (open.memory_v1_ && !open.swap_bounded_)
    DSEC_TRY_VOID(Write(open.memory_.get(), "memory.swappiness", "0"));
  const bool v1 = open.memory_v1_;
  const auto control = [](const os::UniqueFd& dir, const char* file) {
    return os::OpenAt(dir.get(), file, O_RDONLY);
  };
  DSEC_TRY(open.usage_, control(open.memory_, v1 ? "memory.usage_in_bytes" : "memory.current"));
  DSEC_TRY(open.memory_events_, control(open.memory_, v1 ? "memory.oom_control" : "memory.events"));
  DSEC_TRY(open.stat_, control(open.memory_, "memory.stat"));
  if (v1) {
    DSEC_TRY(open.peak_, os::OpenAt(open.memory_.get(), kPeakV1, O_RDWR));
  }
  DSEC_TRY(open.processes_, control(open.pids_, "pids.current"));
  DSEC_TRY(open.pids_events_, control(open.pids_, "pids.events"));
  return open;
}

Result<void> CallGroups::SetMemory(uint64_t bytes) {
  const std::string value = fmt::format("{}", bytes);
  if (!memory_v1_) return Write(memory_.get(), "memory.max", value);
  // The kernel keeps limit_in_bytes <= memsw at every moment: the one that makes room goes first.
  constexpr const char* kPlain = "memory.limit_in_bytes";
  constexpr const char* kWithSwap = "memory.memsw.limit_in_bytes";
  if (!swap_bounded_) return Write(memory_.get(), kPlain, value);
  const bool raise = memory_limit_ != 0 && bytes > memory_limit_;
  DSEC_TRY_VOID(Write(memory_.get(), raise ? kWithSwap : kPlain, value));
  return Write(memory_.get(), raise ? kPlain : kWithSwap, value);
}

Result<void> CallGroups::SetLimits(uint64_t memory_bytes, uint64_t processes, uint64_t held) {
  own_memory_ = kOwnMemory + held;
  const uint64_t memory = memory_bytes + own_memory_;
  if (memory != memory_limit_) {
    auto set = SetMemory(memory);
    if (!set.ok()) {
      memory_limit_ = 0;
      return set;
    }
    memory_limit_ = memory;
  }
  // Page cache that earlier calls have left would be taken for this call's own once the bound is
  // reached. Best effort: what the kernel does not give back stays charged. What the zygote runs on
  // may stay, the call runs on it too.
  constexpr uint64_t kShare = 4;
  const uint64_t kept = std::min(own_cache_, memory_bytes / kShare);
  if (memory_v1_ && MemoryNow() > own_memory_ + kept + (memory_bytes / kShare))
    (void)Write(memory_.get(), "memory.force_empty", "0");
  const uint64_t pids = processes + own_processes_;
  if (pids != pids_limit_) {
    DSEC_TRY_VOID(Write(pids_.get(), "pids.max", fmt::format("{}", pids)));
    pids_limit_ = pids;
  }
  return Ok();
}

Result<void> CallGroups::HoldZygote() {
  own_processes_ = base_processes_ + 1;
  // Linux 6.12: a write sets back what is then read through this descriptor.
  if (!memory_v1_ && !peak_.valid()) {
    DSEC_TRY(peak_, os::OpenAt(memory_.get(), "memory.peak", O_RDWR));
  }
  own_files_ = ReadControl(stat_, "shmem");
  own_cache_ = ReadControl(stat_, memory_v1_ ? "cache" : "file");
  return Ok();
}

void CallGroups::HoldNothing() {
  own_processes_ = base_processes_;
  own_files_ = own_cache_ = 0;
}

uint64_t CallGroups::MemoryNow() const { return ReadControl(usage_); }

uint64_t CallGroups::HeldMemory() const {
  const uint64_t shmem = ReadControl(stat_, "shmem");
  const uint64_t cache = ReadControl(stat_, memory_v1_ ? "cache" : "file");
  const uint64_t now = MemoryNow();
  return now - std::min(now, cache - std::min(cache, shmem));
}

uint64_t CallGroups::OomKills() const {
  const uint64_t now = ReadControl(memory_events_, "oom_kill");
  return now - std::min(now, before_.oom_kills);
}

bool CallGroups::Thrashes() {
  constexpr uint64_t kPage = 4096;
  constexpr uint64_t kFilesShare = 8;  // of the bound: with more of files the kernel has room
  constexpr uint64_t kTimesOver = 16;
  constexpr uint64_t kFewRefaults = 256;
  constexpr int kLooks = 2;
  if (MemoryNow() + memory_limit_ / kFilesShare < memory_limit_) {
    thrashing_looks_ = 0;
    return false;
  }
  // Both count files in memory, which cannot be taken back without swap, as cache.
  const uint64_t cache = ReadControl(stat_, memory_v1_ ? "cache" : "file");
  const uint64_t files = cache - std::min(cache, ReadControl(stat_, "shmem"));
  const uint64_t refaults = ReadControl(stat_, "workingset_refault_file");
  const uint64_t fresh = refaults - std::min(refaults, refaults_before_);
  refaults_before_ = refaults;
  const bool over =
      files < memory_limit_ / kFilesShare && fresh > kFewRefaults + (kTimesOver * files / kPage);
  thrashing_looks_ = over ? thrashing_looks_ + 1 : 0;
  // The first look of a call counts what came since the last look at another: it says nothing.
  return thrashing_looks_ > kLooks;
}

bool CallGroups::AwaitRelease(MonoTime deadline) const {
  constexpr uint64_t kNothingMuch = 1 << 20;
  constexpr auto kPause = std::chrono::milliseconds(1);
  // A call that has never had that much leaves no more.
  if (peak_.valid() && ReadControl(peak_) <= memory_before_ + kNothingMuch) return true;
  while (ReadControl(stat_, "shmem") > own_files_ + kNothingMuch) {
    if (Clock::System().Mono() >= deadline) return false;
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

Result<uint64_t> CallGroups::Processes() const {
  char text[32];
  const ssize_t n = ::pread(processes_.get(), text, sizeof(text), 0);
  if (n <= 0) return os::ErrnoError("fn.groups", "read pids.current");
  std::string_view words(text, static_cast<size_t>(n));
  return ToNumber(TakeWord(words));
}

Result<void> CallGroups::Begin(int call) {
  if (peak_.valid() && ::pwrite(peak_.get(), "0", 1, 0) != 1)
    return os::ErrnoError("fn.groups", "set back the peak of memory");
  before_ = {};
  memory_before_ = 0;
  thrashing_looks_ = 0;
  max_events_before_ = memory_v1_ ? 0 : ReadControl(memory_events_, "max");
  DSEC_TRY(before_, Read(call));
  // Otherwise the call has a v2 directory of its own, whose peak begins at nothing.
  memory_before_ = peak_.valid() ? MemoryNow() : 0;
  return Ok();
}

Result<CallGroups::Counters> CallGroups::Read(int call) const {
  Counters now;
  now.oom_kills = ReadControl(memory_events_, "oom_kill");
  now.forks_denied = ReadControl(pids_events_, "max");
  now.oom_kills -= std::min(now.oom_kills, before_.oom_kills);
  now.forks_denied -= std::min(now.forks_denied, before_.forks_denied);
  const uint64_t peak = peak_.valid() ? ReadControl(peak_) : ReadControl(call, "memory.peak");
  // Not failcnt, which newer kernels no longer count. Charges go up in steps of 64 pages a core.
  constexpr uint64_t kNearlyFull = 1 << 20;
  now.memory_full = memory_v1_ ? peak + kNearlyFull >= memory_limit_
                               : ReadControl(memory_events_, "max") > max_events_before_;
  // Page cache that an earlier call has left counts as used until the kernel needs the room. As
  // long as it did not, all of it is still there; once it did, the call has had all that it may
  // have.
  const uint64_t before = now.memory_full ? std::min(memory_before_, own_memory_) : memory_before_;
  now.memory_peak = peak - std::min(peak, before);
  return now;
}

Result<uint64_t> CallGroups::CpuUsec(int call) {
  DSEC_TRY(const auto text, os::ReadFile(call, "cpu.stat", 4096));
  return ControlValue(text, "usage_usec");
}

Result<void> CallGroups::Kill(int call) {
  killed_ = true;
  return Write(call, "cgroup.kill", "1");
}

}  // namespace dsec::sandbox

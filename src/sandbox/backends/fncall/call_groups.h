// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/result.h"
#include "os/unique_fd.h"
#include "sandbox/isolators/cgroup_tree.h"

namespace dsec::sandbox {

// The cgroups of one worker as one call after another uses them: memory and processes are bounded
// in the group of all that is in the worker below its runner, CPU time and life are those of the
// call's own v2 directory. One thread.
class CallGroups {
 public:
  // What of the kernel's and their own memory they are charged, rounded up.
  static constexpr uint64_t kOwnMemory = 2 << 20;

  static Result<CallGroups> Open(const SlotCgroups& groups);

  // Writes what differs from the last call. `held` is what an interpreter that waits for the call
  // has of memory, which is not the call's.
  Result<void> SetLimits(uint64_t memory_bytes, uint64_t processes, uint64_t held = 0);

  // From now on there is a zygote, whose process and files in memory are the worker's; or none. It
  // is in the same v2 directory as its forks, one call after another.
  Result<void> HoldZygote();
  void HoldNothing();
  // Processes that are there during a call and are not the call's.
  uint64_t own_processes() const { return own_processes_; }

  // Whether the next call needs a v2 directory of its own: after Kill, and for memory.peak, which
  // counts from the making of the directory. All else is told apart by what it was at Begin.
  bool TakeNeedsFresh() { return std::exchange(killed_, false) || !memory_v1_; }

  struct Counters {
    uint64_t memory_peak = 0;
    bool memory_full = false;  // the bound was reached, and the kernel took back what it could
    uint64_t oom_kills = 0;
    uint64_t forks_denied = 0;
  };
  // Sets the peak back and remembers where the counters stand.
  Result<void> Begin(int call);
  // Since Begin. The peak is that of the call alone: what was there before is taken off.
  Result<Counters> Read(int call) const;
  // OOM kills since Begin.
  uint64_t OomKills() const;
  // Whether the call gets nowhere for want of memory. The kernel kills nothing as long as it can
  // take back a page of a file, even when it is the very page that the program runs on and reads
  // again at once. True when memory is full of what cannot be taken back, and in each of the last
  // two intervals between looks the few pages of files that are left were read again many times
  // over. To be asked at intervals of a call.
  bool Thrashes();
  // What the end of a cell frees is freed a little later: its files in memory and shared segments
  // go with mounts and namespaces that the kernel takes down by itself, and tells nobody when it
  // has. False when some of it is still there at the deadline.
  bool AwaitRelease(MonoTime deadline) const;
  // Memory in the groups now that the kernel cannot take back: of processes, files in memory, its
  // own.
  uint64_t HeldMemory() const;
  // Processes in the groups now, the worker's own included.
  Result<uint64_t> Processes() const;

  // Of the v2 directory `call`.
  static Result<uint64_t> CpuUsec(int call);
  // SIGKILL to all in it.
  Result<void> Kill(int call);

 private:
  uint64_t MemoryNow() const;
  Result<void> SetMemory(uint64_t bytes);

  os::UniqueFd memory_, pids_;  // directories with the files of the two controllers
  // Read for each call, hence open.
  os::UniqueFd usage_, peak_, memory_events_, stat_, processes_, pids_events_;
  bool memory_v1_ = false;
  bool swap_bounded_ = false;
  bool killed_ = false;
  uint64_t memory_limit_ = 0;
  uint64_t pids_limit_ = 0;
  uint64_t own_memory_ = kOwnMemory;
  // What of the worker itself is counted during a call: the init of the cell, with v1 the runner,
  // the zygote where there is one.
  uint64_t base_processes_ = 1;
  uint64_t own_processes_ = 1;
  uint64_t own_files_ = 0;
  uint64_t own_cache_ = 0;
  uint64_t memory_before_ = 0;
  uint64_t max_events_before_ = 0;
  uint64_t refaults_before_ = 0;
  int thrashing_looks_ = 0;
  Counters before_;
};

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "dsec/v1/edge.pb.h"
#include "dsec/v1/model.pb.h"
#include "os/process.h"
#include "os/unique_fd.h"
#include "sandbox/isolators/slot_name.h"

namespace dsec::sandbox {

// Makes and removes cgroup directories. A test with a directory tree in the kernel's place derives
// from it to fill new directories with the files that the kernel would put there.
class CgroupFs {
 public:
  virtual ~CgroupFs() = default;
  virtual Result<void> Make(int parent, const char* name);
  // Missing: ok. EBUSY stays visible as sys_errno.
  virtual Result<void> Remove(int parent, const char* name);
};

struct CgroupOptions {
  std::string node_dir;  // "dsec-<node>", in every hierarchy
  std::string
      root;  // put before /proc/self/mountinfo and before each mount point; empty on the host
  CgroupFs* fs = nullptr;  // null: the kernel
};

// Descriptors for the making of one slot.
struct SlotCgroups {
  os::UniqueFd slot, agent, init;      // v2
  os::UniqueFd memory, pids, cpu;      // v1 directories of the code; invalid where v2
  std::vector<os::UniqueFd> v1_procs;  // cgroup.procs of each v1 group
};

// What has been killed. The agent is the last to go: as the first process of its pid namespace it
// outlives all that is in it, also after it has left its cgroup.
struct DyingSlot {
  os::UniqueFd events;  // cgroup.events of the slot; invalid when it has no directory
  os::PidFd agent;      // not valid when none was there
};

// The cgroups of this node in every hierarchy in use: v2 (for the tree, cgroup.kill and device
// rules, always) and for memory, cpu and pids whichever version the host has each on. Where no v2
// hierarchy is mounted, a detached mount of it is made.
//
//   v2                 node_dir/s<n>-<g>/{agent,code/{init,<exec>...}}   limits of v2 controllers
//   on code/ v1, per controller node_dir/s<n>-<g>                                 code only
//
// Thread-safe; every call blocks for some microseconds to milliseconds. Holds at most four
// descriptors.
class CgroupTree {
 public:
  // Finds the hierarchies, makes node_dir in each and turns controllers on. kFailedPrecondition
  // "cgroup.unusable" names what is missing.
  static Result<std::unique_ptr<CgroupTree>> Open(const CgroupOptions& options);

  // "v1", "hybrid" or "v2".
  std::string_view driver() const { return driver_; }
  std::vector<v1::Capability> Capabilities() const;
  // Why a bound cannot be held here; empty when it can.
  std::string MemoryUnenforceable() const;
  std::string CpuUnenforceable() const;
  std::string PidsUnenforceable() const;
  // node_dir in v2.
  int top() const { return unified_.get(); }

  // On failure what was made is left to Remove.
  Result<SlotCgroups> Make(const SlotName& slot, uint32_t agent_uid, uint32_t id_base);
  // Sets every limit of a group that has none yet, or changes them (kResourceExhausted when memory
  // cannot be taken back).
  Result<void> SetLimits(const SlotName& slot, const v1::Limits& limits);
  // Fills cpu, memory, pids and the counters of limits that struck. Figures of a group that is gone
  // stay 0.
  Result<void> ReadUsage(const SlotName& slot, v1::Usage& usage) const;

  // SIGKILL to the agent and everything below it. Missing: ok.
  Result<DyingSlot> Kill(const SlotName& slot) const;
  // Whether nothing of it lives in the cgroup any more, by what `events` says; reading arms it for
  // POLLPRI.
  static Result<bool> IsEmpty(int events);
  // False when something was still there at the deadline.
  static Result<bool> WaitGone(const DyingSlot& dying, MonoTime deadline);
  // Removes the directories of a slot without processes; waits for what is on its way out.
  // kDeadlineExceeded "cgroup.busy" names the processes that stay. Missing: ok.
  Result<void> Remove(const SlotName& slot, MonoTime deadline);
  // Every slot that has a directory in any hierarchy, of whatever kind.
  Result<std::vector<SlotName>> List() const;
  // Kills and removes the slots of that kind that have no owner. One line for each.
  Result<std::vector<std::string>> Sweep(SlotKind kind,
                                         const std::function<bool(const SlotName&)>& owned,
                                         MonoTime deadline);
  Result<std::vector<int>> Processes(const SlotName& slot) const;
  // Removes node_dir everywhere; kResourceExhausted while a slot is left in it. Nothing else may be
  // called afterwards.
  Result<void> RemoveTop();

 private:
  // Where one controller is: in v2, in v1_tops_[v1_top], or nowhere.
  struct Place {
    bool v2 = false;
    int v1_top = -1;
    bool found() const { return v2 || v1_top >= 0; }
  };
  struct MountPoint;
  explicit CgroupTree(const CgroupOptions& options);
  Result<void> FindHierarchies();
  Result<void> OpenUnified(const MountPoint* mounted);
  Result<void> EnableControllers(int dir, const std::string& path) const;
  Result<os::UniqueFd> OpenTop(int root);
  Result<void> SetMemory(const std::string& slot, uint64_t bytes);
  Result<void> SetCpu(const std::string& slot, uint64_t millis);
  Result<void> RemoveV1(int top, const std::string& slot, MonoTime deadline);
  Result<void> RemoveV2(const std::string& slot, MonoTime deadline);
  // The directory that bears a controller's files for one slot, and the path of it.
  int DirOf(const Place& place) const;
  std::string PathOf(const Place& place, const std::string& slot) const;

  const CgroupOptions options_;
  CgroupFs kernel_;
  CgroupFs& fs_;
  std::string_view driver_;
  std::string v2_controllers_;  // "+memory +cpu +pids": those that are on v2
  bool swap_bounded_ = false;   // v1 memory with memsw, or v2
  bool burst_ = false;          // cpu.cfs_burst_us, cpu.max.burst
  // The bandwidth of the last sandbox, which new slots are given: setting it costs a walk over all
  // groups of the host, which a create then need not do.
  std::unique_ptr<std::atomic<uint64_t>> likely_cpu_millis_ =
      std::make_unique<std::atomic<uint64_t>>(1000);
  os::UniqueFd unified_;               // node_dir in v2
  std::vector<os::UniqueFd> v1_tops_;  // node_dir in each v1 hierarchy in use
  Place memory_, cpu_, pids_;
};

}  // namespace dsec::sandbox

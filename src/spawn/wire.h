// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the daemon, the spawner and its stages say to one another: flat structs of fixed size in
// native byte order, checked by size, magic and version. Each packet is one struct plus
// descriptors. Values with strings and vectors are in plan.h. Nothing here allocates.

#include <cstddef>
#include <cstdint>

namespace dsec::spawn::wire {

inline constexpr uint32_t kVersion = 2;
inline constexpr uint32_t kStartMagic = 0x31534544;    // "DES1"
inline constexpr uint32_t kSlotMagic = 0x32534544;     // "DES2"
inline constexpr uint32_t kLaunchMagic = 0x33534544;   // "DES3"
inline constexpr uint32_t kReplyMagic = 0x34534544;    // "DES4"
inline constexpr uint32_t kWorkerMagic = 0x35534544;   // "DES5"
inline constexpr uint32_t kViewsMagic = 0x36534544;    // "DES6"
inline constexpr uint32_t kCellMagic = 0x37534544;     // "DES7"
inline constexpr uint32_t kCellEndMagic = 0x38534544;  // "DES8"
inline constexpr uint32_t kZygoteMagic = 0x39534544;   // "DES9"
inline constexpr uint32_t kOrphanMagic = 0x41534544;   // "DESA"

// Steps, in the order they are taken. The numbers are local to one build; names leave the process.
enum class Step : uint32_t {
  kNone = 0,
  kRequest,
  // Start of the spawner.
  kMountNamespace,
  kTemplate,
  kFilters,
  // Slot.
  kCloneAgent,
  kMapAgent,
  kAgentProc,
  kNetwork,
  kCloneInit,
  kMapInit,
  kCgroups,
  kInitProc,
  kInitDev,
  kExecAgent,
  // Launch.
  kRoot,
  kDirectories,
  kFiles,
  kProc,
  kDev,
  kShm,
  kViews,
  kHostname,
  kEnterRoot,
  kLimits,
  kHandover,
  // Worker and its cells.
  kCloneRunner,
  kCells,
  kStage,
  kCloneCell,
  kMounts,
  kIdentity,
  kCloneZygote,
};

constexpr const char* StepName(Step step) {
  switch (step) {
    case Step::kNone:
      return "none";
    case Step::kRequest:
      return "request";
    case Step::kMountNamespace:
      return "mount_namespace";
    case Step::kTemplate:
      return "template";
    case Step::kFilters:
      return "filters";
    case Step::kCloneAgent:
      return "clone_agent";
    case Step::kMapAgent:
      return "map_agent";
    case Step::kAgentProc:
      return "agent_proc";
    case Step::kNetwork:
      return "network";
    case Step::kCloneInit:
      return "clone_init";
    case Step::kMapInit:
      return "map_init";
    case Step::kCgroups:
      return "cgroups";
    case Step::kInitProc:
      return "init_proc";
    case Step::kInitDev:
      return "init_dev";
    case Step::kExecAgent:
      return "exec_agent";
    case Step::kRoot:
      return "root";
    case Step::kDirectories:
      return "directories";
    case Step::kFiles:
      return "files";
    case Step::kProc:
      return "proc";
    case Step::kDev:
      return "dev";
    case Step::kShm:
      return "shm";
    case Step::kViews:
      return "views";
    case Step::kHostname:
      return "hostname";
    case Step::kEnterRoot:
      return "enter_root";
    case Step::kLimits:
      return "limits";
    case Step::kHandover:
      return "handover";
    case Step::kCloneRunner:
      return "clone_runner";
    case Step::kCells:
      return "cells";
    case Step::kStage:
      return "stage";
    case Step::kCloneCell:
      return "clone_cell";
    case Step::kMounts:
      return "mounts";
    case Step::kIdentity:
      return "identity";
    case Step::kCloneZygote:
      return "clone_zygote";
  }
  return "unknown";
}

// Answer to every request: no failed step, or the step and its errno. The steps done, in order,
// with their time.
struct StepTime {
  Step step = Step::kNone;
  uint32_t usec = 0;
};
inline constexpr uint32_t kMaxSteps = 24;
struct Reply {
  uint32_t magic = kReplyMagic;
  uint32_t version = kVersion;
  Step failed = Step::kNone;
  int32_t sys_errno = 0;
  uint32_t step_count = 0;
  uint32_t reserved = 0;
  StepTime steps[kMaxSteps] = {};
};

// Descriptors: agent image (sealed memfd), the four seccomp programs one after another (sealed
// memfd), log.
inline constexpr uint32_t kMaxFilterBytes = 32768;
struct Start {
  uint32_t magic = kStartMagic;
  uint32_t version = kVersion;
  uint32_t allow_bytes = 0;      // installed in the spawner, so shared by all that comes from it
  uint32_t arguments_bytes = 0;  // likewise
  uint32_t code_bytes = 0;       // installed in every exec
  uint32_t zygote_bytes = 0;     // installed in every zygote in its place
};
inline constexpr size_t kStartFds = 3;

// Descriptors: listening socket, token, v2 directories (slot, agent, code/init), [v1 memory
// directory], [v1 pids directory], cgroup.procs files of the v1 groups. The answer carries the
// agent's pidfd, the launch socket and user namespace B.
inline constexpr uint32_t kIdCount = 65536;
inline constexpr uint32_t kMaxV1 = 16;
struct Slot {
  uint32_t magic = kSlotMagic;
  uint32_t version = kVersion;
  uint32_t agent_uid = 0;
  uint32_t id_base = 0;
  uint32_t has_memory = 0;
  uint32_t has_pids = 0;
  uint32_t has_cpu = 0;
  uint32_t v1_count = 0;
  uint32_t timeout_ms = 0;
  uint32_t reserved = 0;
};
inline constexpr size_t kSlotFixedFds = 5;
inline constexpr size_t kSlotReplyFds = 3;

// Descriptors: root mount, then one detached mount a view.
inline constexpr uint32_t kMaxViews = 16;
inline constexpr uint32_t kMaxTarget = 64;
inline constexpr uint32_t kMaxHostname = 64;  // __NEW_UTS_LEN
inline constexpr uint32_t kMaxHosts = 16384;
inline constexpr uint32_t kMaxResolvConf = 4096;
inline constexpr uint32_t kMaxRlimits = 16;
inline constexpr uint32_t kCpuMaskWords = 16;
struct Rlimit {
  uint32_t resource = 0;
  uint32_t reserved = 0;
  uint64_t soft = 0;
  uint64_t hard = 0;
};
struct Launch {
  uint32_t magic = kLaunchMagic;
  uint32_t version = kVersion;
  uint32_t view_count = 0;
  uint32_t rlimit_count = 0;
  uint64_t capabilities = 0;  // bounding set of what runs inside
  uint64_t shm_bytes = 0;
  uint64_t shm_inodes = 0;
  uint64_t cpu_mask[kCpuMaskWords] = {};  // all zero: not restricted
  Rlimit rlimits[kMaxRlimits] = {};
  char views[kMaxViews][kMaxTarget] = {};  // absolute paths, NUL-terminated
  char hostname[kMaxHostname + 1] = {};
  char padding[7] = {};
  uint32_t hosts_bytes = 0;        // 0: the image's own file stays
  uint32_t resolv_conf_bytes = 0;  // likewise
  char hosts[kMaxHosts] = {};
  char resolv_conf[kMaxResolvConf] = {};
};

// ---- Workers of FnCall (stage/runner.cc).

// Descriptors: v2 directories (slot, agent, code/init), cgroup.procs files of the v1 groups. The
// answer carries the runner's pidfd, its control socket and user namespace B.
struct Worker {
  uint32_t magic = kWorkerMagic;
  uint32_t version = kVersion;
  uint32_t agent_uid = 0;
  uint32_t id_base = 0;
  uint32_t v1_count = 0;
  uint32_t timeout_ms = 0;
};
inline constexpr size_t kWorkerFixedFds = 3;
inline constexpr size_t kWorkerReplyFds = 3;

// To the runner, once, before the first cell: what every cell shows. Descriptors: one detached
// mount a view, of a file unless the target is "/sys".
struct Views {
  uint32_t magic = kViewsMagic;
  uint32_t version = kVersion;
  uint32_t view_count = 0;
  uint32_t reserved = 0;
  char views[kMaxViews][kMaxTarget] = {};
};

// To the runner: make a cell. Descriptors: the root and the /dev/shm of the cell as detached
// mounts, [its /dev in place of the worker's]. The answer carries the channel to the cell's init
// (agent_abi.h), the v2 directory that the program starts in, and init's oom_score_adj. The cell
// lives until the channel is closed; then a CellEnd comes, and another cell can be made.
struct Cell {
  uint32_t magic = kCellMagic;
  uint32_t version = kVersion;
  uint64_t serial = 0;  // names the v2 directory, if a new one is made
  uint32_t has_dev = 0;
  uint32_t timeout_ms = 0;
  // A new v2 directory; otherwise that of the last cell, if there is one. Needed after a write to
  // cgroup.kill: a clone into such a directory (CLONE_INTO_CGROUP) from outside of it is killed at
  // once, for the kernel takes it for one that was under way (seen on 6.18).
  uint32_t fresh_group = 0;
  // For a fork of the zygote, whose v2 directory it stays in, so that is the one that is answered
  // and none is made. The answer carries the cell's namespaces as well, see CellNamespace.
  uint32_t has_fork = 0;
};
inline constexpr size_t kCellFixedFds = 3;
inline constexpr size_t kCellReplyFds = 2;
// In the order in which a fork enters them. The pid namespace only its children can be in.
enum CellNamespace : uint32_t { kPidNs, kMountNs, kIpcNs, kNetNs, kCellNamespaces };

struct CellEnd {
  uint32_t magic = kCellEndMagic;
  uint32_t version = kVersion;
  uint64_t serial = 0;
  int32_t init_status = 0;       // as wait4 gives it
  int32_t cgroup_errno = 0;      // why the v2 directory is not empty; 0: it is
  int32_t network_errno = 0;     // why the state of the network is unknown
  uint32_t network_renewed = 0;  // the call had used it, and the worker has a new one
};

// To the runner, while there is no cell: start the zygote, an interpreter that later calls are
// forks of, in place of the one before. It is in the runner's pid namespace, with a root of its own
// that is made as that of a cell. Descriptors: that root and its /dev/shm as detached mounts, then
// those of an ExecRequest (agent_abi.h) without cgroup and program: payload, status, 0, 1, 2, and
// kZygoteExtraFds more. Ids of the payload are those of A. The answer carries its pidfd.
struct Zygote {
  uint32_t magic = kZygoteMagic;
  uint32_t version = kVersion;
  uint32_t timeout_ms = 0;
  uint32_t reserved = 0;
};
inline constexpr size_t kZygoteMounts = 2;
inline constexpr size_t kZygoteExtraFds = 2;
inline constexpr size_t kZygoteFds = kZygoteMounts + 5 + kZygoteExtraFds;
inline constexpr size_t kZygoteReplyFds = 1;

// From the runner, while there is a cell: a process that had come to it as the next parent has
// ended. That is how a fork of the zygote ends.
struct OrphanEnd {
  uint32_t magic = kOrphanMagic;
  uint32_t version = kVersion;
  int32_t pid = 0;  // in the runner's pid namespace
  int32_t wait_status = 0;
};

// Structural checks of the receiving side; what the values may be is Validate()'s to say.
inline bool WellFormed(const Start& start, size_t size, size_t fds) {
  return size == sizeof(Start) && start.magic == kStartMagic && start.version == kVersion &&
         fds == kStartFds && start.allow_bytes <= kMaxFilterBytes &&
         start.arguments_bytes <= kMaxFilterBytes && start.code_bytes <= kMaxFilterBytes &&
         start.zygote_bytes <= kMaxFilterBytes && start.allow_bytes % 8 == 0 &&
         start.arguments_bytes % 8 == 0 && start.code_bytes % 8 == 0 && start.zygote_bytes % 8 == 0;
}
inline bool WellFormed(const Slot& slot, size_t size, size_t fds) {
  return size == sizeof(Slot) && slot.magic == kSlotMagic && slot.version == kVersion &&
         slot.has_memory <= 1 && slot.has_pids <= 1 && slot.has_cpu <= 1 &&
         slot.v1_count <= kMaxV1 && slot.agent_uid != 0 && slot.id_base != 0 &&
         fds == kSlotFixedFds + slot.has_memory + slot.has_pids + slot.has_cpu + slot.v1_count;
}
inline bool Terminated(const char* text, size_t room) {
  for (size_t i = 0; i < room; ++i) {
    if (text[i] == '\0') return true;
  }
  return false;
}
inline bool WellFormed(const Worker& worker, size_t size, size_t fds) {
  return size == sizeof(Worker) && worker.magic == kWorkerMagic && worker.version == kVersion &&
         worker.v1_count <= kMaxV1 && worker.agent_uid != 0 && worker.id_base != 0 &&
         fds == kWorkerFixedFds + worker.v1_count;
}
inline bool WellFormed(const Views& views, size_t size, size_t fds) {
  if (size != sizeof(Views) || views.magic != kViewsMagic || views.version != kVersion ||
      views.view_count > kMaxViews || fds != views.view_count) {
    return false;
  }
  for (uint32_t i = 0; i < views.view_count; ++i) {
    if (views.views[i][0] != '/' || !Terminated(views.views[i], kMaxTarget)) return false;
  }
  return true;
}
inline bool WellFormed(const Cell& cell, size_t size, size_t fds) {
  return size == sizeof(Cell) && cell.magic == kCellMagic && cell.version == kVersion &&
         cell.has_dev <= 1 && cell.has_fork <= 1 && fds == kCellFixedFds + cell.has_dev;
}
inline bool WellFormed(const Zygote& zygote, size_t size, size_t fds) {
  return size == sizeof(Zygote) && zygote.magic == kZygoteMagic && zygote.version == kVersion &&
         fds == kZygoteFds;
}
inline bool WellFormed(const Launch& launch, size_t size, size_t fds) {
  if (size != sizeof(Launch) || launch.magic != kLaunchMagic || launch.version != kVersion ||
      launch.view_count > kMaxViews || launch.rlimit_count > kMaxRlimits ||
      fds != 1 + launch.view_count || launch.hosts_bytes > kMaxHosts ||
      launch.resolv_conf_bytes > kMaxResolvConf ||
      !Terminated(launch.hostname, sizeof(launch.hostname))) {
    return false;
  }
  for (uint32_t i = 0; i < launch.view_count; ++i) {
    if (launch.views[i][0] != '/' || !Terminated(launch.views[i], kMaxTarget)) return false;
  }
  return true;
}

}  // namespace dsec::spawn::wire

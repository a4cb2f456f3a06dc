// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "os/unique_fd.h"
#include "runtime/deadline.h"
#include "spawn/spawner.h"

namespace dsec::spawn {

// What a worker of FnCall is told over its control socket (stage/runner.cc). Blocking; one call at
// a time for one socket. After any error the worker is over. Reasons: spawn.bad_plan,
// spawn.cell_failed, spawn.timeout, spawn.worker_gone (kUnavailable).

// Once, before the first cell: what its cells show at `targets` ("/sys", plain paths below
// "/proc"), one detached mount each.
Result<void> FurnishWorker(int control, const std::vector<std::string>& targets,
                           std::span<const int> mounts, runtime::Deadline deadline);

// Starts the zygote of a worker, while it has no cell. `exec` holds the descriptors of an
// abi::ExecRequest without cgroup and program, two extra ones last.
Result<os::PidFd> MakeZygote(int control, int root, int shm, std::span<const int> exec,
                             runtime::Deadline deadline);

// A place for one call: namespaces, mounts, a v2 cgroup, and an init that starts the program. It
// ends when the channel is closed.
struct CellProcess {
  os::UniqueFd channel;    // to its init, agent_abi.h; no InitReady comes
  os::UniqueFd group;      // v2 directory that the program is to be started in
  os::UniqueFd oom_score;  // oom_score_adj of init: lower than it may be, until it is written anew
  std::vector<os::UniqueFd> namespaces;  // wire::CellNamespace, of a cell for a fork
  std::vector<StepTime> steps;
};
// `dev` < 0: the /dev of the worker.
struct CellMounts {
  int root = -1;
  int shm = -1;
  int dev = -1;
};
struct CellOrder {
  uint64_t serial = 0;
  bool fresh_group = false;  // see wire::Cell
  bool for_fork = false;
};
Result<CellProcess> MakeCell(int control, const CellOrder& order, const CellMounts& mounts,
                             runtime::Deadline deadline);

// What the runner has taken while there was a cell: how a fork of the zygote has ended. Nothing
// when there is no message yet.
struct OrphanReport {
  int32_t pid = 0;  // in A
  int wait_status = 0;
};
Result<std::optional<OrphanReport>> TakeOrphan(int control);

// How a cell has ended. Everything that ran in it is gone.
struct CellReport {
  bool init_killed = false;      // its init did not end by itself
  bool network_renewed = false;  // the worker has got a new network namespace
  std::string dirt;              // what of it could not be removed; empty: nothing
};
// After its channel has been closed, or its init has died.
Result<CellReport> AwaitCellEnd(int control, uint64_t serial, runtime::Deadline deadline);

}  // namespace dsec::spawn

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "os/process.h"
#include "os/unique_fd.h"
#include "runtime/deadline.h"
#include "spawn/plan.h"
#include "spawn/seccomp_filter.h"

namespace dsec::spawn {

struct StepTime {
  std::string_view step;  // static
  uint32_t usec = 0;
};

// A slot that is ready to be launched. Dropping the launch socket before Launch has succeeded ends
// its processes.
struct SlotProcess {
  os::PidFd agent;  // pid 1 of A, executing the agent by now; its death ends everything in the slot
  os::UniqueFd launch_socket;  // to init
  os::UniqueFd user_ns;        // B, for id-mapped mounts
  int32_t agent_pid = 0;
  uint64_t agent_start_time = 0;
  std::vector<StepTime> steps;
};

// A worker of FnCall without a cell. Dropping the control socket ends it.
struct WorkerProcess {
  os::PidFd runner;      // pid 1 of A; its death ends everything in the worker
  os::UniqueFd control;  // worker.h speaks over it
  os::UniqueFd user_ns;  // B, for id-mapped mounts
  std::vector<StepTime> steps;
};

struct SpawnerOptions {
  std::string spawner_path;  // the static dsec-spawner
  std::string agent_path;    // the static dsec-aether; copied into a sealed memfd once
  int log_fd = 2;            // stderr of the agents; may be closed once Start has returned
};

// The daemon's end of the spawner process. Thread-safe, blocking: call from a BlockingPool. The
// process is started by Start() and again by the first MakeSlot() after it has died; slots that
// exist do not depend on it.
class Spawner {
 public:
  // posix_spawn: may be called with threads running. Needs root.
  static Result<std::unique_ptr<Spawner>> Start(const SpawnerOptions& options);
  // Ends the process. Slots live on.
  ~Spawner();

  // One slot at a time; others wait their turn until the deadline. On failure nothing of the slot
  // is left (the caller's directories are) and the message names the step. Reasons: spawn.bad_plan,
  // spawn.slot_failed, spawn.timeout, spawn.spawner_died (kUnavailable: nothing was made, ask
  // again).
  Result<SlotProcess> MakeSlot(const SlotPlan& plan, runtime::Deadline deadline);
  // Likewise.
  Result<WorkerProcess> MakeWorker(const WorkerPlan& plan, runtime::Deadline deadline);

  // Of the process last started; 0 when it is known to have ended.
  pid_t pid() const { return pid_.load(); }

 private:
  Spawner(SpawnerOptions options, os::UniqueFd agent_image, os::UniqueFd log,
          SeccompFilters filters);
  Result<void> StartProcess(runtime::Deadline deadline);
  // What both of them make: pid 1 of A, a socket into it, user namespace B.
  struct Made {
    os::PidFd first;
    os::UniqueFd socket;
    os::UniqueFd user_ns;
    std::vector<StepTime> steps;
  };
  template <typename Plan>
  Result<Made> Make(const Plan& plan, runtime::Deadline deadline);
  template <typename Plan>
  Result<Made> Ask(const Plan& plan, runtime::Deadline deadline);
  void EndProcess();

  const SpawnerOptions options_;
  const os::UniqueFd agent_image_;
  const os::UniqueFd log_;
  const SeccompFilters filters_;
  std::timed_mutex mutex_;
  os::UniqueFd control_;  // invalid: no process
  os::PidFd process_;
  std::atomic<pid_t> pid_ = 0;
};

struct LaunchReport {
  std::vector<StepTime> steps;
};

// Sends a plan to the init of a slot and waits until the sandbox stands. `fds` holds the root mount
// and one mount a view; they are borrowed. A slot can be launched once: after any failure its init
// has ended and with it the slot. Reasons: spawn.bad_plan, spawn.launch_failed, spawn.timeout,
// spawn.slot_gone.
Result<LaunchReport> Launch(int launch_socket, const LaunchPlan& plan, std::span<const int> fds,
                            runtime::Deadline deadline);

}  // namespace dsec::spawn

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"
#include "os/process.h"
#include "runtime/deadline.h"
#include "vmm/keeper.h"
#include "vmm/machine.h"

namespace dsec::vmm {

enum class RunState { kRunning, kPaused, kOther };

// A program that runs machines: one interface, a driver each. Blocking; thread-safe for different
// machines. A machine that runs is known by the socket of its control channel, so that a process
// that did not start it can steer it: adoption is FindKeeper and that. It ends by SIGKILL to its
// keeper or its cgroup (no state of it needs more), or by itself.
class Vmm {
 public:
  virtual ~Vmm() = default;
  virtual std::string_view name() const = 0;

  // Starts a machine under a keeper. `machine.incoming`: it waits for Restore. Errors of
  // StartKeeper.
  virtual Result<os::PidFd> Boot(const KeeperPlan& plan, const Machine& machine) = 0;
  // The processors stand still; devices are at rest. Idempotent, as Resume.
  virtual Result<void> Pause(const std::string& control, runtime::Deadline deadline) = 0;
  virtual Result<void> Resume(const std::string& control, runtime::Deadline deadline) = 0;
  // Writes memory and devices of a machine that is paused by this into `file`, from its start.
  // Disks are not in it: copy them before Resume. On failure the machine is as it was, paused.
  virtual Result<void> Snapshot(const std::string& control, int file,
                                runtime::Deadline deadline) = 0;
  // Takes such a file into a machine that was booted as `incoming`, with the same devices in the
  // same order; it is paused afterwards. After a failure it is of no use.
  virtual Result<void> Restore(const std::string& control, int file,
                               runtime::Deadline deadline) = 0;
  virtual Result<RunState> Status(const std::string& control, runtime::Deadline deadline) = 0;
  // What the guest is to do with; the rest it gives back as it can.
  virtual Result<void> SetMemory(const std::string& control, uint64_t bytes,
                                 runtime::Deadline deadline) = 0;
};

// QEMU 7.2: QMP. Reasons: those of QmpClient, kInternal "vm.snapshot_failed".
class QemuVmm final : public Vmm {
 public:
  std::string_view name() const override { return "qemu"; }
  Result<os::PidFd> Boot(const KeeperPlan& plan, const Machine& machine) override;
  Result<void> Pause(const std::string& control, runtime::Deadline deadline) override;
  Result<void> Resume(const std::string& control, runtime::Deadline deadline) override;
  Result<void> Snapshot(const std::string& control, int file, runtime::Deadline deadline) override;
  Result<void> Restore(const std::string& control, int file, runtime::Deadline deadline) override;
  Result<RunState> Status(const std::string& control, runtime::Deadline deadline) override;
  Result<void> SetMemory(const std::string& control, uint64_t bytes,
                         runtime::Deadline deadline) override;
};

}  // namespace dsec::vmm

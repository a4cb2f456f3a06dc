// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "dsec/v1/fncall.pb.h"
#include "image/layer_mounts.h"
#include "os/process.h"
#include "os/unique_fd.h"
#include "runtime/deadline.h"
#include "sandbox/backends/fncall/call_groups.h"
#include "sandbox/backends/fncall/warm.h"
#include "sandbox/node_parts.h"
#include "sandbox/rootfs.h"
#include "spawn/worker.h"

namespace dsec::sandbox {

// Who the code of a call is: an ordinary user inside, without capabilities.
inline constexpr uint32_t kCallUser = 1000;

// The writable layer of one call: a tmpfs that holds the overlay's folders and /dev/shm, bounded as
// a whole.
struct CellDisk {
  os::UniqueFd mount;  // the tmpfs
  os::UniqueFd upper;
  os::UniqueFd root;  // of the cell: the overlay
  uint64_t bytes = 0;
  uint64_t inodes = 0;
  // Bytes and inodes are all in use.
  bool Full() const;
  // Changes the bounds; nothing happens when they are as they should be.
  Result<void> Resize(uint64_t to_bytes, uint64_t to_inodes);
};

// A cell that waits for its call.
struct Cell {
  uint64_t serial = 0;
  spawn::CellProcess process;
  CellDisk disk;
  std::optional<WarmProgram> warm;
  uint64_t warm_bytes = 0;  // memory that it holds
};

// One worker on the host. Everything blocks; one thread.
class WorkerHost {
 public:
  WorkerHost(const NodeParts& parts, SlotName name) : parts_(parts), name_(name) {}

  // Cgroups, ids, namespaces, runner, layers. What a failed Make leaves is for Remove.
  // What cells show of the machine is as large as `view`.
  Result<void> Make(HeldLayers layers, const ViewShape& view, runtime::Deadline deadline);
  Result<Cell> MakeCell(const v1::FnLimits& limits, const std::vector<std::string>& devices,
                        runtime::Deadline deadline);
  // Starts the interpreter that calls are forks of, or a new one when it has had enough of them.
  // While there is no cell; the cells made from then on are for its forks.
  Result<void> Heat(const v1::FnWarm& warm, const v1::FnLimits& prepared, int cancel,
                    runtime::Deadline deadline);
  // Makes the fork for a cell under the limits of `prepared`.
  Result<void> Warm(Cell& cell, const v1::FnLimits& prepared, int cancel,
                    runtime::Deadline deadline);
  // Takes what the runner has said of any process that ended as its child; false: nothing.
  Result<bool> TakeAnyEnd();
  // How the fork of a cell has ended, once the runner has told it.
  Result<std::optional<int>> TakeEnd(const WarmProgram& warm);
  // Ends a cell and waits until everything of it is gone. An error, or dirt in the report: the
  // worker is over.
  Result<spawn::CellReport> EndCell(Cell cell, runtime::Deadline deadline);
  // SIGKILL to everything in the worker.
  void Kill();
  // Kills and removes. kDeadlineExceeded when something would not go: again later.
  Result<void> Remove(MonoTime deadline);

  const SlotName& name() const { return name_; }
  CallGroups& groups() { return groups_; }
  const os::PidFd& runner() const { return process_.runner; }
  int control() const { return process_.control.get(); }
  // Host id of the calls' user.
  uint32_t owner() const { return parts_.ids.IdBase(name_.index) + kCallUser; }

 private:
  Result<void> Furnish(const ViewShape& view, runtime::Deadline deadline);
  Result<void> MakeBottom();
  Result<CellDisk> MakeDisk(uint64_t bytes, uint64_t inodes);
  Result<os::UniqueFd> ShmOf(const CellDisk& disk);

  const NodeParts parts_;
  const SlotName name_;
  HeldLayers layers_;
  spawn::WorkerProcess process_;
  CallGroups groups_;
  os::UniqueFd slot_dir_;
  // The mapped layers, and above them a small one with the folders that every root needs.
  std::vector<os::UniqueFd> lowers_;
  uint64_t serial_ = 0;
  std::optional<Zygote> zygote_;
  uint64_t warm_bytes_ = 0;  // what it and the fork for a call held last
  bool devices_allowed_ = false;
};

}  // namespace dsec::sandbox

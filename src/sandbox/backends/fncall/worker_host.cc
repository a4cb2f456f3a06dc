// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/worker_host.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <string_view>

#include "base/fault.h"
#include "base/log.h"
#include "os/file.h"
#include "os/mount.h"
#include "sandbox/backends/fncall/call_files.h"
#include "sandbox/backends/fncall/dev_folder.h"
#include "sandbox/isolators/devices.h"

namespace dsec::sandbox {
namespace {

constexpr uint64_t kDataAttributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
// What init of a cell is as a victim of the OOM killer, and what no code of it can go below: the
// program starts above it (stage/serve.cc), the runner is far below.
constexpr std::string_view kInitOomScore = "0";
// What forks of one interpreter share (hash seed, addresses) is renewed after so many.
constexpr uint32_t kMaxForks = 1000;

struct Folder {
  const char* path;
  mode_t mode;
  uint32_t id;  // inside
};
struct SmallFile {
  const char* path;
  std::string_view content;
};
// What every root has, whatever its layers hold.
constexpr Folder kBottomFolders[] = {{"proc", 0555, 0}, {"sys", 0555, 0},
                                     {"dev", 0755, 0},  {"etc", 0755, 0},
                                     {"tmp", 01777, 0}, {kWorkFolder, 0755, kCallUser}};
constexpr SmallFile kBottomFiles[] = {
    {"etc/hostname", "sandbox\n"},
    {"etc/hosts", "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"},
    {"etc/resolv.conf", "# network: none\n"}};
constexpr Folder kDiskFolders[] = {
    {"upper", 0755, 0}, {"work", 0755, 0}, {"shm", 01777, 0}, {"upper/work", 0755, kCallUser}};

Result<void> MakeFolder(int dir, const Folder& folder, uint32_t id_base) {
  const uint32_t id = id_base + folder.id;
  if (::mkdirat(dir, folder.path, folder.mode) != 0 ||
      ::fchmodat(dir, folder.path, folder.mode, 0) != 0 ||
      ::fchownat(dir, folder.path, id, id, AT_SYMLINK_NOFOLLOW) != 0) {
    return os::ErrnoError("fn.folder", folder.path);
  }
  return Ok();
}

Result<os::UniqueFd> NewTmpfs(const std::string& bytes, const std::string& inodes,
                              uint64_t attributes) {
  DSEC_TRY(auto context, os::FsContext::Open("tmpfs"));
  DSEC_TRY_VOID(context.SetString("source", "none"));
  DSEC_TRY_VOID(context.SetString("size", bytes.c_str()));
  DSEC_TRY_VOID(context.SetString("nr_inodes", inodes.c_str()));
  DSEC_TRY_VOID(context.SetString("mode", "0755"));
  return std::move(context).Mount(attributes);
}

// tmpfs takes 0 for "no limit"; its own folders are not the call's.
std::string InodesOf(uint64_t inodes) {
  return fmt::format("{}", inodes + 1 + std::size(kDiskFolders));
}

}  // namespace

bool CellDisk::Full() const {
  struct statfs space;
  return ::fstatfs(mount.get(), &space) == 0 && (space.f_bfree == 0 || space.f_ffree == 0);
}

Result<void> CellDisk::Resize(uint64_t to_bytes, uint64_t to_inodes) {
  if (to_bytes == bytes && to_inodes == inodes) return Ok();
  const os::UniqueFd context(::fspick(mount.get(), "", FSPICK_CLOEXEC | FSPICK_EMPTY_PATH));
  if (!context.valid() ||
      ::fsconfig(context.get(), FSCONFIG_SET_STRING, "size", fmt::format("{}", to_bytes).c_str(),
                 0) != 0 ||
      ::fsconfig(context.get(), FSCONFIG_SET_STRING, "nr_inodes", InodesOf(to_inodes).c_str(), 0) !=
          0 ||
      ::fsconfig(context.get(), FSCONFIG_CMD_RECONFIGURE, nullptr, nullptr, 0) != 0) {
    return os::ErrnoError("fn.disk", "change the bounds of a writable layer");
  }
  bytes = to_bytes;
  inodes = to_inodes;
  return Ok();
}

Result<void> WorkerHost::Make(HeldLayers layers, const ViewShape& view,
                              runtime::Deadline deadline) {
  DSEC_FAULT_POINT("fn.worker.before_make");
  layers_ = std::move(layers);
  spawn::WorkerPlan plan;
  plan.agent_uid = parts_.ids.AgentUid(name_.index);
  plan.id_base = parts_.ids.IdBase(name_.index);
  DSEC_TRY(auto made, parts_.tree.Make(name_, plan.agent_uid, plan.id_base));
  plan.slot_dir_fd = made.slot.get();
  plan.agent_dir_fd = made.agent.get();
  plan.init_dir_fd = made.init.get();
  for (const os::UniqueFd& procs : made.v1_procs) plan.v1_procs_fds.push_back(procs.get());
  DSEC_TRY(groups_, CallGroups::Open(made));
  DSEC_TRY(process_, parts_.spawner.MakeWorker(plan, deadline));
  slot_dir_ = std::move(made.slot);
  DSEC_TRY(lowers_, MapLayers(layers_, process_.user_ns.get()));
  DSEC_TRY_VOID(MakeBottom());
  return Furnish(view, deadline);
}

Result<void> WorkerHost::MakeBottom() {
  const uint32_t id_base = parts_.ids.IdBase(name_.index);
  DSEC_TRY(auto mount, NewTmpfs("64k", "64", kDataAttributes));
  for (const Folder& folder : kBottomFolders)
    DSEC_TRY_VOID(MakeFolder(mount.get(), folder, id_base));
  for (const SmallFile& file : kBottomFiles) {
    DSEC_TRY_VOID(os::CreateFile(mount.get(), file.path, file.content, 0644));
    if (::fchownat(mount.get(), file.path, id_base, id_base, 0) != 0)
      return os::ErrnoError("fn.folder", file.path);
  }
  if (::fchownat(mount.get(), "", id_base, id_base, AT_EMPTY_PATH) != 0)
    return os::ErrnoError("fn.folder", "the root");
  lowers_.push_back(std::move(mount));
  return Ok();
}

Result<void> WorkerHost::Furnish(const ViewShape& view, runtime::Deadline deadline) {
  DSEC_TRY(const auto views, parts_.views.For(view, process_.user_ns.get()));
  std::vector<std::string> targets;
  std::vector<int> mounts;
  for (const ViewMount& item : views) {
    targets.push_back(item.target);
    mounts.push_back(item.mount.get());
  }
  return spawn::FurnishWorker(process_.control.get(), targets, mounts, deadline);
}

Result<CellDisk> WorkerHost::MakeDisk(uint64_t bytes, uint64_t inodes) {
  const uint32_t id_base = parts_.ids.IdBase(name_.index);
  CellDisk disk;
  disk.bytes = bytes;
  disk.inodes = inodes;
  DSEC_TRY(disk.mount, NewTmpfs(fmt::format("{}", bytes), InodesOf(inodes), 0));
  for (const Folder& folder : kDiskFolders)
    DSEC_TRY_VOID(MakeFolder(disk.mount.get(), folder, id_base));
  ScratchLayer scratch;
  DSEC_TRY(scratch.upper, os::OpenAt(disk.mount.get(), "upper", O_RDONLY | O_DIRECTORY));
  DSEC_TRY(scratch.work, os::OpenAt(disk.mount.get(), "work", O_RDONLY | O_DIRECTORY));
  DSEC_TRY(disk.root, BuildRoot(lowers_, scratch));
  disk.upper = std::move(scratch.upper);
  return disk;
}

Result<os::UniqueFd> WorkerHost::ShmOf(const CellDisk& disk) {
  DSEC_TRY(auto shm, os::CloneMount(disk.mount.get(), "shm", false));
  DSEC_TRY_VOID(os::SetMountAttributes(shm.get(), kDataAttributes, 0));
  return shm;
}

Result<Cell> WorkerHost::MakeCell(const v1::FnLimits& limits,
                                  const std::vector<std::string>& devices,
                                  runtime::Deadline deadline) {
  DSEC_FAULT_POINT("fn.worker.before_cell");
  Cell cell;
  os::UniqueFd dev;
  if (!devices.empty()) {
    DSEC_TRY(const auto nodes, FindDevices(devices));
    DSEC_TRY(dev, MakeDevFolder(nodes, parts_.ids.IdBase(name_.index)));
    DSEC_TRY_VOID(AllowDevices(slot_dir_.get(), NumbersOf(nodes)));
    devices_allowed_ = true;
  }
  cell.serial = ++serial_;
  DSEC_TRY(cell.disk, MakeDisk(limits.disk_bytes(), limits.disk_inodes()));
  DSEC_TRY(const auto shm, ShmOf(cell.disk));
  const spawn::CellOrder order = {cell.serial, groups_.TakeNeedsFresh(), zygote_.has_value()};
  DSEC_TRY(cell.process, spawn::MakeCell(process_.control.get(), order,
                                         {cell.disk.root.get(), shm.get(), dev.get()}, deadline));
  DSEC_TRY_VOID(os::WriteAll(cell.process.oom_score.get(), kInitOomScore));
  cell.process.oom_score.Reset();
  return cell;
}

Result<void> WorkerHost::Heat(const v1::FnWarm& warm, const v1::FnLimits& prepared, int cancel,
                              runtime::Deadline deadline) {
  if (zygote_.has_value() && zygote_->forks < kMaxForks) return Ok();
  DSEC_FAULT_POINT("fn.worker.before_zygote");
  zygote_.reset();
  groups_.HoldNothing();
  DSEC_TRY_VOID(groups_.SetLimits(prepared.memory_bytes(), prepared.processes()));
  DSEC_TRY(const auto disk, MakeDisk(prepared.disk_bytes(), prepared.disk_inodes()));
  DSEC_TRY(const auto shm, ShmOf(disk));
  DSEC_TRY(zygote_,
           StartZygote(process_.control.get(), disk.root.get(), shm.get(), warm, cancel, deadline));
  DSEC_TRY_VOID(groups_.HoldZygote());
  DSEC_TRY(const uint64_t processes, groups_.Processes());
  if (processes == groups_.own_processes() - 1) return Ok();
  return Error(Code::kFailedPrecondition, "fn.warm_failed",
               "processes are started by the imports, beside the interpreter");
}

Result<void> WorkerHost::Warm(Cell& cell, const v1::FnLimits& prepared, int cancel,
                              runtime::Deadline deadline) {
  DSEC_FAULT_POINT("fn.worker.before_fork");
  DSEC_TRY_VOID(groups_.SetLimits(prepared.memory_bytes(), prepared.processes(), warm_bytes_));
  const ForkPlace place = {&cell.process, process_.user_ns.get(), cell.disk.root.get(),
                           process_.runner.pid(), owner()};
  DSEC_TRY(cell.warm, ForkZygote(*zygote_, place, cancel, deadline));
  // Rounded up and left alone while it fits, so that one call after another finds the limit as it
  // is: the kernel takes its time for a lower one.
  constexpr uint64_t kStep = 4 << 20;
  const uint64_t held = groups_.HeldMemory();
  if (held > warm_bytes_ || held + 2 * kStep < warm_bytes_)
    warm_bytes_ = (held + kStep - 1) / kStep * kStep;
  cell.warm_bytes = warm_bytes_;
  return Ok();
}

Result<bool> WorkerHost::TakeAnyEnd() {
  DSEC_TRY(const auto ended, spawn::TakeOrphan(process_.control.get()));
  return ended.has_value();
}

Result<std::optional<int>> WorkerHost::TakeEnd(const WarmProgram& warm) {
  DSEC_TRY(const auto ended, spawn::TakeOrphan(process_.control.get()));
  if (!ended.has_value() || ended->pid != warm.pid) return std::optional<int>();
  return std::optional(ended->wait_status);
}

Result<spawn::CellReport> WorkerHost::EndCell(Cell cell, runtime::Deadline deadline) {
  const uint64_t serial = cell.serial;
  cell = Cell();  // the channel, and what holds its mounts
  DSEC_TRY(auto report, spawn::AwaitCellEnd(process_.control.get(), serial, deadline));
  if (devices_allowed_) {
    DSEC_TRY_VOID(AllowDevices(slot_dir_.get(), {}));
    devices_allowed_ = false;
  }
  if (!report.dirt.empty()) return report;
  // Whatever was moved into the groups otherwise, or out of the cell's reach.
  DSEC_TRY(const uint64_t processes, groups_.Processes());
  const uint64_t own = groups_.own_processes() - 1;  // without the init
  if (processes != own)
    report.dirt = fmt::format("{} processes are in its groups instead of {}", processes, own);
  if (report.dirt.empty() && !groups_.AwaitRelease(deadline.at()))
    report.dirt = "memory of a call stays charged after its end";
  return report;
}

void WorkerHost::Kill() {
  if (!process_.runner.valid()) return;
  const auto killed = process_.runner.Signal(SIGKILL);
  if (!killed.ok())
    log::Warn("fn.kill_failed", {{"worker", name_.str()}, {"error", killed.error()}});
}

Result<void> WorkerHost::Remove(MonoTime deadline) {
  process_.control.Reset();
  lowers_.clear();
  DSEC_TRY(const auto dying, parts_.tree.Kill(name_));
  DSEC_TRY(const bool gone, CgroupTree::WaitGone(dying, deadline));
  if (!gone) {
    return Error(Code::kDeadlineExceeded, "fn.worker_stuck",
                 fmt::format("processes of worker {} do not end", name_.str()));
  }
  return parts_.tree.Remove(name_, deadline);
}

}  // namespace dsec::sandbox

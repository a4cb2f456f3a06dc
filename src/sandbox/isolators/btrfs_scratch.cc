// SPDX-License-Identifier: Apache-2.0
// Writable layers as subvolumes of a btrfs on a loop device, each with a limit on its quota group.
//
// Simple quotas (Linux 6.7) charge an extent to the subvolume that allocated it: exact for layers,
// which share nothing, without the back references that full quota groups walk at each commit, and
// without their habit of giving up accounting after the removal of a large subvolume. A subvolume
// is removed in constant time whatever its tree looks like.
//
// The image belongs to one boot of the host: no sandbox outlives a boot, so the file system is made
// anew, and is mounted without barriers and checksums.
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>

#include "base/log.h"
#include "os/file.h"
#include "os/mount.h"
#include "os/process.h"
#include "sandbox/isolators/dir_list.h"
#include "sandbox/isolators/loop_device.h"
#include "sandbox/isolators/run_tool.h"
#include "sandbox/isolators/scratch.h"

namespace dsec::sandbox {
namespace {

constexpr uint64_t kEnableSimpleQuota =
    4;  // BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA, linux/btrfs.h of 6.7
constexpr uint64_t kFirstObject =
    256;  // BTRFS_FIRST_FREE_OBJECTID: the root directory of each subvolume
constexpr uint64_t kMinImageBytes = 1ull << 30;
// Each inode has an item of its own in a leaf: btrfs_inode_item (160 bytes) and btrfs_item (25),
// linux/btrfs_tree.h. A name adds 150 and more; a file that is unlinked and still open has none.
constexpr uint64_t kInodeBytes = 185;
constexpr auto kMkfsTime = std::chrono::seconds(60);

// struct btrfs_qgroup_inherit ends in a flexible array that C++ has no use for.
struct InheritLimit {
  uint64_t flags = BTRFS_QGROUP_INHERIT_SET_LIMITS;
  uint64_t num_qgroups = 0;
  uint64_t num_ref_copies = 0;
  uint64_t num_excl_copies = 0;
  btrfs_qgroup_limit limit = {};
};

Error NotHere(std::string message) {
  return Error(Code::kFailedPrecondition, "scratch.none", "btrfs image: " + std::move(message));
}

Result<uint64_t> SubvolumeId(int subvolume) {
  btrfs_ioctl_ino_lookup_args args = {};
  args.objectid = kFirstObject;
  if (::ioctl(subvolume, BTRFS_IOC_INO_LOOKUP, &args) != 0) {
    return os::ErrnoError("scratch.lookup", "subvolume id");
  }
  return args.treeid;
}

class BtrfsScratch final : public Scratch {
 public:
  static Result<std::unique_ptr<Scratch>> Open(const ScratchOptions& options) {
    std::unique_ptr<BtrfsScratch> scratch(new BtrfsScratch(options));
    DSEC_TRY_VOID(scratch->OpenImage());
    DSEC_TRY_VOID(scratch->Mount());
    DSEC_TRY_VOID(scratch->EnableQuota());
    return std::unique_ptr<Scratch>(std::move(scratch));
  }

  v1::Capability capability() const override {
    v1::Capability item;
    item.set_name("disk_quota");
    item.set_used("btrfs-squota");
    item.set_ok(true);
    item.set_detail(
        fmt::format("subvolumes with byte limits on {} (no project quota on that file system). "
                    "Inodes are bounded through bytes, at {} "
                    "bytes an inode, and not counted; df inside shows the whole image",
                    path_, kInodeBytes));
    return item;
  }
  uint64_t inode_cost_bytes() const override { return kInodeBytes; }
  std::string space_path() const override { return fmt::format("/proc/self/fd/{}", root_.get()); }

  Result<ScratchLayer> Create(const std::string& name, uint64_t bytes, uint64_t,
                              uint32_t owner) override {
    InheritLimit inherit;
    inherit.limit.flags = BTRFS_QGROUP_LIMIT_MAX_RFER;
    inherit.limit.max_rfer = bytes;
    btrfs_ioctl_vol_args_v2 args = {};
    DSEC_TRY_VOID(CopyName(name, args.name, sizeof(args.name)));
    args.flags = BTRFS_SUBVOL_QGROUP_INHERIT;
    args.size = sizeof(inherit);
    args.qgroup_inherit = reinterpret_cast<btrfs_qgroup_inherit*>(&inherit);
    // The limit is there from the first byte on.
    if (::ioctl(root_.get(), BTRFS_IOC_SUBVOL_CREATE_V2, &args) != 0) {
      return os::ErrnoError("scratch.create", name);
    }
    auto layer = Furnish(name, owner);
    if (!layer.ok()) {
      const auto removed = Remove(name);
      if (!removed.ok())
        log::Warn("scratch.remove_failed", {{"name", name}, {"error", removed.error()}});
    }
    return layer;
  }

  Result<void> SetLimits(const std::string& name, uint64_t bytes, uint64_t) override {
    DSEC_TRY(const uint64_t id, IdOf(name));
    btrfs_ioctl_qgroup_limit_args args = {};
    args.qgroupid = id;
    args.lim.flags = BTRFS_QGROUP_LIMIT_MAX_RFER;
    args.lim.max_rfer = bytes;
    if (::ioctl(root_.get(), BTRFS_IOC_QGROUP_LIMIT, &args) != 0) {
      return os::ErrnoError("scratch.limit", name);
    }
    return Ok();
  }

  // The quota tree shows the last commit only; sysfs shows the counters that the limit is held
  // against.
  Result<ScratchUsage> Usage(const std::string& name) override {
    DSEC_TRY(const uint64_t id, IdOf(name));
    DSEC_TRY(const auto group,
             os::OpenAt(AT_FDCWD, fmt::format("{}/qgroups/0_{}", sysfs_, id).c_str(),
                        O_RDONLY | O_DIRECTORY));
    ScratchUsage usage;
    for (const char* file : {"referenced", "rsv_data"}) {
      DSEC_TRY(const auto text, os::ReadFile(group.get(), file, 64));
      uint64_t value = 0;
      std::from_chars(text.data(), text.data() + text.size(), value);
      usage.bytes += value;
    }
    return usage;
  }

  Result<void> Remove(const std::string& name) override {
    btrfs_ioctl_vol_args args = {};
    DSEC_TRY_VOID(CopyName(name, args.name, sizeof(args.name)));
    if (::ioctl(root_.get(), BTRFS_IOC_SNAP_DESTROY, &args) != 0 && errno != ENOENT) {
      return os::ErrnoError("scratch.remove", name);
    }
    return Ok();
  }

  Result<os::UniqueFd> OpenUpper(const std::string& name) override {
    char checked[sizeof(btrfs_ioctl_vol_args_v2::name)] = {};
    DSEC_TRY_VOID(CopyName(name, checked, sizeof(checked)));
    DSEC_TRY(const auto subvolume,
             os::OpenAt(root_.get(), checked, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    return os::OpenAt(subvolume.get(), "upper", O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  }

  bool copies() const override { return true; }

  // The kernel writes out what is dirty in the layer and commits: it is one state of the layer,
  // which holds each write that had returned.
  Result<void> Copy(const std::string& name, const std::string& copy) override {
    char checked[sizeof(btrfs_ioctl_vol_args_v2::name)] = {};
    DSEC_TRY_VOID(CopyName(name, checked, sizeof(checked)));
    DSEC_TRY(const auto subvolume,
             os::OpenAt(root_.get(), checked, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    btrfs_ioctl_vol_args_v2 args = {};
    DSEC_TRY_VOID(CopyName(copy, args.name, sizeof(args.name)));
    args.fd = subvolume.get();
    args.flags = BTRFS_SUBVOL_RDONLY;
    if (::ioctl(root_.get(), BTRFS_IOC_SNAP_CREATE_V2, &args) != 0) {
      return os::ErrnoError("scratch.copy", name);
    }
    return Ok();
  }

  Result<std::vector<std::string>> List() override {
    DSEC_TRY(const auto entries, ListDir(root_.get(), "."));
    std::vector<std::string> names;
    for (const DirEntry& entry : entries) {
      if (entry.is_dir) names.push_back(entry.name);
    }
    return names;
  }

 private:
  explicit BtrfsScratch(const ScratchOptions& options)
      : options_(options), path_(options.state_dir + "/scratch.img") {}

  static Result<void> CopyName(const std::string& name, char* to, size_t room) {
    if (name.empty() || name.size() >= room || name.find('/') != std::string::npos ||
        name[0] == '.') {
      return Error(Code::kInvalidArgument, "scratch.name",
                   fmt::format("'{}' names no layer", name));
    }
    std::memcpy(to, name.data(), name.size());
    return Ok();
  }

  Result<uint64_t> IdOf(const std::string& name) {
    DSEC_TRY(const auto subvolume,
             os::OpenAt(root_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    return SubvolumeId(subvolume.get());
  }

  Result<ScratchLayer> Furnish(const std::string& name, uint32_t owner) {
    DSEC_TRY(const auto subvolume,
             os::OpenAt(root_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    ScratchLayer layer;
    for (auto [part, fd] : {std::pair("upper", &layer.upper), std::pair("work", &layer.work)}) {
      DSEC_TRY_VOID(os::MakeDir(subvolume.get(), part, 0755));
      DSEC_TRY(*fd, os::OpenAt(subvolume.get(), part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
      if (::fchmod(fd->get(), 0755) != 0 || ::fchown(fd->get(), owner, owner) != 0) {
        return os::ErrnoError("scratch.owner", name);
      }
    }
    return layer;
  }

  Result<void> OpenImage() {
    DSEC_TRY(image_, os::OpenAt(AT_FDCWD, path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW, 0600));
    // A description of its own: the loop device keeps the other one open, and with it a lock.
    DSEC_TRY(lock_, os::OpenAt(AT_FDCWD, path_.c_str(), O_RDONLY | O_NOFOLLOW));
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
      return Error(Code::kConflict, "scratch.in_use", path_ + " is in use by another daemon")
          .WithErrno(errno);
    }
    return Ok();
  }

  Result<void> Mount() {
    DSEC_TRY(auto attached, LoopDevice::Find(image_.get()));
    if (attached.has_value()) {
      // Sandboxes of an earlier daemon live on it.
      DSEC_TRY_VOID(MountDevice(*attached));
      image_.Reset();
      return Ok();
    }
    DSEC_TRY(const auto boot_id, os::ReadBootId());
    const std::string boot_path = path_ + ".boot";
    const auto made_in = os::ReadFile(AT_FDCWD, boot_path.c_str(), 128);
    if (made_in.ok() && *made_in == boot_id) {
      DSEC_TRY(const auto device, LoopDevice::Attach(image_.get()));
      const auto mounted = MountDevice(device);
      if (mounted.ok()) {
        image_.Reset();
        return Ok();
      }
      log::Warn("scratch.recreated", {{"path", path_}, {"error", mounted.error()}});
    }
    ::unlink(boot_path.c_str());
    DSEC_TRY_VOID(Format());
    DSEC_TRY(const auto device, LoopDevice::Attach(image_.get()));
    DSEC_TRY_VOID(MountDevice(device));
    image_.Reset();
    return os::CreateFile(AT_FDCWD, boot_path.c_str(), boot_id, 0600);
  }

  Result<void> Format() {
    if (::ftruncate(image_.get(), 0) != 0) return os::ErrnoError("scratch.truncate", path_);
    struct statvfs space;
    if (::fstatvfs(image_.get(), &space) != 0) return os::ErrnoError("scratch.statvfs", path_);
    const uint64_t free = space.f_bavail * space.f_frsize;
    uint64_t bytes = options_.image_bytes;
    // Of what is free: sandboxes that fill the image must not fill the disk below it, where a write
    // that fails breaks the image for all of them.
    if (bytes == 0) bytes = free / 5 * 4;
    bytes = std::max(bytes / 4096 * 4096, kMinImageBytes);
    if (bytes > free) {
      log::Warn("scratch.overcommitted", {{"path", path_}, {"bytes", bytes}, {"free", free}});
    }
    // Where the image lies on btrfs itself; other file systems refuse the flag and have nothing to
    // turn off.
    unsigned flags = FS_NOCOW_FL;
    (void)::ioctl(image_.get(), FS_IOC_SETFLAGS, &flags);
    if (::ftruncate(image_.get(), static_cast<off_t>(bytes)) != 0) {
      return os::ErrnoError("scratch.truncate", path_);
    }
    auto made = RunTool({"mkfs.btrfs", "-q", "-f", "-K", "-m", "single", "-d", "single", path_},
                        Clock::System().Mono() + kMkfsTime);
    if (!made.ok() && made.error().code() == Code::kFailedPrecondition) {
      return NotHere(made.error().message() + " (package btrfs-progs)");
    }
    return made;
  }

  Result<void> MountDevice(const LoopDevice& device) {
    auto context = os::FsContext::Open("btrfs");
    if (!context.ok()) return NotHere("the kernel has no btrfs: " + context.error().message());
    DSEC_TRY_VOID(context->SetString("source", device.path().c_str()));
    DSEC_TRY_VOID(context->SetFlag("nodatacow"));
    DSEC_TRY_VOID(context->SetFlag("nobarrier"));
    // Gives the space of removed layers back to the host.
    DSEC_TRY_VOID(context->SetString("discard", "async"));
    DSEC_TRY(mount_, std::move(*context).Mount(MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV |
                                               MOUNT_ATTR_NOEXEC | MOUNT_ATTR_NOATIME));
    DSEC_TRY(root_, os::OpenAt(mount_.get(), ".", O_RDONLY | O_DIRECTORY));
    return Ok();
  }

  Result<void> EnableQuota() {
    btrfs_ioctl_fs_info_args info = {};
    if (::ioctl(root_.get(), BTRFS_IOC_FS_INFO, &info) != 0)
      return os::ErrnoError("scratch.info", path_);
    const uint8_t* id = info.fsid;
    sysfs_ = "/sys/fs/btrfs/";
    for (int i = 0; i < BTRFS_FSID_SIZE; ++i) {
      sysfs_ += fmt::format("{}{:02x}", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", id[i]);
    }
    btrfs_ioctl_quota_ctl_args args = {};
    args.cmd = kEnableSimpleQuota;
    if (::ioctl(root_.get(), BTRFS_IOC_QUOTA_CTL, &args) != 0) {
      return NotHere(fmt::format("simple quotas (Linux 6.7) cannot be turned on: {}",
                                 os::ErrnoError("scratch.quota", path_).message()));
    }
    DSEC_TRY(const auto mode, os::ReadFile(AT_FDCWD, (sysfs_ + "/qgroups/mode").c_str(), 64));
    if (!mode.starts_with("squota")) {
      return NotHere(fmt::format("{} has quotas of another mode: {}", path_, mode));
    }
    return Ok();
  }

  const ScratchOptions options_;
  const std::string path_;
  std::string sysfs_;
  os::UniqueFd image_;  // while it is being attached
  os::UniqueFd lock_;
  os::UniqueFd mount_;  // detached
  os::UniqueFd root_;   // of mount_
};

}  // namespace

Result<std::unique_ptr<Scratch>> OpenBtrfsScratch(const ScratchOptions& options) {
  return BtrfsScratch::Open(options);
}

}  // namespace dsec::sandbox

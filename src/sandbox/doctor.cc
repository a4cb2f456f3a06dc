// SPDX-License-Identifier: Apache-2.0
#include "sandbox/doctor.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/fuse.h>
#include <linux/landlock.h>
#include <linux/userfaultfd.h>
#include <sys/fanotify.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>

#include "base/result.h"
#include "image/compress_probe.h"
#include "image/share_content.h"
#include "os/file.h"
#include "os/mount.h"
#include "os/syscalls.h"
#include "os/unique_fd.h"

namespace dsec::sandbox {
namespace {

constexpr int kPrSchedCore = 62;             // linux/prctl.h of 5.14
constexpr unsigned kFanClassPreContent = 8;  // linux/fanotify.h

using os::UniqueFd;

// The smallest EROFS image: one block with a superblock and an empty root directory
// (fs/erofs/erofs_fs.h).
std::string TinyErofs() {
  constexpr size_t kSuper = 1024, kInode = 2048, kSlot = 32;
  std::string image(4096, '\0');
  auto put = [&image](size_t at, uint64_t value, size_t size) {
    std::memcpy(&image[at], &value, size);
  };
  put(kSuper + 0, 0xE0F5E1E2, 4);       // magic
  put(kSuper + 12, 12, 1);              // block size
  put(kSuper + 14, kInode / kSlot, 2);  // root
  put(kSuper + 16, 1, 8);               // inodes
  put(kSuper + 36, 1, 4);               // blocks
  put(kInode + 0, 2 << 1, 2);           // compact, data inline
  put(kInode + 4, S_IFDIR | 0755, 2);
  put(kInode + 6, 2, 2);            // links
  put(kInode + 8, 27, 4);           // size: two entries and their names
  put(kInode + 16, 0xffffffff, 4);  // no blocks
  const size_t data = kInode + kSlot;
  for (size_t i = 0; i < 2; ++i) {
    put(data + i * 12, kInode / kSlot, 8);
    put(data + i * 12 + 8, 24 + i, 2);
    put(data + i * 12 + 10, 2, 1);  // a directory
  }
  std::memcpy(&image[data + 24], "...", 3);
  return image;
}

Result<UniqueFd> MountTinyErofs(const std::string& dir) {
  const std::string path = fmt::format("{}/.probe-{}.erofs", dir, ::getpid());
  ::unlink(path.c_str());
  DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, path.c_str(), TinyErofs(), 0600));
  auto mount = [&]() -> Result<UniqueFd> {
    DSEC_TRY(auto context, os::FsContext::Open("erofs"));
    DSEC_TRY_VOID(context.SetString("source", path.c_str()));
    DSEC_TRY_VOID(context.SetFlag("ro"));
    return std::move(context).Mount(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID);
  }();
  ::unlink(path.c_str());
  return mount;
}

// An overlay of descriptors with the options that a sandbox's root has.
Result<UniqueFd> MountOverlay(int lower) {
  DSEC_TRY(auto memory, os::FsContext::Open("tmpfs"));
  DSEC_TRY_VOID(memory.SetString("size", "64k"));
  DSEC_TRY(const auto upper_mount, std::move(memory).Mount(0));
  DSEC_TRY_VOID(os::MakeDir(upper_mount.get(), "upper", 0755));
  DSEC_TRY_VOID(os::MakeDir(upper_mount.get(), "work", 0755));
  DSEC_TRY(const auto upper, os::OpenAt(upper_mount.get(), "upper", O_RDONLY | O_DIRECTORY));
  DSEC_TRY(const auto work, os::OpenAt(upper_mount.get(), "work", O_RDONLY | O_DIRECTORY));
  DSEC_TRY(auto overlay, os::FsContext::Open("overlay"));
  DSEC_TRY_VOID(overlay.SetFd("lowerdir+", lower));
  DSEC_TRY_VOID(overlay.SetFd("upperdir", upper.get()));
  DSEC_TRY_VOID(overlay.SetFd("workdir", work.get()));
  DSEC_TRY_VOID(overlay.SetFlag("volatile"));
  return std::move(overlay).Mount(MOUNT_ATTR_NODEV);
}

class Table {
 public:
  void Add(const char* name, bool required, bool ok, std::string used, std::string detail) {
    AddFigure(name, ok, ok ? std::move(used) : "none", std::move(detail));
    rows_.back().required = required;
  }
  // What is always there, if perhaps too small.
  void AddFigure(const char* name, bool ok, std::string figure, std::string detail) {
    HostProbe& probe = rows_.emplace_back();
    probe.capability.set_name(name);
    probe.capability.set_ok(ok);
    probe.capability.set_used(std::move(figure));
    probe.capability.set_detail(std::move(detail));
  }
  // For what no container needs: what it would serve.
  void AddOptional(const char* name, bool ok, const char* serves) {
    Add(name, false, ok, "available",
        ok ? serves : fmt::format("missing; would serve: {}", serves));
  }
  std::vector<HostProbe> Take() { return std::move(rows_); }

 private:
  std::vector<HostProbe> rows_;
};

// Mounts a FUSE file system, without a line in a mount table, and looks whether the kernel sends
// requests again when another process goes on with the session (Linux 6.9, FUSE_HAS_RESEND).
Result<bool> FuseResends() {
  constexpr uint64_t kHasResend = 1ull << (39 - 32);  // of flags2
  DSEC_TRY(const auto device, os::OpenAt(AT_FDCWD, "/dev/fuse", O_RDWR | O_NONBLOCK));
  DSEC_TRY(auto context, os::FsContext::Open("fuse"));
  for (const auto& [key, value] :
       {std::pair("source", std::string("dsec-probe")), std::pair("rootmode", std::string("40000")),
        std::pair("fd", std::to_string(device.get())), std::pair("user_id", std::string("0")),
        std::pair("group_id", std::string("0"))})
    DSEC_TRY_VOID(context.SetString(key, value.c_str()));
  DSEC_TRY(const auto mount, std::move(context).Mount(MOUNT_ATTR_RDONLY));
  struct {
    fuse_in_header header;
    fuse_init_in init;
    char rest[FUSE_MIN_READ_BUFFER];
  } request{};
  if (::read(device.get(), &request, sizeof request) < 0)
    return os::ErrnoError("doctor.fuse", "read /dev/fuse");
  return (request.init.flags & FUSE_INIT_EXT) != 0 && (request.init.flags2 & kHasResend) != 0;
}

void ProbeFuse(Table& table) {
  const auto fuse = FuseResends();
  table.Add(
      "fuse_resend", false, fuse.ok() && *fuse, "requests are sent again to a new server",
      fuse.ok() && *fuse ? "layers_verify and layers_url: reads outlive a crash of dsec-blobfs"
      : fuse.ok()
          ? "needs Linux 6.9: layers_verify and layers_url work, but reads under way "
            "when dsec-blobfs dies hang"
          : fmt::format("{}: layers_verify and layers_url cannot be used", fuse.error().message()));
}

void ProbeFileSystems(Table& table, const std::string& dir) {
  ProbeFuse(table);
  const auto erofs = MountTinyErofs(dir);
  table.Add(
      "erofs_file", true, erofs.ok(), "file-backed, detached",
      erofs.ok()
          ? "layers are mounted from plain files, without loop devices"
          : fmt::format("{}; needs Linux 6.12 with EROFS_FS_BACKED_BY_FILE; nothing replaces it",
                        erofs.error().message()));
  if (!erofs.ok()) return;
  const auto compressed = image::ProbeCompressedLayers(dir);
  table.Add(
      "erofs_lz4", false, compressed.ok(), "mounted and read",
      compressed.ok()
          ? "compressed layers (dsec layer build --compress) can be used on this node"
          : fmt::format("{}; without EROFS_FS_ZIP compressed layers cannot be used here; "
                        "another node makes plain ones of them (dsec layer compress --method none)",
                        compressed.error().message()));
  const auto folder = os::OpenAt(AT_FDCWD, dir.c_str(), O_RDONLY | O_DIRECTORY);
  const auto links = folder.ok() ? image::CheckLinks(folder->get()) : Result<void>(folder.error());
  table.Add("layer_sharing", false, links.ok(), "hard links",
            links.ok() ? "content that several layers have is kept once"
                       : fmt::format("{}: what several layers have is kept by each",
                                     links.error().message()));
  const auto overlay = MountOverlay(erofs->get());
  table.Add("overlay_by_fd", true, overlay.ok(), "lowerdir+ by descriptor, volatile",
            overlay.ok() ? "roots are built without a line in the host's mount table"
                         : fmt::format("{}; needs Linux 6.13; nothing replaces it",
                                       overlay.error().message()));
}

bool CanOpen(const char* path) {
  return UniqueFd(::open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK)).valid();
}

std::string ReadLine(const char* path) {
  auto text = os::ReadFile(AT_FDCWD, path, 4096);
  if (!text.ok()) return "";
  return text->substr(0, text->find('\n'));
}

void ProbeSecurity(Table& table) {
  const long landlock =
      ::syscall(SYS_landlock_create_ruleset, nullptr, 0, LANDLOCK_CREATE_RULESET_VERSION);
  table.Add("landlock", false, landlock > 0, fmt::format("ABI {}", landlock),
            landlock > 0 ? "not applied: the namespaces of a container leave nothing for it to add"
                         : "missing; not needed by containers");
  const bool apparmor = ReadLine("/sys/module/apparmor/parameters/enabled") == "Y";
  table.Add("apparmor", false, apparmor, "enabled",
            apparmor ? "no profile is loaded yet"
                     : "missing; instead: user namespaces, masks, seccomp, device rules");
  const std::string lsms = ReadLine("/sys/kernel/security/lsm");
  table.Add("bpf_lsm", false, lsms.find("bpf") != std::string::npos, "listed",
            lsms.empty() ? "securityfs is not mounted"
                         : fmt::format("lsm={}; not used by containers", lsms));
  const std::string actions = ReadLine("/proc/sys/kernel/seccomp/actions_avail");
  table.Add("seccomp", true, actions.find("errno") != std::string::npos, "filter",
            actions.empty() ? "the kernel has no seccomp filters; nothing replaces them" : actions);
  const bool sched_core =
      ::prctl(kPrSchedCore, 0 /* PR_SCHED_CORE_GET */, 0, 0, 0) == 0 || errno == EFAULT;
  table.Add(
      "core_scheduling", false, sched_core, "available",
      sched_core
          ? "not used yet"
          : "missing (CONFIG_SCHED_CORE, or no SMT): sandboxes of different users share cores");
}

void ProbeMemory(Table& table) {
  const std::string swaps = [] {
    auto text = os::ReadFile(AT_FDCWD, "/proc/swaps", 65536);
    return text.ok() ? *text : std::string();
  }();
  const bool swap = swaps.find('\n') != std::string::npos && swaps.find('\n') + 1 < swaps.size();
  table.Add(
      "swap", false, swap, "on",
      swap ? "sandboxes are bounded in memory and swap together" : "off: idle memory stays in RAM");
  const bool psi = !ReadLine("/proc/pressure/memory").empty();
  table.Add("psi", false, psi, "on",
            psi ? "pressure takes part in admission"
                : "off (boot with psi=1); admission looks at MemAvailable alone");
  const int process = os::PidFdOpen(::getpid(), 0);
  const UniqueFd self(process);
  const bool madvise =
      ::syscall(SYS_process_madvise, process, nullptr, 0, 0 /* MADV_NORMAL is refused */, 0) == 0 ||
      errno != ENOSYS;
  table.AddOptional("process_madvise", madvise, "reclaim of paused sandboxes");
  UniqueFd faults(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY)));
  table.AddOptional("userfaultfd", faults.valid(), "memory of restored virtual machines");
  table.AddOptional("damon", ::access("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", W_OK) == 0,
                    "reclaim of cold memory");
  const UniqueFd fanotify(::fanotify_init(kFanClassPreContent | FAN_CLOEXEC, O_RDONLY));
  table.AddOptional("fanotify_pre_content", fanotify.valid(),
                    "layers that are filled as they are read");
}

void ProbeLimits(Table& table) {
  utsname kernel = {};
  ::uname(&kernel);
  table.AddFigure("kernel", true, kernel.release, kernel.machine);
  rlimit files = {};
  ::getrlimit(RLIMIT_NOFILE, &files);
  table.AddFigure(
      "open_files", files.rlim_max >= 65536, fmt::format("{}", files.rlim_max),
      fmt::format(
          "hard limit of the daemon {}, 2 for each live sandbox; it also bounds limits.open_files",
          files.rlim_max));
  const std::string pid_max = ReadLine("/proc/sys/kernel/pid_max");
  table.AddFigure(
      "pid_max", pid_max.size() >= 6, pid_max,
      fmt::format("{} processes on the whole host, at least 2 for each live sandbox", pid_max));
  const bool resource = ::prctl(PR_CAPBSET_READ, CAP_SYS_RESOURCE, 0, 0, 0) == 1;
  table.Add("cap_sys_resource", false, resource, "held",
            resource ? "limits of the daemon can be raised"
                     : "missing: hard limits stay as they are and oom_score_adj cannot be lowered; "
                       "the host's OOM killer may "
                       "choose the daemon, which sandboxes survive");
}

void ProbeVirtualMachines(Table& table) {
  table.AddOptional("kvm", CanOpen("/dev/kvm"), "microVM and VM backends");
  table.AddOptional("vhost_vsock", CanOpen("/dev/vhost-vsock"),
                    "agents of virtual machines (else virtio-serial)");
  const bool ublk = CanOpen("/dev/ublk-control"), nbd = CanOpen("/dev/nbd0");
  table.AddOptional("ublk", ublk, "writable disks of virtual machines");
  const bool fuse = CanOpen("/dev/fuse");
  table.Add("disk_export", false, fuse, "FUSE file; NBD on a Unix socket for QEMU",
            fmt::format("of ublk ({}), the kernel's NBD client ({}) and FUSE ({}) disks of virtual "
                        "machines take FUSE, which survives their daemon; ublk is not served yet",
                        ublk ? "there" : "missing", nbd ? "there" : "missing",
                        fuse ? "there" : "missing"));
}

}  // namespace

std::vector<HostProbe> ProbeHost(const std::string& dir) {
  Table table;
  ProbeLimits(table);
  ProbeFileSystems(table, dir);
  ProbeSecurity(table);
  ProbeMemory(table);
  ProbeVirtualMachines(table);
  return table.Take();
}

}  // namespace dsec::sandbox

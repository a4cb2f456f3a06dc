// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "os/syscalls.h"
#include "os/unique_fd.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

using os::UniqueFd;
using wire::Step;

// Entries of /proc that tell of the host or reach into it. Hidden: files by /dev/null, directories
// by an empty read-only one. What a kernel does not have is skipped.
constexpr const char* kHidden[] = {
    "acpi",         "asound",     "buddyinfo",     "cgroups",     "cmdline",    "config.gz",
    "diskstats",    "dma",        "driver",        "interrupts",  "iomem",      "ioports",
    "kallsyms",     "kcore",      "key-users",     "keys",        "kmsg",       "kpagecgroup",
    "kpagecount",   "kpageflags", "latency_stats", "misc",        "modules",    "mtrr",
    "pagetypeinfo", "partitions", "pressure",      "sched_debug", "schedstat",  "scsi",
    "slabinfo",     "softirqs",   "swaps",         "sysvipc",     "timer_list", "timer_stats",
    "vmallocinfo",  "vmstat",     "zoneinfo"};
constexpr const char* kReadOnly[] = {"bus", "fs", "irq", "sys", "sysrq-trigger"};

int SetReadOnly(const char* path) {
  mount_attr attributes = {};
  attributes.attr_set =
      MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
  return ::mount_setattr(AT_FDCWD, path, 0, &attributes, sizeof(attributes)) == 0 ? 0 : -errno;
}

// Of the entries of kHidden, as the spawner has found them before its first fork. What was not
// there then, a module may have brought since; what was there stays what it is.
enum class EntryKind : uint8_t { kUnknown, kFile, kDirectory };
EntryKind hidden_kinds[std::size(kHidden)] = {};

EntryKind KindOf(const char* path) {
  struct stat info;
  if (::stat(path, &info) != 0) return EntryKind::kUnknown;
  return S_ISDIR(info.st_mode) ? EntryKind::kDirectory : EntryKind::kFile;
}

// Below the working directory, which is the /proc.
int HideEntry(size_t index) {
  const char* name = kHidden[index];
  EntryKind kind = hidden_kinds[index];
  if (kind == EntryKind::kUnknown) kind = KindOf(name);
  if (kind == EntryKind::kUnknown) return errno == ENOENT ? 0 : -errno;
  const char* cover = kind == EntryKind::kDirectory ? kEmptyDir : "/dev/null";
  if (::mount(cover, name, nullptr, MS_BIND, nullptr) == 0) return 0;
  return errno == ENOENT ? 0 : -errno;
}

int FreezeEntry(const char* path) {
  if (::mount(path, path, nullptr, MS_BIND, nullptr) != 0) return errno == ENOENT ? 0 : -errno;
  return SetReadOnly(path);
}

// A directory of that name directly below the root. Whatever else the image has there, a link above
// all, gives way: no code of the sandbox runs yet, and the root is the sandbox's own writable
// layer.
int EnsureDirectory(int root, const char* name, mode_t mode) {
  if (::mkdirat(root, name, mode) == 0) return 0;
  if (errno != EEXIST) return -errno;
  struct stat info;
  if (::fstatat(root, name, &info, AT_SYMLINK_NOFOLLOW) != 0) return -errno;
  if (S_ISDIR(info.st_mode)) return 0;
  if (::unlinkat(root, name, 0) != 0) return -errno;
  return ::mkdirat(root, name, mode) == 0 ? 0 : -errno;
}

int PrepareDirectories(int root) {
  int error = EnsureDirectory(root, "proc", 0555);
  if (error == 0) error = EnsureDirectory(root, "sys", 0555);
  if (error == 0) error = EnsureDirectory(root, "dev", 0755);
  if (error != 0) return error;
  if (::mkdirat(root, "tmp", 0777) == 0) return ::fchmodat(root, "tmp", 01777, 0) == 0 ? 0 : -errno;
  return errno == EEXIST ? 0 : -errno;
}

// /etc may be a link within the image; nothing outside of the root and no other mount is ever
// entered.
int OpenEtc(int root, UniqueFd* etc) {
  constexpr uint64_t kResolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV;
  for (int attempt = 0;; ++attempt) {
    etc->Reset(os::OpenAt2(root, "etc", O_PATH | O_DIRECTORY | O_CLOEXEC, 0, kResolve));
    if (etc->valid()) return 0;
    if (attempt > 0 || (errno != ENOENT && errno != ENOTDIR && errno != ELOOP)) return -errno;
    int error = EnsureDirectory(root, "etc", 0755);
    if (error != 0) return error;
  }
}

int ReplaceFile(int dir, const char* name, const char* content, size_t size) {
  // A link of the image is removed, not followed.
  if (::unlinkat(dir, name, 0) != 0 && errno != ENOENT) return -errno;
  UniqueFd file(::openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!file.valid()) return -errno;
  while (size > 0) {
    ssize_t n = ::write(file.get(), content, size);
    if (n < 0) return -errno;
    content += n;
    size -= static_cast<size_t>(n);
  }
  return 0;
}

int WriteFiles(int root, const wire::Launch& plan) {
  char hostname[wire::kMaxHostname + 2];
  int length = std::snprintf(hostname, sizeof(hostname), "%s\n", plan.hostname);
  UniqueFd etc;
  int error = OpenEtc(root, &etc);
  if (error == 0) error = ReplaceFile(etc.get(), "hostname", hostname, static_cast<size_t>(length));
  if (error == 0 && plan.hosts_bytes > 0)
    error = ReplaceFile(etc.get(), "hosts", plan.hosts, plan.hosts_bytes);
  if (error == 0 && plan.resolv_conf_bytes > 0) {
    error = ReplaceFile(etc.get(), "resolv.conf", plan.resolv_conf, plan.resolv_conf_bytes);
  }
  return error;
}

int MountShm(int root, const wire::Launch& plan) {
  char size[24], inodes[24];
  std::snprintf(size, sizeof(size), "%llu", static_cast<unsigned long long>(plan.shm_bytes));
  std::snprintf(inodes, sizeof(inodes), "%llu", static_cast<unsigned long long>(plan.shm_inodes));
  const FsOption options[] = {
      {"source", "shm"}, {"size", size}, {"nr_inodes", inodes}, {"mode", "1777"}};
  UniqueFd mount;
  int error = NewFileSystem("tmpfs", options, kDataAttributes, &mount);
  if (error != 0) return error;
  return ::move_mount(mount.get(), "", root, "dev/shm", MOVE_MOUNT_F_EMPTY_PATH) == 0 ? 0 : -errno;
}

}  // namespace

int AttachView(int root, int view, const char* target) {
  mount_attr attributes = {};
  attributes.attr_set =
      MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
  if (::mount_setattr(view, "", AT_EMPTY_PATH, &attributes, sizeof(attributes)) != 0) return -errno;
  UniqueFd at(os::OpenAt2(root, target, O_PATH | O_CLOEXEC, 0,
                          RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS));
  if (!at.valid()) return -errno;
  constexpr unsigned kEmptyPaths = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
  return ::move_mount(view, "", at.get(), "", kEmptyPaths) == 0 ? 0 : -errno;
}

// Over the stage, which holds nothing, and into it: what switch_root(8) does. To uncover the stage
// one would have to be root of B with CAP_SYS_ADMIN and umount2(2), which no code ever has.
int EnterRoot(int root) {
  if (::move_mount(root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) != 0 || ::fchdir(root) != 0 ||
      ::chroot(".") != 0 || ::chdir("/") != 0) {
    return -errno;
  }
  return 0;
}

int AttachRoot(int mount, UniqueFd* root) {
  mount_attr attributes = {};
  attributes.attr_set = MOUNT_ATTR_NODEV;
  if (::mount_setattr(mount, "", AT_EMPTY_PATH, &attributes, sizeof(attributes)) != 0)
    return -errno;
  if (::move_mount(mount, "", AT_FDCWD, kNewRoot, MOVE_MOUNT_F_EMPTY_PATH) != 0) return -errno;
  root->Reset(::open(kNewRoot, O_PATH | O_DIRECTORY | O_CLOEXEC));
  return root->valid() ? 0 : -errno;
}

int MountProc(const char* place) {
  UniqueFd proc;
  int error = NewFileSystem("proc", {}, kDataAttributes, &proc);
  if (error != 0) return error;
  if (::move_mount(proc.get(), "", AT_FDCWD, place, MOVE_MOUNT_F_EMPTY_PATH) != 0) return -errno;
  if (::chdir(place) != 0) return -errno;
  for (size_t i = 0; i < std::size(kHidden); ++i) {
    error = HideEntry(i);
    if (error != 0) return error;
  }
  for (const char* name : kReadOnly) {
    error = FreezeEntry(name);
    if (error != 0) return error;
  }
  return 0;
}

void LearnProc() {
  char path[64];
  for (size_t i = 0; i < std::size(kHidden); ++i) {
    std::snprintf(path, sizeof(path), "/proc/%s", kHidden[i]);
    hidden_kinds[i] = KindOf(path);
  }
}

int MountPts(const char* place, const char* gid) {
  // kernel.pty.max is one number for the whole host; `max` keeps a sandbox from using it up.
  const FsOption options[] = {
      {"source", "devpts"}, {"ptmxmode", "0666"}, {"mode", "0620"}, {"gid", gid}, {"max", "256"}};
  UniqueFd pts;
  int error = NewFileSystem("devpts", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, &pts);
  if (error != 0) return error;
  return ::move_mount(pts.get(), "", AT_FDCWD, place, MOVE_MOUNT_F_EMPTY_PATH) == 0 ? 0 : -errno;
}

int PrepareProc() {
  // A mount of its own, to be pivoted to.
  if (::mount(kStage, kStage, nullptr, MS_BIND, nullptr) != 0) return -errno;
  char place[32];
  std::snprintf(place, sizeof(place), "%s%s", kStage, kInitProc);
  return MountProc(place);
}

int PrepareDev(int dev_mount) {
  char path[32];
  std::snprintf(path, sizeof(path), "%s%s", kStage, kInitDev);
  if (::move_mount(dev_mount, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH) != 0) return -errno;
  std::snprintf(path, sizeof(path), "%s%s/pts", kStage, kInitDev);
  return MountPts(path, "5");
}

int EnterStage(const char* stage) {
  if (::chdir(stage) != 0 || os::PivotRoot(".", ".") != 0 || ::umount2(".", MNT_DETACH) != 0 ||
      ::chdir("/") != 0) {
    return -errno;
  }
  return 0;
}

int ExecuteLaunch(const wire::Launch& plan, const int* fds, StepClock& clock, int* root_out) {
  UniqueFd root;
  int error = AttachRoot(fds[0], &root);
  if (error != 0) return clock.Fail(Step::kRoot, error);
  clock.Done(Step::kRoot);
  error = PrepareDirectories(root.get());
  if (error != 0) return clock.Fail(Step::kDirectories, error);
  clock.Done(Step::kDirectories);
  error = WriteFiles(root.get(), plan);
  if (error != 0) return clock.Fail(Step::kFiles, error);
  clock.Done(Step::kFiles);
  // These were made and masked with the slot; they move here with everything that is mounted on
  // them.
  if (::move_mount(AT_FDCWD, kInitProc, root.get(), "proc", 0) != 0)
    return clock.Fail(Step::kProc, -errno);
  clock.Done(Step::kProc);
  if (::move_mount(AT_FDCWD, kInitDev, root.get(), "dev", 0) != 0)
    return clock.Fail(Step::kDev, -errno);
  clock.Done(Step::kDev);
  error = MountShm(root.get(), plan);
  if (error != 0) return clock.Fail(Step::kShm, error);
  clock.Done(Step::kShm);
  for (uint32_t i = 0; i < plan.view_count; ++i) {
    error = AttachView(root.get(), fds[1 + i], plan.views[i]);
    if (error != 0) return clock.Fail(Step::kViews, error);
  }
  clock.Done(Step::kViews);
  constexpr char kNoDomain[] = "(none)";  // the kernel's own default
  if (::sethostname(plan.hostname, std::strlen(plan.hostname)) != 0 ||
      ::setdomainname(kNoDomain, sizeof(kNoDomain) - 1) != 0) {
    return clock.Fail(Step::kHostname, -errno);
  }
  clock.Done(Step::kHostname);
  error = EnterRoot(root.get());
  if (error != 0) return clock.Fail(Step::kEnterRoot, error);
  clock.Done(Step::kEnterRoot);
  *root_out = root.Release();
  return 0;
}

}  // namespace dsec::spawn::stage

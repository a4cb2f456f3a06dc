// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "os/syscalls.h"
#include "os/unique_fd.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

using os::UniqueFd;

struct Node {
  const char* name;
  unsigned minor;
  unsigned major;
};
// Documentation/admin-guide/devices.txt
constexpr Node kNodes[] = {{"null", 3, 1},   {"zero", 5, 1},    {"full", 7, 1},
                           {"random", 8, 1}, {"urandom", 9, 1}, {"tty", 0, 5}};
struct Link {
  const char* name;
  const char* target;
};
constexpr Link kLinks[] = {{"ptmx", "pts/ptmx"},
                           {"fd", "/proc/self/fd"},
                           {"stdin", "/proc/self/fd/0"},
                           {"stdout", "/proc/self/fd/1"},
                           {"stderr", "/proc/self/fd/2"}};

int BuildTemplate(int root) {
  for (const char* dir : {"proc", "dev", "dev/pts", "dev/shm", "stage", "stage/root", "stage/proc",
                          "stage/dev", kEmptyDir + 1}) {
    if (::mkdirat(root, dir, 0755) != 0) return -errno;
  }
  UniqueFd dev(::openat(root, "dev", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!dev.valid()) return -errno;
  for (const Node& node : kNodes) {
    if (::mknodat(dev.get(), node.name, S_IFCHR | 0666, ::makedev(node.major, node.minor)) != 0)
      return -errno;
  }
  for (const Link& link : kLinks) {
    if (::symlinkat(link.target, dev.get(), link.name) != 0) return -errno;
  }
  return 0;
}

}  // namespace

int EnterPrivateRoot(StepClock& clock) {
  ::umask(0);
  if (::unshare(CLONE_NEWNS) != 0) return clock.Fail(wire::Step::kMountNamespace, -errno);
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    return clock.Fail(wire::Step::kMountNamespace, -errno);
  }
  clock.Done(wire::Step::kMountNamespace);

  constexpr FsOption kRootOptions[] = {
      {"source", "none"}, {"size", "256k"}, {"nr_inodes", "64"}, {"mode", "0755"}};
  UniqueFd root;
  int error = NewFileSystem("tmpfs", kRootOptions, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, &root);
  if (error == 0) error = BuildTemplate(root.get());
  if (error != 0) return clock.Fail(wire::Step::kTemplate, error);
  // The host's /proc is the one directory that certainly exists; only this namespace sees what is
  // put on it.
  if (::move_mount(root.get(), "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH) != 0) {
    return clock.Fail(wire::Step::kTemplate, -errno);
  }
  UniqueFd proc;
  error = NewFileSystem("proc", {}, kDataAttributes, &proc);
  if (error != 0) return clock.Fail(wire::Step::kTemplate, error);
  // A nested user namespace may mount a /proc only where a complete one is visible already: this
  // one, which the stages inherit and cover with their own.
  if (::move_mount(proc.get(), "", root.get(), "proc", MOVE_MOUNT_F_EMPTY_PATH) != 0 ||
      ::fchdir(root.get()) != 0 || os::PivotRoot(".", ".") != 0 ||
      ::umount2(".", MNT_DETACH) != 0 || ::chdir("/") != 0) {
    return clock.Fail(wire::Step::kTemplate, -errno);
  }
  mount_attr read_only = {};
  read_only.attr_set = MOUNT_ATTR_RDONLY;
  if (::mount_setattr(root.get(), "", AT_EMPTY_PATH, &read_only, sizeof(read_only)) != 0) {
    return clock.Fail(wire::Step::kTemplate, -errno);
  }
  clock.Done(wire::Step::kTemplate);
  return 0;
}

}  // namespace dsec::spawn::stage

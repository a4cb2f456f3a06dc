// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <linux/openat2.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdio>

#include "os/fd_passing.h"
#include "os/syscalls.h"
#include "os/unique_fd.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

using os::UniqueFd;
using wire::Step;

// The init's own descriptors, next to 0, 1 and 2.
constexpr int kLaunchSocket = 3;
constexpr int kChannel = 4;
constexpr int kOomScore = 5;
constexpr int kUserNs = 6;
constexpr int kFirstMount = 7;
constexpr int kMaxMounts = 3;
// Group 5 of B, as A numbers it.
constexpr char kTtyGroup[] = "6";

[[noreturn]] void Fail(StepClock& clock) {
  os::SendPacketRaw(kLaunchSocket, clock.reply(), sizeof(wire::Reply), nullptr, 0, 0);
  ::_exit(1);
}

int KeepOwnFds(const CellStart& start, int oom_score) {
  int src[kFirstMount + kMaxMounts] = {start.shared->dev_null, start.shared->dev_null,
                                       start.shared->dev_null, start.launch,
                                       start.channel,          oom_score,
                                       start.user_ns};
  int dst[kFirstMount + kMaxMounts];
  const size_t mounts = start.has_dev ? 3 : 2;
  const size_t count = kFirstMount + mounts;
  for (size_t i = 0; i < mounts; ++i) src[kFirstMount + i] = start.mounts[i];
  for (size_t i = 0; i < count; ++i) dst[i] = static_cast<int>(i);
  int error = PlaceFds(src, dst, count, true);
  if (error != 0) return error;
  return ::close_range(static_cast<unsigned>(count), ~0u, 0) == 0 ? 0 : -errno;
}

int Attach(int mount, int root, const char* path) {
  return ::move_mount(mount, "", root, path, MOVE_MOUNT_F_EMPTY_PATH) == 0 ? 0 : -errno;
}

// The runner has attached the views where this mount namespace, a copy of its own, has them too.
int MoveViews(const wire::Views& views, int root) {
  for (uint32_t i = 0; i < views.view_count; ++i) {
    char from[kViewPathBytes];
    RunnerViewPath(i, from);
    UniqueFd at(os::OpenAt2(root, views.views[i], O_PATH | O_CLOEXEC, 0,
                            RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS));
    if (!at.valid() || ::move_mount(AT_FDCWD, from, at.get(), "", MOVE_MOUNT_T_EMPTY_PATH) != 0) {
      return -errno;
    }
  }
  return 0;
}

// What a fork needs to get here. While /proc is that of A, where this process is shown.
int OpenNamespaces(int fds[wire::kCellNamespaces]) {
  constexpr const char* kNames[wire::kCellNamespaces] = {"pid", "mnt", "ipc", "net"};
  for (uint32_t i = 0; i < wire::kCellNamespaces; ++i) {
    char path[32];
    std::snprintf(path, sizeof(path), "/proc/self/ns/%s", kNames[i]);
    fds[i] = ::open(path, O_RDONLY | O_CLOEXEC);
    if (fds[i] < 0) return -errno;
  }
  return 0;
}

}  // namespace

// The folders that mounts go to are in the root: the daemon sees to that. The runner's /proc, which
// shows the processes of A and without which no other could be mounted, stays behind on the stage:
// taking it off would wait for a grace period of RCU, and covered it is as good as gone
// (EnterRoot).
int BuildCellRoot(const CellRoot& parts, StepClock& clock) {
  UniqueFd root;
  int error = AttachRoot(parts.root, &root);
  if (error != 0) return clock.Fail(Step::kRoot, error);
  clock.Done(Step::kRoot);
  char proc[32];
  std::snprintf(proc, sizeof(proc), "%s%s", kNewRoot, kInitProc);
  error = MountProc(proc);
  if (error != 0) return clock.Fail(Step::kInitProc, error);
  clock.Done(Step::kInitProc);
  if (parts.dev >= 0) error = Attach(parts.dev, AT_FDCWD, kInitDev);
  if (error == 0) error = MountPts("/dev/pts", kTtyGroup);
  if (error == 0) error = Attach(parts.shm, AT_FDCWD, "/dev/shm");
  if (error == 0 && ::move_mount(AT_FDCWD, kInitDev, root.get(), "dev", 0) != 0) error = -errno;
  if (error != 0) return clock.Fail(Step::kDev, error);
  clock.Done(Step::kDev);
  error = MoveViews(*parts.views, root.get());
  if (error == 0) error = EnterRoot(root.get());
  if (error != 0) return clock.Fail(Step::kMounts, error);
  clock.Done(Step::kMounts);
  return 0;
}

void RunCell(const CellStart& start) {
  wire::Reply reply;
  StepClock clock(&reply);
  // As RunInit: no signal is blocked or handled but SIGCHLD, which is taken by descriptor. The
  // runner has none of its own.
  sigset_t children;
  ::sigemptyset(&children);
  ::sigaddset(&children, SIGCHLD);
  ::sigprocmask(SIG_SETMASK, &children, nullptr);
  // While /proc is that of A and this process is one of the runner's.
  int oom_score = ::open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
  if (oom_score < 0 || KeepOwnFds(start, oom_score) != 0) ::_exit(1);
  Rename(*start.shared, "init");
  int report[kCellReportFds] = {kOomScore};
  int error = start.has_fork ? OpenNamespaces(report + 1) : 0;
  if (error != 0) {
    clock.Fail(Step::kMounts, error);
    Fail(clock);
  }
  // All mounts belong to a namespace of A, where nothing inside has a right.
  const CellRoot parts = {start.views, kFirstMount, kFirstMount + 1,
                          start.has_dev ? kFirstMount + 2 : -1};
  if (BuildCellRoot(parts, clock) != 0) Fail(clock);
  error = ::setns(kUserNs, CLONE_NEWUSER) == 0 ? 0 : -errno;
  if (error == 0) error = TakeIdentity();
  // Whatever runs here has no capability, and no program gives it one.
  if (error == 0) error = LimitBoundingSet(0);
  if (error != 0) {
    clock.Fail(Step::kIdentity, error);
    Fail(clock);
  }
  clock.Done(Step::kIdentity);
  const size_t count = start.has_fork ? kCellReportFds : 1;
  if (os::SendPacketRaw(kLaunchSocket, &reply, sizeof(reply), report, count, 0) != 0) ::_exit(1);
  ::close(kLaunchSocket);
  for (size_t i = 1; i < count; ++i) ::close(report[i]);
  for (int fd = kUserNs; fd < kFirstMount + kMaxMounts; ++fd) ::close(fd);
  Serve({start.shared, kChannel, kOomScore, 0});
}

}  // namespace dsec::spawn::stage

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

[[noreturn]] void Fail(StepClock& clock, Step step, int error) {
  clock.Fail(step, error);
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

// The folders that mounts go to are in the root: the daemon sees to that. The runner's /proc, which
// shows the processes of A and without which no other could be mounted, stays behind on the stage:
// taking it off would wait for a grace period of RCU, and covered it is as good as gone
// (EnterRoot).
void BuildMounts(const CellStart& start, StepClock& clock) {
  UniqueFd root;
  int error = AttachRoot(kFirstMount, &root);
  if (error != 0) Fail(clock, Step::kRoot, error);
  clock.Done(Step::kRoot);
  char proc[32];
  std::snprintf(proc, sizeof(proc), "%s%s", kNewRoot, kInitProc);
  error = MountProc(proc);
  if (error != 0) Fail(clock, Step::kInitProc, error);
  clock.Done(Step::kInitProc);
  if (start.has_dev) error = Attach(kFirstMount + 2, AT_FDCWD, kInitDev);
  if (error == 0) error = MountPts("/dev/pts", kTtyGroup);
  if (error == 0) error = Attach(kFirstMount + 1, AT_FDCWD, "/dev/shm");
  if (error == 0 && ::move_mount(AT_FDCWD, kInitDev, root.get(), "dev", 0) != 0) error = -errno;
  if (error != 0) Fail(clock, Step::kDev, error);
  clock.Done(Step::kDev);
  error = MoveViews(*start.views, root.get());
  if (error == 0) error = EnterRoot(root.get());
  if (error != 0) Fail(clock, Step::kMounts, error);
  clock.Done(Step::kMounts);
}

}  // namespace

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
  // All mounts belong to a namespace of A, where nothing inside has a right.
  BuildMounts(start, clock);
  int error = ::setns(kUserNs, CLONE_NEWUSER) == 0 ? 0 : -errno;
  if (error == 0) error = TakeIdentity();
  // Whatever runs here has no capability, and no program gives it one.
  if (error == 0) error = LimitBoundingSet(0);
  if (error != 0) Fail(clock, Step::kIdentity, error);
  clock.Done(Step::kIdentity);
  oom_score = kOomScore;
  if (os::SendPacketRaw(kLaunchSocket, &reply, sizeof(reply), &oom_score, 1, 0) != 0) ::_exit(1);
  ::close(kLaunchSocket);
  for (int fd = kUserNs; fd < kFirstMount + kMaxMounts; ++fd) ::close(fd);
  Serve({start.shared, kChannel, kOomScore, 0});
}

}  // namespace dsec::spawn::stage

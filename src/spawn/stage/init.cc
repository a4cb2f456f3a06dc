// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "os/fd_passing.h"
#include "os/unique_fd.h"
#include "spawn/agent_abi.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

using wire::Step;

// init's own descriptors, next to 0, 1 and 2.
constexpr int kLaunchSocket = 3;
constexpr int kAgentChannel = 4;
constexpr int kOomScore = 5;

wire::Launch launch_plan;  // one packet of some 20 KiB, received in place

// Closes whatever of the spawner and the agent's stage came along with the fork.
int KeepOwnFds(const InitStart& start, int oom_score) {
  const int src[] = {start.shared->dev_null, start.shared->dev_null, start.shared->dev_null,
                     start.launch,           start.channel,          oom_score};
  const int dst[] = {0, 1, 2, kLaunchSocket, kAgentChannel, kOomScore};
  int error = PlaceFds(src, dst, 6, true);
  if (error != 0) return error;
  return ::close_range(kOomScore + 1, ~0u, 0) == 0 ? 0 : -errno;
}

int ApplyLimits(const wire::Launch& plan) {
  for (uint32_t i = 0; i < plan.rlimit_count; ++i) {
    rlimit limit = {plan.rlimits[i].soft, plan.rlimits[i].hard};
    if (::setrlimit(static_cast<__rlimit_resource>(plan.rlimits[i].resource), &limit) != 0)
      return -errno;
  }
  bool pinned = false;
  for (uint64_t word : plan.cpu_mask) pinned |= word != 0;
  if (pinned && ::sched_setaffinity(0, sizeof(plan.cpu_mask),
                                    reinterpret_cast<const cpu_set_t*>(plan.cpu_mask)) != 0) {
    return -errno;
  }
  return LimitBoundingSet(plan.capabilities);
}

// Receives the one launch plan of this slot. End of file: the edge or the spawner is gone and
// nobody can ever use the slot.
int ReceivePlan(int* fds, size_t* count) {
  ssize_t size =
      os::ReceivePacketRaw(kLaunchSocket, &launch_plan, sizeof(launch_plan), fds, count, 0);
  if (size == 0) ::_exit(0);
  if (size < 0) return static_cast<int>(size);
  return wire::WellFormed(launch_plan, static_cast<size_t>(size), *count) ? 0 : -EINVAL;
}

[[noreturn]] void FailLaunch(StepClock& clock) {
  os::SendPacketRaw(kLaunchSocket, clock.reply(), sizeof(wire::Reply), nullptr, 0, 0);
  ::_exit(1);
}

int HandOver(int root) {
  abi::InitReady ready;
  return os::SendPacketRaw(kAgentChannel, &ready, sizeof(ready), &root, 1, 0);
}

}  // namespace

void RunInit(const InitStart& start) {
  wire::Reply reply;
  StepClock clock(&reply);
  // Signals from inside B to its pid 1 are dropped by the kernel as long as they are not blocked
  // and have no handler; a blocked one would wait, and real-time ones pile up. Only SIGCHLD is
  // taken, by descriptor.
  ResetSignals();
  sigset_t children;
  ::sigemptyset(&children);
  ::sigaddset(&children, SIGCHLD);
  ::sigprocmask(SIG_SETMASK, &children, nullptr);
  // Opened while /proc is still that of A and its files are still ours; serve.cc explains the use.
  int oom_score = ::open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
  int error = oom_score >= 0 ? KeepOwnFds(start, oom_score) : -errno;
  if (error != 0) ::_exit(1);  // seen as end of file, reported as clone_init's successor step

  char go = 0;
  int dev_mount = -1;
  size_t count = 1;
  if (os::ReceivePacketRaw(kLaunchSocket, &go, 1, &dev_mount, &count, 0) != 1 || count != 1)
    ::_exit(1);
  clock.Restart();
  error = TakeIdentity();
  if (error == 0) {
    Rename(*start.shared, "init");
    error = PrepareProc();
  }
  if (error != 0) {
    clock.Fail(Step::kInitProc, error);
    FailLaunch(clock);
  }
  clock.Done(Step::kInitProc);
  error = PrepareDev(dev_mount);
  ::close(dev_mount);
  if (error == 0) error = EnterStage(kStage);
  if (error != 0) {
    clock.Fail(Step::kInitDev, error);
    FailLaunch(clock);
  }
  clock.Done(Step::kInitDev);
  if (os::SendPacketRaw(kLaunchSocket, &reply, sizeof(reply), nullptr, 0, 0) != 0) ::_exit(1);

  int fds[1 + wire::kMaxViews];
  count = 1 + wire::kMaxViews;
  reply = {};
  error = ReceivePlan(fds, &count);
  clock.Restart();
  if (error != 0) {
    clock.Fail(Step::kRequest, error);
    FailLaunch(clock);
  }
  int root = -1;
  if (ExecuteLaunch(launch_plan, fds, clock, &root) != 0) FailLaunch(clock);
  for (size_t i = 0; i < count; ++i) ::close(fds[i]);
  error = ApplyLimits(launch_plan);
  if (error != 0) {
    clock.Fail(Step::kLimits, error);
    FailLaunch(clock);
  }
  clock.Done(Step::kLimits);
  error = HandOver(root);
  ::close(root);
  if (error != 0) {
    clock.Fail(Step::kHandover, error);
    FailLaunch(clock);
  }
  clock.Done(Step::kHandover);
  error = os::SendPacketRaw(kLaunchSocket, &reply, sizeof(reply), nullptr, 0, 0);
  ::close(kLaunchSocket);
  // Nobody took the answer: nobody knows that this sandbox exists.
  if (error != 0) ::_exit(1);
  Serve({start.shared, kAgentChannel, kOomScore, launch_plan.capabilities});
}

}  // namespace dsec::spawn::stage

// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "os/fd_passing.h"
#include "os/process.h"
#include "os/syscalls.h"
#include "os/unique_fd.h"
#include "spawn/agent_abi.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

using os::UniqueFd;
using wire::Step;

// How long the processes of a failed slot may take to be gone. Killed they are in any case; one
// that the kernel holds longer shows to the caller as a cgroup directory that cannot be removed
// yet.
constexpr uint64_t kReapUsec = 5'000'000;

struct SlotFds {
  int listen, token, slot_dir, agent_dir, init_dir;
  int memory_dir = -1;
  int pids_dir = -1;
  int cpu_dir = -1;
  const int* v1_procs;
};

SlotFds NameFds(const wire::Slot& slot, const int* fds) {
  SlotFds named = {fds[0], fds[1], fds[2], fds[3], fds[4], -1, -1, -1, nullptr};
  const int* next = fds + wire::kSlotFixedFds;
  if (slot.has_memory != 0) named.memory_dir = *next++;
  if (slot.has_pids != 0) named.pids_dir = *next++;
  if (slot.has_cpu != 0) named.cpu_dir = *next++;
  named.v1_procs = next;
  return named;
}

// ---- The agent's stage: pid 1 of A until it executes the agent.

[[noreturn]] void FailStage(int sync, StepClock& clock, Step step, int error) {
  clock.Fail(step, error);
  os::SendPacketRaw(sync, clock.reply(), sizeof(wire::Reply), nullptr, 0, 0);
  ::_exit(1);
}

[[noreturn]] void RunAgentStage(const Shared& shared, const SlotFds& fds, int sync, int channel,
                                int channel_init, int launch_init) {
  wire::Reply reply;
  StepClock clock(&reply);
  ResetSignals();
  AwaitGo(sync);
  clock.Restart();
  int error = BecomeRootOfA();
  if (error == 0) error = CoverProc();
  if (error != 0) FailStage(sync, clock, Step::kAgentProc, error);
  clock.Done(Step::kAgentProc);
  error = ConfigureNetwork();
  if (error != 0) FailStage(sync, clock, Step::kNetwork, error);
  clock.Done(Step::kNetwork);

  int pidfd = -1;
  pid_t init = os::Clone3(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS,
                          &pidfd, fds.init_dir, SIGCHLD);
  if (init < 0) FailStage(sync, clock, Step::kCloneInit, -errno);
  if (init == 0) RunInit({&shared, launch_init, channel_init});
  clock.Done(Step::kCloneInit);
  // Only a process of A or B may write the map of B, and the ids in it are those of A.
  char map[32];
  std::snprintf(map, sizeof(map), "0 1 %u", wire::kIdCount);
  error = WriteIdMaps(init, map);
  if (error != 0) FailStage(sync, clock, Step::kMapInit, error);
  clock.Done(Step::kMapInit);
  if (os::SendPacketRaw(sync, &reply, sizeof(reply), &pidfd, 1, 0) != 0) ::_exit(1);

  AwaitGo(sync);
  // On success the descriptor of `sync` closes with the exec, which is what the spawner waits for.
  constexpr int kSync = 11;
  constexpr int kImage = 12;
  int src[13] = {shared.dev_null, shared.dev_null, shared.log, fds.listen, channel,
                 fds.slot_dir,    fds.token,       pidfd,      sync,       shared.agent_image};
  int dst[13] = {0,
                 1,
                 2,
                 abi::kListenFd,
                 abi::kInitFd,
                 abi::kSlotCgroupFd,
                 abi::kTokenFd,
                 abi::kInitPidFd,
                 kSync,
                 kImage};
  size_t count = 10;
  const int optional[][2] = {{fds.memory_dir, abi::kMemoryCgroupFd},
                             {fds.pids_dir, abi::kPidsCgroupFd},
                             {fds.cpu_dir, abi::kCpuCgroupFd}};
  for (const auto& [from, to] : optional) {
    if (from < 0) continue;
    src[count] = from;
    dst[count++] = to;
  }
  reply = {};
  error = PlaceFds(src, dst, count, false);
  if (error != 0) FailStage(sync, clock, Step::kExecAgent, error);
  for (const auto& [from, to] : optional) {
    if (from < 0) ::close(to);
  }
  if (::close_range(kImage + 1, ~0u, 0) != 0) FailStage(kSync, clock, Step::kExecAgent, -errno);
  ::fcntl(kSync, F_SETFD, FD_CLOEXEC);
  ::fcntl(kImage, F_SETFD, FD_CLOEXEC);
  error = LimitBoundingSet(abi::kAgentCapabilities);
  if (error == 0) {
    char name[] = "dsec-aether";
    char* argv[] = {name, nullptr};
    char* envp[] = {nullptr};
    ::execveat(kImage, "", argv, envp, AT_EMPTY_PATH);
    error = -errno;
  }
  FailStage(kSync, clock, Step::kExecAgent, error);
}

// ---- The spawner's side.
// ----------------------------------------------------------------------------------------

struct SlotInProgress {
  UniqueFd agent;   // pidfd
  UniqueFd sync;    // to the agent's stage
  UniqueFd launch;  // to init
  UniqueFd user_ns;
};

int Fork(const Shared& shared, const wire::Slot& slot, const SlotFds& fds, StepClock& clock,
         SlotInProgress& made) {
  int sync[2], launch[2], channel[2];
  UniqueFd sync_agent, launch_init, channel_agent, channel_init;
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sync) != 0)
    return clock.Fail(Step::kCloneAgent, -errno);
  made.sync.Reset(sync[0]);
  sync_agent.Reset(sync[1]);
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, launch) != 0) {
    return clock.Fail(Step::kCloneAgent, -errno);
  }
  made.launch.Reset(launch[0]);
  launch_init.Reset(launch[1]);
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channel) != 0) {
    return clock.Fail(Step::kCloneAgent, -errno);
  }
  channel_agent.Reset(channel[0]);
  channel_init.Reset(channel[1]);

  int pidfd = -1;
  pid_t agent = os::Clone3(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET, &pidfd,
                           fds.agent_dir, SIGCHLD);
  if (agent < 0) return clock.Fail(Step::kCloneAgent, -errno);
  if (agent == 0) {
    made.sync.Reset();
    made.launch.Reset();
    RunAgentStage(shared, fds, sync_agent.get(), channel_agent.get(), channel_init.get(),
                  launch_init.get());
  }
  made.agent.Reset(pidfd);
  clock.Done(Step::kCloneAgent);

  char map[64];
  std::snprintf(map, sizeof(map), "0 %u 1\n1 %u %u", slot.agent_uid, slot.id_base, wire::kIdCount);
  int error = WriteIdMaps(agent, map);
  if (error != 0) return clock.Fail(Step::kMapAgent, error);
  clock.Done(Step::kMapAgent);
  return 0;
}

// Runs the two stages to their end.
int Conduct(const wire::Slot& slot, const SlotFds& fds, uint64_t deadline, StepClock& clock,
            SlotInProgress& made) {
  wire::Reply stage;
  UniqueFd init;
  if (!SendGo(made.sync.get())) return clock.Fail(Step::kAgentProc, -EPIPE);
  int init_fd = -1;
  size_t count = 1;
  int error = AwaitReply(made.sync.get(), deadline, &stage, &init_fd, &count);
  if (count == 1) init.Reset(init_fd);
  if (error != 0) return clock.Fail(Step::kAgentProc, error);
  clock.Append(stage);
  if (stage.failed != Step::kNone) return clock.Fail(stage.failed, -stage.sys_errno);
  if (!init.valid()) return clock.Fail(Step::kCloneInit, -EBADMSG);

  pid_t pid = os::PidOfPidFd(init.get());
  if (pid <= 0) return clock.Fail(Step::kCgroups, pid < 0 ? pid : -ESRCH);
  int user_ns = OpenUserNamespace(init.get(), pid);
  if (user_ns < 0) return clock.Fail(Step::kMapInit, user_ns);
  made.user_ns.Reset(user_ns);
  char text[16];
  int length = std::snprintf(text, sizeof(text), "%d", pid);
  for (uint32_t i = 0; i < slot.v1_count; ++i) {
    if (::write(fds.v1_procs[i], text, static_cast<size_t>(length)) < 0)
      return clock.Fail(Step::kCgroups, -errno);
  }
  clock.Done(Step::kCgroups);

  UniqueFd dev;
  error = MapDevTemplate(made.user_ns.get(), &dev);
  if (error != 0) return clock.Fail(Step::kInitDev, error);
  int dev_fd = dev.get();
  if (os::SendPacketRaw(made.launch.get(), "g", 1, &dev_fd, 1, 0) != 0)
    return clock.Fail(Step::kInitProc, -EPIPE);
  count = 0;
  error = AwaitReply(made.launch.get(), deadline, &stage, nullptr, &count);
  if (error != 0) return clock.Fail(Step::kInitProc, error);
  clock.Append(stage);
  if (stage.failed != Step::kNone) return clock.Fail(stage.failed, -stage.sys_errno);

  if (!SendGo(made.sync.get())) return clock.Fail(Step::kExecAgent, -EPIPE);
  error = AwaitReply(made.sync.get(), deadline, &stage, nullptr, &count);
  if (error == 0) return clock.Fail(Step::kExecAgent, -stage.sys_errno);
  if (error != -EPIPE) return clock.Fail(Step::kExecAgent, error);
  // End of file: executed, or killed just before. The latter shows as a dead agent to whoever holds
  // the pidfd.
  clock.Done(Step::kExecAgent);
  return 0;
}

}  // namespace

int MakeSlot(const Shared& shared, const wire::Slot& slot, const int* fds, wire::Reply* reply,
             int out[wire::kSlotReplyFds]) {
  StepClock clock(reply);
  SlotFds named = NameFds(slot, fds);
  SlotInProgress made;
  uint64_t deadline = MonotonicUsec() + static_cast<uint64_t>(slot.timeout_ms) * 1000u;
  int error = Fork(shared, slot, named, clock, made);
  if (error == 0) error = Conduct(slot, named, deadline, clock, made);
  if (error != 0) {
    if (made.agent.valid()) {
      os::PidFdSendSignal(made.agent.get(), SIGKILL);
      WaitReadable(made.agent.get(), MonotonicUsec() + kReapUsec);
    }
    return error;
  }
  out[0] = made.agent.Release();
  out[1] = made.launch.Release();
  out[2] = made.user_ns.Release();
  return 0;
}

}  // namespace dsec::spawn::stage

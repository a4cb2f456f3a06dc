// SPDX-License-Identifier: Apache-2.0
#include "spawn/spawner.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "os/fd_passing.h"
#include "os/file.h"
#include "os/memfd.h"
#include "spawn/reply.h"

namespace dsec::spawn {
namespace {

using os::UniqueFd;
using runtime::Deadline;

constexpr uint64_t kMaxAgentBytes = 64ull << 20;
constexpr auto kStartTimeout = std::chrono::seconds(10);
// The spawner gives up on a slot by itself before the caller does, so that the answer names the
// step.
constexpr auto kReplyMargin = std::chrono::milliseconds(200);
constexpr auto kMaxSlotTime = std::chrono::seconds(60);

}  // namespace

Spawner::Spawner(SpawnerOptions options, UniqueFd agent_image, UniqueFd log, SeccompFilters filters)
    : options_(std::move(options)),
      agent_image_(std::move(agent_image)),
      log_(std::move(log)),
      filters_(std::move(filters)) {}

Spawner::~Spawner() { EndProcess(); }

Result<std::unique_ptr<Spawner>> Spawner::Start(const SpawnerOptions& options) {
  DSEC_TRY(auto agent, os::OpenAt(AT_FDCWD, options.agent_path.c_str(), O_RDONLY));
  DSEC_TRY(auto image, os::SealedCopy("dsec-aether", agent.get(), kMaxAgentBytes)
                           .Context("agent {}", options.agent_path));
  UniqueFd log(::fcntl(options.log_fd, F_DUPFD_CLOEXEC, 3));
  if (!log.valid()) return os::ErrnoError("spawn.start_failed", "keep the log descriptor");
  DSEC_TRY(auto filters, CompileSeccompFilters());
  std::unique_ptr<Spawner> spawner(
      new Spawner(options, std::move(image), std::move(log), std::move(filters)));
  DSEC_TRY_VOID(spawner->StartProcess(Deadline::After(kStartTimeout)));
  return spawner;
}

Result<void> Spawner::StartProcess(Deadline deadline) {
  DSEC_TRY(auto sockets, os::PacketPair());
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  // dup2 onto the same number would keep close-on-exec; the socket pair never is 3 in a daemon, but
  // nothing is taken for granted: glibc clears the flag in that case too (since 2.29).
  ::posix_spawn_file_actions_adddup2(&actions, sockets.second.get(), 3);
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  // A session of its own: an interrupt from the daemon's terminal is not for it.
  ::posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID);
  char name[] = "dsec-spawner";
  char* argv[] = {name, nullptr};
  char* envp[] = {nullptr};
  pid_t pid = 0;
  int error = ::posix_spawn(&pid, options_.spawner_path.c_str(), &actions, &attributes, argv, envp);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error != 0)
    return Error::FromErrno(error, "spawn.start_failed",
                            fmt::format("start {}", options_.spawner_path));
  // It is our child and not waited for: the number cannot have passed to another process.
  DSEC_TRY(process_, os::PidFd::Open(pid).Context("the spawner just started"));
  pid_ = pid;
  control_ = std::move(sockets.first);
  sockets.second.Reset();

  auto hand_over = [&]() -> Result<void> {
    wire::Start start;
    std::vector<uint8_t> programs = filters_.allow;
    programs.insert(programs.end(), filters_.arguments.begin(), filters_.arguments.end());
    programs.insert(programs.end(), filters_.code.begin(), filters_.code.end());
    programs.insert(programs.end(), filters_.zygote.begin(), filters_.zygote.end());
    start.allow_bytes = static_cast<uint32_t>(filters_.allow.size());
    start.arguments_bytes = static_cast<uint32_t>(filters_.arguments.size());
    start.code_bytes = static_cast<uint32_t>(filters_.code.size());
    start.zygote_bytes = static_cast<uint32_t>(filters_.zygote.size());
    DSEC_TRY(auto file, os::SealedMemfd("dsec-filters", programs));
    const int fds[] = {agent_image_.get(), file.get(), log_.get()};
    DSEC_TRY_VOID(os::SendPacket(control_.get(), BytesOf(start), fds));
    DSEC_TRY(auto answer, AwaitReply(control_.get(), deadline, "the start of the spawner"));
    return CheckReply(answer.reply, "spawn.start_failed", "the start of the spawner");
  };
  auto started = hand_over();
  if (!started.ok()) EndProcess();
  return started;
}

void Spawner::EndProcess() {
  control_.Reset();
  pid_ = 0;
  if (!process_.valid()) return;
  auto killed = process_.Signal(SIGKILL);
  if (killed.ok()) {
    siginfo_t info;
    while (::waitid(P_PIDFD, static_cast<id_t>(process_.fd()), &info, WEXITED) < 0 &&
           errno == EINTR) {
    }
  }
  process_ = os::PidFd();
}

Result<SlotProcess> Spawner::MakeSlot(const SlotPlan& plan, Deadline deadline) {
  DSEC_TRY(auto made, Make(plan, deadline));
  SlotProcess slot;
  slot.agent = std::move(made.first);
  slot.launch_socket = std::move(made.socket);
  slot.user_ns = std::move(made.user_ns);
  slot.agent_pid = slot.agent.pid();
  slot.agent_start_time = slot.agent.start_time();
  slot.steps = std::move(made.steps);
  return slot;
}

Result<WorkerProcess> Spawner::MakeWorker(const WorkerPlan& plan, Deadline deadline) {
  DSEC_TRY(auto made, Make(plan, deadline));
  return WorkerProcess{std::move(made.first), std::move(made.socket), std::move(made.user_ns),
                       std::move(made.steps)};
}

template <typename Plan>
Result<Spawner::Made> Spawner::Make(const Plan& plan, Deadline deadline) {
  DSEC_TRY_VOID(plan.Validate());
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!lock.try_lock_until(
          std::min(deadline.at(), std::chrono::steady_clock::now() + kMaxSlotTime))) {
    return Late("waiting for the spawner");
  }
  if (!control_.valid())
    DSEC_TRY_VOID(StartProcess(deadline.Sooner(Deadline::After(kStartTimeout))));
  auto made = Ask(plan, deadline.Sooner(Deadline::After(kMaxSlotTime)));
  if (made.ok()) return made;
  // After these the answers no longer match the questions. A slot half made ends with the process.
  const Error& error = made.error();
  if (PeerGone(error) || error.reason() == "spawn.timeout" || error.reason() == "spawn.bad_reply")
    EndProcess();
  if (PeerGone(error)) {
    return Error(Code::kUnavailable, "spawn.spawner_died", "the spawner ended while it made a slot")
        .WithErrno(EPIPE);
  }
  return made;
}

template <typename Plan>
Result<Spawner::Made> Spawner::Ask(const Plan& plan, Deadline deadline) {
  auto allowed =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline.Remaining()) - kReplyMargin;
  std::vector<int> fds;
  const auto request =
      plan.Encode(fds, static_cast<uint32_t>(std::max<int64_t>(allowed.count(), 1)));
  DSEC_TRY_VOID(os::SendPacket(control_.get(), BytesOf(request), fds));
  DSEC_TRY(auto answer, AwaitReply(control_.get(), deadline, "making a slot"));
  DSEC_TRY_VOID(CheckReply(answer.reply, "spawn.slot_failed", "making a slot"));
  if (answer.fds.size() != wire::kSlotReplyFds) {
    return Error(Code::kInternal, "spawn.bad_reply",
                 fmt::format("{} descriptors", answer.fds.size()));
  }
  Made made;
  made.socket = std::move(answer.fds[1]);
  made.user_ns = std::move(answer.fds[2]);
  auto first = os::PidFd::Adopt(std::move(answer.fds[0]));
  if (!first.ok()) {
    return Error(Code::kInternal, "spawn.slot_failed",
                 "its first process ended as soon as it was started")
        .WithErrno(ESRCH);
  }
  made.first = std::move(first).value();
  made.steps = StepsOf(answer.reply);
  return made;
}

Result<LaunchReport> Launch(int launch_socket, const LaunchPlan& plan, std::span<const int> fds,
                            Deadline deadline) {
  DSEC_TRY_VOID(plan.Validate());
  if (fds.size() != 1 + plan.views.size()) {
    return Error(Code::kInvalidArgument, "spawn.bad_plan",
                 fmt::format("{} mounts for a root and {} views", fds.size(), plan.views.size()));
  }
  auto gone = [](const Error& error) -> Error {
    if (!PeerGone(error)) return error;
    return Error(Code::kUnavailable, "spawn.slot_gone", "the slot's init has ended")
        .WithErrno(EPIPE);
  };
  auto wired = std::make_unique<wire::Launch>(plan.Encode());
  auto sent = os::SendPacket(launch_socket, BytesOf(*wired), fds);
  if (!sent.ok()) return gone(sent.error());
  auto answer = AwaitReply(launch_socket, deadline, "the launch");
  if (!answer.ok()) return gone(answer.error());
  DSEC_TRY_VOID(CheckReply(answer->reply, "spawn.launch_failed", "the launch"));
  return LaunchReport{StepsOf(answer->reply)};
}

}  // namespace dsec::spawn

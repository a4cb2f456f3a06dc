// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/warm.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>

#include "os/fd_passing.h"
#include "os/file.h"
#include "os/memfd.h"
#include "sandbox/backends/fncall/warm_prelude.h"
#include "sandbox/backends/fncall/worker_host.h"
#include "spawn/agent_abi.h"
#include "spawn/seccomp_filter.h"

namespace dsec::sandbox {
namespace {

namespace abi = spawn::abi;

constexpr size_t kMaxSaid = 4096;
// As the programs of a cell stand to its init (stage/serve.cc).
constexpr std::string_view kForkOomScore = "1000";
constexpr std::string_view kZygoteOomScore = "0";

Error Failed(std::string why) {
  return Error(Code::kFailedPrecondition, "fn.warm_failed", std::move(why));
}

Error Broken(std::string why) {
  return Error(Code::kUnavailable, "fn.worker_broken", std::move(why));
}

void AppendString(std::string& text, std::string_view word) {
  text.append(word);
  text.push_back('\0');
}

// Waits until `fd` has something to say or its other end is closed.
Result<void> AwaitWord(int fd, int cancel, runtime::Deadline deadline) {
  while (true) {
    pollfd items[] = {{fd, POLLIN, 0}, {cancel, POLLIN, 0}};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.Remaining()).count();
    const int ready = ::poll(items, 2, static_cast<int>(std::clamp<int64_t>(left, 0, 60'000)));
    if (ready < 0 && errno != EINTR) return os::ErrnoError("fn.poll", "wait for an interpreter");
    if (items[1].revents != 0)
      return Error(Code::kCancelled, "task.cancelled", "the worker is ended");
    if (items[0].revents != 0) return Ok();
    if (deadline.Expired()) return Failed("the interpreter was not ready in time");
  }
}

// What it says, at once and as a whole; empty at the end. `*from` is the process that has said it,
// or another one of its pid namespace, if it has CAP_SYS_ADMIN there and says so.
Result<std::string> Hear(int fd, pid_t* from) {
  std::string said(kMaxSaid, '\0');
  iovec part = {said.data(), said.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred))];
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0 && errno != ECONNRESET) return os::ErrnoError("fn.warm", "hear an interpreter");
  said.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
  for (cmsghdr* item = CMSG_FIRSTHDR(&message); item != nullptr && from != nullptr;
       item = CMSG_NXTHDR(&message, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_CREDENTIALS) continue;
    ucred sender;
    std::memcpy(&sender, CMSG_DATA(item), sizeof(sender));
    *from = sender.pid;
  }
  return said;
}

struct Link {
  os::UniqueFd here, there;
};
Result<Link> MakeLink(int type) {
  int fds[2];
  if (::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, fds) != 0)
    return os::ErrnoError("fn.warm", "make a socket");
  Link link{os::UniqueFd(fds[0]), os::UniqueFd(fds[1])};
  constexpr int kOn = 1;
  // Room for all arguments at once: nobody waits for who does not read.
  constexpr int kRoom = 4 << 20;
  if (::setsockopt(fds[0], SOL_SOCKET, SO_PASSCRED, &kOn, sizeof(kOn)) != 0 ||
      ::setsockopt(fds[0], SOL_SOCKET, SO_SNDBUFFORCE, &kRoom, sizeof(kRoom)) != 0)
    return os::ErrnoError("fn.warm", "set up a socket");
  return link;
}

// Why an interpreter that has said nothing has ended.
Error Silent(int status, std::string_view name) {
  abi::ExecFailure failure;
  if (::read(status, &failure, sizeof(failure)) != sizeof(failure))
    return Failed("the interpreter ended before it was ready");
  if (failure.step == abi::ExecStep::kExec) {
    return Error::FromErrno(failure.sys_errno, "fn.warm_failed", fmt::format("execute {}", name));
  }
  return Broken(fmt::format("starting an interpreter failed at step {}: {}",
                            abi::ExecStepName(failure.step), std::strerror(failure.sys_errno)));
}

// The call goes before the interpreter that it is a fork of, and that one before anything of the
// platform; neither can lower it.
Result<void> SetOomScore(const os::PidFd& process, std::string_view score) {
  return os::WriteExisting(AT_FDCWD, fmt::format("/proc/{}/oom_score_adj", process.pid()).c_str(),
                           score)
      .Context("set the OOM score of an interpreter");
}

// A zygote that served before and does not now.
Error NoFork(const Error& error) {
  if (error.reason() != "fn.warm_failed") return error;
  return Broken(fmt::format("no fork of the warm interpreter: {}", error.message()));
}

}  // namespace

Result<void> CheckWarm(const v1::FnWarm& warm) {
  if (warm.kind().empty()) return Ok();
  if (warm.kind() != "python") {
    return Error(Code::kInvalidArgument, "fn.bad_warm",
                 fmt::format("warm.kind '{}' is not python", warm.kind()))
        .WithField("warm.kind");
  }
  if (warm.argv().empty()) {
    return Error(Code::kInvalidArgument, "fn.bad_warm", "warm.argv names no interpreter")
        .WithField("warm.argv");
  }
  return Ok();
}

Result<Zygote> StartZygote(int control, int root, int shm, const v1::FnWarm& warm, int cancel,
                           runtime::Deadline deadline) {
  Zygote made;
  DSEC_TRY(made.fork_filter, spawn::CompileForkFilter());
  DSEC_TRY(auto link, MakeLink(SOCK_SEQPACKET));
  made.link = std::move(link.here);
  const std::string_view text = WarmPrelude();
  DSEC_TRY(const auto memory,
           os::SealedMemfd("warm", {reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
  // An offset of its own for whoever reads it.
  DSEC_TRY(const auto script,
           os::OpenAt(AT_FDCWD, fmt::format("/proc/self/fd/{}", memory.get()).c_str(), O_RDONLY));
  std::vector<std::string> argv(warm.argv().begin(), warm.argv().end());
  argv.emplace_back("/proc/self/fd/3");
  argv.insert(argv.end(), warm.imports().begin(), warm.imports().end());
  // A in whose ids it is numbers those of B from 1 on.
  DSEC_TRY(const auto payload, MakePayload(argv, {{"PATH", "/usr/local/bin:/usr/bin:/bin"}},
                                           OpenRlimits(), kCallUser + 1));
  // Pipes, as each call has, so that its streams are set up for those.
  DSEC_TRY(const auto pipes, MakePipes());
  const int exec[] = {payload.get(),          pipes.theirs.status.get(), pipes.theirs.in.get(),
                      pipes.theirs.out.get(), pipes.theirs.err.get(),    script.get(),
                      link.there.get()};
  DSEC_TRY(made.process, spawn::MakeZygote(control, root, shm, exec, deadline));
  DSEC_TRY_VOID(SetOomScore(made.process, kZygoteOomScore));
  link.there.Reset();
  DSEC_TRY_VOID(AwaitWord(made.link.get(), cancel, deadline));
  DSEC_TRY(const auto said, Hear(made.link.get(), nullptr));
  if (said.empty()) return Silent(pipes.ours.status.get(), argv.front());
  if (said != "R") return Failed(said.substr(1));
  return made;
}

Result<WarmProgram> ForkZygote(Zygote& zygote, const ForkPlace& place, int cancel,
                               runtime::Deadline deadline) {
  ++zygote.forks;
  WarmProgram made;
  DSEC_TRY(auto link, MakeLink(SOCK_STREAM));
  made.link = std::move(link.here);
  DSEC_TRY(auto pipes, MakePipes());
  std::vector<int> fds;
  for (const os::UniqueFd& ns : place.cell->namespaces) fds.push_back(ns.get());
  fds.insert(fds.end(), {place.user_ns, pipes.theirs.in.get(), pipes.theirs.out.get(),
                         pipes.theirs.err.get(), link.there.get()});
  if (!os::SendPacket(zygote.link.get(), zygote.fork_filter, fds).ok())
    return Broken("the warm interpreter has ended");
  struct stat link_there;
  if (::fstat(link.there.get(), &link_there) != 0) return os::ErrnoError("fn.warm", "stat a link");
  link.there.Reset();
  pipes.theirs = Program();
  if (auto waited = AwaitWord(zygote.link.get(), cancel, deadline); !waited.ok())
    return NoFork(waited.error());
  DSEC_TRY(auto said, Hear(zygote.link.get(), nullptr));
  if (said.empty()) return Broken("the warm interpreter has ended");
  const bool forked = said == "F";
  // What the fork itself has to say is the better reason.
  pid_t pid = 0;
  if (forked) {
    auto waited = AwaitWord(made.link.get(), cancel, deadline);
    if (!waited.ok()) return NoFork(waited.error());
  }
  auto heard = Hear(made.link.get(), &pid);
  if (heard.ok() && heard->starts_with("E")) return NoFork(Failed(heard->substr(1)));
  if (!forked) return NoFork(Failed(said.substr(1)));
  if (!heard.ok() || *heard != "R") return Broken("a fork ended before it was in its cell");
  auto process = os::PidFd::Open(pid);
  if (!process.ok()) return Broken("a fork ended as soon as it was in its cell");
  made.process = std::move(*process);
  // First: until then its number is what it says.
  DSEC_TRY_VOID(CheckFork(made.process, pipes.ours, link_there, place, &made.pid));
  DSEC_TRY_VOID(SetOomScore(made.process, kForkOomScore));
  made.program = std::move(pipes.ours);
  made.program.status.Reset();
  return made;
}

Result<void> HandOver(const WarmProgram& warm, const FnRun& run) {
  DSEC_TRY(const bool ended, warm.process.WaitExit(Clock::System().Mono()));
  if (ended) return Broken("the interpreter of a call ended before it");
  for (const Rlimit& limit : RlimitsOf(run.limits)) {
    const rlimit value = {limit.soft, limit.hard};
    if (::prlimit(warm.process.pid(), static_cast<__rlimit_resource>(limit.resource), &value,
                  nullptr) != 0 &&
        errno != ESRCH) {
      return os::ErrnoError("fn.limits", "set the limits of an interpreter");
    }
  }
  std::string words;
  AppendString(words, run.code_path);
  // What follows the code on the command line are its arguments.
  auto first = std::ranges::find(run.argv, run.code_path);
  if (first != run.argv.end()) ++first;
  AppendString(words, fmt::format("{}", run.argv.end() - first));
  for (; first != run.argv.end(); ++first) AppendString(words, *first);
  for (const auto& [key, value] : run.env) AppendString(words, key + "=" + value);
  std::string message = fmt::format("{}\n", words.size()) + words;
  std::string_view left = message;
  while (!left.empty()) {
    const ssize_t n =
        ::send(warm.link.get(), left.data(), left.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EPIPE || errno == ECONNRESET)) return Ok();
    if (n < 0) return os::ErrnoError("fn.warm", "hand a call to an interpreter");
    left.remove_prefix(static_cast<size_t>(n));
  }
  return Ok();
}

}  // namespace dsec::sandbox

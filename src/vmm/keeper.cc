// SPDX-License-Identifier: Apache-2.0
#include "vmm/keeper.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>

#include "os/file.h"
#include "os/unique_fd.h"

namespace dsec::vmm {
namespace {

constexpr int kFirstKeeperFd = 3;
constexpr int kFarFd = 256;  // above all numbers that the keeper is given
constexpr size_t kMaxWhy = 200;
constexpr std::string_view kEndMark = "] end: ";
constexpr std::string_view kOwnMark = "dsec-guest: [";
constexpr std::string_view kPanicMark = "Kernel panic - not syncing";

}  // namespace

Result<os::PidFd> StartKeeper(const KeeperPlan& plan, const Machine& machine) {
  DSEC_TRY_VOID(machine.Validate());
  QemuCommand command = MakeQemuCommand(machine);
  std::vector<int> own = {plan.console_fd, plan.exit_fd};
  own.insert(own.end(), plan.procs_fds.begin(), plan.procs_fds.end());
  if (own.size() > static_cast<size_t>(kFirstQemuFd - kFirstKeeperFd)) {
    return Error(Code::kInternal, "vm.start_failed", "too many descriptors for the keeper");
  }
  // Copies beyond all targets, so that none is overwritten before its turn.
  std::vector<os::UniqueFd> copies;
  std::vector<std::pair<int, int>> moves;
  auto move = [&](int from, int to) -> Result<void> {
    os::UniqueFd copy(::fcntl(from, F_DUPFD_CLOEXEC, kFarFd));
    if (!copy.valid()) return os::ErrnoError("vm.start_failed", "copy a descriptor");
    moves.emplace_back(copy.get(), to);
    copies.push_back(std::move(copy));
    return Ok();
  };
  for (size_t i = 0; i < own.size(); ++i)
    DSEC_TRY_VOID(move(own[i], kFirstKeeperFd + static_cast<int>(i)));
  for (size_t i = 0; i < command.fds.size(); ++i)
    DSEC_TRY_VOID(move(command.fds[i], kFirstQemuFd + static_cast<int>(i)));

  std::vector<std::string> arguments = {
      "dsec-vmkeeper",
      fmt::format("{}", plan.uid),
      fmt::format("{}", plan.kvm_gid),
      fmt::format("{}", plan.procs_fds.size()),
      fmt::format("{}", command.fds.size()),
      plan.qemu,
  };
  std::ranges::move(command.arguments, std::back_inserter(arguments));
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  char* envp[] = {nullptr};

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  for (const auto& [from, to] : moves) ::posix_spawn_file_actions_adddup2(&actions, from, to);
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  ::posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID);
  pid_t pid = 0;
  const int error =
      ::posix_spawn(&pid, plan.program.c_str(), &actions, &attributes, argv.data(), envp);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error != 0)
    return Error::FromErrno(error, "vm.start_failed", fmt::format("start {}", plan.program));
  // It is our child and not waited for: the number cannot have passed to another process.
  return os::PidFd::Open(pid);
}

void ReapKeeper(const os::PidFd& keeper) {
  siginfo_t info;
  while (::waitid(P_PIDFD, static_cast<id_t>(keeper.fd()), &info, WEXITED | WNOHANG) < 0 &&
         errno == EINTR) {
  }
}

VmExit ParseExit(std::string_view text) {
  VmExit end;
  for (const auto& [word, signaled] : {std::pair(std::string_view("exited "), false),
                                       std::pair(std::string_view("signal "), true)}) {
    if (!text.starts_with(word) || !text.ends_with('\n')) continue;
    const std::string_view number = text.substr(word.size(), text.size() - word.size() - 1);
    const auto [rest, failure] =
        std::from_chars(number.data(), number.data() + number.size(), end.status);
    end.known = failure == std::errc() && rest == number.data() + number.size();
    end.signaled = signaled;
  }
  return end;
}

GuestEnd ParseConsole(std::string_view console) {
  GuestEnd end;
  end.panicked = console.find(kPanicMark) != std::string_view::npos;
  const size_t mark = console.rfind(kEndMark);
  if (mark == std::string_view::npos) return end;
  const size_t line = console.rfind('\n', mark);
  const size_t begin = line == std::string_view::npos ? 0 : line + 1;
  if (!console.substr(begin).starts_with(kOwnMark)) return end;
  end.said = true;
  std::string_view why = console.substr(mark + kEndMark.size());
  why = why.substr(0, std::min(why.find_first_of("\r\n"), kMaxWhy));
  for (const char c : why) end.why += c >= ' ' && c <= '~' ? c : '?';
  return end;
}

}  // namespace dsec::vmm

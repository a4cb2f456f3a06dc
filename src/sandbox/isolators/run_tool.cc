// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/run_tool.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "os/file.h"
#include "os/process.h"
#include "os/unique_fd.h"

namespace dsec::sandbox {
namespace {

constexpr const char* kDirectories[] = {"/usr/sbin/", "/sbin/", "/usr/bin/", "/bin/"};
constexpr off_t kMaxMessage = 400;

std::string Tail(int fd) {
  const off_t end = ::lseek(fd, 0, SEEK_END);
  std::string text(static_cast<size_t>(kMaxMessage), '\0');
  const ssize_t size =
      ::pread(fd, text.data(), text.size(), end > kMaxMessage ? end - kMaxMessage : 0);
  text.resize(size > 0 ? static_cast<size_t>(size) : 0);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

}  // namespace

Result<void> RunTool(const std::vector<std::string>& argv, MonoTime deadline) {
  std::string path;
  for (const char* directory : kDirectories) {
    path = directory + argv[0];
    if (::access(path.c_str(), X_OK) == 0) break;
    path.clear();
  }
  if (path.empty()) {
    return Error(Code::kFailedPrecondition, "tool.missing",
                 fmt::format("{} is not installed", argv[0]));
  }
  os::UniqueFd log(::memfd_create("tool-stderr", MFD_CLOEXEC));
  if (!log.valid()) return os::ErrnoError("tool.start", "memfd");
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  char language[] = "LC_ALL=C";
  char* environment[] = {language, nullptr};
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, log.get(), 2);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  pid_t pid = 0;
  const int error =
      ::posix_spawn(&pid, path.c_str(), &actions, &attributes, arguments.data(), environment);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return Error::FromErrno(error, "tool.start", path);

  bool ended = false;
  if (const auto process = os::PidFd::Open(pid); process.ok()) {
    const auto waited = process->WaitExit(deadline);
    ended = waited.ok() && *waited;
  }
  if (!ended) ::kill(pid, SIGKILL);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return os::ErrnoError("tool.wait", path);
  }
  if (!ended) {
    return Error(Code::kDeadlineExceeded, "tool.timeout",
                 fmt::format("{} did not end in time", path));
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    return Error(Code::kInternal, "tool.failed",
                 fmt::format("{} failed (wait status {}): {}", path, status, Tail(log.get())));
  }
  return Ok();
}

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#include "os/process.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "os/file.h"
#include "os/syscalls.h"

namespace dsec::os {
namespace {

template <typename T>
bool TakeNumber(std::string_view& text, T& out) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return text.empty() || text.front() == ' ' || text.front() == '\n';
}

Error BadStat() {
  return Error(Code::kInternal, "os.proc_stat", "unexpected form of /proc/<pid>/stat");
}

}  // namespace

Result<ProcStat> ParseProcStat(std::string_view text) {
  ProcStat stat;
  std::string_view rest = text;
  if (!TakeNumber(rest, stat.pid) || !rest.starts_with(" (")) return BadStat();
  size_t close = rest.rfind(')');
  if (close == std::string_view::npos || close + 3 >= rest.size()) return BadStat();
  stat.comm = rest.substr(2, close - 2);
  stat.state = rest[close + 2];
  rest.remove_prefix(close + 3);
  if (!TakeNumber(rest, stat.parent)) return BadStat();
  // Fields 5 to 24 of proc(5), signed where they can be negative.
  for (int field = 5; field <= 24; ++field) {
    int64_t value = 0;
    uint64_t large = 0;
    bool is_large = field == 22 || field == 23;
    if (is_large ? !TakeNumber(rest, large) : !TakeNumber(rest, value)) return BadStat();
    if (field == 14) stat.user_ticks = static_cast<uint64_t>(value);
    if (field == 15) stat.system_ticks = static_cast<uint64_t>(value);
    if (field == 20) stat.threads = static_cast<uint64_t>(value);
    if (field == 22) stat.start_time = large;
    if (field == 24) stat.rss_pages = static_cast<uint64_t>(value);
  }
  return stat;
}

Result<ProcStat> ReadProcStat(pid_t pid) {
  char path[40];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  auto text = ReadFile(AT_FDCWD, path, 4096);
  if (!text.ok()) {
    // ESRCH: it ended between open and read.
    if (text.error().sys_errno() == ENOENT || text.error().sys_errno() == ESRCH) {
      return Error(Code::kNotFound, "os.no_process", fmt::format("no process {}", pid));
    }
    return std::move(text).error();
  }
  return ParseProcStat(*text);
}

Result<std::string> ReadBootId() {
  DSEC_TRY(auto text, ReadFile(AT_FDCWD, "/proc/sys/kernel/random/boot_id", 64));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

Result<PidFd> PidFd::Adopt(UniqueFd fd) {
  pid_t pid = PidOfPidFd(fd.get());
  if (pid < 0) return Error::FromErrno(-pid, "os.pidfd", "read the pid of a pidfd");
  if (pid == 0) return Error(Code::kNotFound, "os.no_process", "the process of a pidfd has ended");
  DSEC_TRY(auto stat, ReadProcStat(pid));
  return PidFd(std::move(fd), pid, stat.start_time);
}

Result<PidFd> PidFd::Open(pid_t pid) {
  UniqueFd fd(PidFdOpen(pid, 0));
  if (!fd.valid()) {
    if (errno == ESRCH)
      return Error(Code::kNotFound, "os.no_process", fmt::format("no process {}", pid));
    return ErrnoError("os.pidfd", fmt::format("open a pidfd of {}", pid));
  }
  DSEC_TRY(auto stat, ReadProcStat(pid));
  return PidFd(std::move(fd), pid, stat.start_time);
}

Result<PidFd> PidFd::Verify(pid_t pid, uint64_t start_time) {
  DSEC_TRY(auto found, Open(pid));
  // The pidfd was taken first: if the number had been reused before it, the start time differs; if
  // the process ended after it, the descriptor still names the right one.
  if (found.start_time() != start_time) {
    return Error(Code::kNotFound, "os.no_process",
                 fmt::format("pid {} is another process now", pid));
  }
  return found;
}

Result<void> PidFd::Signal(int signal) const {
  if (PidFdSendSignal(fd_.get(), signal) != 0 && errno != ESRCH) {
    return ErrnoError("os.kill", fmt::format("send signal {} to {}", signal, pid_));
  }
  return Ok();
}

Result<bool> PidFd::WaitExit(MonoTime deadline) const { return WaitReadable(fd_.get(), deadline); }

pid_t PidOfPidFd(int pidfd) {
  char path[48];
  std::snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", pidfd);
  UniqueFd info(::open(path, O_RDONLY | O_CLOEXEC));
  if (!info.valid()) return -errno;
  char text[512];
  ssize_t n = ::read(info.get(), text, sizeof(text) - 1);
  if (n < 0) return -errno;
  text[n] = '\0';
  const char* line = std::strstr(text, "\nPid:");
  if (line == nullptr) return -EINVAL;
  long pid = std::strtol(line + 5, nullptr, 10);
  return pid > 0 ? static_cast<pid_t>(pid) : 0;  // -1: ended
}

}  // namespace dsec::os

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::os {

// Fields of /proc/<pid>/stat, see proc(5). Times in clock ticks.
struct ProcStat {
  pid_t pid = 0;
  std::string comm;
  char state = 0;
  pid_t parent = 0;
  uint64_t user_ticks = 0;
  uint64_t system_ticks = 0;
  uint64_t threads = 0;
  uint64_t start_time = 0;  // since boot; with the boot id it names a process for ever
  uint64_t rss_pages = 0;
};
// `comm` may hold any byte, spaces and parentheses included.
Result<ProcStat> ParseProcStat(std::string_view text);
// kNotFound when there is no such process.
Result<ProcStat> ReadProcStat(pid_t pid);
Result<std::string> ReadBootId();

// A process, held by descriptor so that its number cannot come to mean another. Movable, closes on
// destruction, never kills by itself.
class PidFd {
 public:
  PidFd() = default;
  // Takes over a pidfd of a live process; finds pid and start time. The process may be a zombie,
  // not gone.
  static Result<PidFd> Adopt(UniqueFd fd);
  static Result<PidFd> Open(pid_t pid);
  // kNotFound when the process is gone or the number belongs to another process by now.
  static Result<PidFd> Verify(pid_t pid, uint64_t start_time);

  int fd() const { return fd_.get(); }
  bool valid() const { return fd_.valid(); }
  pid_t pid() const { return pid_; }
  uint64_t start_time() const { return start_time_; }
  // A process that has ended already is success.
  Result<void> Signal(int signal) const;
  // True once the process has ended; waits until then or the deadline.
  Result<bool> WaitExit(MonoTime deadline) const;

 private:
  PidFd(UniqueFd fd, pid_t pid, uint64_t start_time)
      : fd_(std::move(fd)), pid_(pid), start_time_(start_time) {}
  UniqueFd fd_;
  pid_t pid_ = 0;
  uint64_t start_time_ = 0;
};

// The pid that a pidfd names in the caller's pid namespace, from /proc/self/fdinfo. 0 when it has
// ended or is not visible here; -errno on failure. No allocation.
pid_t PidOfPidFd(int pidfd);

}  // namespace dsec::os

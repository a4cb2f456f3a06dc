// SPDX-License-Identifier: Apache-2.0
#pragma once

// System calls without a libc wrapper, as thin inline functions: result or -1 with errno. No
// allocation; safe between clone and exec.

#include <linux/openat2.h>
#include <linux/sched.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdint>

namespace dsec::os {

// clone3(2) in fork style (no shared memory, no stack of its own). Returns 0 in the child. Only for
// single-threaded processes. `pidfd` may be null; `cgroup_fd` < 0 means the parent's cgroup
// (Linux 5.7 for CLONE_INTO_CGROUP).
inline pid_t Clone3(uint64_t flags, int* pidfd, int cgroup_fd, int exit_signal) {
  clone_args args = {};
  args.flags = flags;
  args.exit_signal = static_cast<uint64_t>(exit_signal);
  if (pidfd != nullptr) {
    args.flags |= CLONE_PIDFD;
    args.pidfd = reinterpret_cast<uint64_t>(pidfd);
  }
  if (cgroup_fd >= 0) {
    args.flags |= CLONE_INTO_CGROUP;
    args.cgroup = static_cast<uint64_t>(cgroup_fd);
  }
  return static_cast<pid_t>(::syscall(SYS_clone3, &args, sizeof(args)));
}

inline int OpenAt2(int dirfd, const char* path, uint64_t flags, uint64_t mode, uint64_t resolve) {
  open_how how = {};
  how.flags = flags;
  how.mode = mode;
  how.resolve = resolve;
  return static_cast<int>(::syscall(SYS_openat2, dirfd, path, &how, sizeof(how)));
}

inline int PidFdOpen(pid_t pid, unsigned flags) {
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, flags));
}

inline int PidFdSendSignal(int pidfd, int signal) {
  return static_cast<int>(::syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0));
}

inline int PivotRoot(const char* new_root, const char* put_old) {
  return static_cast<int>(::syscall(SYS_pivot_root, new_root, put_old));
}

// From linux/pidfd.h of Linux 6.11: a descriptor of the user namespace that the process of a pidfd
// is in.
inline constexpr unsigned long kPidFdGetUserNamespace = 0xFF09;

}  // namespace dsec::os

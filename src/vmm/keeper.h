// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "os/process.h"
#include "vmm/machine.h"

namespace dsec::vmm {

// What dsec-vmkeeper (apps/dsec_vmkeeper) is started with. It joins the cgroups, leaves the host's
// network, IPC and host name, becomes `uid` for good and starts QEMU with that uid, in a pid
// namespace of its own and on a root that holds /usr, /opt, libraries and three devices, read-only.
// It keeps the last of what is written to the console and, when QEMU has ended, writes how. It
// lives on without the daemon, and QEMU does not without it.
struct KeeperPlan {
  std::string program;         // dsec-vmkeeper
  std::string qemu;            // path of QEMU
  uint32_t uid = 0;            // and gid
  uint32_t kvm_gid = 0;        // supplementary group that may open /dev/kvm; 0: none
  int console_fd = -1;         // file, read and written
  int exit_fd = -1;            // file, written once
  std::vector<int> procs_fds;  // cgroup.procs to join, open for writing
};
// Keeps as much of the console.
inline constexpr size_t kConsoleBytes = 64 << 10;

// Starts both. posix_spawn: may be called with threads running. The caller has the pidfd and is
// the parent: ReapKeeper once it has ended. kUnavailable "vm.start_failed".
Result<os::PidFd> StartKeeper(const KeeperPlan& plan, const Machine& machine);
// Takes the exit status of a keeper that has ended, if it is a child of this process.
void ReapKeeper(const os::PidFd& keeper);

// What the keeper has written.
struct VmExit {
  bool known = false;  // false: it did not come to write anything
  bool signaled = false;
  int status = 0;  // exit code or signal
};
VmExit ParseExit(std::string_view text);
// Why the machine ended, out of what its console says last.
struct GuestEnd {
  bool said = false;  // pid 1 has said why, and powered off
  std::string why;    // what it said: printable, bounded
  bool panicked = false;
};
GuestEnd ParseConsole(std::string_view console);

}  // namespace dsec::vmm

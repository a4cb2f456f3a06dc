// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/units.h"
#include "spawn/rights.h"
#include "spawn/wire.h"

namespace dsec::spawn {

// Plans are values: made, checked and compared without root. Validate() names the field, the value
// and the rule.

// What a slot is made of. Descriptors are borrowed until MakeSlot returns. All cgroup directories
// exist; the v2 slot directory, its cgroup.procs and that of code/init belong to agent_uid,
// code/cgroup.procs to id_base.
struct SlotPlan {
  uint32_t agent_uid = 0;  // host uid and gid of the agent, outside of every id range
  uint32_t id_base = 0;    // host id of the sandbox's root, the first of wire::kIdCount
  int listen_fd = -1;      // AF_UNIX socket, listening
  int token_fd = -1;       // sealed memfd of abi::kTokenBytes
  int slot_dir_fd = -1;    // v2 directories
  int agent_dir_fd = -1;
  int init_dir_fd = -1;
  int memory_dir_fd = -1;  // v1 memory directory of the code, -1 on v2
  int pids_dir_fd = -1;    // v1 pids directory of the code, -1 on v2
  int cpu_dir_fd = -1;     // v1 cpu directory of the code, -1 on v2
  std::vector<int>
      v1_procs_fds;  // cgroup.procs of the code's group in each v1 hierarchy, open for writing

  Result<void> Validate() const;
  // Requires Validate(). `fds` receives them in the order of the wire.
  wire::Slot Encode(std::vector<int>& fds, uint32_t timeout_ms) const;
};

// "/sys" or a plain path below "/proc", where a view may be put.
Result<void> CheckViewTarget(const std::string& target);

// What a worker of FnCall is made of; as SlotPlan.
struct WorkerPlan {
  uint32_t agent_uid = 0;
  uint32_t id_base = 0;
  int slot_dir_fd = -1;
  int agent_dir_fd = -1;
  int init_dir_fd = -1;
  std::vector<int> v1_procs_fds;

  Result<void> Validate() const;
  wire::Worker Encode(std::vector<int>& fds, uint32_t timeout_ms) const;
};

// capabilities(7): CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP,
// NET_BIND_SERVICE, SYS_CHROOT, SETFCAP. Not MKNOD and AUDIT_WRITE, which a user namespace cannot
// use, nor NET_RAW.
inline constexpr uint64_t kCodeCapabilities =
    (1ull << 0) | (1ull << 1) | (1ull << 3) | (1ull << 4) | (1ull << 5) | (1ull << 6) |
    (1ull << 7) | (1ull << 8) | (1ull << 10) | (1ull << 18) | (1ull << 31);
// What ExtraCapabilities may add: NET_RAW, SYS_PTRACE, SYS_NICE.
inline constexpr uint64_t kGrantableCapabilities = (1ull << 13) | (1ull << 19) | (1ull << 23);

// How the root of a sandbox is furnished. Goes to its init together with the root mount and one
// detached mount a view.
class LaunchPlan {
 public:
  // A detached mount that is put, read-only, on an existing file or directory: "/sys" or something
  // below "/proc".
  struct View {
    std::string target;
    bool operator==(const View&) const = default;
  };
  struct Rlimit {
    int resource = 0;  // RLIMIT_*
    uint64_t soft = 0;
    uint64_t hard = 0;
    bool operator==(const Rlimit&) const = default;
  };

  std::string hostname;
  std::string hosts;        // content of /etc/hosts; empty: the image's own file stays
  std::string resolv_conf;  // content of /etc/resolv.conf; empty: the image's own file stays
  Bytes shm_size = Bytes::MiB(64);
  uint64_t shm_inodes = 16384;
  std::vector<View> views;
  std::vector<Rlimit>
      rlimits;  // of init and so of all that runs inside; a hard limit cannot be raised again
  std::vector<uint32_t> cpus;  // host cores that everything inside is pinned to; empty: not pinned

  void GrantCapabilities(uint64_t capabilities, rights::ExtraCapabilities) {
    extra_capabilities_ |= capabilities;
  }
  uint64_t capabilities() const { return kCodeCapabilities | extra_capabilities_; }
  bool operator==(const LaunchPlan&) const = default;

  Result<void> Validate() const;
  // Requires Validate().
  wire::Launch Encode() const;

 private:
  uint64_t extra_capabilities_ = 0;
};

}  // namespace dsec::spawn

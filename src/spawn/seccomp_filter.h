// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"

namespace dsec::spawn {

// Four classic BPF programs (arrays of sock_filter). The kernel runs all that a process has and
// takes the strictest answer; a call that all of them allow whatever its arguments costs nothing
// (its seccomp cache). The spawner installs the first two in itself, each exec gets the third,
// a zygote of FnCall (stage/zygote.cc) the fourth in its place.
//
// - allow: by number. What Docker's default profile lets an unprivileged container call, and what
//   the platform's own processes need. All else: EPERM; calls newer than this list and other ABIs
//   (32 bits, x32): ENOSYS, so that libraries fall back and no kernel log is written. `sync` does
//   nothing and succeeds: it would flush the whole host, and nothing of a sandbox outlives it.
// - arguments: socket families and netlink protocols, ioctls that change or exhaust a shared file
//   system, ioctls that inject input into terminals. Compared as the kernel reads them, on the low
//   32 bits.
// - code: what the platform needs and code in a sandbox does not: mounts, namespaces, host name.
//   clone3 answers ENOSYS: a filter cannot read its flags, and libraries then use clone.
// - zygote: the same but for setns, which a fork of it takes away from itself before it runs code.
struct SeccompFilters {
  std::vector<uint8_t> allow;
  std::vector<uint8_t> arguments;
  std::vector<uint8_t> code;
  std::vector<uint8_t> zygote;
};

// Takes some milliseconds; once a daemon.
Result<SeccompFilters> CompileSeccompFilters();
// What `code` refuses and `zygote` does not.
Result<std::vector<uint8_t>> CompileForkFilter();

}  // namespace dsec::spawn

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "dsec/v1/fncall.pb.h"

namespace dsec::sandbox {

// Why the platform ended a program.
enum class StoppedBy { kNothing, kWall, kCpu, kOutput, kMemory };

// What is known of a run after everything of it has ended.
struct Evidence {
  StoppedBy stopped_by = StoppedBy::kNothing;
  int wait_status = 0;  // of the program, as wait4 gives it
  uint64_t cpu_usec = 0;
  uint64_t oom_kills = 0;
  uint64_t forks_denied = 0;
  uint64_t stdout_total = 0;
  uint64_t stderr_total = 0;
  bool disk_full = false;  // nothing was left of disk_bytes or disk_inodes at the end
};

// Sets verdict, exit_code, signal and limit. Evidence of the kernel that a bound was hit comes
// before how the program took it: a program that caught the failure of a child killed for memory,
// or that was over its CPU time when it ended by itself, has hit the limit all the same. Denied
// forks and a full disk are for the program to handle: they count only when it failed. Pure.
void Judge(const Evidence& evidence, const v1::FnLimits& limits, v1::FnStep& step);

}  // namespace dsec::sandbox

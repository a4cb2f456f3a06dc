// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "aether/identity.h"
#include "base/result.h"
#include "dsec/v1/aether.pb.h"

namespace dsec::aether {

// Limits of one exec. The first two are the kernel's (execve(2)): MAX_ARG_STRLEN is 32 pages with
// the final NUL, and argv and environment together may take a quarter of the 8 MiB stack.
inline constexpr size_t kMaxArgBytes = 131071;
inline constexpr size_t kMaxArgsTotal = (2u << 20) - (16u << 10);
inline constexpr uint64_t kMaxOutputBytes = 32u << 20;
inline constexpr uint64_t kDefaultOutputBytes = 1u << 20;
inline constexpr uint64_t kMaxTimeoutMs = 366ull * 24 * 3600 * 1000;

// What Hello has set for all execs.
struct ExecDefaults {
  std::vector<v1::KeyValue> env;
  std::string workdir = "/";
  std::string user;
  uint64_t output_bytes = kDefaultOutputBytes;
  uint64_t open_files = 0;
  uint64_t memory_limit_bytes = 0;
};
// kInvalidArgument with the field when a value cannot be used.
Result<ExecDefaults> DefaultsFrom(const v1::HelloRequest& hello);

// Checks all that does not depend on the sandbox. kInvalidArgument with field and rule;
// "exec.too_long" when the kernel would refuse the size, counted with the environment of
// `defaults`.
Result<void> CheckExecRequest(const v1::ExecRequest& request, const ExecDefaults& defaults);

// The environment of a program, later sources winning: the fixed part (PATH, HOME, USER, TERM with
// a terminal), the sandbox's, the exec's own.
std::vector<std::string> BuildEnvironment(const v1::ExecRequest& request,
                                          const ExecDefaults& defaults, const Identity& identity);

}  // namespace dsec::aether

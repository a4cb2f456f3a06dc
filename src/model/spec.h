// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "dsec/v1/model.pb.h"

namespace dsec::model {

// What one limit may be on this node. A field left at 0 takes `fallback`.
struct LimitRule {
  uint64_t min = 0;
  uint64_t max = 0;
  uint64_t fallback = 0;
  // Not empty: this host cannot hold the bound, and why. Since every bound is always on, each spec
  // is then refused.
  std::string unenforceable;
};

// The bounds that a node offers. The defaults here are those of a node without settings; the
// container backend lowers the maxima to what its host has.
struct LimitsPolicy {
  LimitRule memory_bytes{16ull << 20, 4ull << 40, 1ull << 30, ""};
  LimitRule cpu_millis{10, 1'024'000, 1000, ""};
  LimitRule pids{4, 1 << 20, 1024, ""};
  LimitRule disk_bytes{16ull << 20, 16ull << 40, 2ull << 30, ""};
  LimitRule disk_inodes{1024, 1ull << 40, 0,
                        ""};  // fallback 0: one for each 4 KiB of disk, at least 65,536
  LimitRule shm_bytes{1ull << 20, 4ull << 40, 64ull << 20,
                      ""};                        // the default is never above half of the memory
  LimitRule open_files{256, 1 << 20, 16384, ""};  // init of a sandbox needs the minimum
  LimitRule output_bytes{1024, 32ull << 20, 1ull << 20, ""};
  LimitRule ttl_ms{1000, 30ull * 86'400'000, 0, ""};   // 0: none
  LimitRule idle_ms{1000, 30ull * 86'400'000, 0, ""};  // 0: none
  LimitRule ttl_extension_ms{1000, 86'400'000, 600'000, ""};
  // > 0: the writable layer has no inode quota of its own, but its byte quota bounds the inodes,
  // because each takes at least this many bytes. A spec that asks for fewer inodes than follow from
  // its disk_bytes is refused.
  uint64_t inode_cost_bytes = 0;
};

// Fills defaults into `spec` and checks every field. kInvalidArgument "spec.<rule>" names the field
// as the public API calls it, the value and the rule; kFailedPrecondition "limit.unenforceable" for
// a bound that this host cannot hold. Pure; idempotent. Layer references are checked for form only.
Result<void> NormalizeSpec(v1::SandboxSpec& spec, const LimitsPolicy& policy);

// --- rules that execs and other callers share; `field` is named in the error ---

// Bytes of argv, env and scripts that the kernel takes in one string (MAX_ARG_STRLEN in
// linux/binfmts.h), final NUL included.
inline constexpr size_t kMaxArgString = 131072;
inline constexpr size_t kMaxEnvCount = 16384;
inline constexpr size_t kMaxEnvBytes = 1 << 20;   // of one spec
inline constexpr size_t kMaxArgvBytes = 1 << 20;  // of an entrypoint
inline constexpr size_t kMaxPathBytes = 4095;     // PATH_MAX without the NUL
inline constexpr size_t kMaxLabels = 64;

// [A-Za-z_][A-Za-z0-9_.-]*, at most 256 bytes: nothing that a shell could take for more than a
// name.
Result<void> CheckEnvKey(std::string_view key, std::string_view field);
// Keys, values (any bytes but NUL), no key twice, sizes. kInvalidArgument "spec.too_long" names the
// limit.
Result<void> CheckEnv(const google::protobuf::RepeatedPtrField<v1::KeyValue>& env,
                      std::string_view field);
// A name, a uid, or uid:gid, ids at most 65535.
Result<void> CheckUser(std::string_view user, std::string_view field);
// Absolute, no NUL, at most kMaxPathBytes.
Result<void> CheckAbsolutePath(std::string_view path, std::string_view field);
// RFC 1123, at most 63 bytes.
Result<void> CheckHostname(std::string_view name);
// Sandbox names: [A-Za-z0-9][A-Za-z0-9_.-]*, at most 63 bytes.
Result<void> CheckName(std::string_view name);
// Key: [A-Za-z0-9][A-Za-z0-9_./-]*, at most 63 bytes; value: valid UTF-8 without control
// characters, at most 256 bytes.
Result<void> CheckLabel(std::string_view key, std::string_view value);

// Text for a message: printable ASCII as it is, all else escaped, cut after `max` bytes.
std::string Quoted(std::string_view bytes, size_t max = 64);

}  // namespace dsec::model

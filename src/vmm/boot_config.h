// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace dsec::vmm {

// The disk that carries it: text lines, then zeroes. A multiple of 512.
inline constexpr size_t kBootConfigBytes = 64 << 10;
inline constexpr size_t kPortSecretBytes = 16;
inline constexpr size_t kTokenBytes = 32;  // spawn::abi::kTokenBytes
// Two disks each, 24 transports of a microvm, four taken by others.
inline constexpr uint32_t kMaxLayers = 10;
inline constexpr uint32_t kMaxLayerDisks = 2 * kMaxLayers;

// Serial numbers by which the guest tells its disks apart; layer i has "m<i>", "b<i>" and, where it
// shares content with others, "b<i>.1" and so on.
inline std::string ContentSerial(size_t layer, size_t part) {
  return part == 0 ? fmt::format("b{}", layer) : fmt::format("b{}.{}", layer, part);
}
inline constexpr char kConfigSerial[] = "config";
inline constexpr char kDiskSerial[] = "disk";
inline constexpr char kPortName[] = "dsec.agent";

// What the guest's pid 1 is told by the host. A value; trusted by the guest, parsed with bounds
// nevertheless.
struct BootConfig {
  std::string port_secret;  // kPortSecretBytes
  std::string token;        // kTokenBytes: what Hello must carry
  uint32_t layers = 0;      // 1..kMaxLayers
  std::string hostname;
  uint64_t memory_bytes = 0;  // limits of the code, as v1::Limits has them
  uint64_t cpu_millis = 0;
  uint64_t pids = 0;
  uint64_t shm_bytes = 0;
  uint64_t open_files = 0;
  // 1: the code has a user namespace of its own, as in a container. Nothing else is known so far.
  uint32_t user_namespace = 1;
  bool operator==(const BootConfig&) const = default;

  // kInvalidArgument "vm.boot_config" names the key and the rule.
  Result<void> Validate() const;
  // Requires Validate(). kBootConfigBytes long.
  std::string Encode() const;
  // Exactly what Encode writes; anything else is "vm.boot_config".
  static Result<BootConfig> Parse(std::string_view bytes);
};

}  // namespace dsec::vmm

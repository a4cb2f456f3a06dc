// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/rng.h"
#include "disk/disk.h"

namespace dsec::disk::testing {

inline constexpr char kBootA[] = "aaaaaaaa-0000-4000-8000-000000000000";
inline constexpr char kBootB[] = "bbbbbbbb-0000-4000-8000-000000000000";

inline DiskOptions OptionsOf(std::string boot) {
  DiskOptions options;
  options.upper.boot_id = std::move(boot);
  return options;
}

inline std::vector<uint8_t> Fill(uint8_t byte, size_t size) { return {std::vector(size, byte)}; }

inline std::vector<uint8_t> RandomBytes(Rng& rng, size_t size) {
  std::vector<uint8_t> bytes(size);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(rng.Next());
  return bytes;
}

inline std::vector<uint8_t> Content(Disk& disk) {
  std::vector<uint8_t> all(disk.bytes());
  auto read = disk.ReadNow(0, all);
  EXPECT_TRUE(read.ok()) << read.error().ToString();
  return all;
}

}  // namespace dsec::disk::testing

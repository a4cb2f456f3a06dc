// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace dsec::disk {

// A disk that a session has a file of: a line of <dir>/served, which is replaced as a whole before
// the kernel or a client can know of it.
struct Served {
  uint64_t node = 0;
  uint64_t bytes = 0;
  std::string dir;
  std::string nbd;  // socket; empty: none
};
std::string EncodeServed(const std::vector<Served>& all);
// kInternal "disk.corrupt".
Result<std::vector<Served>> ParseServed(std::string_view text);

// An error that has come over the socket; "disk.io" when this program does not know its reason.
Error DiskErrorOf(std::string_view reason, std::string message);

inline constexpr size_t kMaxServed = 4096;  // disks

}  // namespace dsec::disk

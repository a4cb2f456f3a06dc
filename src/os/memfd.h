// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::os {

// Anonymous files that nobody, their maker included, can change any more. `name` shows in
// /proc/<pid>/fd only.
Result<UniqueFd> SealedMemfd(const char* name, std::span<const uint8_t> content);
// A sealed copy of a regular file of at most `limit` bytes, executable by descriptor.
Result<UniqueFd> SealedCopy(const char* name, int file, uint64_t limit);
// Whether content and size can no longer change. No allocation.
bool IsSealed(int fd);

}  // namespace dsec::os

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/result.h"

namespace dsec::image {

inline constexpr char kMetaName[] = "meta.erofs";
inline constexpr char kBlobName[] = "data.blob";

// Runs mkfs.erofs over <work>/tree and leaves <work>/out/{meta.erofs,data.blob}: uncompressed, all
// file data in the blob in chunks, identical chunks once, mtimes exact. The same tree gives the
// same bytes, whatever the order of its folders on disk. The child inherits `lock_fd`, so that a
// lock on it lives as long as the child even when we are killed. `progress` (may be empty) is asked
// several times a second with the bytes of the blob so far; false kills the child: kCancelled
// "layer.cancelled". A missing or failing mkfs.erofs: kFailedPrecondition "layer.no_mkfs",
// kInternal "layer.build_failed" with what it said.
Result<void> WriteErofs(int work, int lock_fd, const std::function<bool(uint64_t)>& progress);

// Checks what a mount would rely on: magic, block size, one extra device, no feature but chunks and
// devices (mkfs.erofs ignores options that it does not know). kInternal "layer.corrupt".
Result<void> CheckSuperblock(int meta_fd);

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace dsec::image {

// Names in a folder, without "." and "..", in byte order. More than `limit`:
// "layer.too_many_entries".
Result<std::vector<std::string>> ListNames(int dirfd, uint64_t limit);

// Bytes that the file system of `fd` has free for us.
Result<uint64_t> FreeBytes(int fd);
// kResourceExhausted "layer.no_space" unless `bytes` and a reserve of 64 MiB are free.
Result<void> RequireSpace(int fd, uint64_t bytes, std::string_view what);

// Of a call that has just set errno on something in our own store: no room -> kResourceExhausted
// "layer.no_space", a name that the file system cannot take -> kInvalidArgument "layer.bad_path",
// else kInternal "layer.io".
Error StoreError(std::string_view what);

}  // namespace dsec::image

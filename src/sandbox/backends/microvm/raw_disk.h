// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::sandbox {

// Where the writable disks of machines come from. Blocking, thread-safe.
class WritableDisks {
 public:
  virtual ~WritableDisks() = default;
  // A new disk `path` with an empty ext4 of at least `bytes` of room and `inodes` files, open for
  // reading and writing.
  virtual Result<os::UniqueFd> Create(const std::string& path, uint64_t bytes, uint64_t inodes) = 0;
  // What it takes on the host.
  virtual Result<uint64_t> UsedBytes(const std::string& path) = 0;
};

// Sparse raw images, copied from a template of the same shape that mkfs has made once.
class RawDisks final : public WritableDisks {
 public:
  // `dir`: where the templates are kept; exists.
  explicit RawDisks(std::string dir) : dir_(std::move(dir)) {}
  Result<os::UniqueFd> Create(const std::string& path, uint64_t bytes, uint64_t inodes) override;
  Result<uint64_t> UsedBytes(const std::string& path) override;

 private:
  Result<os::UniqueFd> Template(uint64_t bytes, uint64_t inodes);
  const std::string dir_;
  std::mutex mutex_;
};

}  // namespace dsec::sandbox

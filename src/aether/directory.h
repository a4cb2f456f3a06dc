// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/result.h"

namespace dsec::aether {

// The entries of an open directory from its present position on, without "." and "..", in the file
// system's order. Needs no more memory than its buffer.
class DirectoryReader {
 public:
  struct Entry {
    std::string_view name;   // NUL-terminated, until the next call
    unsigned char type = 0;  // DT_*
  };
  explicit DirectoryReader(int fd) : fd_(fd) {}
  // nullopt at the end.
  Result<std::optional<Entry>> Next();

 private:
  int fd_;
  size_t size_ = 0;
  size_t position_ = 0;
  alignas(8) char buffer_[16 << 10];
};

}  // namespace dsec::aether

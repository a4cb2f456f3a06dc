// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace dsec::http {

// Cuts a byte stream into lines that end with '\n'.
class LineBuffer {
 public:
  explicit LineBuffer(size_t max_line_bytes) : max_(max_line_bytes) {}

  void Append(std::string_view data) { data_ += data; }
  // The next whole line without its newline, nullopt when none is there yet. kPayloadTooLarge
  // "reply.line_too_long".
  Result<std::optional<std::string>> Next();
  // Bytes after the last newline.
  bool empty() const { return used_ == data_.size(); }

 private:
  const size_t max_;
  std::string data_;
  size_t used_ = 0;     // given out
  size_t scanned_ = 0;  // known to hold no newline
};

}  // namespace dsec::http

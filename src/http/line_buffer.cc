// SPDX-License-Identifier: Apache-2.0
#include "http/line_buffer.h"

#include <algorithm>

namespace dsec::http {

Result<std::optional<std::string>> LineBuffer::Next() {
  const size_t end = data_.find('\n', std::max(used_, scanned_));
  if (end != std::string::npos && end - used_ <= max_) {
    std::optional<std::string> line = data_.substr(used_, end - used_);
    used_ = end + 1;
    if (used_ == data_.size()) {
      data_.clear();
      used_ = 0;
    }
    scanned_ = 0;
    return line;
  }
  if (end != std::string::npos || data_.size() - used_ > max_) {
    return Error(Code::kPayloadTooLarge, "reply.line_too_long",
                 fmt::format("a line is above {} bytes", max_));
  }
  data_.erase(0, used_);
  used_ = 0;
  scanned_ = data_.size();
  return std::optional<std::string>();
}

}  // namespace dsec::http

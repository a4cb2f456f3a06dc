// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/result.h"

namespace dsec::vmm {

inline constexpr size_t kNonceBytes = 16;
// What may be left of earlier connections before the answer comes: the buffers of QEMU, of the
// guest's kernel and of the relay together hold far less.
inline constexpr size_t kMaxStaleBytes = size_t{32} << 20;

// The beginning of a host connection and the answer to it (docs/design/vm.md, section 4).
std::string SyncAnswer(std::string_view secret, std::string_view nonce);

// The host's side of it, without I/O. What the guest says is compared and dropped.
class PortSync {
 public:
  // A nonce of the kernel's generator.
  explicit PortSync(std::string_view secret);
  // What the connection begins with.
  const std::string& sync() const { return sync_; }

  struct Step {
    size_t take = 0;    // so many of the bytes are done with: take them off the socket
    bool done = false;  // all that follows them is of this connection
  };
  // `bytes` were looked at and not taken (MSG_PEEK). kUnavailable "vm.port" when more than
  // kMaxStaleBytes came without an answer.
  Result<Step> Look(std::string_view bytes);

 private:
  std::string sync_;
  std::string answer_;
  std::string window_;  // what was taken last, shorter than the answer
  size_t dropped_ = 0;
};

}  // namespace dsec::vmm

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"

namespace dsec::image {

// A file of a layer as its digests know it, wherever its bytes lie. Thread-safe, blocking; may hang
// with what it reads from.
class BlobReader {
 public:
  virtual ~BlobReader() = default;
  // Fills `out` or fails: kUnavailable "layer.unreachable" where a later try may work, kNotFound
  // "layer.not_found", kInternal "layer.corrupt" when it ends before. Bytes are not checked.
  virtual Result<void> ReadAt(uint64_t offset, std::span<uint8_t> out) = 0;
  // What was read is wrong: the next read opens what is there by then.
  virtual void Reopen() {}
};

}  // namespace dsec::image

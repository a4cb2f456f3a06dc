// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

struct evp_md_ctx_st;

namespace dsec::image {

using Digest = std::array<uint8_t, 32>;

// SHA-256 of a stream. Not thread-safe.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void Update(std::span<const uint8_t> data);
  // 64 lower-case hex digits; the object is spent.
  std::string Finish();
  // The same as bytes; the object is ready for another stream.
  Digest Next();

 private:
  evp_md_ctx_st* context_;
};

std::string Sha256Hex(std::string_view data);
Digest Sha256Of(std::span<const uint8_t> data);
bool IsSha256Hex(std::string_view text);

// Of the whole file, read from its start; the file position is not used. `proceed` (may be empty)
// is asked between reads with the bytes done; false gives kCancelled "layer.cancelled".
Result<std::string> Sha256File(int fd, const std::function<bool(uint64_t)>& proceed);

}  // namespace dsec::image

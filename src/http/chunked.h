// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace dsec::http {

// Takes the chunked coding (RFC 9112 section 7.1) off a body. Needs no buffer: every byte that it
// is given is used. Extensions and trailers are passed over, within bounds. Line ends are CRLF
// alone; a size is 1..15 hex digits without white space around it.
class ChunkDecoder {
 public:
  explicit ChunkDecoder(size_t max_trailer_bytes) : max_trailer_(max_trailer_bytes) {}

  // Appends at most `max` bytes of the body to `out`; returns how many bytes of `data` were used:
  // less than all only when `max` is reached or the end was found. kInvalidArgument
  // "request.malformed"; then nothing more can be decoded.
  Result<size_t> Decode(std::string_view data, size_t max, std::string& out);
  bool done() const { return state_ == State::kDone; }

 private:
  enum class State {
    kSize,
    kExtension,
    kSizeLf,
    kData,
    kDataCr,
    kDataLf,
    kLineStart,
    kLine,
    kLineLf,
    kEndLf,
    kDone
  };
  Result<void> Step(char c);

  const size_t max_trailer_;
  State state_ = State::kSize;
  uint64_t size_ = 0;  // of the chunk; in kData what is left of it
  size_t digits_ = 0;
  size_t overhead_ = 0;  // extension bytes of this chunk, or trailer bytes
};

}  // namespace dsec::http

// SPDX-License-Identifier: Apache-2.0
#include "http/chunked.h"

#include <algorithm>

namespace dsec::http {
namespace {

constexpr size_t kMaxDigits = 15;
constexpr size_t kMaxExtension = 256;

Error Malformed(std::string_view what) {
  return Error(Code::kInvalidArgument, "request.malformed",
               fmt::format("chunked coding: {}", what));
}

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// What may stand in an extension or a trailer line.
bool IsText(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte == '\t' || (byte >= 0x20 && byte != 0x7f);
}

}  // namespace

Result<void> ChunkDecoder::Step(char c) {
  const auto expect_lf = [&](State next) -> Result<void> {
    if (c != '\n') return Malformed("a CR without LF");
    state_ = next;
    return Ok();
  };
  switch (state_) {
    case State::kSize: {
      const int value = HexValue(c);
      if (value >= 0) {
        if (++digits_ > kMaxDigits) return Malformed("the size of a chunk is too large");
        size_ = size_ << 4 | static_cast<uint64_t>(value);
        return Ok();
      }
      if (digits_ == 0 || (c != '\r' && c != ';'))
        return Malformed("a chunk must begin with its size in hex");
      state_ = c == '\r' ? State::kSizeLf : State::kExtension;
      return Ok();
    }
    case State::kExtension:
      if (c == '\r') {
        state_ = State::kSizeLf;
        return Ok();
      }
      if (!IsText(c) || ++overhead_ > kMaxExtension)
        return Malformed("a bad or long chunk extension");
      return Ok();
    case State::kSizeLf:
      overhead_ = 0;
      digits_ = 0;
      return expect_lf(size_ == 0 ? State::kLineStart : State::kData);
    case State::kDataCr:
      if (c != '\r') return Malformed("a chunk is longer than its size");
      state_ = State::kDataLf;
      return Ok();
    case State::kDataLf:
      return expect_lf(State::kSize);
    case State::kLineStart:
    case State::kLine:
      if (c == '\r') {
        state_ = state_ == State::kLineStart ? State::kEndLf : State::kLineLf;
        return Ok();
      }
      if (!IsText(c) || ++overhead_ > max_trailer_) return Malformed("bad or long trailers");
      state_ = State::kLine;
      return Ok();
    case State::kLineLf:
      return expect_lf(State::kLineStart);
    case State::kEndLf:
      return expect_lf(State::kDone);
    case State::kData:
    case State::kDone:
      break;
  }
  return Ok();
}

Result<size_t> ChunkDecoder::Decode(std::string_view data, size_t max, std::string& out) {
  size_t used = 0;
  while (used < data.size() && !done()) {
    if (state_ != State::kData) {
      DSEC_TRY_VOID(Step(data[used++]));
      continue;
    }
    const size_t count = static_cast<size_t>(std::min<uint64_t>({size_, max, data.size() - used}));
    if (count == 0) break;
    out.append(data.substr(used, count));
    used += count;
    max -= count;
    size_ -= count;
    if (size_ == 0) state_ = State::kDataCr;
  }
  return used;
}

}  // namespace dsec::http

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace dsec::image {

// How content is compressed: by liblz4's HC at this level; 0: not at all.
struct Compression {
  static constexpr int kLowest = 3;  // below it liblz4 takes this one
  static constexpr int kDefault = 9;
  static constexpr int kHighest = 12;
  int level = 0;
  bool on() const { return level > 0; }
};
// "lz4hc[:LEVEL]" or "none". kInvalidArgument "layer.bad_compression".
Result<Compression> ParseCompression(std::string_view text);
// What the bytes of a compressed layer depend on beside its tree, as in "lz4hc:9 liblz4:1.9.4".
std::string DescribeCompression(const Compression& compression);

// Compresses pieces of content to whole blocks of EROFS, zeros in front. What the kernel reads of
// each piece, it reads without the others. Single-threaded.
class Compressor {
 public:
  static constexpr size_t kMaxPiece = 64 << 10;
  static constexpr size_t kBlock = 4096;

  explicit Compressor(const Compression& compression);

  // The blocks of a piece of at most kMaxPiece bytes, valid until the next call. Empty: it would
  // not get smaller by a block and an eighth. What does not compress is found out at the speed of
  // plain LZ4. Zeros always get smaller.
  std::span<const uint8_t> Compress(std::span<const uint8_t> piece);
  // A piece back from its blocks; `piece` has its size. kInternal "layer.corrupt" for blocks that
  // do not make exactly that.
  static Result<void> Decompress(std::span<const uint8_t> blocks, std::span<uint8_t> piece);

 private:
  int level_;
  std::vector<uint8_t> state_;
  std::vector<uint8_t> packed_;
  std::vector<uint8_t> blocks_;
};

}  // namespace dsec::image

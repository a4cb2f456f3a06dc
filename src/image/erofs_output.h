// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/result.h"
#include "image/digest.h"
#include "image/erofs_format.h"
#include "image/layer.h"

namespace dsec::image::erofs {

// Of the block that begins an image, with whatever it has for a checksum.
uint32_t Checksum(std::span<const uint8_t> block);

// An EROFS image from its first byte to its last, hashed as it is written. The checksum of the
// first block is filled in. Single-threaded.
class Output {
 public:
  // `fd`: an empty file, which must outlive this object.
  explicit Output(int fd);

  uint64_t position() const { return flushed_ + buffer_.size(); }

  template <typename T>
  void Put(const T& value) {
    static_assert(std::has_unique_object_representations_v<T>);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    buffer_.insert(buffer_.end(), bytes, bytes + sizeof(T));
  }
  void Put(std::string_view text) { buffer_.insert(buffer_.end(), text.begin(), text.end()); }
  // Zeros up to there, which lies not behind.
  void PadTo(uint64_t position);
  void PadToBlock();

  // To be called between inodes and blocks: all since the last call is kept in memory.
  Result<void> FlushIfFull();
  // Writes the rest and syncs. The image is at least a block.
  Result<FileDigest> Finish();

 private:
  Result<void> Flush();

  int fd_;
  std::vector<uint8_t> buffer_;
  uint64_t flushed_ = 0;
  Sha256 sha_;
};

}  // namespace dsec::image::erofs

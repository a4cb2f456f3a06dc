// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "image/stored_form.h"

namespace dsec::image {

// The metadata of larger layers stay as they are: they are rewritten in memory.
inline constexpr uint64_t kMaxSharedMeta = 64 << 20;

// Held while metadata are read and rewritten on a thread of a daemon, of which there are many: at
// most two are in memory at a time in this process. Waits, and with a store that hangs for as long
// as that does.
class MetaTurn {
 public:
  MetaTurn();
  ~MetaTurn();
  MetaTurn(const MetaTurn&) = delete;
  MetaTurn& operator=(const MetaTurn&) = delete;
  static int most();  // that were held at once since the process began
};

// A whole meta.erofs, read into memory. More than kMaxSharedMeta: kInternal "layer.corrupt". May
// hang with what it reads from.
Result<std::vector<uint8_t>> ReadMeta(int fd, uint64_t size);

// Makes of a layer's meta.erofs the metadata for a mount over the files of `form`: a device a file,
// in their order, and each chunk where the form says. Nothing moves and the size stays; two calls
// give the same bytes. Takes hostile metadata: kInternal "layer.corrupt" for what has other
// features than ours, is compressed, names blocks that are not there, or has a chunk of which the
// form has the parts in several places.
Result<void> ShareMeta(std::span<uint8_t> meta, const StoredForm& form);

// The chunks of data.blob of a layer that is not compressed, in their order, as its metadata tell.
// As ShareMeta.
struct BlobExtent {
  uint32_t block = 0;
  uint32_t blocks = 0;
  bool operator==(const BlobExtent&) const = default;
};
Result<std::vector<BlobExtent>> ChunksOf(std::span<uint8_t> meta);

}  // namespace dsec::image

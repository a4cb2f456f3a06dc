// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/result.h"
#include "image/chunk_store.h"
#include "image/erofs_format.h"
#include "image/erofs_output.h"
#include "image/tree.h"

namespace dsec::image::erofs {

inline constexpr uint16_t kBlobDevice = 1;

// How the image says where the content of a file lies.
struct Content {
  Layout layout = kChunkBased;
  uint32_t data = 0;       // of the inode
  uint64_t map_bytes = 0;  // behind the xattrs, at a multiple of 8
};
Content ContentOf(const Inode& file, const ChunkStore& chunks);

// Appends the map of a file. `blob_block`: where the blob begins when all devices are seen as one.
// What is full is written.
Result<void> PutContentMap(const Inode& file, const ChunkStore& chunks, uint32_t blob_block,
                           Output& out);

}  // namespace dsec::image::erofs

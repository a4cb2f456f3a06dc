// SPDX-License-Identifier: Apache-2.0
#include "image/erofs_content.h"

#include "base/check.h"

namespace dsec::image::erofs {
namespace {

constexpr uint32_t kChunkFormat = kChunkIndexes | 4;  // 2^4 blocks
static_assert(ChunkStore::kChunkBytes == kBlockBytes << 4);
constexpr uint64_t kMapAlign = 8;
static_assert(sizeof(ChunkIndex) % kMapAlign == 0 && sizeof(ClusterIndex) % kMapAlign == 0);

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint64_t ChunksOf(const Inode& file) { return ChunkStore::CountOf(file.size); }

uint32_t ChunkAt(const Inode& file, const ChunkStore& chunks, uint64_t index) {
  return chunks.chunk(static_cast<uint32_t>(file.data + index));
}

// Clusters of the chunk of that number in its file.
uint32_t ClustersOf(const Inode& file, uint64_t index) {
  const uint64_t bytes =
      std::min(ChunkStore::kChunkBytes, file.size - index * ChunkStore::kChunkBytes);
  return static_cast<uint32_t>(RoundUp(bytes, kBlockBytes) / kBlockBytes);
}

void PutChunkIndex(uint32_t chunk, const ChunkStore& chunks, Output& out) {
  const bool hole = chunk == ChunkStore::kHole;
  out.Put(ChunkIndex{
      .block_high = 0,
      .device = hole ? uint16_t{0} : kBlobDevice,
      .block = hole ? kNoBlock : chunks.block(chunk),
  });
}

// One extent: a head, then continuations with the way back to it and on to the next head. The
// first has the blocks of the extent in place of the way back, which is one cluster.
void PutCompressedExtent(uint32_t block, uint32_t blocks, uint32_t clusters, Output& out) {
  DSEC_CHECK(clusters > 1 && blocks < clusters);
  out.Put(ClusterIndex{.type = kLz4Head, .offset = 0, .where = block});
  for (uint32_t i = 1; i < clusters; ++i) {
    const uint32_t back = i == 1 ? kBlockCount | blocks : i;
    out.Put(ClusterIndex{.type = kContinuation, .offset = 0, .where = back | (clusters - i) << 16});
  }
}

// A plain cluster is one block.
void PutPlainExtents(uint32_t block, uint32_t clusters, Output& out) {
  for (uint32_t i = 0; i < clusters; ++i) {
    out.Put(ClusterIndex{.type = kPlainHead, .offset = 0, .where = block + i});
  }
}

}  // namespace

Content ContentOf(const Inode& file, const ChunkStore& chunks) {
  if (!chunks.IsCompressed(file.data, file.size)) {
    return {kChunkBased, kChunkFormat, ChunksOf(file) * sizeof(ChunkIndex)};
  }
  uint64_t blocks = 0;
  for (uint64_t i = 0; i < ChunksOf(file); ++i) blocks += chunks.blocks(ChunkAt(file, chunks, i));
  const uint64_t clusters = RoundUp(file.size, kBlockBytes) / kBlockBytes;
  return {kCompressedFull, static_cast<uint32_t>(blocks),
          sizeof(MapHeader) + clusters * sizeof(ClusterIndex)};
}

Result<void> PutContentMap(const Inode& file, const ChunkStore& chunks, uint32_t blob_block,
                           Output& out) {
  out.PadTo(RoundUp(out.position(), kMapAlign));
  const bool compressed = chunks.IsCompressed(file.data, file.size);
  if (compressed) {
    out.Put(MapHeader{
        .reserved = 0, .advise = kBigClusters, .algorithms = 0, .cluster_bits = 0, .reserved2 = 0});
  }
  for (uint64_t i = 0; i < ChunksOf(file); ++i) {
    const uint32_t chunk = ChunkAt(file, chunks, i);
    if (!compressed) {
      PutChunkIndex(chunk, chunks, out);
    } else if (chunks.compressed(chunk)) {
      PutCompressedExtent(blob_block + chunks.block(chunk), chunks.blocks(chunk),
                          ClustersOf(file, i), out);
    } else {
      PutPlainExtents(blob_block + chunks.block(chunk), ClustersOf(file, i), out);
    }
    DSEC_TRY_VOID(out.FlushIfFull());
  }
  return Ok();
}

}  // namespace dsec::image::erofs

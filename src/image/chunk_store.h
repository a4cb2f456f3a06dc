// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "image/chunk_table.h"
#include "image/compressor.h"
#include "image/layer.h"
#include "os/unique_fd.h"

namespace dsec::image {

// Content of files on its way into a blob. It is cut into chunks of 64 KiB at multiples of 64 KiB
// of the file (the last is shorter), equal chunks are kept once and zeros not at all. Chunks go to
// the file as they come; their order in the blob is decided when all are known, by Place. When that
// is the order in which they came, the file is the blob; else it is copied into one.
//
// Memory: 24 bytes and a hash entry (about 50) a chunk kept, 4 bytes a reference, 2 MiB of buffers.
// Single-threaded. Errors: kResourceExhausted "layer.no_space", kInternal "layer.io".
class ChunkStore {
 public:
  static constexpr uint64_t kChunkBytes = 64 << 10;  // not those that have digests
  static constexpr uint32_t kHole = UINT32_MAX;
  static_assert(kChunkBytes == Compressor::kMaxPiece);

  // Makes `name` below `dir`, which stays open as long as this lives. `seed`: of HashOf, for who
  // wants to compare them; else any.
  static Result<std::unique_ptr<ChunkStore>> Create(int dir, std::string name,
                                                    const Compression& compression = {},
                                                    std::optional<uint64_t> seed = {});
  ~ChunkStore();
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;

  // One file: BeginFile, Write in ascending order, EndFile with the size that the file has. What no
  // Write covers is a hole. Returns the first of the file's references, one a chunk.
  void BeginFile();
  Result<void> Write(uint64_t offset, std::span<const uint8_t> bytes);
  Result<uint32_t> EndFile(uint64_t size);
  static uint64_t CountOf(uint64_t size) { return (size + kChunkBytes - 1) / kChunkBytes; }

  // Makes all chunks of a file of that size fit one form. A compressed file (one that has a
  // compressed chunk) has no holes left; it saves an eighth of its blocks and four times what its
  // longer map takes. Chunks of any other file are kept as they are. Once all files have ended.
  Result<void> Settle(uint32_t first_reference, uint64_t size);
  bool IsCompressed(uint32_t first_reference, uint64_t size) const;

  // The chunk's number or kHole.
  uint32_t chunk(uint32_t reference) const { return references_[reference]; }
  bool compressed(uint32_t chunk) const { return chunks_[chunk].compressed != 0; }
  uint32_t blocks(uint32_t chunk) const { return chunks_[chunk].blocks; }  // that it takes

  // Begins the order of another blob of the same chunks; what FinishInto has written stays.
  void BeginPlacement();
  // Gives a chunk the next place in the blob unless it has one.
  void Place(uint32_t chunk);
  uint32_t block(uint32_t chunk) const { return chunks_[chunk].placed; }  // its place
  uint32_t placed_blocks() const { return placed_blocks_; }
  uint64_t placed_bytes() const { return placed_blocks_ * kBlock; }

  // What a chunk's bytes, in whole blocks, are known by. Nobody who does not know the seed can make
  // two that have one in common; equal bytes are to be found out by comparing them all the same.
  uint64_t seed() const { return seed_; }
  static uint64_t HashOf(std::span<const uint8_t> blocks, uint64_t seed);
  // The chunks of the blob in their order, without compression.
  struct Placed {
    uint64_t hash = 0;
    uint32_t block = 0;
    uint32_t blocks = 0;
  };
  std::vector<Placed> placed() const;

  struct Blob {
    FileDigest digest;
    ChunkDigests chunks;
    std::string table;    // their digests (chunk_table.h)
    bool copied = false;  // the order was another, so the content was written twice
  };
  // Leaves the blob of all chunks placed under the name, synced. `proceed` (may be empty) is asked
  // with the bytes done; false: kCancelled "layer.cancelled".
  Result<Blob> Finish(const std::function<bool(uint64_t)>& proceed);
  // The same into a new file, for one of several blobs; between two of them BeginPlacement.
  Result<Blob> FinishInto(int dir, const std::string& name,
                          const std::function<bool(uint64_t)>& proceed);

 private:
  static constexpr uint64_t kBlock = 4096;
  struct Chunk {
    uint32_t stored;  // block in the file
    uint32_t placed;
    uint32_t blocks;
    uint32_t bytes : 31;  // of content; without compression with the zeros to its last block's end
    uint32_t compressed : 1;
    uint64_t hash = 0;
  };
  using Hash = std::array<uint64_t, 2>;
  struct FirstHalf {
    size_t operator()(const Hash& hash) const { return hash[0]; }
  };

  ChunkStore(int dir, std::string name, os::UniqueFd file, const Compression& compression,
             uint64_t seed);
  Result<void> CloseChunk(uint64_t length);
  // `bytes` of content in whole blocks; in the last one zeros follow.
  Result<uint32_t> Keep(std::span<const uint8_t> blocks, uint64_t bytes);
  Result<uint32_t> Append(std::span<const uint8_t> blocks, uint64_t bytes, bool compressed,
                          uint64_t hash = 0);
  Result<bool> Same(const Chunk& chunk, std::span<const uint8_t> blocks, uint64_t bytes);
  // The blocks that are stored of a chunk, valid until the next call and the next Append.
  Result<std::span<const uint8_t>> Stored(const Chunk& chunk);
  Result<uint32_t> PlainOf(uint32_t chunk);
  Result<uint32_t> ZerosOf(uint64_t bytes);
  Result<void> Flush();
  Result<os::UniqueFd> CopyOut(int dir, const std::string& name,
                               const std::function<bool(uint64_t)>& proceed, BlobHasher& hasher);
  Blob Describe(BlobHasher& hasher, bool copied) const;
  Result<void> HashInPlace(const std::function<bool(uint64_t)>& proceed, BlobHasher& hasher);

  int dir_;
  std::string name_;
  os::UniqueFd file_;
  uint64_t seed_;
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> references_;
  std::unordered_map<Hash, uint32_t, FirstHalf> known_;
  Compression compression_;
  Compressor compressor_;
  std::unordered_map<uint32_t, uint32_t> plain_;  // of compressed chunks that are needed so, too
  std::unordered_map<uint64_t, uint32_t> zeros_;  // chunks of compressed files, by their bytes
  uint32_t stored_blocks_ = 0;
  uint32_t placed_blocks_ = 0;
  bool in_order_ = true;  // each chunk was placed where it is stored

  uint32_t first_reference_ = 0;  // of the present file
  std::vector<uint8_t> partial_;  // the present chunk
  size_t partial_end_ = 0;        // 0: nothing of it has come
  std::vector<uint8_t> pending_;  // whole chunks not written yet
  uint64_t flushed_ = 0;
  uint64_t space_checked_ = 0;
  std::vector<uint8_t> stored_;
  std::vector<uint8_t> unpacked_;
};

}  // namespace dsec::image

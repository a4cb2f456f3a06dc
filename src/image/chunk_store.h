// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "image/layer.h"
#include "os/unique_fd.h"

namespace dsec::image {

// Content of files on its way into a blob. It is cut into chunks of 64 KiB at multiples of 64 KiB
// of the file (the last is shorter), equal chunks are kept once and zeros not at all. Chunks go to
// the file as they come; their order in the blob is decided when all are known, by Place. When that
// is the order in which they came, the file is the blob; else it is copied into one.
//
// Memory: 12 bytes and a hash entry (about 50) a chunk kept, 4 bytes a reference, 2 MiB of buffers.
// Single-threaded. Errors: kResourceExhausted "layer.no_space", kInternal "layer.io".
class ChunkStore {
 public:
  static constexpr uint64_t kChunkBytes = 64 << 10;
  static constexpr uint32_t kHole = UINT32_MAX;

  // Makes `name` below `dir`, which stays open as long as this lives.
  static Result<std::unique_ptr<ChunkStore>> Create(int dir, std::string name);
  ~ChunkStore();
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;

  // One file: BeginFile, Write in ascending order, EndFile with the size that the file has. What no
  // Write covers is a hole. Returns the first of the file's references, one a chunk.
  void BeginFile();
  Result<void> Write(uint64_t offset, std::span<const uint8_t> bytes);
  Result<uint32_t> EndFile(uint64_t size);
  static uint64_t CountOf(uint64_t size) { return (size + kChunkBytes - 1) / kChunkBytes; }

  // The chunk's number or kHole.
  uint32_t chunk(uint32_t reference) const { return references_[reference]; }

  // Gives a chunk the next place in the blob unless it has one.
  void Place(uint32_t chunk);
  uint32_t block(uint32_t chunk) const { return chunks_[chunk].placed; }  // its place
  uint32_t placed_blocks() const { return placed_blocks_; }
  uint64_t placed_bytes() const { return placed_blocks_ * kBlock; }

  struct Blob {
    FileDigest digest;
    bool copied = false;  // the order was another, so the content was written twice
  };
  // Leaves the blob of all chunks placed under the name, synced. `proceed` (may be empty) is asked
  // with the bytes done; false: kCancelled "layer.cancelled".
  Result<Blob> Finish(const std::function<bool(uint64_t)>& proceed);

 private:
  static constexpr uint64_t kBlock = 4096;
  struct Chunk {
    uint32_t stored;  // block in the file
    uint32_t placed;
    uint32_t blocks;
  };
  using Hash = std::array<uint64_t, 2>;
  struct HashOf {
    size_t operator()(const Hash& hash) const { return hash[0]; }
  };

  ChunkStore(int dir, std::string name, os::UniqueFd file);
  Result<void> CloseChunk(uint64_t length);
  Result<uint32_t> Keep(std::span<const uint8_t> bytes);
  Result<bool> Same(const Chunk& chunk, std::span<const uint8_t> bytes);
  Result<void> Flush();
  Result<void> CopyOut(const std::function<bool(uint64_t)>& proceed, FileDigest& digest);

  int dir_;
  std::string name_;
  os::UniqueFd file_;
  uint64_t seed_;
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> references_;
  std::unordered_map<Hash, uint32_t, HashOf> known_;
  uint32_t stored_blocks_ = 0;
  uint32_t placed_blocks_ = 0;
  bool in_order_ = true;  // each chunk was placed where it is stored

  uint32_t first_reference_ = 0;  // of the present file
  std::vector<uint8_t> partial_;  // the present chunk
  size_t partial_end_ = 0;        // 0: nothing of it has come
  std::vector<uint8_t> pending_;  // whole chunks not written yet
  uint64_t flushed_ = 0;
  uint64_t space_checked_ = 0;
  std::vector<uint8_t> compare_;
};

}  // namespace dsec::image

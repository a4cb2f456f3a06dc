// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/result.h"
#include "image/digest.h"
#include "image/layer.h"

namespace dsec::image {

// In the folder of a layer from format 3 on: the SHA-256 of each chunk of data.blob, 32 bytes each,
// in their order. Chunks are of one size, the last may be shorter.
inline constexpr char kTableName[] = "chunks.sha256";
// Of new layers. What is read at random is fetched and checked by the chunk: 1 MiB brings in four
// times as much for a small file and gains nothing in a row, since neighbours are fetched together.
inline constexpr uint32_t kChunkBytes = 256 << 10;

// The digests of one blob's chunks, proved by the manifest. A value.
class ChunkTable {
 public:
  ChunkTable() = default;
  // Takes the bytes of the file. kFailedPrecondition "layer.unverifiable": the layer has no such
  // table. kInternal "layer.corrupt": these bytes are not its.
  static Result<ChunkTable> Parse(const Manifest& manifest, std::string bytes);
  // The same of another kind of manifest, which says these. kInternal "layer.corrupt".
  static Result<ChunkTable> Parse(uint64_t blob_bytes, const ChunkDigests& chunks,
                                  std::string_view of, std::string bytes);
  // How long the file is.
  static uint64_t FileBytes(const Manifest& manifest);

  uint64_t count() const { return digests_.size() / sizeof(Digest); }
  uint32_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t blob_bytes() const { return blob_bytes_; }
  uint64_t OffsetOf(uint64_t chunk) const { return chunk * chunk_bytes_; }
  uint32_t SizeOf(uint64_t chunk) const;
  // Whether these are the bytes of that chunk.
  bool Matches(uint64_t chunk, std::span<const uint8_t> bytes) const;
  const std::string& bytes() const { return digests_; }

 private:
  uint32_t chunk_bytes_ = 0;
  uint64_t blob_bytes_ = 0;
  std::string digests_;
};

// kFailedPrecondition: the layer was built before its chunks had digests.
Error Unverifiable(const LayerId& id);

// Digests of a blob on its way: of the whole on the caller's thread, of its chunks on another one,
// which may lag behind by 16 pieces (they are copied). Not thread-safe.
class BlobHasher {
 public:
  explicit BlobHasher(uint32_t chunk_bytes);
  ~BlobHasher();
  BlobHasher(const BlobHasher&) = delete;
  BlobHasher& operator=(const BlobHasher&) = delete;

  void Update(std::span<const uint8_t> bytes);
  struct Sums {
    std::string sha256;
    std::string table;
  };
  Sums Finish();  // once

 private:
  void Run(const std::stop_token& stop);
  void HashChunks(std::span<const uint8_t> bytes);
  void CloseChunk();

  const uint32_t chunk_bytes_;
  Sha256 whole_;
  Sha256 chunk_;
  uint32_t in_chunk_ = 0;
  std::string table_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::vector<uint8_t>> queue_;  // its front is being hashed
  std::jthread helper_;                     // last: it uses all of the above
};

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#include "image/chunk_store.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/check.h"
#include "base/rng.h"
#include "image/digest.h"
#include "image/fs.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr size_t kPendingBytes = 1 << 20;
constexpr uint64_t kSpaceCheckBytes = 64 << 20;
constexpr uint32_t kUnplaced = UINT32_MAX;

bool IsZero(std::span<const uint8_t> bytes) {
  return bytes.empty() ||
         (bytes[0] == 0 && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

Result<void> WriteAt(int fd, std::span<const uint8_t> bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return StoreError("write the blob");
    offset += static_cast<uint64_t>(n);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return Ok();
}

Result<void> ReadAt(int fd, std::span<uint8_t> bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n = ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return StoreError("read the blob");
    if (n == 0) return Error(Code::kInternal, "layer.io", "the blob has lost its end");
    offset += static_cast<uint64_t>(n);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return Ok();
}

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

ChunkStore::ChunkStore(int dir, std::string name, os::UniqueFd file, const Compression& compression,
                       uint64_t seed)
    : dir_(dir),
      name_(std::move(name)),
      file_(std::move(file)),
      // Nobody outside can know which contents collide. Results do not depend on it.
      seed_(seed),
      compression_(compression),
      compressor_(compression),
      partial_(kChunkBytes) {
  pending_.reserve(kPendingBytes + kChunkBytes);
}

ChunkStore::~ChunkStore() = default;

Result<std::unique_ptr<ChunkStore>> ChunkStore::Create(int dir, std::string name,
                                                       const Compression& compression,
                                                       std::optional<uint64_t> seed) {
  os::UniqueFd file(::openat(dir, name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid()) return StoreError("make the blob");
  return std::unique_ptr<ChunkStore>(new ChunkStore(
      dir, std::move(name), std::move(file), compression, seed ? *seed : Rng::FromSystem().Next()));
}

void ChunkStore::BeginFile() {
  first_reference_ = static_cast<uint32_t>(references_.size());
  partial_end_ = 0;
}

Result<void> ChunkStore::Write(uint64_t offset, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const uint64_t at = offset % kChunkBytes;
    const uint64_t index = offset / kChunkBytes;
    if (index != references_.size() - first_reference_) {
      if (partial_end_ > 0) DSEC_TRY_VOID(CloseChunk(kChunkBytes));
      references_.resize(first_reference_ + index, kHole);
    }
    const size_t step = std::min<uint64_t>(bytes.size(), kChunkBytes - at);
    if (step == kChunkBytes) {
      DSEC_TRY(const uint32_t chunk, Keep(bytes.first(step), step));
      references_.push_back(chunk);
    } else {
      std::memset(partial_.data() + partial_end_, 0, at - partial_end_);
      std::memcpy(partial_.data() + at, bytes.data(), step);
      partial_end_ = at + step;
      if (partial_end_ == kChunkBytes) DSEC_TRY_VOID(CloseChunk(kChunkBytes));
    }
    offset += step;
    bytes = bytes.subspan(step);
  }
  return Ok();
}

// Ends the present chunk, of which something has come.
Result<void> ChunkStore::CloseChunk(uint64_t length) {
  const uint64_t padded = RoundUp(length, kBlock);
  std::memset(partial_.data() + partial_end_, 0, padded - partial_end_);
  partial_end_ = 0;
  DSEC_TRY(const uint32_t chunk, Keep({partial_.data(), padded}, length));
  references_.push_back(chunk);
  return Ok();
}

Result<uint32_t> ChunkStore::EndFile(uint64_t size) {
  const uint64_t count = CountOf(size);
  DSEC_CHECK(references_.size() - first_reference_ <= count);
  if (partial_end_ > 0) {
    const uint64_t start = (references_.size() - first_reference_) * kChunkBytes;
    DSEC_TRY_VOID(CloseChunk(std::min(kChunkBytes, size - start)));
  }
  if (first_reference_ + count > UINT32_MAX) {
    return Error(Code::kInvalidArgument, "layer.too_large", "more content than a layer can hold");
  }
  references_.resize(first_reference_ + count, kHole);
  return first_reference_;
}

Result<uint32_t> ChunkStore::Keep(std::span<const uint8_t> blocks, uint64_t bytes) {
  if (IsZero(blocks)) return kHole;
  if (!compression_.on()) bytes = blocks.size();
  const XXH128_hash_t hash = XXH3_128bits_withSeed(blocks.data(), blocks.size(), seed_ + bytes);
  const auto next = static_cast<uint32_t>(chunks_.size());
  const auto [known, added] = known_.try_emplace(Hash{hash.low64, hash.high64}, next);
  if (!added) {
    DSEC_TRY(const bool same, Same(chunks_[known->second], blocks, bytes));
    if (same) return known->second;
  }
  if (compression_.on()) {
    const auto packed = compressor_.Compress(blocks.first(bytes));
    if (!packed.empty()) return Append(packed, bytes, true);
  }
  return Append(blocks, bytes, false, hash.low64);
}

Result<uint32_t> ChunkStore::Append(std::span<const uint8_t> blocks, uint64_t bytes,
                                    bool compressed, uint64_t hash) {
  const auto count = static_cast<uint32_t>(blocks.size() / kBlock);
  if (kUnplaced - stored_blocks_ <= count) {
    return Error(Code::kInvalidArgument, "layer.too_large", "more content than a layer can hold");
  }
  const auto next = static_cast<uint32_t>(chunks_.size());
  chunks_.push_back({.stored = stored_blocks_,
                     .placed = kUnplaced,
                     .blocks = count,
                     .bytes = static_cast<uint32_t>(bytes) & INT32_MAX,
                     .compressed = compressed ? 1U : 0U,
                     .hash = hash});
  stored_blocks_ += count;
  pending_.insert(pending_.end(), blocks.begin(), blocks.end());
  if (pending_.size() >= kPendingBytes) DSEC_TRY_VOID(Flush());
  return next;
}

Result<std::span<const uint8_t>> ChunkStore::Stored(const Chunk& chunk) {
  const uint64_t start = chunk.stored * kBlock;
  const uint64_t size = chunk.blocks * kBlock;
  if (start >= flushed_) return std::span<const uint8_t>(pending_).subspan(start - flushed_, size);
  stored_.resize(size);
  DSEC_TRY_VOID(ReadAt(file_.get(), stored_, start));
  return std::span<const uint8_t>(stored_);
}

// Whether a chunk of the same hash has the same bytes.
Result<bool> ChunkStore::Same(const Chunk& chunk, std::span<const uint8_t> blocks, uint64_t bytes) {
  if (chunk.bytes != bytes) return false;
  DSEC_TRY(std::span<const uint8_t> stored, Stored(chunk));
  if (chunk.compressed != 0) {
    unpacked_.resize(bytes);
    DSEC_TRY_VOID(Compressor::Decompress(stored, unpacked_));
    stored = unpacked_;
  }
  return std::memcmp(stored.data(), blocks.data(), bytes) == 0;
}

Result<void> ChunkStore::Flush() {
  if (flushed_ + pending_.size() - space_checked_ >= kSpaceCheckBytes) {
    space_checked_ = flushed_;
    DSEC_TRY_VOID(RequireSpace(file_.get(), pending_.size(), "the content so far"));
  }
  DSEC_TRY_VOID(WriteAt(file_.get(), pending_, flushed_));
  flushed_ += pending_.size();
  pending_.clear();
  return Ok();
}

bool ChunkStore::IsCompressed(uint32_t first_reference, uint64_t size) const {
  if (!compression_.on()) return false;
  const std::span file(references_.data() + first_reference, CountOf(size));
  return std::ranges::any_of(
      file, [this](uint32_t chunk) { return chunk != kHole && compressed(chunk); });
}

Result<void> ChunkStore::Settle(uint32_t first_reference, uint64_t size) {
  if (!IsCompressed(first_reference, size)) return Ok();
  const std::span file(references_.data() + first_reference, CountOf(size));
  uint64_t plain = 0, saved = 0;  // blocks
  for (const uint32_t number : file) {
    if (number == kHole) continue;
    const Chunk& chunk = chunks_[number];
    const uint64_t blocks = RoundUp(chunk.bytes, kBlock) / kBlock;
    plain += blocks;
    saved += blocks - chunk.blocks;
  }
  const uint64_t map_bytes = RoundUp(size, kBlock) / kBlock * sizeof(uint64_t);
  const bool worth = saved * 8 >= plain && saved * kBlock >= map_bytes * 4;
  for (size_t i = 0; i < file.size(); ++i) {
    if (worth && file[i] == kHole) {
      DSEC_TRY(file[i], ZerosOf(std::min(kChunkBytes, size - i * kChunkBytes)));
    } else if (!worth && file[i] != kHole) {
      DSEC_TRY(file[i], PlainOf(file[i]));
    }
  }
  return Ok();
}

// The same content in a chunk that is not compressed.
Result<uint32_t> ChunkStore::PlainOf(uint32_t number) {
  if (!compressed(number)) return number;
  if (const auto known = plain_.find(number); known != plain_.end()) return known->second;
  const Chunk chunk = chunks_[number];
  DSEC_TRY(const auto stored, Stored(chunk));
  unpacked_.resize(chunk.bytes);
  DSEC_TRY_VOID(Compressor::Decompress(stored, unpacked_));
  unpacked_.resize(RoundUp(chunk.bytes, kBlock));
  DSEC_TRY(const uint32_t made, Append(unpacked_, chunk.bytes, false));
  plain_.emplace(number, made);
  return made;
}

// Linux 6.12 knows no holes among compressed clusters.
Result<uint32_t> ChunkStore::ZerosOf(uint64_t bytes) {
  if (const auto known = zeros_.find(bytes); known != zeros_.end()) return known->second;
  const std::vector<uint8_t> zeros(RoundUp(bytes, kBlock));
  const auto packed = compressor_.Compress({zeros.data(), bytes});
  DSEC_TRY(const uint32_t made,
           packed.empty() ? Append(zeros, bytes, false) : Append(packed, bytes, true));
  zeros_.emplace(bytes, made);
  return made;
}

void ChunkStore::Place(uint32_t chunk) {
  Chunk& placed = chunks_[chunk];
  if (placed.placed != kUnplaced) return;
  placed.placed = placed_blocks_;
  in_order_ = in_order_ && placed.placed == placed.stored;
  placed_blocks_ += placed.blocks;
}

uint64_t ChunkStore::HashOf(std::span<const uint8_t> blocks, uint64_t seed) {
  return XXH3_128bits_withSeed(blocks.data(), blocks.size(), seed + blocks.size()).low64;
}

std::vector<ChunkStore::Placed> ChunkStore::placed() const {
  std::vector<Placed> list;
  for (const Chunk& chunk : chunks_) {
    if (chunk.placed != kUnplaced) list.push_back({chunk.hash, chunk.placed, chunk.blocks});
  }
  std::ranges::sort(list, {}, &Placed::block);
  return list;
}

Result<ChunkStore::Blob> ChunkStore::Finish(const std::function<bool(uint64_t)>& proceed) {
  const bool copied = !in_order_ || placed_blocks_ != stored_blocks_;
  if (copied) {
    const std::string name = name_ + ".ordered";
    DSEC_TRY(auto blob, FinishInto(dir_, name, proceed));
    if (::renameat(dir_, name.c_str(), dir_, name_.c_str()) != 0)
      return StoreError("name the blob");
    return blob;
  }
  DSEC_TRY_VOID(Flush());
  pending_ = {};
  known_ = {};
  BlobHasher hasher(image::kChunkBytes);
  DSEC_TRY_VOID(HashInPlace(proceed, hasher));
  if (::fsync(file_.get()) != 0) return StoreError("fsync the blob");
  return Describe(hasher, false);
}

Result<ChunkStore::Blob> ChunkStore::FinishInto(int dir, const std::string& name,
                                                const std::function<bool(uint64_t)>& proceed) {
  DSEC_TRY_VOID(Flush());
  pending_ = {};
  known_ = {};
  BlobHasher hasher(image::kChunkBytes);
  DSEC_TRY(const auto out, CopyOut(dir, name, proceed, hasher));
  if (::fsync(out.get()) != 0) return StoreError("fsync the blob");
  return Describe(hasher, true);
}

ChunkStore::Blob ChunkStore::Describe(BlobHasher& hasher, bool copied) const {
  Blob blob;
  blob.digest.size = placed_blocks_ * kBlock;
  blob.copied = copied;
  auto sums = hasher.Finish();
  blob.digest.sha256 = std::move(sums.sha256);
  blob.chunks = {image::kChunkBytes, Sha256Hex(sums.table)};
  blob.table = std::move(sums.table);
  return blob;
}

void ChunkStore::BeginPlacement() {
  for (Chunk& chunk : chunks_) chunk.placed = kUnplaced;
  placed_blocks_ = 0;
  in_order_ = true;
}

Result<void> ChunkStore::HashInPlace(const std::function<bool(uint64_t)>& proceed,
                                     BlobHasher& hasher) {
  std::vector<uint8_t> buffer(kPendingBytes);
  const uint64_t size = placed_bytes();
  for (uint64_t done = 0; done < size;) {
    const std::span<uint8_t> bytes(buffer.data(), std::min<uint64_t>(buffer.size(), size - done));
    DSEC_TRY_VOID(ReadAt(file_.get(), bytes, done));
    hasher.Update(bytes);
    done += bytes.size();
    if (proceed && !proceed(done)) {
      return Error(Code::kCancelled, "layer.cancelled", "cancelled while hashing");
    }
  }
  return Ok();
}

Result<os::UniqueFd> ChunkStore::CopyOut(int dir, const std::string& name,
                                         const std::function<bool(uint64_t)>& proceed,
                                         BlobHasher& hasher) {
  DSEC_TRY_VOID(RequireSpace(file_.get(), placed_bytes(), "the blob in its order"));
  os::UniqueFd out(::openat(dir, name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!out.valid()) return StoreError("make the blob");
  std::vector<const Chunk*> order;
  for (const Chunk& chunk : chunks_) {
    if (chunk.placed != kUnplaced) order.push_back(&chunk);
  }
  std::ranges::sort(order, {}, &Chunk::placed);
  std::vector<uint8_t> buffer(kPendingBytes);
  uint64_t done = 0;
  size_t filled = 0;
  const auto write = [&]() -> Result<void> {
    const std::span<const uint8_t> bytes(buffer.data(), filled);
    hasher.Update(bytes);
    DSEC_TRY_VOID(WriteAt(out.get(), bytes, done));
    done += filled;
    filled = 0;
    if (proceed && !proceed(done)) {
      return Error(Code::kCancelled, "layer.cancelled", "cancelled while writing the blob");
    }
    return Ok();
  };
  for (size_t i = 0; i < order.size();) {
    // A run that lies together in both files, as far as the buffer goes.
    const Chunk& first = *order[i];
    uint64_t blocks = 0;
    const uint64_t room = (buffer.size() - filled) / kBlock;
    for (; i < order.size() && order[i]->stored == first.stored + blocks &&
           blocks + order[i]->blocks <= room;
         ++i) {
      blocks += order[i]->blocks;
    }
    if (blocks > 0) {
      DSEC_TRY_VOID(
          ReadAt(file_.get(), {buffer.data() + filled, blocks * kBlock}, first.stored * kBlock));
      filled += blocks * kBlock;
    } else {
      DSEC_TRY_VOID(write());
    }
  }
  DSEC_TRY_VOID(write());
  return out;
}

}  // namespace dsec::image

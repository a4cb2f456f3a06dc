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

ChunkStore::ChunkStore(int dir, std::string name, os::UniqueFd file)
    : dir_(dir),
      name_(std::move(name)),
      file_(std::move(file)),
      // Nobody outside can know which contents collide. Results do not depend on it.
      seed_(Rng::FromSystem().Next()),
      partial_(kChunkBytes) {
  pending_.reserve(kPendingBytes + kChunkBytes);
}

ChunkStore::~ChunkStore() = default;

Result<std::unique_ptr<ChunkStore>> ChunkStore::Create(int dir, std::string name) {
  os::UniqueFd file(::openat(dir, name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid()) return StoreError("make the blob");
  return std::unique_ptr<ChunkStore>(new ChunkStore(dir, std::move(name), std::move(file)));
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
      DSEC_TRY(const uint32_t chunk, Keep(bytes.first(step)));
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
  DSEC_TRY(const uint32_t chunk, Keep({partial_.data(), padded}));
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

Result<uint32_t> ChunkStore::Keep(std::span<const uint8_t> bytes) {
  if (IsZero(bytes)) return kHole;
  const XXH128_hash_t hash = XXH3_128bits_withSeed(bytes.data(), bytes.size(), seed_);
  const auto blocks = static_cast<uint32_t>(bytes.size() / kBlock);
  const auto next = static_cast<uint32_t>(chunks_.size());
  const auto [known, added] = known_.try_emplace(Hash{hash.low64, hash.high64}, next);
  if (!added) {
    DSEC_TRY(const bool same, Same(chunks_[known->second], bytes));
    if (same) return known->second;
  }
  if (kUnplaced - stored_blocks_ <= blocks) {
    return Error(Code::kInvalidArgument, "layer.too_large", "more content than a layer can hold");
  }
  chunks_.push_back({stored_blocks_, kUnplaced, blocks});
  stored_blocks_ += blocks;
  pending_.insert(pending_.end(), bytes.begin(), bytes.end());
  if (pending_.size() >= kPendingBytes) DSEC_TRY_VOID(Flush());
  return next;
}

// Whether a chunk of the same hash has the same bytes.
Result<bool> ChunkStore::Same(const Chunk& chunk, std::span<const uint8_t> bytes) {
  if (chunk.blocks * kBlock != bytes.size()) return false;
  const uint64_t start = chunk.stored * kBlock;
  if (start >= flushed_) {
    return std::memcmp(pending_.data() + (start - flushed_), bytes.data(), bytes.size()) == 0;
  }
  compare_.resize(bytes.size());
  DSEC_TRY_VOID(ReadAt(file_.get(), compare_, start));
  return std::memcmp(compare_.data(), bytes.data(), bytes.size()) == 0;
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

void ChunkStore::Place(uint32_t chunk) {
  Chunk& placed = chunks_[chunk];
  if (placed.placed != kUnplaced) return;
  placed.placed = placed_blocks_;
  in_order_ = in_order_ && placed.placed == placed.stored;
  placed_blocks_ += placed.blocks;
}

Result<ChunkStore::Blob> ChunkStore::Finish(const std::function<bool(uint64_t)>& proceed) {
  DSEC_TRY_VOID(Flush());
  pending_ = {};
  known_ = {};
  Blob blob;
  blob.digest.size = placed_blocks_ * kBlock;
  blob.copied = !in_order_ || placed_blocks_ != stored_blocks_;
  if (blob.copied) {
    DSEC_TRY_VOID(CopyOut(proceed, blob.digest));
  } else {
    DSEC_TRY(blob.digest.sha256, Sha256File(file_.get(), proceed));
  }
  if (::fsync(file_.get()) != 0) return StoreError("fsync the blob");
  return blob;
}

Result<void> ChunkStore::CopyOut(const std::function<bool(uint64_t)>& proceed, FileDigest& digest) {
  DSEC_TRY_VOID(RequireSpace(file_.get(), digest.size, "the blob in its order"));
  const std::string name = name_ + ".ordered";
  os::UniqueFd out(::openat(dir_, name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!out.valid()) return StoreError("make the blob");
  std::vector<const Chunk*> order;
  for (const Chunk& chunk : chunks_) {
    if (chunk.placed != kUnplaced) order.push_back(&chunk);
  }
  std::ranges::sort(order, {}, &Chunk::placed);
  Sha256 sha;
  std::vector<uint8_t> buffer(kPendingBytes);
  uint64_t done = 0;
  size_t filled = 0;
  const auto write = [&]() -> Result<void> {
    const std::span<const uint8_t> bytes(buffer.data(), filled);
    sha.Update(bytes);
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
  digest.sha256 = sha.Finish();
  if (::renameat(dir_, name.c_str(), dir_, name_.c_str()) != 0) return StoreError("name the blob");
  file_ = std::move(out);
  return Ok();
}

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#include "image/chunk_table.h"

#include <algorithm>
#include <cstring>
namespace dsec::image {
namespace {

constexpr size_t kMostQueued = 16;

uint64_t CountOf(uint64_t bytes, const ChunkDigests& chunks) {
  if (chunks.bytes == 0) return 0;
  return bytes / chunks.bytes + (bytes % chunks.bytes != 0 ? 1 : 0);
}

}  // namespace

Error Unverifiable(const LayerId& id) {
  return Error(
      Code::kFailedPrecondition, "layer.unverifiable",
      fmt::format(
          "{} was built without digests of its chunks: build it again from its "
          "source, or write it anew with `dsec layer flatten --kind KIND --name NEW:TAG OLD`, "
          "and use the new layer",
          id.str()));
}

uint64_t ChunkTable::FileBytes(const Manifest& manifest) {
  return CountOf(manifest.blob.size, manifest.chunks) * sizeof(Digest);
}

Result<ChunkTable> ChunkTable::Parse(const Manifest& manifest, std::string bytes) {
  if (manifest.chunks.bytes == 0) return Unverifiable(manifest.Id());
  return Parse(manifest.blob.size, manifest.chunks, manifest.Id().str(), std::move(bytes));
}

Result<ChunkTable> ChunkTable::Parse(uint64_t blob_bytes, const ChunkDigests& chunks,
                                     std::string_view of, std::string bytes) {
  if (bytes.size() != CountOf(blob_bytes, chunks) * sizeof(Digest) ||
      Sha256Hex(bytes) != chunks.sha256) {
    return Error(Code::kInternal, "layer.corrupt",
                 fmt::format("{}: {} is not the table of its manifest", of, kTableName));
  }
  ChunkTable table;
  table.chunk_bytes_ = chunks.bytes;
  table.blob_bytes_ = blob_bytes;
  table.digests_ = std::move(bytes);
  return table;
}

uint32_t ChunkTable::SizeOf(uint64_t chunk) const {
  return static_cast<uint32_t>(std::min<uint64_t>(chunk_bytes_, blob_bytes_ - OffsetOf(chunk)));
}

bool ChunkTable::Matches(uint64_t chunk, std::span<const uint8_t> bytes) const {
  if (chunk >= count() || bytes.size() != SizeOf(chunk)) return false;
  const Digest digest = Sha256Of(bytes);
  return std::memcmp(digest.data(), digests_.data() + chunk * sizeof(Digest), sizeof(Digest)) == 0;
}

BlobHasher::BlobHasher(uint32_t chunk_bytes)
    : chunk_bytes_(chunk_bytes), helper_([this](const std::stop_token& stop) { Run(stop); }) {}

BlobHasher::~BlobHasher() = default;

void BlobHasher::Update(std::span<const uint8_t> bytes) {
  if (bytes.empty()) return;
  std::vector<uint8_t> copy(bytes.begin(), bytes.end());
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.size() < kMostQueued; });
    queue_.push_back(std::move(copy));
  }
  changed_.notify_all();
  whole_.Update(bytes);
}

void BlobHasher::Run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [&] { return !queue_.empty(); })) {
    const std::vector<uint8_t>& bytes = queue_.front();
    lock.unlock();
    HashChunks(bytes);
    lock.lock();
    queue_.pop_front();
    changed_.notify_all();
  }
}

void BlobHasher::HashChunks(std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const size_t step = std::min<size_t>(bytes.size(), chunk_bytes_ - in_chunk_);
    chunk_.Update(bytes.first(step));
    in_chunk_ += static_cast<uint32_t>(step);
    bytes = bytes.subspan(step);
    if (in_chunk_ == chunk_bytes_) CloseChunk();
  }
}

void BlobHasher::CloseChunk() {
  const Digest digest = chunk_.Next();
  table_.append(reinterpret_cast<const char*>(digest.data()), digest.size());
  in_chunk_ = 0;
}

BlobHasher::Sums BlobHasher::Finish() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty(); });
  }
  if (in_chunk_ > 0) CloseChunk();
  return {whole_.Finish(), std::move(table_)};
}

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#include "blobfs/layers.h"

#include <fcntl.h>

#include <algorithm>
#include <vector>

#include "base/log.h"
#include "blobfs/settings.h"
#include "image/digest.h"
#include "image/erofs_writer.h"
#include "image/layer_files.h"
#include "os/file.h"

namespace dsec::blobfs {
namespace {

constexpr size_t kMaxTable = 64 << 20;  // of a blob of 512 GiB
constexpr uint64_t kCopyBytes = 1 << 20;

Error Corrupt(const std::string& hex, std::string_view what) {
  return Error(Code::kInternal, "layer.corrupt", fmt::format("sha256:{}: {}", hex, what));
}

}  // namespace

std::shared_ptr<Layer> Layers::Peek(const std::string& hex) {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(hex);
  if (found == known_.end()) return nullptr;
  order_.splice(order_.begin(), order_, found->second.place);
  return found->second.layer;
}

Result<std::shared_ptr<Layer>> Layers::Find(const std::string& hex) {
  {
    // One finds it for all.
    std::unique_lock lock(mutex_);
    found_.wait(lock, [&] { return !finding_.contains(hex); });
    if (const auto found = known_.find(hex); found != known_.end()) return found->second.layer;
    finding_.insert(hex);
  }
  auto made = Make(hex);
  std::vector<std::shared_ptr<Layer>> dropped;  // after the lock
  {
    const std::lock_guard lock(mutex_);
    finding_.erase(hex);
    if (made.ok()) {
      order_.push_front(hex);
      known_.emplace(hex, Known{*made, order_.begin()});
      while (known_.size() > kKept) {
        const auto oldest = known_.find(order_.back());
        dropped.push_back(std::move(oldest->second.layer));
        known_.erase(oldest);
        order_.pop_back();
      }
    }
  }
  found_.notify_all();
  return made;
}

Result<std::shared_ptr<Layer>> Layers::Make(const std::string& hex) {
  std::optional<DataCache::Proof> proof;
  if (cache_ != nullptr) proof = cache_->ReadProof(hex);
  std::shared_ptr<CachedLayer> local;
  const bool had = proof.has_value();
  if (!had) {
    DSEC_TRY(proof, Fetch(hex));
  }
  if (cache_ != nullptr) {
    const auto keep = [&]() -> Result<void> {
      if (!had) DSEC_TRY_VOID(cache_->WriteProof(hex, *proof));
      DSEC_TRY(local, cache_->Use(hex, proof->table));
      return Ok();
    };
    const auto kept = keep();
    // Served all the same, from the source alone.
    if (!kept.ok()) log::Warn("blobfs.no_local_copy", {{"layer", hex}, {"error", kept.error()}});
  }
  auto reader = source_.Open(hex, image::kBlobName, proof->table.blob_bytes());
  return std::make_shared<Layer>(hex, *std::move(proof), std::move(local), std::move(reader));
}

Result<DataCache::Proof> Layers::Fetch(const std::string& hex) {
  DSEC_TRY(const std::string text, source_.ReadAll(hex, image::kManifestName, kMaxManifest));
  if (image::Sha256Hex(text) != hex) return Corrupt(hex, "the manifest does not have this digest");
  DSEC_TRY(const auto manifest, image::Manifest::Parse(text));
  if (manifest.chunks.bytes == 0) return image::Unverifiable(manifest.Id());
  const uint64_t size = image::ChunkTable::FileBytes(manifest);
  if (size > kMaxTable) return Corrupt(hex, "its blob is larger than any layer's");
  DSEC_TRY(std::string table, source_.ReadAll(hex, image::kTableName, size));
  DSEC_TRY(auto parsed, image::ChunkTable::Parse(manifest, std::move(table)));
  return DataCache::Proof{text, std::move(parsed)};
}

Result<os::UniqueFd> Layers::FetchMeta(const Layer& layer, const std::string& dir) {
  DSEC_TRY(const auto manifest, image::Manifest::Parse(layer.proof.manifest));
  const image::FileDigest& meta = manifest.meta;
  DSEC_TRY(auto file, os::OpenAt(AT_FDCWD, dir.c_str(), O_TMPFILE | O_RDWR, 0600));
  const auto reader = source_.Open(layer.hex, image::kMetaName, meta.size);
  std::vector<uint8_t> buffer(std::min(meta.size, kCopyBytes));
  image::Sha256 sha;
  for (uint64_t done = 0; done < meta.size;) {
    const std::span<uint8_t> part(buffer.data(),
                                  std::min<uint64_t>(buffer.size(), meta.size - done));
    DSEC_TRY_VOID(reader->ReadAt(done, part));
    sha.Update(part);
    DSEC_TRY_VOID(
        os::WriteAll(file.get(), {reinterpret_cast<const char*>(part.data()), part.size()}));
    done += part.size();
  }
  if (sha.Finish() != meta.sha256) return Corrupt(layer.hex, "the metadata have a wrong digest");
  return file;
}

}  // namespace dsec::blobfs

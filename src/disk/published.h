// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/result.h"
#include "blobfs/chunk_loader.h"
#include "blobfs/data_cache.h"
#include "blobfs/source.h"
#include "disk/layer.h"

namespace dsec::disk {

// Layers on a shared root: <root>/blobs/<hex>/{manifest.json, layer.lsmt, chunks.sha256}, hex the
// SHA-256 of the manifest, which proves the table of digests, which proves each chunk of the layer.
inline constexpr char kLayerName[] = "layer.lsmt";

// manifest.json: one line of JSON, keys sorted, no white space.
struct PublishedManifest {
  uint64_t bytes = 0;  // of layer.lsmt
  std::string sha256;
  uint32_t chunk_bytes = 0;
  std::string chunks_sha256;
  uint64_t virtual_bytes = 0;
  std::string uuid;
  std::string parent_uuid;
  std::string Encode() const;
  // Canonical text only; kInternal "layer.corrupt".
  static Result<PublishedManifest> Parse(const std::string& text);
};

// Copies a sealed layer to the root, synced and renamed as a whole. Its hex, also when it was there
// already. `proceed` (may be empty) is asked with the bytes done.
Result<std::string> Publish(const std::string& root, const std::string& layer,
                            const std::function<bool(uint64_t)>& proceed);
// Reads a published layer through: digests, format, data of each entry. "layer.corrupt",
// "disk.bad_layer".
Result<PublishedManifest> VerifyPublished(const std::string& root, const std::string& hex);
// A local layer in the same way, without digests. Bytes of data.
Result<uint64_t> VerifyLayer(const Layer& layer);

// Finds published layers and reads them on demand: chunks of 256 KiB, each with its digest, kept in
// memory and in a bounded local copy, fetched once however many wait (blobfs::ChunkLoader). Calls
// on the root are made on threads of the loader. Thread-safe. Layers that it has given must have
// gone before it goes.
class PublishedStore {
 public:
  struct Options {
    std::string root;
    std::string cache_dir;  // empty: nothing is kept on disk
    uint64_t cache_bytes = uint64_t{16} << 30;
    bool keep_proofs = false;  // see DataCache
    blobfs::LoaderOptions loader;
  };
  // The layers come from `source`, or the folder `root` when that is null.
  static Result<std::unique_ptr<PublishedStore>> Open(Options options,
                                                      std::unique_ptr<blobfs::LayerSource> source);
  ~PublishedStore();

  // Reads and checks manifest, table, header, trailer. Waits for the root unless all are here.
  Result<std::shared_ptr<const Layer>> Find(const std::string& hex);
  const blobfs::Counts& counts() const { return counts_; }

 private:
  explicit PublishedStore(Options options) : options_(std::move(options)) {}
  Result<blobfs::DataCache::Proof> Fetch(const std::string& hex);

  const Options options_;
  blobfs::Counts counts_;
  std::unique_ptr<blobfs::LayerSource> source_;
  std::unique_ptr<blobfs::DataCache> cache_;
  std::unique_ptr<blobfs::ChunkLoader> loader_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Layer>> known_;
};

}  // namespace dsec::disk

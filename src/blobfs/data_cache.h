// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "image/chunk_table.h"
#include "image/layer.h"
#include "os/unique_fd.h"

namespace dsec::blobfs {

// What is counted; all since the start of the process but the gauges.
struct Counts {
  std::atomic<uint64_t> fetched_bytes = 0;
  std::atomic<uint64_t> fetches = 0;
  std::atomic<uint64_t> fetch_failures = 0;
  std::atomic<uint64_t> wrong_digests = 0;   // of the source
  std::atomic<uint64_t> damaged_chunks = 0;  // of the cache
  std::atomic<uint64_t> memory_hits = 0;     // chunks
  std::atomic<uint64_t> disk_hits = 0;       // chunks
  std::atomic<uint64_t> not_kept = 0;        // chunks that had no room on disk
  std::atomic<uint64_t> evicted = 0;         // chunks
  std::atomic<uint64_t> cache_bytes = 0;     // gauge
};

// The table that a manifest, whose digest has been checked, proves.
using ParseProof =
    std::function<Result<image::ChunkTable>(const std::string& manifest, std::string table)>;
Result<image::ChunkTable> ParseLayerProof(const std::string& manifest, std::string table);

class DataCache;

// The local copy of one layer's content, as far as it has come.
class CachedLayer {
 private:
  friend class DataCache;
  struct Place {
    CachedLayer* layer;
    uint64_t chunk;
    uint64_t written;  // which of all writes it came by
  };
  std::string hex_;
  os::UniqueFd data_;  // sparse; past the page cache where that can be
  uint32_t chunk_bytes_ = 0;
  uint64_t blob_bytes_ = 0;
  // Of the lock of the cache. By chunk: its place in the order of use, if it is there.
  std::vector<std::optional<std::list<Place>::iterator>> places_;
};

// Chunks of layers on a local file system, each checked by whoever reads it:
//
//   <dir>/<hex>/manifest.json, chunks.sha256   what proves the chunks
//   <dir>/<hex>/data                           sparse; a chunk is there when it is no hole
//   <dir>/new-<ulid>/                          being made; Open removes what a death has left
//
// There is no other record of what is there: a chunk that was cut off by a crash, or rots, has not
// its digest, and is fetched anew. So nothing is synced. No room: what is read is not kept. One
// process has a folder open. Thread-safe, blocking on local disk. Errors: "layer.no_space",
// "layer.io".
class DataCache {
 public:
  // Makes the folder (0700). Chunks beyond `max_bytes` go, the longest unused first, those of
  // layers that were not used since the start before all others. `keep_proofs`: manifests and
  // tables stay, since a session that goes on may need any of them.
  static Result<std::unique_ptr<DataCache>> Open(const std::string& dir, uint64_t max_bytes,
                                                 bool keep_proofs, Counts& counts,
                                                 ParseProof parse = ParseLayerProof);
  ~DataCache();
  DataCache(const DataCache&) = delete;
  DataCache& operator=(const DataCache&) = delete;

  // Manifest and table, checked; nullopt: they are not there or damaged.
  struct Proof {
    std::string manifest;  // its text, whose digest is the layer's id
    image::ChunkTable table;
  };
  std::optional<Proof> ReadProof(const std::string& hex);
  Result<void> WriteProof(const std::string& hex, const Proof& proof);
  std::vector<std::string> Layers() const;  // that have a folder

  // Of a layer that has its proof here. Its folder stays while this lives.
  Result<std::shared_ptr<CachedLayer>> Use(const std::string& hex, const image::ChunkTable& table);
  bool Has(const CachedLayer& layer, uint64_t chunk) const;
  // Into a buffer aligned to 4096 bytes. What is there, by a number for Drop; 0: nothing is, or it
  // cannot be read.
  uint64_t Read(CachedLayer& layer, uint64_t chunk, std::span<uint8_t> out);
  // From such a buffer.
  void Write(CachedLayer& layer, uint64_t chunk, std::span<const uint8_t> bytes);
  // What was read had not its digest. False: it had gone meanwhile.
  bool Drop(CachedLayer& layer, uint64_t chunk, uint64_t read);

 private:
  using Place = CachedLayer::Place;
  // A layer that was not used since the start.
  struct Cold {
    uint64_t bytes = 0;
    timespec used = {};
  };
  DataCache(uint64_t max_bytes, bool keep_proofs, Counts& counts, ParseProof parse)
      : max_bytes_(max_bytes),
        keep_proofs_(keep_proofs),
        counts_(counts),
        parse_(std::move(parse)) {}
  void FindChunks(CachedLayer& layer);
  void MakeRoom(uint64_t bytes);
  void EvictCold();
  void Forget(CachedLayer& layer, uint64_t chunk);
  void RemoveIfUnused(const std::string& hex);
  void Account(int64_t change);

  const uint64_t max_bytes_;
  const bool keep_proofs_;
  Counts& counts_;
  const ParseProof parse_;
  os::UniqueFd dir_;
  mutable std::mutex mutex_;                                  // of all below and of places
  std::list<Place> order_;                                    // most recently used first
  std::map<std::string, std::shared_ptr<CachedLayer>> used_;  // by hex
  std::map<std::string, Cold> cold_;
  std::set<std::pair<const CachedLayer*, uint64_t>> writing_;  // chunks
  uint64_t writes_ = 0;
  uint64_t bytes_ = 0;
  MonoTime full_until_ = {};
};

}  // namespace dsec::blobfs

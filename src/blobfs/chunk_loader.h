// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/id.h"
#include "base/result.h"
#include "blobfs/data_cache.h"
#include "image/blob_reader.h"
#include "image/chunk_table.h"

namespace dsec::blobfs {

// Memory for whole chunks, aligned for O_DIRECT. Read-only once it has been filled.
class Buffer {
 public:
  explicit Buffer(size_t size);  // rounded up to 4096 for what reads whole blocks
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::span<uint8_t> bytes() { return {data_, size_}; }
  std::span<const uint8_t> bytes() const { return {data_, size_}; }

 private:
  uint8_t* data_;
  size_t size_;
};

// A part of a checked chunk, held by its buffer.
struct Piece {
  std::shared_ptr<const Buffer> buffer;
  std::span<const uint8_t> bytes;
};

struct LoaderOptions {
  size_t disk_threads = 4;    // that read the local copy and check it
  size_t fetch_threads = 32;  // calls on the source under way; half of them at most for one layer
  // Checked chunks that are kept in memory, so that reads of a few pages do not check a chunk each.
  size_t memory_bytes = 64 << 20;
  // A chunk with a wrong digest is not fetched again for so long.
  std::chrono::milliseconds bad_pause = std::chrono::seconds(2);
};

class ChunkLoader;

// A layer that is served. All but the constructor's is the loader's.
class Layer {
 public:
  // `local`: null when nothing is kept on disk.
  Layer(std::string layer_hex, DataCache::Proof layer_proof, std::shared_ptr<CachedLayer> local,
        std::unique_ptr<image::BlobReader> reader)
      : hex(std::move(layer_hex)),
        proof(std::move(layer_proof)),
        local_(std::move(local)),
        reader_(std::move(reader)) {}
  const std::string hex;
  const DataCache::Proof proof;

 private:
  friend class ChunkLoader;
  struct Fetch;
  static inline std::atomic<uint64_t> made_ = 0;
  const uint64_t serial_ = ++made_;  // names it for ever, which its address does not
  const std::shared_ptr<CachedLayer> local_;
  const std::unique_ptr<image::BlobReader> reader_;
  std::map<uint64_t, std::shared_ptr<Fetch>> fetches_;  // under way, by chunk
  size_t fetching_ = 0;                                 // of them on a thread
  std::map<uint64_t, MonoTime> bad_;                    // chunks with a wrong digest, since when
};

// Reads of layers: from memory, else from the local copy, else from the source, and from neither
// of them without the digest of the chunk. A chunk is fetched once however many wait for it, with
// its missing neighbours of the same read. Nothing blocks the caller. Thread-safe.
class ChunkLoader {
 public:
  using Pieces = std::vector<Piece>;
  // On a thread of the loader, once. kInternal "layer.corrupt", or the error of the source.
  using Done = std::function<void(Result<Pieces>)>;
  // A chunk of the source had a wrong digest; on a thread of the loader.
  using OnBad = std::function<void(const std::string& hex, uint64_t chunk)>;
  struct Job;

  ChunkLoader(DataCache* cache, LoaderOptions options, Counts& counts, OnBad on_bad);
  // Waits for calls under way; stop the source first. Reads that wait are not answered any more.
  ~ChunkLoader();
  ChunkLoader(const ChunkLoader&) = delete;
  ChunkLoader& operator=(const ChunkLoader&) = delete;

  // [offset, offset + size) of the blob, not empty and within it.
  std::shared_ptr<Job> Read(std::shared_ptr<Layer> layer, uint64_t offset, uint32_t size,
                            Done done);
  // Nobody waits for it any more: true when `done` will not be called.
  bool Cancel(const std::shared_ptr<Job>& job);
  // Chunks of the layer that had a wrong digest when they were fetched last; fetches the first of
  // them anew. Blocks.
  std::vector<uint64_t> Recheck(const std::shared_ptr<Layer>& layer);

 private:
  using Fetch = Layer::Fetch;
  using Key = std::pair<uint64_t, uint64_t>;  // serial of the layer, chunk
  struct Kept {
    std::shared_ptr<const Buffer> buffer;
    std::list<Key>::iterator place;
  };
  void DiskThread(const std::stop_token& stop);
  void FetchThread(const std::stop_token& stop);
  void Advance(const std::shared_ptr<Job>& job);
  bool Assemble(Job& job, Pieces& pieces, std::vector<uint64_t>& missing);
  std::shared_ptr<const Buffer> FromMemory(const Layer& layer, uint64_t chunk);
  std::shared_ptr<const Buffer> FromDisk(Layer& layer, uint64_t chunk);
  void Remember(const Layer& layer, uint64_t chunk, std::shared_ptr<const Buffer> buffer);
  void WaitFor(const std::shared_ptr<Job>& job, uint64_t first, uint64_t last);
  std::shared_ptr<Fetch> NextFetch();
  void Run(const std::shared_ptr<Fetch>& fetch);
  void Load(Fetch& fetch);
  bool LoadChunks(Fetch& fetch);
  static void Finish(const std::shared_ptr<Job>& job, Result<Pieces> result);

  DataCache* const cache_;
  const LoaderOptions options_;
  Counts& counts_;
  const OnBad on_bad_;
  std::mutex mutex_;  // of all below and what is the loader's in layers and jobs
  std::condition_variable_any disk_work_;
  std::condition_variable_any fetch_work_;
  std::deque<std::shared_ptr<Job>> jobs_;
  std::list<std::shared_ptr<Fetch>> fetches_;  // that have no thread yet
  std::map<Key, Kept> memory_;
  std::list<Key> memory_order_;  // most recently used first
  size_t memory_used_ = 0;
  std::vector<std::jthread> threads_;  // last: they use all of the above
};

}  // namespace dsec::blobfs

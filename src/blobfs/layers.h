// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "base/result.h"
#include "blobfs/chunk_loader.h"
#include "blobfs/data_cache.h"
#include "blobfs/source.h"
#include "os/unique_fd.h"

namespace dsec::blobfs {

// The layers of one process by their ids: what proves them comes from the local copy or the source,
// and is checked. The ones used last are kept; a layer that has gone from memory is found again.
// Thread-safe, blocking.
class Layers {
 public:
  static constexpr size_t kKept = 512;

  Layers(LayerSource& source, DataCache* cache) : source_(source), cache_(cache) {}

  std::shared_ptr<Layer> Peek(const std::string& hex);  // in memory, or null
  // kNotFound "layer.not_found", kInternal "layer.corrupt", kFailedPrecondition
  // "layer.unverifiable", kUnavailable "layer.unreachable".
  Result<std::shared_ptr<Layer>> Find(const std::string& hex);
  // The metadata of a layer in a file without a name, checked. `dir`: where.
  Result<os::UniqueFd> FetchMeta(const Layer& layer, const std::string& dir);

 private:
  struct Known {
    std::shared_ptr<Layer> layer;
    std::list<std::string>::iterator place;
  };
  Result<DataCache::Proof> Fetch(const std::string& hex);
  Result<std::shared_ptr<Layer>> Make(const std::string& hex);

  LayerSource& source_;
  DataCache* const cache_;
  std::mutex mutex_;
  std::condition_variable found_;
  std::set<std::string> finding_;
  std::map<std::string, Known> known_;
  std::list<std::string> order_;  // most recently used first
};

}  // namespace dsec::blobfs

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "image/chunk_store.h"

struct sqlite3;

namespace dsec::image {

inline constexpr char kChunkIndexName[] = "chunks.db";

// Which files of a store's layers have which chunks: SQLite in the root of the store. It says where
// to look, never what is there: whoever uses an answer compares the bytes. It may be lost, old or
// wrong at the cost of content that is kept twice. Of most layers one chunk in 16 can be found, by
// its hash; the file that most of them are in is then read as a list. Errors as of sql. Not
// thread-safe; several processes may have it open.
class ChunkIndex {
 public:
  // A damaged one is removed and made anew, empty.
  static Result<std::unique_ptr<ChunkIndex>> Open(const std::string& path);
  static void Remove(const std::string& path);
  ~ChunkIndex();
  ChunkIndex(const ChunkIndex&) = delete;
  ChunkIndex& operator=(const ChunkIndex&) = delete;

  // Of the hashes (ChunkStore::HashOf).
  uint64_t seed() const { return seed_; }

  // The files that have something of this content, those that seem to have most of it first.
  Result<std::vector<int64_t>> Rank(std::span<const ChunkStore::Placed> content, size_t most);

  struct Place {
    std::string layer;  // hex digits of its id
    std::string name;   // in its folder
  };
  struct File {
    int64_t id = 0;                          // 0: none
    std::vector<Place> places;               // hard links of one another
    std::vector<ChunkStore::Placed> chunks;  // all that is in it, in its order
  };
  Result<File> Load(int64_t id);

  // A layer has these files: the one of its own content, which may be empty, and links.
  struct Link {
    int64_t file = 0;
    std::string name;
  };
  Result<void> Add(const std::string& layer, const std::string& own_name,
                   std::span<const ChunkStore::Placed> own, const std::vector<Link>& links);
  Result<bool> Knows(const std::string& layer);
  // Forgets places where there is no such file any more.
  Result<void> Prune(const std::function<bool(const Place&)>& exists);
  Result<void> Forget(const Place& place);

 private:
  ChunkIndex() = default;
  Result<void> Init(const std::string& path);

  sqlite3* db_ = nullptr;
  uint64_t seed_ = 0;
};

}  // namespace dsec::image

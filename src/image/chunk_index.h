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
  // A damaged one is removed and made anew, empty; any other failure leaves it. That of another
  // version of this program: kFailedPrecondition "layer.index_schema".
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
  // One file of a layer, which keeps those that are known of it: a file that nobody has listed yet,
  // or one more place of another. Of a list that is too long nothing is kept: 0.
  Result<int64_t> AddFile(const Place& place, std::span<const ChunkStore::Placed> chunks);
  Result<void> AddPlace(const Place& place, int64_t file);
  struct Placement {
    int64_t file = 0;
    Place place;
  };
  Result<std::vector<Placement>> Places();  // all
  // Forgets places where there is no such file any more. The first error of `exists` ends it, and
  // nothing is forgotten.
  Result<void> Prune(const std::function<Result<bool>(const Place&)>& exists);
  // The file with its chunks goes with its last place.
  Result<void> Forget(const Place& place);
  Result<void> ForgetLayer(const std::string& layer);

 private:
  ChunkIndex() = default;
  Result<void> Init(const std::string& path);
  Result<std::vector<Place>> PlacesOf(const std::string& layer);
  Result<int64_t> PutFile(const Place& place, std::span<const ChunkStore::Placed> chunks);
  Result<void> PutPlace(const Place& place, int64_t file);
  Result<void> ForgetNow(const Place& place);

  sqlite3* db_ = nullptr;
  uint64_t seed_ = 0;
};

}  // namespace dsec::image

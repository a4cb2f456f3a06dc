// SPDX-License-Identifier: Apache-2.0
#include "image/chunk_index.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "base/log.h"
#include "base/rng.h"
#include "image/sqlite.h"

namespace dsec::image {
namespace {

using sql::Execute;
using sql::Statement;
using sql::Transaction;

constexpr uint64_t kSchemaVersion = 1;
// Which chunks can be found: all of a small layer, one in so many of another.
constexpr size_t kSmall = 1024;
constexpr uint64_t kSampled = 16;
// Of one hash; what so many files have each by itself is nothing to go by.
constexpr int kMostOfOne = 32;
constexpr uint64_t kMaxList = 64 << 20;

constexpr char kSchema[] = R"sql(
CREATE TABLE settings(seed INTEGER NOT NULL);
CREATE TABLE files(id INTEGER PRIMARY KEY AUTOINCREMENT, chunks BLOB NOT NULL);
CREATE TABLE places(
  file INTEGER NOT NULL, layer TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY(layer, name)) WITHOUT ROWID;
CREATE INDEX places_by_file ON places(file);
CREATE TABLE samples(hash INTEGER NOT NULL, file INTEGER NOT NULL, PRIMARY KEY(hash, file)) WITHOUT ROWID;
PRAGMA user_version = 1;
)sql";

// In the list of a file, where a chunk follows the one before: hash, blocks.
constexpr size_t kListedBytes = sizeof(uint64_t) + sizeof(uint32_t);

bool IsSample(const ChunkStore::Placed& chunk, size_t of) {
  return of <= kSmall || chunk.hash % kSampled == 0;
}

std::vector<uint8_t> EncodeList(std::span<const ChunkStore::Placed> chunks) {
  std::vector<uint8_t> bytes(chunks.size() * kListedBytes);
  uint8_t* at = bytes.data();
  for (const ChunkStore::Placed& chunk : chunks) {
    std::memcpy(at, &chunk.hash, sizeof(chunk.hash));
    std::memcpy(at + sizeof(chunk.hash), &chunk.blocks, sizeof(chunk.blocks));
    at += kListedBytes;
  }
  return bytes;
}

std::vector<ChunkStore::Placed> DecodeList(std::span<const uint8_t> bytes) {
  std::vector<ChunkStore::Placed> chunks;
  if (bytes.size() > kMaxList) return chunks;
  chunks.reserve(bytes.size() / kListedBytes);
  uint64_t block = 0;
  for (; bytes.size() >= kListedBytes; bytes = bytes.subspan(kListedBytes)) {
    ChunkStore::Placed chunk;
    std::memcpy(&chunk.hash, bytes.data(), sizeof(chunk.hash));
    std::memcpy(&chunk.blocks, bytes.data() + sizeof(chunk.hash), sizeof(chunk.blocks));
    chunk.block = static_cast<uint32_t>(block);
    block += chunk.blocks;
    if (chunk.blocks == 0 || block > UINT32_MAX) return {};
    chunks.push_back(chunk);
  }
  return chunks;
}

}  // namespace

ChunkIndex::~ChunkIndex() { ::sqlite3_close_v2(db_); }

void ChunkIndex::Remove(const std::string& path) {
  ::unlink(path.c_str());
  ::unlink((path + "-journal").c_str());
}

Result<std::unique_ptr<ChunkIndex>> ChunkIndex::Open(const std::string& path) {
  for (bool again = false;; again = true) {
    std::unique_ptr<ChunkIndex> index(new ChunkIndex());
    auto opened = index->Init(path);
    if (opened.ok()) return index;
    if (again || opened.error().reason() != "layer.catalog") return std::move(opened).error();
    log::Warn("layer.chunk_index_made_anew", {{"path", path}, {"error", opened.error()}});
    index.reset();
    Remove(path);
  }
}

Result<void> ChunkIndex::Init(const std::string& path) {
  DSEC_TRY_VOID(sql::Open(path, &db_));
  // What a power failure leaves of it is as good as any.
  DSEC_TRY_VOID(Execute(db_, "PRAGMA synchronous = OFF;"));
  Transaction transaction(db_);
  DSEC_TRY_VOID(transaction.Begin());
  Statement version(db_, "PRAGMA user_version");
  DSEC_TRY_VOID(version.Step());
  if (version.NumberAt(0) == 0) {
    DSEC_TRY_VOID(Execute(db_, kSchema));
    Statement seed(db_, "INSERT INTO settings VALUES(?)");
    DSEC_TRY_VOID(seed.Number(Rng::FromSystem().Next()).Run());
  } else if (version.NumberAt(0) != kSchemaVersion) {
    return Error(Code::kInternal, "layer.catalog",
                 fmt::format("{} has schema {}", path, version.NumberAt(0)));
  }
  Statement ask(db_, "SELECT seed FROM settings");
  DSEC_TRY(const bool found, ask.Step());
  if (!found) return Error(Code::kInternal, "layer.catalog", path + " has no seed");
  seed_ = ask.NumberAt(0);
  ask.Rewind();
  version.Rewind();
  return transaction.Commit();
}

Result<std::vector<int64_t>> ChunkIndex::Rank(std::span<const ChunkStore::Placed> content,
                                              size_t most) {
  std::map<int64_t, uint64_t> votes;  // blocks
  Statement find(db_, fmt::format("SELECT file FROM samples WHERE hash = ? LIMIT {}", kMostOfOne));
  for (const ChunkStore::Placed& chunk : content) {
    if (!IsSample(chunk, content.size())) continue;
    find.Rewind();
    find.Number(chunk.hash);
    while (true) {
      DSEC_TRY(const bool more, find.Step());
      if (!more) break;
      votes[static_cast<int64_t>(find.NumberAt(0))] += chunk.blocks;
    }
  }
  std::vector<std::pair<uint64_t, int64_t>> order;
  for (const auto& [file, blocks] : votes) order.emplace_back(blocks, file);
  std::ranges::sort(order, std::greater());
  std::vector<int64_t> files;
  for (const auto& [blocks, file] : order) {
    if (files.size() == most) break;
    files.push_back(file);
  }
  return files;
}

Result<ChunkIndex::File> ChunkIndex::Load(int64_t id) {
  File file;
  const auto number = static_cast<uint64_t>(id);
  Statement list(db_, "SELECT chunks FROM files WHERE id = ?");
  DSEC_TRY(const bool found, list.Number(number).Step());
  if (!found) return file;
  file.id = id;
  file.chunks = DecodeList(list.BytesAt(0));
  Statement places(db_, "SELECT layer, name FROM places WHERE file = ?");
  places.Number(number);
  while (true) {
    DSEC_TRY(const bool more, places.Step());
    if (!more) return file;
    file.places.push_back({places.TextAt(0), places.TextAt(1)});
  }
}

Result<void> ChunkIndex::Add(const std::string& layer, const std::string& own_name,
                             std::span<const ChunkStore::Placed> own,
                             const std::vector<Link>& links) {
  Transaction transaction(db_);
  DSEC_TRY_VOID(transaction.Begin());
  Statement forget(db_, "DELETE FROM places WHERE layer = ?");
  DSEC_TRY_VOID(forget.Text(layer).Run());
  std::vector<Link> all = links;
  if (!own.empty() && own.size() * kListedBytes <= kMaxList) {
    Statement insert(db_, "INSERT INTO files(chunks) VALUES(?)");
    DSEC_TRY_VOID(insert.Bytes(EncodeList(own)).Run());
    const int64_t id = ::sqlite3_last_insert_rowid(db_);
    Statement sample(db_, "INSERT OR IGNORE INTO samples VALUES(?,?)");
    for (const ChunkStore::Placed& chunk : own) {
      if (!IsSample(chunk, own.size())) continue;
      sample.Rewind();
      DSEC_TRY_VOID(sample.Number(chunk.hash).Number(static_cast<uint64_t>(id)).Run());
    }
    sample.Rewind();
    all.push_back({id, own_name});
  }
  for (const Link& link : all) {
    Statement place(db_, "INSERT OR REPLACE INTO places VALUES(?,?,?)");
    DSEC_TRY_VOID(place.Number(static_cast<uint64_t>(link.file)).Text(layer).Text(link.name).Run());
  }
  return transaction.Commit();
}

Result<bool> ChunkIndex::Knows(const std::string& layer) {
  Statement find(db_, "SELECT 1 FROM places WHERE layer = ?");
  return find.Text(layer).Step();
}

Result<void> ChunkIndex::Forget(const Place& place) {
  Statement remove(db_, "DELETE FROM places WHERE layer = ? AND name = ?");
  return remove.Text(place.layer).Text(place.name).Run();
}

Result<void> ChunkIndex::Prune(const std::function<bool(const Place&)>& exists) {
  std::vector<Place> gone;
  {
    Statement all(db_, "SELECT layer, name FROM places");
    while (true) {
      DSEC_TRY(const bool more, all.Step());
      if (!more) break;
      Place place{all.TextAt(0), all.TextAt(1)};
      if (!exists(place)) gone.push_back(std::move(place));
    }
  }
  if (gone.empty()) return Ok();
  Transaction transaction(db_);
  DSEC_TRY_VOID(transaction.Begin());
  for (const Place& place : gone) DSEC_TRY_VOID(Forget(place));
  DSEC_TRY_VOID(Execute(db_,
                        "DELETE FROM files WHERE id NOT IN (SELECT file FROM places);"
                        "DELETE FROM samples WHERE file NOT IN (SELECT id FROM files);"));
  return transaction.Commit();
}

}  // namespace dsec::image

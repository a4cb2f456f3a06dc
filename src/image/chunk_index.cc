// SPDX-License-Identifier: Apache-2.0
#include "image/chunk_index.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

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
    if (again || opened.error().reason() != "layer.catalog_damaged")
      return std::move(opened).error();
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
    return Error(Code::kFailedPrecondition, "layer.index_schema",
                 fmt::format("{} has schema {}, this program knows {}", path, version.NumberAt(0),
                             kSchemaVersion));
  }
  Statement ask(db_, "SELECT seed FROM settings");
  DSEC_TRY(const bool found, ask.Step());
  if (!found) return Error(Code::kInternal, "layer.catalog_damaged", path + " has no seed");
  seed_ = ask.NumberAt(0);
  ask.Rewind();
  version.Rewind();
  return transaction.Commit();
}

Result<std::vector<int64_t>> ChunkIndex::Rank(std::span<const ChunkStore::Placed> content,
                                              size_t most) {
  std::map<int64_t, uint64_t> votes;  // blocks
  // Those that are anywhere still, the latest first: they are there the most likely.
  Statement find(db_, fmt::format("SELECT file FROM samples WHERE hash = ? AND EXISTS"
                                  "(SELECT 1 FROM places WHERE places.file = samples.file) "
                                  "ORDER BY file DESC LIMIT {}",
                                  kMostOfOne));
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
  // The links first: what was the last place of one of these files may be among those that go.
  for (const Link& link : links) DSEC_TRY_VOID(PutPlace({layer, link.name}, link.file));
  std::set<std::string> names;
  for (const Link& link : links) names.insert(link.name);
  DSEC_TRY(const auto places, PlacesOf(layer));
  for (const Place& place : places) {
    if (!names.contains(place.name)) DSEC_TRY_VOID(ForgetNow(place));
  }
  if (!own.empty()) DSEC_TRY_VOID(PutFile({layer, own_name}, own));
  return transaction.Commit();
}

Result<int64_t> ChunkIndex::AddFile(const Place& place,
                                    std::span<const ChunkStore::Placed> chunks) {
  Transaction transaction(db_);
  DSEC_TRY_VOID(transaction.Begin());
  DSEC_TRY(const int64_t id, PutFile(place, chunks));
  DSEC_TRY_VOID(transaction.Commit());
  return id;
}

Result<void> ChunkIndex::AddPlace(const Place& place, int64_t file) {
  Transaction transaction(db_);
  DSEC_TRY_VOID(transaction.Begin());
  DSEC_TRY_VOID(PutPlace(place, file));
  return transaction.Commit();
}

// With a transaction. 0: the list is too long.
Result<int64_t> ChunkIndex::PutFile(const Place& place,
                                    std::span<const ChunkStore::Placed> chunks) {
  if (chunks.size() * kListedBytes > kMaxList) return 0;
  Statement insert(db_, "INSERT INTO files(chunks) VALUES(?)");
  DSEC_TRY_VOID(insert.Bytes(EncodeList(chunks)).Run());
  const int64_t id = ::sqlite3_last_insert_rowid(db_);
  Statement sample(db_, "INSERT OR IGNORE INTO samples VALUES(?,?)");
  for (const ChunkStore::Placed& chunk : chunks) {
    if (!IsSample(chunk, chunks.size())) continue;
    sample.Rewind();
    DSEC_TRY_VOID(sample.Number(chunk.hash).Number(static_cast<uint64_t>(id)).Run());
  }
  sample.Rewind();
  DSEC_TRY_VOID(PutPlace(place, id));
  return id;
}

// With a transaction.
Result<void> ChunkIndex::PutPlace(const Place& place, int64_t file) {
  {
    Statement find(db_, "SELECT file FROM places WHERE layer = ? AND name = ?");
    DSEC_TRY(const bool found, find.Text(place.layer).Text(place.name).Step());
    if (found && static_cast<int64_t>(find.NumberAt(0)) == file) return Ok();
  }
  DSEC_TRY_VOID(ForgetNow(place));
  Statement put(db_, "INSERT INTO places VALUES(?,?,?)");
  return put.Number(static_cast<uint64_t>(file)).Text(place.layer).Text(place.name).Run();
}

Result<void> ChunkIndex::Forget(const Place& place) {
  Transaction transaction(db_);
  DSEC_TRY_VOID(transaction.Begin());
  DSEC_TRY_VOID(ForgetNow(place));
  return transaction.Commit();
}

Result<void> ChunkIndex::ForgetLayer(const std::string& layer) {
  Transaction transaction(db_);
  DSEC_TRY_VOID(transaction.Begin());
  DSEC_TRY(const auto places, PlacesOf(layer));
  for (const Place& place : places) DSEC_TRY_VOID(ForgetNow(place));
  return transaction.Commit();
}

Result<std::vector<ChunkIndex::Place>> ChunkIndex::PlacesOf(const std::string& layer) {
  std::vector<Place> places;
  Statement names(db_, "SELECT name FROM places WHERE layer = ?");
  names.Text(layer);
  while (true) {
    DSEC_TRY(const bool more, names.Step());
    if (!more) return places;
    places.push_back({layer, names.TextAt(0)});
  }
}

// With a transaction. A file goes with its last place.
Result<void> ChunkIndex::ForgetNow(const Place& place) {
  uint64_t file = 0;
  {
    Statement find(db_, "SELECT file FROM places WHERE layer = ? AND name = ?");
    DSEC_TRY(const bool found, find.Text(place.layer).Text(place.name).Step());
    if (!found) return Ok();
    file = find.NumberAt(0);
  }
  Statement remove(db_, "DELETE FROM places WHERE layer = ? AND name = ?");
  DSEC_TRY_VOID(remove.Text(place.layer).Text(place.name).Run());
  Statement other(db_, "SELECT 1 FROM places WHERE file = ?");
  DSEC_TRY(const bool stays, other.Number(file).Step());
  if (stays) return Ok();
  std::vector<ChunkStore::Placed> chunks;
  {
    Statement list(db_, "SELECT chunks FROM files WHERE id = ?");
    DSEC_TRY(const bool found, list.Number(file).Step());
    if (found) chunks = DecodeList(list.BytesAt(0));
  }
  Statement sample(db_, "DELETE FROM samples WHERE hash = ? AND file = ?");
  for (const ChunkStore::Placed& chunk : chunks) {
    if (!IsSample(chunk, chunks.size())) continue;
    sample.Rewind();
    DSEC_TRY_VOID(sample.Number(chunk.hash).Number(file).Run());
  }
  Statement gone(db_, "DELETE FROM files WHERE id = ?");
  return gone.Number(file).Run();
}

Result<std::vector<ChunkIndex::Placement>> ChunkIndex::Places() {
  std::vector<Placement> places;
  Statement all(db_, "SELECT file, layer, name FROM places");
  while (true) {
    DSEC_TRY(const bool more, all.Step());
    if (!more) return places;
    places.push_back({static_cast<int64_t>(all.NumberAt(0)), {all.TextAt(1), all.TextAt(2)}});
  }
}

Result<void> ChunkIndex::Prune(const std::function<Result<bool>(const Place&)>& exists) {
  DSEC_TRY(const auto places, Places());
  std::vector<Place> gone;
  for (const Placement& placed : places) {
    DSEC_TRY(const bool there, exists(placed.place));
    if (!there) gone.push_back(placed.place);
  }
  Transaction transaction(db_);
  DSEC_TRY_VOID(transaction.Begin());
  for (const Place& place : gone) {
    DSEC_TRY(const bool there, exists(place));  // published again meanwhile
    if (!there) DSEC_TRY_VOID(ForgetNow(place));
  }
  DSEC_TRY_VOID(Execute(db_,
                        "DELETE FROM files WHERE id NOT IN (SELECT file FROM places);"
                        "DELETE FROM samples WHERE file NOT IN (SELECT id FROM files);"));
  return transaction.Commit();
}

}  // namespace dsec::image

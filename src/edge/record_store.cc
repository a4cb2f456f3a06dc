// SPDX-License-Identifier: Apache-2.0
#include "edge/record_store.h"

#include <algorithm>
#include <utility>

#include "base/fault.h"
#include "model/lifecycle.h"

namespace dsec::edge {
namespace {

constexpr int64_t kSchemaVersion = 1;
constexpr const char* kSchema =
    // ended_ms is 0 while the sandbox lives.
    "CREATE TABLE IF NOT EXISTS sandboxes("
    // request_id is NULL when the record does not hold it.
    "  id TEXT PRIMARY KEY, request_id TEXT UNIQUE, ended_ms INTEGER NOT NULL, record BLOB NOT NULL"
    ") WITHOUT ROWID;"
    "CREATE INDEX IF NOT EXISTS sandboxes_ended ON sandboxes(ended_ms);"
    "CREATE TABLE IF NOT EXISTS events("
    "  node_seq INTEGER PRIMARY KEY, sandbox_id TEXT NOT NULL, seq INTEGER NOT NULL, event BLOB "
    "NOT NULL);"
    "CREATE UNIQUE INDEX IF NOT EXISTS events_sandbox ON events(sandbox_id, seq);";

template <typename Message>
Result<Message> Parse(std::string_view bytes, std::string_view what) {
  Message message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Error(Code::kInternal, "store.corrupt", fmt::format("a stored {} does not parse", what));
  }
  return message;
}

}  // namespace

bool HoldsRequest(const v1::SandboxRecord& record) {
  return record.termination().cause() != model::cause::kCreateFailed &&
         record.stop().cause() != model::cause::kCreateFailed;
}

std::string RequestKey(std::string_view project, std::string_view request_id) {
  if (project.empty()) return std::string(request_id);
  return fmt::format("{}\n{}", project, request_id);
}

Result<std::unique_ptr<RecordStore>> RecordStore::Open(const std::string& path) {
  DSEC_TRY(auto database, store::Database::Open(path));
  std::unique_ptr<RecordStore> store(new RecordStore(std::move(database)));
  DSEC_TRY_VOID(store->Prepare().Context("open {}", path));
  return store;
}

Result<void> RecordStore::Prepare() {
  DSEC_TRY(auto read_version, database_.Prepare("PRAGMA user_version"));
  DSEC_TRY_VOID(read_version.Step());
  const int64_t version = read_version.Int(0);
  read_version.Reset();
  if (version > kSchemaVersion) {
    return Error(Code::kInternal, "store.version",
                 fmt::format("schema version {} was written by a later dsec; this one knows {}",
                             version, kSchemaVersion));
  }
  DSEC_TRY_VOID(database_.Execute(kSchema));
  DSEC_TRY_VOID(database_.Execute(fmt::format("PRAGMA user_version={}", kSchemaVersion).c_str()));

  const std::pair<store::Statement*, const char*> statements[] = {
      {&insert_, "INSERT INTO sandboxes(id, request_id, ended_ms, record) VALUES(?1, ?2, ?3, ?4)"},
      {&update_, "UPDATE sandboxes SET request_id=?2, ended_ms=?3, record=?4 WHERE id=?1"},
      {&append_, "INSERT INTO events(node_seq, sandbox_id, seq, event) VALUES(?1, ?2, ?3, ?4)"},
      {&find_, "SELECT record FROM sandboxes WHERE id=?1"},
      {&find_request_, "SELECT record FROM sandboxes WHERE request_id=?1"},
      {&live_, "SELECT record FROM sandboxes WHERE ended_ms=0 ORDER BY id"},
      {&ended_, "SELECT record FROM sandboxes WHERE id>?1 AND ended_ms>0 ORDER BY id LIMIT ?2"},
      {&events_,
       "SELECT node_seq, event FROM events WHERE sandbox_id=?1 AND seq>?2 ORDER BY seq LIMIT ?3"},
      {&node_events_,
       "SELECT node_seq, event FROM events WHERE node_seq>?1 ORDER BY node_seq LIMIT ?2"},
  };
  for (const auto& [statement, sql] : statements) {
    DSEC_TRY(*statement, database_.Prepare(sql));
  }
  DSEC_TRY(auto last, database_.Prepare("SELECT ifnull(max(node_seq), 0) FROM events"));
  DSEC_TRY_VOID(last.Step());
  next_node_seq_ = static_cast<uint64_t>(last.Int(0)) + 1;
  return Ok();
}

Result<void> RecordStore::Verify() {
  std::lock_guard lock(mutex_);
  DSEC_TRY(auto check, database_.Prepare("PRAGMA quick_check(1)"));
  DSEC_TRY(const bool row, check.Step());
  if (!row || check.Text(0) != "ok") {
    return Error(Code::kInternal, "store.corrupt",
                 row ? std::string(check.Text(0)) : std::string("quick_check gave no answer"));
  }
  return Ok();
}

Result<void> RecordStore::Insert(const v1::SandboxRecord& record,
                                 std::span<const v1::Event> events) {
  return Write(insert_, record, events);
}

Result<void> RecordStore::Save(const v1::SandboxRecord& record, std::span<const v1::Event> events) {
  return Write(update_, record, events);
}

Result<void> RecordStore::Write(store::Statement& statement, const v1::SandboxRecord& record,
                                std::span<const v1::Event> events) {
  const std::string bytes = record.SerializeAsString();
  const std::string request = RequestKey(record.project(), record.request_id());
  DSEC_FAULT_POINT("edge.store.before_write");
  {
    std::lock_guard lock(mutex_);
    DSEC_TRY(auto transaction, store::Transaction::Begin(database_));
    const uint64_t first_seq = next_node_seq_;
    auto write = [&]() -> Result<void> {
      statement.Bind(1, record.id()).Bind(3, record.ended_unix_ms()).BindBlob(4, bytes);
      if (HoldsRequest(record)) statement.Bind(2, request);
      DSEC_TRY_VOID(statement.Run());
      if (database_.Changes() != 1) {
        return Error(Code::kInternal, "store.failed", "the record is not in the store");
      }
      for (const v1::Event& event : events) DSEC_TRY_VOID(AppendLocked(event));
      return transaction.Commit();
    };
    if (auto written = write(); !written.ok()) {
      next_node_seq_ = first_seq;
      return std::move(written).Context("write the record of {}", record.id());
    }
  }
  DSEC_FAULT_POINT("edge.store.after_write");
  return Ok();
}

Result<void> RecordStore::AppendNodeEvent(const v1::Event& event) {
  std::lock_guard lock(mutex_);
  return AppendLocked(event).Context("append a node event");
}

Result<void> RecordStore::AppendLocked(const v1::Event& event) {
  const std::string bytes = event.SerializeAsString();
  const uint64_t seq = event.sandbox_id().empty() ? next_node_seq_ : event.seq();
  DSEC_TRY_VOID(append_.Bind(1, static_cast<int64_t>(next_node_seq_))
                    .Bind(2, event.sandbox_id())
                    .Bind(3, static_cast<int64_t>(seq))
                    .BindBlob(4, bytes)
                    .Run());
  ++next_node_seq_;
  return Ok();
}

Result<std::optional<v1::SandboxRecord>> RecordStore::Find(std::string_view id) {
  return FindBy(find_, id);
}

Result<std::optional<v1::SandboxRecord>> RecordStore::FindByRequest(std::string_view request_key) {
  return FindBy(find_request_, request_key);
}

Result<std::optional<v1::SandboxRecord>> RecordStore::FindBy(store::Statement& statement,
                                                             std::string_view key) {
  std::lock_guard lock(mutex_);
  DSEC_TRY(const bool found, statement.Bind(1, key).Step());
  if (!found) return std::optional<v1::SandboxRecord>();
  auto record = Parse<v1::SandboxRecord>(statement.Blob(0), "record");
  statement.Reset();
  if (!record.ok()) return std::move(record).error();
  return std::optional(*std::move(record));
}

Result<std::vector<v1::SandboxRecord>> RecordStore::Live() {
  std::lock_guard lock(mutex_);
  std::vector<v1::SandboxRecord> records;
  while (true) {
    DSEC_TRY(const bool row, live_.Step());
    if (!row) return records;
    auto record = Parse<v1::SandboxRecord>(live_.Blob(0), "record");
    if (!record.ok()) {
      live_.Reset();
      return std::move(record).error();
    }
    records.push_back(*std::move(record));
  }
}

Result<std::vector<v1::SandboxRecord>> RecordStore::EndedAfter(std::string_view after,
                                                               uint64_t limit) {
  std::lock_guard lock(mutex_);
  ended_.Bind(1, after).Bind(2, static_cast<int64_t>(limit));
  std::vector<v1::SandboxRecord> records;
  while (true) {
    DSEC_TRY(const bool row, ended_.Step());
    if (!row) return records;
    auto record = Parse<v1::SandboxRecord>(ended_.Blob(0), "record");
    if (!record.ok()) {
      ended_.Reset();
      return std::move(record).error();
    }
    records.push_back(*std::move(record));
  }
}

Result<std::vector<v1::Event>> RecordStore::Events(std::string_view id, uint64_t after_seq,
                                                   uint64_t limit) {
  std::lock_guard lock(mutex_);
  store::Statement& statement = id.empty() ? node_events_ : events_;
  int parameter = 1;
  if (!id.empty()) statement.Bind(parameter++, id);
  statement.Bind(parameter, static_cast<int64_t>(after_seq))
      .Bind(parameter + 1, static_cast<int64_t>(limit));
  std::vector<v1::Event> events;
  while (true) {
    DSEC_TRY(const bool row, statement.Step());
    if (!row) return events;
    auto event = Parse<v1::Event>(statement.Blob(1), "event");
    if (!event.ok()) {
      statement.Reset();
      return std::move(event).error();
    }
    event->set_node_seq(static_cast<uint64_t>(statement.Int(0)));
    if (event->sandbox_id().empty()) event->set_seq(event->node_seq());
    events.push_back(*std::move(event));
  }
}

Result<bool> RecordStore::Expire(const Retention& retention, int64_t now_unix_ms, uint64_t batch) {
  std::lock_guard lock(mutex_);
  const auto limit = static_cast<int64_t>(batch);
  // The oldest beyond the count, or beyond the age. The newest event always stays: node_seq is
  // counted from it.
  DSEC_TRY(auto records,
           database_.Prepare(
               "DELETE FROM sandboxes WHERE id IN (SELECT id FROM sandboxes WHERE ended_ms>0 AND "
               "ended_ms<=max(?1, ifnull((SELECT ended_ms FROM sandboxes WHERE ended_ms>0 "
               "ORDER BY ended_ms DESC LIMIT 1 OFFSET ?2), 0)) ORDER BY ended_ms LIMIT ?3)"));
  DSEC_TRY_VOID(records.Bind(1, now_unix_ms - retention.ended_age_ms)
                    .Bind(2, static_cast<int64_t>(retention.ended_records))
                    .Bind(3, limit)
                    .Run());
  const bool more_records = database_.Changes() == limit;
  DSEC_TRY(auto events,
           database_.Prepare("DELETE FROM events WHERE node_seq IN (SELECT node_seq FROM events "
                             "WHERE node_seq<=?1 ORDER BY node_seq LIMIT ?2)"));
  const auto newest = static_cast<int64_t>(next_node_seq_) - 1;
  const int64_t keep = std::max<int64_t>(static_cast<int64_t>(retention.events), 1);
  DSEC_TRY_VOID(events.Bind(1, newest - keep).Bind(2, limit).Run());
  const bool more_events = database_.Changes() == limit;
  return more_records || more_events;
}

}  // namespace dsec::edge

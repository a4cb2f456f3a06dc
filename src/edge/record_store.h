// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "dsec/v1/model.pb.h"
#include "store/sqlite.h"

namespace dsec::edge {

// What retention keeps of the past.
struct Retention {
  uint64_t ended_records = 20'000;
  int64_t ended_age_ms = 24 * 3600 * 1000;
  uint64_t events = 200'000;
};

// Whether a repeat of the record's request_id is answered with the record. Not when its create has
// failed: then the request may be sent again.
bool HoldsRequest(const v1::SandboxRecord& record);
// What stands for a request_id of a project among those of all. Of the root project it is the
// request_id itself, as in records from before there were projects.
std::string RequestKey(std::string_view project, std::string_view request_id);

// The durable records and events of this node (edge.db). Thread-safe; every call is synchronous,
// tens of microseconds, and may wait for the page cache: shards call it through a BlockingPool,
// launch threads directly. What has returned ok survives kill -9 of this process. Errors are those
// of store::Database.
class RecordStore {
 public:
  // Opens or makes the file. kInternal store.corrupt: it is damaged; kInternal store.version: made
  // by a later version.
  static Result<std::unique_ptr<RecordStore>> Open(const std::string& path);
  // Reads the whole file. store.corrupt names what is wrong.
  Result<void> Verify();

  // A record that is not there yet, with its first events. kAlreadyExists store.constraint: id or
  // request_id is taken.
  Result<void> Insert(const v1::SandboxRecord& record, std::span<const v1::Event> events);
  // Replaces the record and appends events, all in one transaction; the node_seq of each event is
  // given here. An event whose (sandbox_id, seq) exists is refused, so a second terminal event
  // cannot be written.
  Result<void> Save(const v1::SandboxRecord& record, std::span<const v1::Event> events);
  // An event of the node itself; its seq becomes its node_seq.
  Result<void> AppendNodeEvent(const v1::Event& event);

  Result<std::optional<v1::SandboxRecord>> Find(std::string_view id);
  // Never one for which HoldsRequest is false.
  Result<std::optional<v1::SandboxRecord>> FindByRequest(std::string_view request_key);
  // Every record that has not ended, in order of id.
  Result<std::vector<v1::SandboxRecord>> Live();
  // Ended records with an id after `after`, in order, at most `limit`.
  Result<std::vector<v1::SandboxRecord>> EndedAfter(std::string_view after, uint64_t limit);
  // Events of one sandbox after its `after_seq`, or of the node (empty id) after node_seq, in
  // order, at most `limit`.
  Result<std::vector<v1::Event>> Events(std::string_view id, uint64_t after_seq, uint64_t limit);

  // Removes at most `batch` of the records and of the events that retention does not keep; true:
  // there is more to do.
  Result<bool> Expire(const Retention& retention, int64_t now_unix_ms, uint64_t batch);

 private:
  explicit RecordStore(store::Database database) : database_(std::move(database)) {}
  Result<void> Prepare();
  Result<void> Write(store::Statement& statement, const v1::SandboxRecord& record,
                     std::span<const v1::Event> events);
  Result<void> AppendLocked(const v1::Event& event);
  Result<std::optional<v1::SandboxRecord>> FindBy(store::Statement& statement,
                                                  std::string_view key);

  std::mutex mutex_;
  store::Database database_;
  uint64_t next_node_seq_ = 1;
  store::Statement insert_, update_, append_, find_, find_request_, live_, ended_, events_,
      node_events_;
};

}  // namespace dsec::edge

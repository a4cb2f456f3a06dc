// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::store {

// Counts the transactions that changed something. The version of an entry is the revision that
// wrote it.
using Revision = uint64_t;
// 0: no lease.
using LeaseId = uint64_t;

struct Entry {
  std::string key;
  std::string value;
  Revision version = 0;
  LeaseId lease = 0;
};

// Keys in [begin, end) by bytes.
struct KeyRange {
  std::string begin;
  std::string end;

  // All keys that begin with `prefix`; an empty one means every key.
  static KeyRange Prefix(std::string prefix);
};

struct Condition {
  std::string key;
  Revision version = 0;  // 0: there is no such key
};

struct Write {
  std::string key;
  std::optional<std::string> value;  // none: delete; deleting what is not there changes nothing
  LeaseId lease = 0;
};

struct Page {
  std::vector<Entry> entries;  // in order of key
  bool more = false;           // there are further keys; go on after the last one
  Revision revision = 0;       // of the store when it was read
};

struct Change {
  std::string key;
  std::optional<std::string> value;  // none: deleted, by a write or by the end of its lease
  Revision revision = 0;
};

struct Changes {
  std::vector<Change> changes;  // in order of revision, those of one transaction together
  Revision next = 0;            // to ask after
};

// A small strongly consistent key-value store: the control state of a cluster. Every transaction is
// atomic, durable as far as its implementation says, and seen by all that begin after it ended.
// Thread-safe; a call resumes on the caller's shard. Keys: 1..1024 bytes; values: at most 1 MiB; a
// transaction: at most 128 conditions and 128 writes, and 1,179,648 bytes of keys and values.
// Beyond: kInvalidArgument store.too_large. kUnavailable store.*: nothing is known about the
// outcome of a write. kDeadlineExceeded: nor here.
class Store {
 public:
  virtual ~Store() = default;

  virtual runtime::Task<std::optional<Entry>> Get(std::string key, runtime::Deadline deadline) = 0;
  // At most `limit` (1..1000) entries; fewer, with `more` set, when they are large.
  virtual runtime::Task<Page> Range(KeyRange range, uint32_t limit, runtime::Deadline deadline) = 0;
  // All writes if every condition holds, and the new revision; else kConflict store.version, which
  // names the key that was found at another version. kNotFound store.lease: a write names a lease
  // that has ended. A key may be written once.
  virtual runtime::Task<Revision> Commit(std::vector<Condition> conditions,
                                         std::vector<Write> writes, runtime::Deadline deadline) = 0;
  // Put-if-version: `expected` 0 = must not exist; none = in any case.
  runtime::Task<Revision> Put(std::string key, std::string value, std::optional<Revision> expected,
                              LeaseId lease, runtime::Deadline deadline);

  // The keys under a lease are deleted when it ends: when nobody kept it alive for `ttl` (1 s..1
  // day), or by Revoke.
  virtual runtime::Task<LeaseId> Grant(std::chrono::milliseconds ttl,
                                       runtime::Deadline deadline) = 0;
  // kNotFound store.lease once it has ended.
  virtual runtime::Task<void> KeepAlive(LeaseId lease, runtime::Deadline deadline) = 0;
  virtual runtime::Task<void> Revoke(LeaseId lease, runtime::Deadline deadline) = 0;

  // Changes in the range after `after`, waiting until the deadline for the first; none then. kGone
  // store.compacted: changes after `after` are forgotten; read the range and go on from its
  // revision.
  virtual runtime::Task<Changes> Watch(KeyRange range, Revision after,
                                       runtime::Deadline deadline) = 0;
};

}  // namespace dsec::store

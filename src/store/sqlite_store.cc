// SPDX-License-Identifier: Apache-2.0
#include "store/sqlite_store.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "base/log.h"
#include "runtime/async_event.h"
#include "store/rules.h"

namespace dsec::store {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kSchemaVersion = 1;
constexpr uint64_t kMaxChanges = 1000;
constexpr size_t kQueue = 4096;
constexpr milliseconds kTick{250};

constexpr const char* kSchema =
    "CREATE TABLE IF NOT EXISTS entries("
    "  key BLOB PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, lease INTEGER NOT "
    "NULL) WITHOUT ROWID;"
    "CREATE INDEX IF NOT EXISTS entries_lease ON entries(lease) WHERE lease<>0;"
    "CREATE TABLE IF NOT EXISTS leases(id INTEGER PRIMARY KEY, ttl_ms INTEGER NOT NULL);"
    // deleted: value is empty.
    "CREATE TABLE IF NOT EXISTS history("
    "  n INTEGER PRIMARY KEY, revision INTEGER NOT NULL, key BLOB NOT NULL, deleted INTEGER NOT "
    "NULL, value BLOB NOT NULL);"
    "CREATE INDEX IF NOT EXISTS history_revision ON history(revision);";

}  // namespace

// One who watches, woken after each transaction that changed something.
struct SqliteStore::Waiter {
  explicit Waiter(runtime::Executor on) : executor(std::move(on)) {}
  const runtime::Executor executor;
  runtime::AsyncEvent news;
};

Result<std::unique_ptr<SqliteStore>> SqliteStore::Open(const std::string& path,
                                                       runtime::Executor executor,
                                                       const Clock& clock) {
  DSEC_TRY(auto database, Database::Open(path));
  std::unique_ptr<SqliteStore> store(new SqliteStore(std::move(database), clock));
  DSEC_TRY_VOID(store->Prepare().Context("open {}", path));
  store->thread_ = std::make_unique<runtime::BlockingPool>("kv", 1, kQueue);
  auto* const self = store.get();
  store->expiry_ = std::make_unique<runtime::Periodic>(std::move(executor), "store.leases", kTick,
                                                       [self] { return self->Tick(); });
  return store;
}

SqliteStore::SqliteStore(Database database, const Clock& clock)
    : database_(std::move(database)), clock_(clock) {}

SqliteStore::~SqliteStore() = default;

Result<void> SqliteStore::Prepare() {
  // Control state has no other copy: it is on the disk before it is answered.
  DSEC_TRY_VOID(database_.Execute("PRAGMA synchronous=FULL"));
  DSEC_TRY_VOID(database_.Execute(kSchema));
  DSEC_TRY(auto version, database_.Prepare("PRAGMA user_version"));
  DSEC_TRY_VOID(version.Step());
  if (version.Int(0) > kSchemaVersion) {
    return Error(Code::kInternal, "store.version", "the file was written by a later dsec");
  }
  version.Reset();
  DSEC_TRY_VOID(database_.Execute(fmt::format("PRAGMA user_version={}", kSchemaVersion).c_str()));
  const std::pair<Statement*, const char*> statements[] = {
      {&find_, "SELECT value, version, lease FROM entries WHERE key=?1"},
      {&range_,
       "SELECT key, value, version, lease FROM entries WHERE key>=?1 AND key<?2 ORDER BY key LIMIT "
       "?3"},
      {&put_,
       "INSERT INTO entries(key, value, version, lease) VALUES(?1, ?2, ?3, ?4) "
       "ON CONFLICT(key) DO UPDATE SET value=excluded.value, version=excluded.version, "
       "lease=excluded.lease"},
      {&erase_, "DELETE FROM entries WHERE key=?1"},
      {&log_, "INSERT INTO history(revision, key, deleted, value) VALUES(?1, ?2, ?3, ?4)"},
      {&changes_,
       "SELECT revision, key, deleted, value FROM history WHERE revision>?1 AND key>=?2 AND key<?3 "
       "ORDER BY n LIMIT ?4"},
      // Whole transactions only: a watcher sees all of one or is told that it is forgotten.
      {&prune_,
       "DELETE FROM history WHERE revision<=(SELECT revision FROM history ORDER BY n DESC LIMIT 1 "
       "OFFSET ?1)"},
      {&oldest_, "SELECT ifnull(min(revision), 0) FROM history"},
      {&lease_keys_, "SELECT key FROM entries WHERE lease=?1 AND lease<>0"},
      {&add_lease_, "INSERT INTO leases(id, ttl_ms) VALUES(?1, ?2)"},
      {&drop_lease_, "DELETE FROM leases WHERE id=?1"},
  };
  for (const auto& [statement, sql] : statements) {
    DSEC_TRY(*statement, database_.Prepare(sql));
  }

  DSEC_TRY(auto newest, database_.Prepare("SELECT ifnull(max(revision), 0) FROM history"));
  DSEC_TRY_VOID(newest.Step());
  revision_ = static_cast<Revision>(newest.Int(0));
  DSEC_TRY_VOID(oldest_.Step());
  const auto oldest = static_cast<Revision>(oldest_.Int(0));
  oldest_.Reset();
  compacted_ = oldest == 0 ? 0 : oldest - 1;
  DSEC_TRY(auto leases, database_.Prepare("SELECT id, ttl_ms FROM leases"));
  while (true) {
    DSEC_TRY(const bool row, leases.Step());
    if (!row) break;
    const auto id = static_cast<LeaseId>(leases.Int(0));
    const milliseconds ttl(leases.Int(1));
    leases_[id] = {ttl, clock_.Mono() + ttl};
    next_lease_ = std::max(next_lease_, id + 1);
  }
  return Ok();
}

// --- calls ---

runtime::Task<std::optional<Entry>> SqliteStore::Get(std::string key, runtime::Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckKey(key));
  auto find = [this, key = std::move(key)] { return Find(key); };
  co_return co_await thread_->Run(std::move(find), deadline);
}

runtime::Task<Page> SqliteStore::Range(KeyRange range, uint32_t limit, runtime::Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckPage(limit));
  auto read = [this, range = std::move(range), limit] { return Read(range, limit); };
  co_return co_await thread_->Run(std::move(read), deadline);
}

runtime::Task<Revision> SqliteStore::Commit(std::vector<Condition> conditions,
                                            std::vector<Write> writes, runtime::Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckCommit(conditions, writes));
  auto apply = [this, conditions = std::move(conditions),
                writes = std::move(writes)]() -> Result<Revision> {
    DSEC_TRY_VOID(EndExpired());
    return Apply(conditions, writes);
  };
  co_return co_await thread_->Run(std::move(apply), deadline);
}

runtime::Task<LeaseId> SqliteStore::Grant(milliseconds ttl, runtime::Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckTtl(ttl));
  auto grant = [this, ttl]() -> Result<LeaseId> {
    const LeaseId id = next_lease_;
    DSEC_TRY_VOID(add_lease_.Bind(1, static_cast<int64_t>(id))
                      .Bind(2, static_cast<int64_t>(ttl.count()))
                      .Run());
    ++next_lease_;
    leases_[id] = {ttl, clock_.Mono() + ttl};
    return id;
  };
  co_return co_await thread_->Run(std::move(grant), deadline);
}

runtime::Task<void> SqliteStore::KeepAlive(LeaseId lease, runtime::Deadline deadline) {
  auto keep = [this, lease]() -> Result<void> {
    DSEC_TRY_VOID(EndExpired());
    const auto it = leases_.find(lease);
    if (it == leases_.end()) return NoLease(lease);
    it->second.expires = clock_.Mono() + it->second.ttl;
    return Ok();
  };
  co_return co_await thread_->Run(std::move(keep), deadline);
}

runtime::Task<void> SqliteStore::Revoke(LeaseId lease, runtime::Deadline deadline) {
  auto revoke = [this, lease]() -> Result<void> {
    if (!leases_.contains(lease)) return NoLease(lease);
    return EndLeases({lease});
  };
  co_return co_await thread_->Run(std::move(revoke), deadline);
}

runtime::Task<Changes> SqliteStore::Watch(KeyRange range, Revision after,
                                          runtime::Deadline deadline) {
  const auto waiter = std::make_shared<Waiter>(co_await boost::asio::this_coro::executor);
  struct Registration {
    SqliteStore& store;
    const std::shared_ptr<Waiter>& waiter;
    Registration(SqliteStore& in, const std::shared_ptr<Waiter>& who) : store(in), waiter(who) {
      std::lock_guard lock(store.waiters_mutex_);
      store.waiters_.push_back(waiter);
    }
    ~Registration() {
      std::lock_guard lock(store.waiters_mutex_);
      std::erase(store.waiters_, waiter);
    }
  };
  const Registration registration(*this, waiter);
  while (true) {
    auto read = [this, range, after] { return ChangesAfter(range, after); };
    auto changes = co_await thread_->Run(std::move(read), runtime::Deadline::Never());
    if (!changes.ok() || !changes->changes.empty() || deadline.Expired()) co_return changes;
    // What was passed over need not be passed over again.
    after = changes->next;
    auto woken = co_await waiter->news.Wait(deadline);
    if (!woken.ok() && woken.error().code() == Code::kCancelled) co_return std::move(woken).error();
    waiter->news.Reset();
  }
}

boost::asio::awaitable<void> SqliteStore::Tick() {
  auto expire = [this] { return EndExpired(); };
  auto expired = co_await thread_->Run(std::move(expire), runtime::Deadline::Never());
  if (!expired.ok()) log::Error("store.lease_expiry_failed", {{"error", expired.error()}});
}

// --- on the store's thread ---

Result<std::optional<Entry>> SqliteStore::Find(const std::string& key) {
  DSEC_TRY(const bool found, find_.BindBlob(1, key).Step());
  if (!found) return std::optional<Entry>();
  Entry entry{key, std::string(find_.Blob(0)), static_cast<Revision>(find_.Int(1)),
              static_cast<LeaseId>(find_.Int(2))};
  find_.Reset();
  return std::optional(std::move(entry));
}

Result<Page> SqliteStore::Read(const KeyRange& range, uint32_t limit) {
  Page page;
  page.revision = revision_;
  range_.BindBlob(1, range.begin).BindBlob(2, range.end).Bind(3, static_cast<int64_t>(limit) + 1);
  while (true) {
    DSEC_TRY(const bool row, range_.Step());
    if (!row) return page;
    if (page.entries.size() == limit) {
      page.more = true;
      range_.Reset();
      return page;
    }
    page.entries.push_back({std::string(range_.Blob(0)), std::string(range_.Blob(1)),
                            static_cast<Revision>(range_.Int(2)),
                            static_cast<LeaseId>(range_.Int(3))});
  }
}

Result<Revision> SqliteStore::Apply(const std::vector<Condition>& conditions,
                                    const std::vector<Write>& writes) {
  for (const Write& write : writes) {
    if (write.lease != 0 && !leases_.contains(write.lease)) return NoLease(write.lease);
  }
  DSEC_TRY(auto transaction, Transaction::Begin(database_));
  for (const Condition& condition : conditions) {
    DSEC_TRY(const auto entry, Find(condition.key));
    const Revision version = entry.has_value() ? entry->version : 0;
    if (version != condition.version) {
      return WrongVersion(condition.key, version, condition.version);
    }
  }
  const Revision revision = revision_ + 1;
  bool changed = false;
  for (const Write& write : writes) DSEC_TRY_VOID(ApplyWrite(write, revision, changed));
  if (!changed) return revision_;
  DSEC_TRY_VOID(prune_.Bind(1, static_cast<int64_t>(kHistory)).Run());
  DSEC_TRY_VOID(oldest_.Step());
  const auto oldest = static_cast<Revision>(oldest_.Int(0));
  oldest_.Reset();
  DSEC_TRY_VOID(transaction.Commit());
  revision_ = revision;
  compacted_ = oldest - 1;
  Announce();
  return revision;
}

Result<void> SqliteStore::ApplyWrite(const Write& write, Revision revision, bool& changed) {
  const auto at = static_cast<int64_t>(revision);
  if (write.value.has_value()) {
    DSEC_TRY_VOID(put_.BindBlob(1, write.key)
                      .BindBlob(2, *write.value)
                      .Bind(3, at)
                      .Bind(4, static_cast<int64_t>(write.lease))
                      .Run());
  } else {
    DSEC_TRY_VOID(erase_.BindBlob(1, write.key).Run());
    if (database_.Changes() == 0) return Ok();
  }
  changed = true;
  return log_.Bind(1, at)
      .BindBlob(2, write.key)
      .Bind(3, write.value.has_value() ? 0 : 1)
      .BindBlob(4, write.value.has_value() ? std::string_view(*write.value) : std::string_view())
      .Run();
}

Result<void> SqliteStore::EndLeases(const std::vector<LeaseId>& leases) {
  DSEC_TRY(auto transaction, Transaction::Begin(database_));
  const Revision revision = revision_ + 1;
  bool changed = false;
  for (const LeaseId lease : leases) {
    std::vector<Write> writes;
    lease_keys_.Bind(1, static_cast<int64_t>(lease));
    while (true) {
      DSEC_TRY(const bool row, lease_keys_.Step());
      if (!row) break;
      writes.push_back({std::string(lease_keys_.Blob(0)), std::nullopt, 0});
    }
    for (const Write& write : writes) DSEC_TRY_VOID(ApplyWrite(write, revision, changed));
    DSEC_TRY_VOID(drop_lease_.Bind(1, static_cast<int64_t>(lease)).Run());
  }
  DSEC_TRY_VOID(transaction.Commit());
  for (const LeaseId lease : leases) leases_.erase(lease);
  if (changed) {
    revision_ = revision;
    Announce();
  }
  return Ok();
}

Result<void> SqliteStore::EndExpired() {
  std::vector<LeaseId> expired;
  const MonoTime now = clock_.Mono();
  for (const auto& [id, lease] : leases_) {
    if (lease.expires <= now) expired.push_back(id);
  }
  return expired.empty() ? Ok() : EndLeases(expired);
}

Result<Changes> SqliteStore::ChangesAfter(const KeyRange& range, Revision after) {
  if (after < compacted_) {
    return Error(Code::kGone, "store.compacted",
                 fmt::format("changes up to revision {} are forgotten, {} was asked for",
                             compacted_, after));
  }
  Changes found;
  found.next = std::max(after, revision_);
  changes_.Bind(1, static_cast<int64_t>(after))
      .BindBlob(2, range.begin)
      .BindBlob(3, range.end)
      .Bind(4, static_cast<int64_t>(kMaxChanges + kMaxBatch));
  while (true) {
    DSEC_TRY(const bool row, changes_.Step());
    if (!row) return found;
    Change change{std::string(changes_.Blob(1)), std::nullopt,
                  static_cast<Revision>(changes_.Int(0))};
    if (changes_.Int(2) == 0) change.value = std::string(changes_.Blob(3));
    // Cut between transactions.
    if (found.changes.size() >= kMaxChanges && found.changes.back().revision != change.revision) {
      found.next = found.changes.back().revision;
      changes_.Reset();
      return found;
    }
    found.changes.push_back(std::move(change));
  }
}

void SqliteStore::Announce() {
  std::lock_guard lock(waiters_mutex_);
  for (const auto& waiter : waiters_) {
    boost::asio::post(waiter->executor, [waiter] { waiter->news.Set(); });
  }
}

}  // namespace dsec::store

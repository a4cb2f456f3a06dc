// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "runtime/blocking_pool.h"
#include "runtime/periodic.h"
#include "store/sqlite.h"
#include "store/store.h"

namespace dsec::store {

// The store of a single machine: one SQLite file, used by one thread of its own. A commit that was
// answered survives kill -9 of the process and a crash of the host. Leases count from the moment of
// opening again after a restart. Must end before its shards do.
class SqliteStore final : public Store {
 public:
  // Watchers that are more than this many changes behind are told store.compacted.
  static constexpr uint64_t kHistory = 10'000;

  // `executor` runs the expiry of leases.
  static Result<std::unique_ptr<SqliteStore>> Open(const std::string& path,
                                                   runtime::Executor executor, const Clock& clock);
  ~SqliteStore() override;

  runtime::Task<std::optional<Entry>> Get(std::string key, runtime::Deadline deadline) override;
  runtime::Task<Page> Range(KeyRange range, uint32_t limit, runtime::Deadline deadline) override;
  runtime::Task<Revision> Commit(std::vector<Condition> conditions, std::vector<Write> writes,
                                 runtime::Deadline deadline) override;
  runtime::Task<LeaseId> Grant(std::chrono::milliseconds ttl, runtime::Deadline deadline) override;
  runtime::Task<void> KeepAlive(LeaseId lease, runtime::Deadline deadline) override;
  runtime::Task<void> Revoke(LeaseId lease, runtime::Deadline deadline) override;
  runtime::Task<Changes> Watch(KeyRange range, Revision after, runtime::Deadline deadline) override;

 private:
  struct Lease {
    std::chrono::milliseconds ttl{};
    MonoTime expires;
  };
  struct Waiter;

  SqliteStore(Database database, const Clock& clock);
  Result<void> Prepare();

  // On the store's thread alone.
  Result<std::optional<Entry>> Find(const std::string& key);
  Result<Page> Read(const KeyRange& range, uint32_t limit);
  Result<Revision> Apply(const std::vector<Condition>& conditions,
                         const std::vector<Write>& writes);
  Result<void> ApplyWrite(const Write& write, Revision revision, bool& changed);
  Result<void> EndLeases(const std::vector<LeaseId>& leases);
  Result<void> EndExpired();
  Result<Changes> ChangesAfter(const KeyRange& range, Revision after);
  void Announce();

  boost::asio::awaitable<void> Tick();

  Database database_;
  const Clock& clock_;
  Revision revision_ = 0;
  Revision compacted_ = 0;
  LeaseId next_lease_ = 1;
  std::map<LeaseId, Lease> leases_;
  Statement find_, range_, put_, erase_, log_, changes_, prune_, oldest_, lease_keys_, add_lease_,
      drop_lease_;

  std::mutex waiters_mutex_;
  std::vector<std::shared_ptr<Waiter>> waiters_;
  std::unique_ptr<runtime::BlockingPool> thread_;
  std::unique_ptr<runtime::Periodic> expiry_;
};

}  // namespace dsec::store

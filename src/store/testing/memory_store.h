// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "runtime/async_event.h"
#include "store/store.h"

namespace dsec::store::testing {

// A store in the memory of this process, for simulations: it passes the conformance suite, needs no
// thread, answers after a latency of its own and can be taken away. Thread-safe.
class MemoryStore final : public Store {
 public:
  struct Options {
    std::chrono::nanoseconds latency{0};  // of each call
    size_t history = 1'000'000;           // changes that a watch can still ask for
    const Clock* clock = &Clock::System();
  };
  explicit MemoryStore(Options options) : options_(options) {}
  MemoryStore() : MemoryStore(Options{}) {}

  runtime::Task<std::optional<Entry>> Get(std::string key, runtime::Deadline deadline) override;
  runtime::Task<Page> Range(KeyRange range, uint32_t limit, runtime::Deadline deadline) override;
  runtime::Task<Revision> Commit(std::vector<Condition> conditions, std::vector<Write> writes,
                                 runtime::Deadline deadline) override;
  runtime::Task<LeaseId> Grant(std::chrono::milliseconds ttl, runtime::Deadline deadline) override;
  runtime::Task<void> KeepAlive(LeaseId lease, runtime::Deadline deadline) override;
  runtime::Task<void> Revoke(LeaseId lease, runtime::Deadline deadline) override;
  runtime::Task<Changes> Watch(KeyRange range, Revision after, runtime::Deadline deadline) override;

  // Ends leases that are due; every call does so, too, and a watch at least each 100 ms.
  void Expire();
  uint64_t commits() const;
  size_t size() const;

 private:
  struct Lease {
    std::chrono::milliseconds ttl{};
    MonoTime ends;
    std::set<std::string> keys;
  };
  struct Waiter {
    explicit Waiter(runtime::Executor on) : executor(std::move(on)) {}
    const runtime::Executor executor;
    KeyRange range;
    runtime::AsyncEvent news;
  };
  runtime::Task<void> Travel(runtime::Deadline deadline) const;
  void ExpireLocked();
  void EndLocked(std::map<LeaseId, Lease>::iterator lease);
  void ApplyLocked(const std::vector<Write>& writes);
  void NoteLocked(Change change);

  const Options options_;
  mutable std::mutex mutex_;
  Revision revision_ = 1;
  Revision compacted_ = 0;
  LeaseId last_lease_ = 0;
  uint64_t commits_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<LeaseId, Lease> leases_;
  std::deque<Change> history_;
  std::vector<std::weak_ptr<Waiter>> waiters_;
};

}  // namespace dsec::store::testing

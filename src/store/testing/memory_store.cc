// SPDX-License-Identifier: Apache-2.0
#include "store/testing/memory_store.h"

#include <algorithm>
#include <boost/asio/post.hpp>

#include "store/rules.h"

namespace dsec::store::testing {
namespace {

using runtime::Deadline;
using runtime::Task;

constexpr size_t kPageBytes = 1 << 20;
constexpr std::chrono::milliseconds kLook{100};

bool Within(const KeyRange& range, const std::string& key) {
  return key >= range.begin && (range.end.empty() || key < range.end);
}

}  // namespace

Task<void> MemoryStore::Travel(Deadline deadline) const {
  if (deadline.Expired())
    co_return Error(Code::kDeadlineExceeded, "deadline.exceeded", "the deadline has passed");
  if (options_.latency.count() > 0) {
    auto slept = co_await runtime::SleepUntil(Deadline::After(options_.latency));
    if (!slept.ok()) co_return std::move(slept).error();
  }
  co_return Ok();
}

Task<std::optional<Entry>> MemoryStore::Get(std::string key, Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckKey(key));
  DSEC_CO_TRY_VOID(co_await Travel(deadline));
  std::lock_guard lock(mutex_);
  ExpireLocked();
  const auto it = entries_.find(key);
  if (it == entries_.end()) co_return std::optional<Entry>();
  co_return std::optional<Entry>(it->second);
}

Task<Page> MemoryStore::Range(KeyRange range, uint32_t limit, Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckPage(limit));
  DSEC_CO_TRY_VOID(co_await Travel(deadline));
  std::lock_guard lock(mutex_);
  ExpireLocked();
  Page page;
  page.revision = revision_;
  size_t bytes = 0;
  for (auto it = entries_.lower_bound(range.begin);
       it != entries_.end() && Within(range, it->first); ++it) {
    if (page.entries.size() == limit || bytes > kPageBytes) {
      page.more = true;
      break;
    }
    bytes += it->first.size() + it->second.value.size();
    page.entries.push_back(it->second);
  }
  co_return page;
}

Task<Revision> MemoryStore::Commit(std::vector<Condition> conditions, std::vector<Write> writes,
                                   Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckCommit(conditions, writes));
  DSEC_CO_TRY_VOID(co_await Travel(deadline));
  std::lock_guard lock(mutex_);
  ExpireLocked();
  for (const Condition& condition : conditions) {
    const auto it = entries_.find(condition.key);
    const Revision found = it == entries_.end() ? 0 : it->second.version;
    if (found != condition.version) co_return WrongVersion(condition.key, found, condition.version);
  }
  for (const Write& write : writes) {
    if (write.lease != 0 && leases_.find(write.lease) == leases_.end())
      co_return NoLease(write.lease);
  }
  ++commits_;
  ApplyLocked(writes);
  co_return revision_;
}

void MemoryStore::ApplyLocked(const std::vector<Write>& writes) {
  const auto changes = [this](const Write& write) {
    return write.value.has_value() || entries_.find(write.key) != entries_.end();
  };
  if (std::none_of(writes.begin(), writes.end(), changes)) return;
  ++revision_;
  for (const Write& write : writes) {
    const auto it = entries_.find(write.key);
    if (it != entries_.end() && it->second.lease != 0) {
      if (const auto lease = leases_.find(it->second.lease); lease != leases_.end())
        lease->second.keys.erase(write.key);
    }
    if (!write.value.has_value()) {
      if (it == entries_.end()) continue;
      entries_.erase(it);
    } else {
      entries_[write.key] = {write.key, *write.value, revision_, write.lease};
      if (write.lease != 0) leases_[write.lease].keys.insert(write.key);
    }
    NoteLocked({write.key, write.value, revision_});
  }
}

void MemoryStore::NoteLocked(Change change) {
  std::erase_if(waiters_, [](const auto& waiter) { return waiter.expired(); });
  for (const auto& weak : waiters_) {
    const auto waiter = weak.lock();
    if (waiter == nullptr || !Within(waiter->range, change.key)) continue;
    boost::asio::post(waiter->executor, [waiter] { waiter->news.Set(); });
  }
  history_.push_back(std::move(change));
  while (history_.size() > options_.history) {
    compacted_ = history_.front().revision;
    history_.pop_front();
  }
}

Task<LeaseId> MemoryStore::Grant(std::chrono::milliseconds ttl, Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckTtl(ttl));
  DSEC_CO_TRY_VOID(co_await Travel(deadline));
  std::lock_guard lock(mutex_);
  const LeaseId id = ++last_lease_;
  leases_[id] = {ttl, options_.clock->Mono() + ttl, {}};
  co_return id;
}

Task<void> MemoryStore::KeepAlive(LeaseId lease, Deadline deadline) {
  DSEC_CO_TRY_VOID(co_await Travel(deadline));
  std::lock_guard lock(mutex_);
  ExpireLocked();
  const auto it = leases_.find(lease);
  if (it == leases_.end()) co_return NoLease(lease);
  it->second.ends = options_.clock->Mono() + it->second.ttl;
  co_return Ok();
}

Task<void> MemoryStore::Revoke(LeaseId lease, Deadline deadline) {
  DSEC_CO_TRY_VOID(co_await Travel(deadline));
  std::lock_guard lock(mutex_);
  ExpireLocked();
  const auto it = leases_.find(lease);
  if (it == leases_.end()) co_return NoLease(lease);
  EndLocked(it);
  co_return Ok();
}

void MemoryStore::EndLocked(std::map<LeaseId, Lease>::iterator lease) {
  const std::set<std::string> keys = std::move(lease->second.keys);
  leases_.erase(lease);
  std::vector<Write> writes;
  for (const std::string& key : keys) writes.push_back({key, std::nullopt, 0});
  ApplyLocked(writes);
}

void MemoryStore::ExpireLocked() {
  const MonoTime now = options_.clock->Mono();
  for (auto it = leases_.begin(); it != leases_.end();) {
    const auto next = std::next(it);
    if (it->second.ends <= now) EndLocked(it);
    it = next;
  }
}

void MemoryStore::Expire() {
  std::lock_guard lock(mutex_);
  ExpireLocked();
}

uint64_t MemoryStore::commits() const {
  std::lock_guard lock(mutex_);
  return commits_;
}

size_t MemoryStore::size() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

Task<Changes> MemoryStore::Watch(KeyRange range, Revision after, Deadline deadline) {
  DSEC_CO_TRY_VOID(co_await Travel(deadline));
  auto waiter = std::make_shared<Waiter>(co_await boost::asio::this_coro::executor);
  waiter->range = range;
  for (bool first = true;; first = false) {
    {
      std::lock_guard lock(mutex_);
      ExpireLocked();
      if (first && after < compacted_)
        co_return Error(Code::kGone, "store.compacted", "these changes are forgotten");
      Changes changes;
      changes.next = std::max(after, revision_);
      const auto begin =
          std::upper_bound(history_.begin(), history_.end(), after,
                           [](Revision at, const Change& change) { return at < change.revision; });
      for (auto it = begin; it != history_.end(); ++it) {
        if (Within(range, it->key)) changes.changes.push_back(*it);
      }
      if (!changes.changes.empty() || deadline.Expired()) co_return changes;
      if (first) waiters_.push_back(waiter);
      // What was looked through need not be again.
      after = revision_;
    }
    auto woken = co_await waiter->news.Wait(deadline.Sooner(Deadline::After(kLook)));
    if (!woken.ok() && woken.error().code() == Code::kCancelled) co_return std::move(woken).error();
    waiter->news.Reset();
  }
}

}  // namespace dsec::store::testing

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "dsec/v1/iam.pb.h"
#include "runtime/blocking_pool.h"
#include "runtime/periodic.h"
#include "store/sqlite.h"

namespace dsec::iam {

struct AuditOptions {
  uint64_t keep = 100'000;                    // records; the oldest go first
  std::chrono::milliseconds flush_every{50};  // what Add has taken is on disk after this
  uint64_t refusals_per_second = 100;         // beyond it they are only counted
  const Clock* clock = &Clock::System();
};

// Who did what, when and with which key, as far as this apiserver saw it: a file that is only ever
// appended to, within a bound. Never holds secrets: what is written is what v1::IamAuditRecord
// names. Thread-safe.
class AuditLog {
 public:
  struct Item {
    uint64_t seq = 0;
    v1::IamAuditRecord record;
  };
  struct Page {
    std::vector<Item> items;  // newest first
    uint64_t next = 0;        // to go on before; 0: there is nothing further
  };
  using Wanted = std::function<bool(const v1::IamAuditRecord&)>;

  // Opens or makes the file. Errors of store::Database.
  static Result<std::unique_ptr<AuditLog>> Open(const std::string& path, runtime::Executor executor,
                                                AuditOptions options);
  // Writes what Add has taken. The periodic run must have ended: Stop, or the shards were stopped.
  ~AuditLog();
  runtime::Task<void> Stop();

  // On disk within flush_every; lost if the process is killed before.
  void Add(v1::IamAuditRecord record);
  // The same of a refused call, bounded by refusals_per_second.
  void AddRefusal(v1::IamAuditRecord record);
  // On disk when this returns.
  runtime::Task<void> AddNow(v1::IamAuditRecord record);
  // Records before `before` (0: from the newest) that are wanted, at most `limit`; looks at no more
  // than 20,000 in one call.
  runtime::Task<Page> List(uint64_t before, uint32_t limit, Wanted wanted,
                           runtime::Deadline deadline);

 private:
  AuditLog(store::Database database, AuditOptions options);
  Result<void> Prepare();
  Result<void> Write();
  Result<Page> Read(uint64_t before, uint32_t limit, const Wanted& wanted);
  boost::asio::awaitable<void> Flush();

  const AuditOptions options_;
  store::Database database_;  // on the thread of pool_
  store::Statement insert_, read_, prune_;
  uint64_t next_seq_ = 1;

  std::mutex mutex_;
  std::vector<v1::IamAuditRecord> pending_;
  uint64_t lost_ = 0;
  int64_t second_ = 0;
  uint64_t refusals_ = 0;
  std::unique_ptr<runtime::BlockingPool> pool_;
  std::unique_ptr<runtime::Periodic> flusher_;
};

}  // namespace dsec::iam

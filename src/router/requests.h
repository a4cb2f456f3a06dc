// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "dsec/v1/router.pb.h"
#include "iam/project.h"
#include "runtime/async_event.h"
#include "runtime/gate.h"
#include "runtime/task.h"
#include "store/store.h"

namespace dsec::router {

// req/<project>/<request_id>.
std::string RequestKey(const iam::ProjectPath& project, std::string_view request_id);

// What the store has of a request.
struct RequestState {
  v1::RequestRecord record;
  store::Revision version = 0;
};

// The records of creates in the store, written many at a time: what comes within `window` goes in
// one transaction of up to 128. Thread-safe; errors are the store's.
class Requests {
 public:
  struct Options {
    std::chrono::microseconds window{2'000};
    size_t at_once = 8;  // transactions under way
    size_t max_waiting = 100'000;
    std::chrono::milliseconds patience{3'000};  // with a store that does not answer
    std::chrono::milliseconds lease{86'400'000};
    std::chrono::milliseconds renew{3'600'000};  // a new lease that often
    metrics::Registry* metrics = &metrics::Registry::Global();
  };
  // `executor` runs what talks to the store, which must outlive this.
  Requests(store::Store& store, runtime::Executor executor, Options options);
  // Stop must have returned, or the shards must have been stopped.
  ~Requests();
  runtime::Task<void> Stop();

  // Writes `record` if the version of the key is `expected` (0: if there is none); else answers
  // what is there (version 0: nothing any more). `written` tells which. When the outcome of a write
  // is not known it is made again: what is there then may be the own record, which its sandbox_id
  // and flags show, and counts as written. kUnavailable create.store_away: the store does not
  // answer; what it has of this is not known.
  struct Written {
    bool written = false;
    RequestState now;
  };
  runtime::Task<Written> Write(std::string key, v1::RequestRecord record, store::Revision expected,
                               runtime::Deadline deadline);
  // Removes it if its version is `expected`.
  runtime::Task<void> Forget(std::string key, store::Revision expected, runtime::Deadline deadline);
  runtime::Task<std::optional<RequestState>> Read(std::string key, runtime::Deadline deadline);

  size_t waiting() const { return waiting_; }

 private:
  struct Item;
  using ItemPtr = std::shared_ptr<Item>;
  runtime::Task<Written> WriteHere(std::string key, std::optional<v1::RequestRecord> record,
                                   store::Revision expected, runtime::Deadline deadline);
  boost::asio::awaitable<void> FlushSoon();
  std::vector<ItemPtr> TakeBatch();
  boost::asio::awaitable<void> CommitBatch(std::vector<ItemPtr> batch);
  boost::asio::awaitable<void> Commit(std::vector<ItemPtr> batch, store::LeaseId lease);
  runtime::Task<store::LeaseId> Lease();
  void Flush();

  store::Store& store_;
  const runtime::Executor executor_;
  const Options options_;
  metrics::Counter& transactions_;
  metrics::Counter& records_;
  metrics::Counter& conflicts_;

  // On executor_ alone.
  std::deque<ItemPtr> queue_;
  bool flush_due_ = false;
  size_t committing_ = 0;
  store::LeaseId lease_ = 0;
  MonoTime lease_until_{};
  std::atomic<size_t> waiting_ = 0;
  runtime::Gate gate_;
};

}  // namespace dsec::router

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>

#include "base/clock.h"
#include "iam/snapshot.h"
#include "runtime/async_event.h"
#include "runtime/blocking_pool.h"
#include "runtime/gate.h"
#include "runtime/task.h"
#include "store/store.h"

namespace dsec::iam {

struct DirectoryOptions {
  KeyDigest root_key{};  // SHA-256 of the root principal's key
  // The longest that what was read last is gone by while the store is away.
  std::chrono::milliseconds cache_max{12 * 3600 * 1000};
  const Clock* clock = &Clock::System();
};

// The present snapshot of IAM's objects, kept up by a watch on the store, and who a key belongs to.
// A change that another process made is in it within kPoll; while the store is away the last one
// goes on to hold, at most `cache_max`, except for the root key, which needs no store.
class Directory {
 public:
  // How often the store is asked at least: the bound on a revocation. Nothing is slower than this
  // while the store answers.
  static constexpr std::chrono::milliseconds kPoll{1'000};

  // Reads everything once (the store's error if it cannot), makes the root project if there is
  // none, and then watches on `executor`. `store` must outlive it.
  static runtime::Task<std::unique_ptr<Directory>> Open(store::Store& store,
                                                        runtime::Executor executor,
                                                        DirectoryOptions options);
  // Stop must have returned, or the shards must have been stopped.
  ~Directory();
  // Ends the watch.
  runtime::Task<void> Stop();

  // Called on `executor` after each new snapshot from now on; any thread.
  void OnChange(std::function<void()> changed);

  // --- any thread ---
  std::shared_ptr<const Snapshot> Now() const;
  // Errors of iam::Authenticate; kUnavailable iam.stale beyond cache_max.
  Result<Caller> Authenticate(std::string_view key) const;
  Result<void> StillGood(const Caller& caller) const;
  store::Store& store() const { return store_; }
  int64_t NowMs() const { return UnixMillis(options_.clock->Wall()); }

  // Waits until the snapshot holds what was written at `revision`; any shard.
  runtime::Task<void> Reach(store::Revision revision, runtime::Deadline deadline);

 private:
  Directory(store::Store& store, runtime::Executor executor, DirectoryOptions options);
  runtime::Task<void> Load();
  runtime::Task<void> EnsureRoot();
  runtime::Task<void> Watch();
  runtime::Task<void> Publish();
  boost::asio::awaitable<void> Follow();
  runtime::Task<void> ReachHere(store::Revision revision, runtime::Deadline deadline);
  Result<void> Fresh() const;
  boost::asio::awaitable<void> RemoveLeftovers(std::shared_ptr<const Snapshot> of);

  store::Store& store_;
  const runtime::Executor executor_;
  const DirectoryOptions options_;

  // On `executor_` alone.
  Snapshot::Entries entries_;
  store::Revision seen_ = 0;
  bool loaded_ = false;
  runtime::AsyncEvent news_;

  mutable std::mutex mutex_;
  std::shared_ptr<const Snapshot> now_;
  std::function<void()> changed_;
  MonoTime heard_{};  // when the store answered last
  runtime::Gate gate_;
  runtime::Running follower_;
  std::unique_ptr<runtime::BlockingPool> builder_;
};

}  // namespace dsec::iam

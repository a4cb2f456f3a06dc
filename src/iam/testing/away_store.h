// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <utility>

#include "store/store.h"

namespace dsec::iam::testing {

// Another store, which a test can take away: then every call answers kUnavailable, and a watch
// under way ends so at its deadline. `lost` commits are made, but their answer does not arrive.
class AwayStore final : public store::Store {
 public:
  explicit AwayStore(store::Store& of) : of_(of) {}
  void SetAway(bool away) { away_ = away; }
  void LoseAnswers(int commits) { lose_ = commits; }
  uint64_t commits() const { return commits_; }

  runtime::Task<std::optional<store::Entry>> Get(std::string key,
                                                 runtime::Deadline deadline) override {
    if (away_) co_return Gone();
    co_return co_await of_.Get(std::move(key), deadline);
  }
  runtime::Task<store::Page> Range(store::KeyRange range, uint32_t limit,
                                   runtime::Deadline deadline) override {
    if (away_) co_return Gone();
    co_return co_await of_.Range(std::move(range), limit, deadline);
  }
  runtime::Task<store::Revision> Commit(std::vector<store::Condition> conditions,
                                        std::vector<store::Write> writes,
                                        runtime::Deadline deadline) override {
    if (away_) co_return Gone();
    ++commits_;
    auto done = co_await of_.Commit(std::move(conditions), std::move(writes), deadline);
    if (lose_.fetch_sub(1) > 0) co_return Gone();
    co_return done;
  }
  runtime::Task<store::LeaseId> Grant(std::chrono::milliseconds ttl,
                                      runtime::Deadline deadline) override {
    co_return co_await of_.Grant(ttl, deadline);
  }
  runtime::Task<void> KeepAlive(store::LeaseId lease, runtime::Deadline deadline) override {
    co_return co_await of_.KeepAlive(lease, deadline);
  }
  runtime::Task<void> Revoke(store::LeaseId lease, runtime::Deadline deadline) override {
    co_return co_await of_.Revoke(lease, deadline);
  }
  runtime::Task<store::Changes> Watch(store::KeyRange range, store::Revision after,
                                      runtime::Deadline deadline) override {
    if (away_) co_return Gone();
    auto changes = co_await of_.Watch(std::move(range), after, deadline);
    if (away_) co_return Gone();
    co_return changes;
  }

 private:
  static Error Gone() { return Error(Code::kUnavailable, "store.io", "taken away by the test"); }
  store::Store& of_;
  std::atomic<bool> away_ = false;
  std::atomic<int> lose_ = 0;
  std::atomic<uint64_t> commits_ = 0;
};

}  // namespace dsec::iam::testing

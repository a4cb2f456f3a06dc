// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "store/store.h"

namespace dsec::cluster::testing {

// A store that counts leases, and refuses commits as if others had come first.
class LeaseCount final : public store::Store {
 public:
  explicit LeaseCount(store::Store& under) : under_(under) {}
  runtime::Task<std::optional<store::Entry>> Get(std::string key,
                                                 runtime::Deadline deadline) override {
    return under_.Get(std::move(key), deadline);
  }
  runtime::Task<store::Page> Range(store::KeyRange range, uint32_t limit,
                                   runtime::Deadline deadline) override {
    return under_.Range(std::move(range), limit, deadline);
  }
  runtime::Task<store::Revision> Commit(std::vector<store::Condition> conditions,
                                        std::vector<store::Write> writes,
                                        runtime::Deadline deadline) override {
    if (conflicts > 0) {
      --conflicts;
      co_return Error(Code::kConflict, "store.version", "made up");
    }
    auto done = co_await under_.Commit(std::move(conditions), std::move(writes), deadline);
    co_return std::move(done);
  }
  runtime::Task<store::LeaseId> Grant(std::chrono::milliseconds ttl,
                                      runtime::Deadline deadline) override {
    ++granted;
    return under_.Grant(ttl, deadline);
  }
  runtime::Task<void> KeepAlive(store::LeaseId lease, runtime::Deadline deadline) override {
    return under_.KeepAlive(lease, deadline);
  }
  runtime::Task<void> Revoke(store::LeaseId lease, runtime::Deadline deadline) override {
    ++revoked;
    return under_.Revoke(lease, deadline);
  }
  runtime::Task<store::Changes> Watch(store::KeyRange range, store::Revision after,
                                      runtime::Deadline deadline) override {
    return under_.Watch(std::move(range), after, deadline);
  }

  std::atomic<int> granted = 0;
  std::atomic<int> revoked = 0;
  std::atomic<int> conflicts = 0;  // of the next commits

 private:
  store::Store& under_;
};

}  // namespace dsec::cluster::testing

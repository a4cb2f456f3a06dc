// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "store/store.h"

namespace dsec::store {

struct EtcdOptions {
  // "http://host:2379" or "unix:/path", one a member of the cluster; asked in this order, starting
  // with the one that answered last.
  std::vector<std::string> endpoints;
  // Before every key: several stores may share a cluster.
  std::string prefix = "dsec/";
  // With several endpoints: how long one that does not answer is waited for.
  std::chrono::milliseconds patience{3'000};
};

// The store of a cluster: etcd v3 (3.4 or later) through its HTTP gateway. Reads are linearizable.
// Reads and leases go to the next member when one is away; a commit only if nothing was sent, for
// else it may have been applied: kUnavailable "store.unavailable". An etcd that has no leader or no
// majority is the same. Leases have whole seconds, and at least what etcd's election timeout makes
// it give (2 s by default); they run on while etcd is away. kResourceExhausted "store.full": etcd's
// quota is reached.
//
// A revision is etcd's own, so other users of the cluster count it up as well.
class EtcdStore final : public Store {
 public:
  // Its connections live on `executor`. Connects with the first call. kInvalidArgument
  // "store.endpoints", "client.endpoint".
  static Result<std::unique_ptr<EtcdStore>> Open(runtime::Executor executor, EtcdOptions options);
  // Calls under way go on; their callers may have gone.
  ~EtcdStore() override;

  runtime::Task<std::optional<Entry>> Get(std::string key, runtime::Deadline deadline) override;
  runtime::Task<Page> Range(KeyRange range, uint32_t limit, runtime::Deadline deadline) override;
  runtime::Task<Revision> Commit(std::vector<Condition> conditions, std::vector<Write> writes,
                                 runtime::Deadline deadline) override;
  runtime::Task<LeaseId> Grant(std::chrono::milliseconds ttl, runtime::Deadline deadline) override;
  runtime::Task<void> KeepAlive(LeaseId lease, runtime::Deadline deadline) override;
  runtime::Task<void> Revoke(LeaseId lease, runtime::Deadline deadline) override;
  runtime::Task<Changes> Watch(KeyRange range, Revision after, runtime::Deadline deadline) override;

 private:
  struct Impl;
  explicit EtcdStore(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl> impl_;
};

}  // namespace dsec::store

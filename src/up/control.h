// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "config/node_config.h"
#include "edge/edge.h"
#include "iam/audit_log.h"
#include "iam/directory.h"
#include "iam/quota_keeper.h"
#include "runtime/gate.h"
#include "runtime/shards.h"
#include "store/store.h"

namespace dsec::up {

// The control state, in the embedded store or in etcd, and what IAM makes of it.
class Control {
 public:
  // Opens <state_dir>/control.db, or etcd if the settings name one, and <state_dir>/audit.db.
  // `api_key` is the root principal's.
  static Result<std::unique_ptr<Control>> Open(const config::NodeConfig& config,
                                               const std::string& api_key, runtime::Shards& shards);
  // Of an edge in a cluster, over its etcd: quotas alone. Starts without the store as well, and
  // reads limits as soon as that answers; until then nothing is known of them
  // (iam::QuotaOptions::limits).
  static Result<std::unique_ptr<Control>> OpenForEdge(const config::NodeConfig& config,
                                                      runtime::Shards& shards);
  // Close must have been called.
  ~Control();

  store::Store& store() { return *store_; }

  iam::Directory& directory() { return *directory_; }
  iam::QuotaKeeper& quota() { return *quota_; }
  iam::AuditLog& audit() { return *audit_; }

  // Who is told when quota comes back; null before it ends.
  void Tell(edge::Edge* edge) { told_->store(edge); }
  // Brings the quotas in line with what the edge has adopted.
  void Settle(runtime::Shards& shards);
  // Ends what goes on in the background. Once; Close does it, from outside of the shards, unless it
  // was done.
  runtime::Task<void> Stop();
  void Close(runtime::Shards& shards);

 private:
  Result<void> OpenStore(const config::NodeConfig& config, const runtime::Executor& home);
  void OpenQuota(const config::NodeConfig& config, const runtime::Executor& home);
  boost::asio::awaitable<void> OpenDirectoryLater(runtime::Executor home,
                                                  iam::DirectoryOptions options);
  Result<void> OpenParts(const config::NodeConfig& config, const std::string& api_key,
                         const runtime::Executor& home);
  Control() : told_(std::make_shared<std::atomic<edge::Edge*>>(nullptr)) {}

  bool stopped_ = false;
  const std::shared_ptr<std::atomic<edge::Edge*>> told_;
  // What knows the limits; null as long as nobody does.
  const std::shared_ptr<std::atomic<iam::Directory*>> limits_ =
      std::make_shared<std::atomic<iam::Directory*>>(nullptr);
  runtime::Running opening_;
  runtime::Gate gate_;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<iam::AuditLog> audit_;
  std::unique_ptr<iam::Directory> directory_;
  std::unique_ptr<iam::QuotaKeeper> quota_;
};

}  // namespace dsec::up

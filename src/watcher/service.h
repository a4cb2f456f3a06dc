// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "dsec/v1/cluster.pb.h"
#include "dsec/v1/watcher.pb.h"
#include "runtime/async_event.h"
#include "runtime/gate.h"
#include "runtime/task.h"
#include "store/follow.h"
#include "store/store.h"
#include "watcher/health.h"
#include "watcher/mirror.h"
#include "watcher/probe.h"

namespace dsec::watcher {

// What apiservers ask of a watcher; over rpc or in one process. Any shard.
class SnapshotApi {
 public:
  virtual ~SnapshotApi() = default;
  virtual runtime::Task<v1::SnapshotReply> Snapshot(v1::SnapshotRequest request,
                                                    runtime::Deadline deadline) = 0;
};

struct WatcherOptions {
  std::string id;       // as node ids: [a-z0-9]{1,32}
  std::string address;  // HOST:PORT where apiservers reach it; for the testimony
  HealthOptions health;
  std::chrono::milliseconds tick{250};
  std::chrono::milliseconds probe_every{1'000};  // of a node, from the start of the last one
  // Probes of a node overlap: one that is slow, or goes on after a pause, is heard by any answer.
  std::chrono::milliseconds probe_timeout{7'000};
  std::chrono::milliseconds lease{5'000};
  size_t probes_at_once = 20'000;
  const Clock* clock = &Clock::System();
  metrics::Registry* metrics = &metrics::Registry::Global();
};

// One of any number of watchers of a cluster (docs/design/cluster.md, section 3). It probes every
// node, mirrors what lives there, tells apiservers how full the nodes are, and, while it holds
// watch/leader, declares nodes dead by the rules of Health. Killed at any moment it leaves nothing
// that counts: parts of lost/ without their part 0.
class Watcher final : public SnapshotApi {
 public:
  // All of it runs on `executor`; store and probe must outlive it.
  Watcher(store::Store& store, runtime::Executor executor, NodeProbe& probe,
          WatcherOptions options);
  // Stop must have returned, or the shards must have been stopped.
  ~Watcher() override;
  void Start();
  // Gives the leadership back when it has it.
  runtime::Task<void> Stop();

  // kInvalidArgument never: an unknown run begins anew. Answers an empty reply at the deadline.
  runtime::Task<v1::SnapshotReply> Snapshot(v1::SnapshotRequest request,
                                            runtime::Deadline deadline) override;

  // An operator's word that a node is dead, for when half a cluster is. Only of one that is
  // suspect: kConflict node.answers; kConflict watcher.not_leading; kNotFound node.unknown.
  runtime::Task<void> DeclareDead(std::string node, std::string who);

  struct Status {
    bool leads = false;
    std::string leader;  // empty: none is known
    size_t watchers = 0;
    size_t nodes = 0;
    size_t suspect = 0;
    uint64_t deaths = 0;  // declared by this one
    size_t mirrored = 0;  // sandboxes
  };
  runtime::Task<Status> GetStatus();

 private:
  struct Node {
    explicit Node(const std::string& id) : mirror(id) {}
    v1::NodeRecord record;
    store::Revision version = 0;  // of record
    Mirror mirror;
    v1::NodeInfo info;
    bool measured = false;
    MonoTime measured_at{};  // when the question was sent
    MonoTime next_probe{};
    size_t probing = 0;  // probes under way
    bool declaring = false;
    bool suspect = false;
    uint64_t changed = 0;  // version of the snapshot
  };
  struct Other {
    v1::WatcherTestimony testimony;
    MonoTime heard{};
  };
  using NodePtr = std::shared_ptr<Node>;

  void OnNodes(store::Update update);
  void SetNode(const store::Entry& entry);
  void DropNode(const std::string& id);
  void OnWatch(store::Update update);
  boost::asio::awaitable<void> Run();
  void Tick();
  void StartProbes(MonoTime now);
  boost::asio::awaitable<void> ProbeOne(std::string id);
  void LookForDeaths(MonoTime now);
  boost::asio::awaitable<void> Bury(std::string id);
  // `who` is a watcher that found it by the rules, or an operator; the rules are asked again before
  // the last step when `by_rule`.
  runtime::Task<void> Declare(NodePtr node, std::string who, bool by_rule);
  bool StillDead(const std::string& id);
  bool SomebodyMirrors(const std::string& id, MonoTime now) const;
  boost::asio::awaitable<void> Yield();
  boost::asio::awaitable<void> ReturnQuota(std::string id);
  boost::asio::awaitable<void> Lead();
  runtime::Task<void> LeadOnce();
  runtime::Task<void> Testify();
  std::vector<Testimony> Others(MonoTime now) const;
  size_t Registered() const;
  bool leads() const { return leader_version_ != 0; }
  void Changed(Node& node);
  v1::NodeStatus StatusOf(const Node& node, MonoTime now) const;
  runtime::Task<v1::SnapshotReply> SnapshotHere(v1::SnapshotRequest request,
                                                runtime::Deadline deadline);
  runtime::Task<void> DeclareHere(std::string node, std::string who);
  runtime::Task<Status> StatusHere();
  void SetGauges();

  store::Store& store_;
  const runtime::Executor executor_;
  NodeProbe& probe_;
  const WatcherOptions options_;
  const std::string run_;

  // On executor_ alone.
  Health health_;
  std::map<std::string, NodePtr> nodes_;     // that have a record, dead ones included
  std::map<uint64_t, std::string> changes_;  // version -> node
  std::map<uint64_t, std::string> gone_;     // version -> node that has no record any more
  uint64_t gone_before_ = 0;                 // versions that gone_ no longer tells
  uint64_t version_ = 0;
  uint64_t awake_ = 1;  // counts the times that it has slept
  size_t probing_ = 0;
  uint64_t deaths_ = 0;
  runtime::AsyncEvent news_;
  store::LeaseId lease_ = 0;
  std::string leader_run_;
  std::string leader_name_;
  store::Revision leader_version_ = 0;  // of watch/leader while it is ours
  bool watch_known_ = false;
  MonoTime yield_until_{};
  runtime::AsyncEvent leader_gone_;
  std::map<std::string, Other> others_;  // by watcher
  uint64_t testimonies_ = 0;
  bool testified_silence_ = false;
  bool seen_known_ = false;  // our own watch/seen is in the store
  // Dead nodes, by epoch, whose quota this one has begun to give back.
  std::set<std::pair<std::string, uint64_t>> quota_returned_;

  struct Metrics;
  const std::unique_ptr<Metrics> metrics_;
  runtime::Gate gate_;
  std::vector<runtime::Running> running_;
};

}  // namespace dsec::watcher

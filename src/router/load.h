// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "base/rng.h"
#include "dsec/v1/watcher.pb.h"
#include "placement/choose.h"
#include "router/nodes.h"
#include "runtime/task.h"
#include "store/follow.h"
#include "watcher/service.h"

namespace dsec::router {

// The way to a watcher by its testimony; may answer null.
using WatcherOf = std::function<std::shared_ptr<watcher::SnapshotApi>(const v1::WatcherTestimony&)>;

// How full the nodes are, and the choice among them. It asks a watcher each `every`, the leader
// first. Without one it goes on with the figures that it had, or with empty nodes, and its own
// placements: that is said in the log and in dsec_router_without_watcher. Thread-safe but for what
// is said otherwise.
class Load {
 public:
  struct Options {
    std::chrono::milliseconds every{1'000};
    std::chrono::milliseconds patience{3'000};  // without an answer: on without a watcher
    placement::Options placement;
    placement::Overlay::Options overlay;
    uint64_t seed = 0;  // 0: by the kernel
    const Clock* clock = &Clock::System();
    metrics::Registry* metrics = &metrics::Registry::Global();
  };
  // `changed` is called after each new snapshot, on the executor that Follow runs on.
  Load(const NodeTable& nodes, WatcherOf watcher_of, Options options,
       std::function<void()> changed);

  // What is under watch/ and under place/; on the executor of Follow.
  void OnWatch(const store::Update& update);
  void OnPlaces(const store::Update& update);
  // The nodes of the table are others.
  void OnNodes();
  // Until it is cancelled.
  boost::asio::awaitable<void> Follow();

  struct Choice {
    NodePtr node;
    placement::Overlay::Ticket ticket = 0;
  };
  // One node for one sandbox of the request, which counts there from now on. kResourceExhausted
  // capacity.cluster: none has room, with the reasons; kUnavailable cluster.no_nodes: there is none
  // that takes anything.
  Result<Choice> Choose(placement::Request request, const std::vector<std::string>& excluded);
  // The create was refused or has failed.
  void Fail(placement::Overlay::Ticket ticket);

  std::shared_ptr<const placement::Snapshot> Now() const;
  // Figures of a node, and whether a watcher told them lately.
  std::vector<v1::NodeStatus> Statuses() const;
  bool without_watcher() const;

 private:
  struct Known {
    v1::NodeStatus status;
    MonoTime measured_at{};
  };
  runtime::Task<void> Ask();
  void Take(v1::SnapshotReply reply);
  void Rebuild();
  std::vector<std::string> Turn() const;
  void SetWithout(bool without);

  const NodeTable& nodes_;
  const WatcherOf watcher_of_;
  const Options options_;
  const std::function<void()> changed_;
  metrics::Gauge& without_gauge_;
  metrics::Gauge& age_gauge_;

  // On the executor of Follow.
  std::map<std::string, v1::WatcherTestimony> watchers_;
  std::map<std::string, std::shared_ptr<watcher::SnapshotApi>> ways_;
  std::string leader_;
  std::map<std::string, bool> places_;
  std::string asked_;  // the watcher that run and version are of
  std::string run_;
  uint64_t version_ = 0;
  MonoTime answered_{};

  mutable std::mutex mutex_;
  std::map<std::string, Known> known_;
  bool without_ = true;
  placement::Overlay overlay_;
  Rng rng_;
};

}  // namespace dsec::router

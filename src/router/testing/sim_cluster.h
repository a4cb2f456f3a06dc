// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "iam/testing/away_store.h"
#include "router/cluster_edge.h"
#include "router/edge_probe.h"
#include "router/testing/sim_node.h"
#include "runtime/testing/virtual_time.h"
#include "store/testing/memory_store.h"
#include "watcher/service.h"

namespace dsec::router::testing {

struct SimClusterOptions {
  size_t nodes = 4;
  size_t watchers = 2;
  size_t apiservers = 2;
  SimNodeOptions node{};  // of each; id and seed are its own
  std::chrono::microseconds store_latency{1'000};
  std::chrono::nanoseconds step = std::chrono::milliseconds(1);
  uint64_t seed = 1;
  bool quota = false;                             // the nodes keep quotas, with node.limits
  std::function<void(ClusterOptions&)> change{};  // of each apiserver
  std::function<void(watcher::WatcherOptions&)> change_watcher{};
};

// A whole cluster on virtual time: watchers and apiservers are the real ones, each in a process of
// its own over one store; nodes are simulated ones.
class SimCluster {
 public:
  using World = runtime::testing::World;
  struct Api {
    World::Process process = 0;
    std::unique_ptr<iam::testing::AwayStore> store;
    std::unique_ptr<ClusterEdge> edge;
  };
  struct Watch {
    World::Process process = 0;
    std::unique_ptr<iam::testing::AwayStore> store;
    std::unique_ptr<EdgeProbe> probe;
    std::unique_ptr<watcher::Watcher> watcher;
  };

  explicit SimCluster(SimClusterOptions options);
  ~SimCluster();

  World& world() { return world_; }
  World::Process main() const { return main_; }
  store::testing::MemoryStore& store() { return store_; }
  metrics::Registry& metrics() { return metrics_; }
  SimNode& node(size_t index) { return *nodes_.at(index); }
  SimNode& node(const std::string& id) { return *by_id_.at(id); }
  size_t node_count() const { return nodes_.size(); }
  Api& api(size_t index) { return *apis_.at(index); }
  Watch& watch(size_t index) { return *watches_.at(index); }
  size_t api_count() const { return apis_.size(); }
  size_t watch_count() const { return watches_.size(); }

  size_t AddApi();
  size_t AddWatcher();
  void KillApi(size_t index);
  void KillWatcher(size_t index);
  v1::NodeRecord Record(const std::string& id);
  void PutRecord(const v1::NodeRecord& record);
  // A node that was declared dead announces itself with its new epoch, as an edge does.
  void Rejoin(const std::string& id);
  // Until every apiserver has nodes and figures of all.
  bool RunUntilReady();

  v1::CreateRequest Request(const std::string& request_id, const std::string& project = "root/p");
  // Through one apiserver; the reply counts as delivered.
  Result<v1::SandboxView> Create(size_t api, v1::CreateRequest request,
                                 std::chrono::nanoseconds time = std::chrono::seconds(30));
  static runtime::Task<v1::SandboxView> CreateAndDeliver(edge::EdgeApi& edge,
                                                         v1::CreateRequest request,
                                                         runtime::Deadline deadline);

 private:
  static std::string NodeIdOf(size_t index);
  std::shared_ptr<edge::EdgeApi> WayTo(const v1::NodeRecord& record);

  const SimClusterOptions options_;
  World world_;
  const World::Process main_;
  const World::Process machines_;
  metrics::Registry metrics_;
  store::testing::MemoryStore store_;
  std::vector<std::unique_ptr<SimNode>> nodes_;
  std::map<std::string, SimNode*> by_id_;
  std::vector<std::unique_ptr<Watch>> watches_;
  std::vector<std::unique_ptr<Api>> apis_;
};

}  // namespace dsec::router::testing

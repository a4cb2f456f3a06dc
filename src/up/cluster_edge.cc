// SPDX-License-Identifier: Apache-2.0
#include "up/cluster_edge.h"

#include <utility>

#include "cluster/remote_edge.h"
#include "cluster/routed_edge.h"

namespace dsec::up {
namespace {

using runtime::Task;

class RoutedEdges final : public ClusterEdges {
 public:
  explicit RoutedEdges(std::unique_ptr<cluster::NodeTable> table)
      : table_(std::move(table)), edge_(*table_) {}
  edge::EdgeApi& api() override { return edge_; }
  Task<void> Stop() override {
    co_await table_->Stop();
    co_return Ok();
  }

 private:
  const std::unique_ptr<cluster::NodeTable> table_;
  cluster::RoutedEdge edge_;
};

}  // namespace

Task<std::unique_ptr<ClusterEdges>> OpenClusterEdges(store::Store& store, runtime::Shards& shards,
                                                     std::shared_ptr<const rpc::TlsHolder> tls) {
  auto dial = [&shards, tls = std::move(tls)](
                  const std::string& address, const std::string& node_id,
                  std::function<uint64_t()> epoch) -> Result<std::shared_ptr<edge::EdgeApi>> {
    cluster::RemoteEdgeOptions options;
    options.address = address;
    options.node_id = node_id;
    options.tls = tls;
    options.epoch = std::move(epoch);
    DSEC_TRY(auto made, cluster::RemoteEdge::Make(shards, std::move(options)));
    return std::shared_ptr<edge::EdgeApi>(std::move(made));
  };
  auto table = co_await cluster::NodeTable::Open(store, shards.at(0), std::move(dial));
  if (!table.ok()) co_return std::move(table).error();
  std::unique_ptr<ClusterEdges> edges = std::make_unique<RoutedEdges>(*std::move(table));
  co_return std::move(edges);
}

}  // namespace dsec::up

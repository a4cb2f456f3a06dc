// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "blobfs/client.h"
#include "config/node_config.h"
#include "edge/edge.h"
#include "fn/fn_service.h"
#include "iam/quota_keeper.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "runtime/shards.h"
#include "sandbox/backends/container/container_backend.h"
#include "sandbox/backends/fncall/fncall_backend.h"
#include "sandbox/backends/microvm/microvm_backend.h"
#include "up/layer_catalog.h"

namespace dsec::up {

// All that runs sandboxes and calls on a machine: what `dsec up` and `dsec edge` have in common.
//
// Life: Open, Start, calls, Stop; then the owner stops the shards, calls LetGo, destroys the shards
// and last this object.
class NodeParts {
 public:
  // `quota` may be null and must outlive it.
  static Result<std::unique_ptr<NodeParts>> Open(const config::NodeConfig& config,
                                                 runtime::Shards& shards, iam::QuotaKeeper* quota);
  ~NodeParts();

  // Adopts, ends and sweeps what a run before has left.
  Result<void> Start(const config::NodeConfig& config);
  // `stop_sandboxes`: ends all of them first.
  runtime::Task<void> StopCalls(bool stop_sandboxes);
  runtime::Task<void> StopEdge(runtime::Deadline deadline);
  void LetGo();

  edge::Edge& edge() { return *edge_; }
  fn::FnService& fn() { return *fn_; }
  LayerCatalog& catalog() { return *catalog_; }

 private:
  NodeParts() = default;

  // What is declared first ends last: the process of checked content after the mounts.
  struct Blobs {
    std::shared_ptr<blobfs::Client> client;  // null: content is not checked
    ~Blobs() {
      if (client != nullptr) client->Leave();
    }
  };
  std::unique_ptr<image::LayerStore> store_;
  Blobs blobs_;
  std::unique_ptr<image::LayerMounts> mounts_;
  std::unique_ptr<sandbox::ContainerBackend> backend_;
  std::unique_ptr<sandbox::MicroVmBackend> vms_;
  std::unique_ptr<sandbox::FnCallBackend> fn_backend_;
  std::unique_ptr<LayerCatalog> catalog_;
  std::unique_ptr<edge::Edge> edge_;
  std::unique_ptr<fn::FnService> fn_;
};

}  // namespace dsec::up

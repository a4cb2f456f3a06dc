// SPDX-License-Identifier: Apache-2.0
#include "up/node_parts.h"

#include <utility>

#include "base/log.h"
#include "up/node.h"

namespace dsec::up {

using runtime::Deadline;
using std::chrono::seconds;

NodeParts::~NodeParts() = default;

Result<std::unique_ptr<NodeParts>> NodeParts::Open(const config::NodeConfig& config,
                                                   runtime::Shards& shards,
                                                   iam::QuotaKeeper* quota) {
  std::unique_ptr<NodeParts> parts(new NodeParts());
  // Touches nothing of the layers' root, which may hang.
  parts->store_ = image::LayerStore::At(LayersDir(config));
  image::LayerMountOptions mount_options = LayerMountOptionsOf(config);
  if (WantsBlobfs(config)) {
    DSEC_TRY(auto blobfs_options, BlobfsOptionsOf(config));
    DSEC_TRY(parts->blobs_.client, blobfs::Client::Start(std::move(blobfs_options)));
    mount_options.server = parts->blobs_.client;
  }
  parts->mounts_ = std::make_unique<image::LayerMounts>(*parts->store_, std::move(mount_options));
  DSEC_TRY_VOID(parts->mounts_->Check());
  DSEC_TRY(const sandbox::ContainerOptions container, ContainerOptionsOf(config));
  DSEC_TRY(parts->backend_,
           sandbox::ContainerBackend::Open(container, *parts->store_, *parts->mounts_));
  DSEC_TRY(const sandbox::MicroVmOptions vm_options, MicroVmOptionsOf(config));
  DSEC_TRY(parts->vms_,
           sandbox::MicroVmBackend::Open(vm_options, parts->backend_->parts(), *parts->mounts_));
  DSEC_TRY(parts->fn_backend_,
           sandbox::FnCallBackend::Open(FnCallOptionsOf(config), parts->backend_->parts(),
                                        *parts->mounts_));
  DSEC_TRY(fn::FnOptions fn_options, FnOptionsOf(config));
  parts->catalog_ = std::make_unique<LayerCatalog>(parts->mounts_->catalog());
  edge::EdgeOptions edge_options = EdgeOptionsOf(config, parts->backend_->ScratchPath());
  edge_options.quota = quota;
  DSEC_TRY(parts->edge_, edge::Edge::Open(std::move(edge_options), shards,
                                          {{v1::BACKEND_CONTAINER, parts->backend_.get()},
                                           {v1::BACKEND_MICROVM, parts->vms_.get()}}));
  DSEC_TRY(parts->fn_, fn::FnService::Open(std::move(fn_options), shards, *parts->fn_backend_));
  return parts;
}

Result<void> NodeParts::Start(const config::NodeConfig& config) {
  DSEC_TRY(const edge::StartReport started, edge_->Start());
  DSEC_TRY(const std::vector<std::string> swept, fn_->Start());
  for (const std::string& line : swept) log::Info("fn.swept", {{"what", line}});
  log::Info("node.started", {{"node_id", config.node_id},
                             {"adopted", started.adopted},
                             {"ended", started.ended},
                             {"unanswered", started.unanswered},
                             {"repairs", started.repairs}});
  return Ok();
}

runtime::Task<void> NodeParts::StopCalls(bool stop_sandboxes) {
  if (stop_sandboxes) {
    auto stopped =
        co_await edge_->StopSandboxes(std::chrono::milliseconds(0), Deadline::After(seconds(60)));
    if (!stopped.ok()) log::Warn("node.stop_sandboxes", {{"error", stopped.error()}});
  }
  auto ended = co_await fn_->Stop(Deadline::After(seconds(10)));
  if (!ended.ok()) log::Warn("node.stop_calls", {{"error", ended.error()}});
  co_return Ok();
}

runtime::Task<void> NodeParts::StopEdge(Deadline deadline) {
  auto stopped = co_await edge_->Stop(deadline);
  co_return std::move(stopped);
}

void NodeParts::LetGo() {
  if (edge_ != nullptr) edge_->LetGo();
  if (fn_ != nullptr) fn_->LetGo();
}

}  // namespace dsec::up

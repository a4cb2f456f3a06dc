// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/id.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "model/spec.h"
#include "sandbox/backend.h"
#include "sandbox/isolators/ids.h"
#include "sandbox/node_parts.h"

namespace dsec::sandbox {

struct ContainerOptions {
  NodeId node_id;
  std::string state_dir;  // agent.key, scratch
  std::string run_dir;    // sockets; made with mode 0700 if it is missing
  std::string spawner_path;
  std::string agent_path;
  int log_fd = 2;  // stderr of agents
  IdPlan ids;
  uint32_t slot_pool_size = 32;
  uint64_t scratch_bytes = 0;  // ScratchOptions.image_bytes
  model::LimitsPolicy limits;  // what this host cannot hold is taken off
  size_t host_threads = 4;     // removal, figures, sweeps
  size_t create_threads = 8;   // creates at work
  size_t layer_threads = 32;   // wait for the layer store
};

// Sandboxes as containers: namespaces, overlay of EROFS layers on a bounded writable layer,
// cgroups. docs/design/spine.md sections 2, 4, 5 and 6.
//
// Two descriptors a live sandbox (agent, channel). What it makes bears the name of its slot or
// sandbox below node-specific roots, so that a process that starts anew finds it all: an instance
// of this class begins with what the host has.
class ContainerBackend final : public SandboxBackend {
 public:
  // Takes the host as it is; nothing of an earlier process is touched before Adopt, Destroy or
  // Sweep say so. `store` and `layers` must outlive it. Blocking. kFailedPrecondition names the
  // mechanism that is missing.
  static Result<std::unique_ptr<ContainerBackend>> Open(const ContainerOptions& options,
                                                        image::LayerStore& store,
                                                        image::LayerMounts& layers);
  // Slots that wait are removed; sandboxes live on. No call may be under way and no Instance left.
  ~ContainerBackend() override;

  std::string_view name() const override { return "container"; }
  std::vector<v1::Capability> Capabilities() const override;
  Result<void> Normalize(v1::SandboxSpec& spec) const override;
  runtime::Task<std::shared_ptr<Instance>> Create(v1::SandboxRecord& record, Journal journal,
                                                  runtime::Deadline deadline) override;
  runtime::Task<std::shared_ptr<Instance>> Adopt(const v1::SandboxRecord& record,
                                                 runtime::Deadline deadline) override;
  runtime::Task<void> Destroy(const v1::SandboxRecord& record, runtime::Deadline deadline) override;
  runtime::Task<std::vector<std::string>> Sweep(const std::vector<v1::SandboxRecord>& live,
                                                runtime::Deadline deadline) override;

  // Whose statvfs tells the room for writable layers; while this object lives.
  std::string ScratchPath() const;
  // For the node's other backends; lives as long as this object.
  NodeParts parts();
  // Slots that are ready.
  size_t ReadySlots() const;

  // Removes everything of a node from the host, sandboxes and workers of FnCall included: what
  // `dsec purge` does. No daemon of the node may run. One line for each thing.
  static Result<std::vector<std::string>> Purge(const ContainerOptions& options, MonoTime deadline);

 private:
  struct Host;
  class ContainerInstance;
  explicit ContainerBackend(std::unique_ptr<Host> host);

  runtime::Task<std::shared_ptr<rpc::Channel>> Greet(const v1::SandboxRecord& record,
                                                     runtime::Deadline deadline);
  // Until nothing is alive in a slot whose processes have been killed.
  runtime::Task<void> AwaitDeath(v1::SandboxRecord record, runtime::Deadline deadline);

  const std::unique_ptr<Host> host_;
};

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "dsec/v1/edge.pb.h"
#include "fn/artifact_store.h"
#include "fn/call_run.h"
#include "fn/compile_cache.h"
#include "fn/environments.h"
#include "fn/fn_api.h"
#include "fn/fn_metrics.h"
#include "fn/gpu.h"
#include "fn/op_table.h"
#include "fn/options.h"
#include "fn/pools.h"
#include "fn/type_registry.h"
#include "runtime/blocking_pool.h"
#include "runtime/gate.h"
#include "runtime/periodic.h"
#include "runtime/shards.h"
#include "sandbox/fn_backend.h"

namespace dsec::fn {

// The engine of FnCall. Calls, lines, pools and workers live on one shard; what blocks on the disk
// has threads of its own. docs/design/fncall.md tells the way of a call.
//
// Life: Open, Start, calls, Stop; then the owner stops the shards, calls LetGo, destroys the shards
// and last this object. Without Stop the same order is a crash: a call leaves nothing, and what
// workers leave is swept by the next Start.
class FnService final : public FnApi {
 public:
  // Makes <state_dir>/{fn_types,fn_artifacts}. `shards` and `backend` outlive it.
  static dsec::Result<std::unique_ptr<FnService>> Open(FnOptions options, runtime::Shards& shards,
                                                       sandbox::FnBackend& backend);
  ~FnService() override;

  // Sweeps what earlier processes left, one line each, and begins to keep pools. Not from a shard.
  dsec::Result<std::vector<std::string>> Start();
  // No new call (edge.stopping), none that waits; those that run end until the deadline, the rest
  // is ended as FN_INFRASTRUCTURE edge.stopping. Then the workers end. Once.
  runtime::Task<void> Stop(runtime::Deadline deadline);
  // After the shards were stopped: destroys what of this object lives on them.
  void LetGo();

  // What is done each `tick`; for tests that move the clock by hand.
  runtime::Task<void> Tick();

  runtime::Task<v1::FnResult> Call(v1::FnCall call, runtime::Deadline deadline) override;
  runtime::Task<v1::FnResult> Result(std::string project, std::string op_id,
                                     runtime::Deadline deadline) override;
  std::vector<v1::FnTaskType> Types() const override;
  runtime::Task<v1::FnTaskType> PutType(v1::FnTaskType type, runtime::Deadline deadline) override;
  runtime::Task<void> RemoveType(std::string name, runtime::Deadline deadline) override;
  runtime::Task<std::string> PutArtifact(std::string bytes, runtime::Deadline deadline) override;
  runtime::Task<std::string> GetArtifact(std::string digest, runtime::Deadline deadline) override;
  std::vector<v1::FnPoolInfo> Pools() const override;
  std::vector<v1::Capability> Capabilities() const override;

 private:
  using OpPtr = std::shared_ptr<Op>;

  FnService(FnOptions options, runtime::Shards& shards, sandbox::FnBackend& backend,
            GpuInventory gpus);

  runtime::Task<v1::FnResult> CallHere(v1::FnCall call, runtime::Deadline deadline);
  runtime::Task<v1::FnResult> ResultHere(std::string project, std::string op_id,
                                         runtime::Deadline deadline);
  runtime::Task<OpPtr> Begin(v1::FnCall call);
  // Whether the node holds as many calls as it may, in whatever line they stand.
  dsec::Result<void> CheckRoom(uint64_t bytes) const;
  runtime::Task<v1::FnResult> Await(OpPtr op, bool existed, runtime::Deadline deadline);
  boost::asio::awaitable<void> RunOp(OpPtr op);
  // Makes the pools that task types want kept; tried again later where an environment is missing.
  boost::asio::awaitable<void> KeepPools();
  boost::asio::awaitable<void> TypesChanged();
  runtime::Task<void> StopHere(runtime::Deadline deadline);
  static boost::asio::awaitable<void> CloseGate(runtime::Gate* gate,
                                                std::shared_ptr<runtime::AsyncEvent> closed);
  runtime::Task<void> WaitClosed(runtime::Gate& gate, runtime::Deadline deadline);

  const FnOptions options_;
  const runtime::Executor home_;
  sandbox::FnBackend& backend_;
  FnMetrics metrics_;
  const std::vector<v1::Capability> gpu_capabilities_;
  std::unique_ptr<TypeRegistry> types_;
  std::unique_ptr<ArtifactStore> artifacts_;
  runtime::Gate calls_;       // calls under way
  runtime::Gate background_;  // making and watching of workers, writing of artefacts
  runtime::Gate closing_;
  fn::Pools pools_;
  GpuAllocator gpus_;
  CompileCache cache_;
  Environments environments_;
  OpTable ops_;
  std::set<OpPtr> running_;  // all that have not ended
  uint64_t running_bytes_ = 0;
  std::atomic<bool> stopping_ = false;
  uint64_t ticks_ = 0;
  std::unique_ptr<runtime::BlockingPool> disk_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<runtime::Periodic> ticker_;
};

}  // namespace dsec::fn

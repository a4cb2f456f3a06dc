// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "model/spec.h"
#include "sandbox/fn_backend.h"
#include "sandbox/node_parts.h"

namespace dsec::sandbox {

// What a node lets the limits of a step be. `fallback` stands in for 0.
struct FnLimitsPolicy {
  model::LimitRule wall_ms{1, 3'600'000, 10'000, ""};
  model::LimitRule cpu_ms{1, 3'600'000, 10'000, ""};
  model::LimitRule memory_bytes{8ull << 20, 4ull << 40, 1ull << 30, ""};
  model::LimitRule processes{1, 1 << 16, 128, ""};
  model::LimitRule output_bytes{1, 64ull << 20, 1ull << 20, ""};
  model::LimitRule file_bytes{1, 1ull << 40, 256ull << 20, ""};
  model::LimitRule disk_bytes{1ull << 20, 1ull << 40, 256ull << 20, ""};
  model::LimitRule disk_inodes{64, 1ull << 30, 65'536, ""};
};

struct FnCallOptions {
  FnLimitsPolicy limits;
  size_t resolve_threads = 2;  // wait for the layer store
};

// Calls in containers (docs/adr/0008-fncall-workers.md). Two descriptors and a thread for a worker
// that waits, some more while it works. Everything on the host bears names of kind kWorker.
class FnCallBackend final : public FnBackend {
 public:
  // `parts` and `layers` must outlive it.
  static Result<std::unique_ptr<FnCallBackend>> Open(const FnCallOptions& options,
                                                     const NodeParts& parts,
                                                     image::LayerMounts& layers);
  // Ends all workers; no call may be under way. Blocks until they are gone or would not go.
  ~FnCallBackend() override;

  std::string_view name() const override { return "fncall"; }
  std::vector<v1::Capability> Capabilities() const override;
  runtime::Task<v1::FnEnvironment> Resolve(v1::FnEnvironment environment,
                                           runtime::Deadline deadline) override;
  Result<v1::FnLimits> Normalize(v1::FnLimits limits, std::string_view prefix) const override;
  runtime::Task<std::unique_ptr<FnWorker>> MakeWorker(FnWorkerSpec spec,
                                                      runtime::Deadline deadline) override;
  runtime::Task<std::vector<std::string>> Sweep(const std::vector<v1::SandboxRecord>& live,
                                                runtime::Deadline deadline) override;

 private:
  struct State;
  class Worker;
  explicit FnCallBackend(std::unique_ptr<State> state);
  const std::unique_ptr<State> state_;
};

}  // namespace dsec::sandbox

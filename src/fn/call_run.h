// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dsec/v1/fncall.pb.h"
#include "fn/compile_cache.h"
#include "fn/environments.h"
#include "fn/fn_metrics.h"
#include "fn/gpu.h"
#include "fn/options.h"
#include "fn/pools.h"
#include "runtime/blocking_pool.h"
#include "runtime/gate.h"
#include "runtime/task.h"
#include "sandbox/fn_backend.h"

namespace dsec::fn {

// What all calls share; one shard, except for the disk.
struct Engine {
  const FnOptions& options;
  FnMetrics& metrics;
  sandbox::FnBackend& backend;
  Environments& environments;
  Pools& pools;
  GpuAllocator& gpus;
  CompileCache& cache;
  ArtifactStore& artifacts;
  runtime::BlockingPool& disk;
  runtime::Executor home;
  runtime::Gate& background;
};

// One call from its checked request to its verdict. Lives in a coroutine of the home shard; `call`
// and `type` outlive it.
class CallRun {
 public:
  CallRun(const Engine& engine, const v1::FnCall& call, const v1::FnTaskType& type)
      : engine_(engine), call_(call), type_(type) {}

  // An error is one of the request, or kCancelled; what goes wrong on the node is a result.
  runtime::Task<v1::FnResult> Execute();

 private:
  using Files = std::vector<const v1::FnFile*>;

  runtime::Task<void> Steps();
  runtime::Task<std::shared_ptr<const Compiled>> Compile();
  runtime::Task<std::shared_ptr<const Compiled>> CompileNow();
  // Puts the files of an outcome into the store and the outcome into the cache.
  static boost::asio::awaitable<void> StoreCompiled(const Engine& engine, std::string key,
                                                    std::shared_ptr<CompileFlight> flight);
  // False when an artefact of `compiled` is gone: it has to be made anew.
  runtime::Task<bool> RunWith(std::shared_ptr<const Compiled> compiled);
  // One program on a worker, tried again after faults of the platform.
  runtime::Task<sandbox::FnReport> Step(std::shared_ptr<Pools::Pool> pool, sandbox::FnRun run,
                                        Files files);
  runtime::Task<sandbox::FnReport> StepOnce(std::shared_ptr<Pools::Pool> pool,
                                            const sandbox::FnRun& run, const Files& files);
  // The bytes of files that are artefacts; `loaded` owns them.
  runtime::Task<Files> Load(Files files, std::vector<std::unique_ptr<v1::FnFile>>* loaded);
  // To the result, with its content or its digest as the call wants it.
  runtime::Task<void> AddFile(v1::FnFile file);
  Files CallFiles() const;
  std::vector<std::string> Words(const v1::FnCommand& command) const;
  std::string CompileKey() const;
  std::shared_ptr<Pools::Pool> PoolFor(bool run);
  // The platform is to blame: the call ends as FN_INFRASTRUCTURE.
  Error Fault(Error error, bool retriable = true);
  Error ExecFault(std::string_view step, const Error& error);

  const Engine& engine_;
  const v1::FnCall& call_;
  const v1::FnTaskType& type_;
  v1::FnEnvironment environment_;  // in canonical form
  v1::FnLimits compile_limits_, run_limits_;
  v1::FnResult result_;
  std::string key_;      // of the compile
  bool cached_ = false;  // the compile was not run by this call
  // The worker of the last step, until the next one is in line or there is none.
  Pools::Lease held_;
  std::chrono::nanoseconds queued_{};
  bool begun_ = false;  // has had a worker
  bool tried_ = false;  // the last step failed on a worker: another may do better
  uint32_t faults_ = 0;
  uint32_t deaths_ = 0;
  bool exhausted_ = false;  // as many workers as may be have taken it
  bool fault_ = false;
  bool retriable_ = false;
};

}  // namespace dsec::fn

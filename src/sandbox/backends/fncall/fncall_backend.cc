// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/fncall_backend.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <list>
#include <mutex>

#include "base/log.h"
#include "runtime/blocking_pool.h"
#include "sandbox/backends/fncall/worker_core.h"
#include "sandbox/fd_wait.h"
#include "sandbox/rootfs.h"

namespace dsec::sandbox {
namespace {

constexpr size_t kQueueLimit = 10'000;

struct LimitField {
  const char* name;
  const model::LimitRule FnLimitsPolicy::* rule;
  uint64_t (v1::FnLimits::*get)() const;
  void (v1::FnLimits::*set)(uint64_t);
};
constexpr LimitField kLimitFields[] = {
    {"wall_ms", &FnLimitsPolicy::wall_ms, &v1::FnLimits::wall_ms, &v1::FnLimits::set_wall_ms},
    {"cpu_ms", &FnLimitsPolicy::cpu_ms, &v1::FnLimits::cpu_ms, &v1::FnLimits::set_cpu_ms},
    {"memory_bytes", &FnLimitsPolicy::memory_bytes, &v1::FnLimits::memory_bytes,
     &v1::FnLimits::set_memory_bytes},
    {"processes", &FnLimitsPolicy::processes, &v1::FnLimits::processes,
     &v1::FnLimits::set_processes},
    {"output_bytes", &FnLimitsPolicy::output_bytes, &v1::FnLimits::output_bytes,
     &v1::FnLimits::set_output_bytes},
    {"file_bytes", &FnLimitsPolicy::file_bytes, &v1::FnLimits::file_bytes,
     &v1::FnLimits::set_file_bytes},
    {"disk_bytes", &FnLimitsPolicy::disk_bytes, &v1::FnLimits::disk_bytes,
     &v1::FnLimits::set_disk_bytes},
    {"disk_inodes", &FnLimitsPolicy::disk_inodes, &v1::FnLimits::disk_inodes,
     &v1::FnLimits::set_disk_inodes}};

void Lower(model::LimitRule& rule, uint64_t max) {
  rule.max = std::min(rule.max, std::max(max, rule.min));
  rule.fallback = std::min(rule.fallback, rule.max);
}

LayerRefs RefsOf(const v1::FnEnvironment& environment) {
  return {environment.base(),
          environment.workspace(),
          {environment.toolkits().begin(), environment.toolkits().end()}};
}

}  // namespace

struct FnCallBackend::State {
  State(const FnCallOptions& from, const NodeParts& node, image::LayerMounts& layer_mounts)
      : options(from), parts(node), layers(layer_mounts) {}

  // Forgets workers whose thread has ended.
  void Collect() {
    const std::lock_guard lock(mutex);
    std::erase_if(cores, [](const std::shared_ptr<WorkerCore>& core) {
      if (!core->finished()) return false;
      core->Join();
      return true;
    });
  }

  FnCallOptions options;
  const NodeParts parts;
  image::LayerMounts& layers;
  std::mutex mutex;
  std::list<std::shared_ptr<WorkerCore>> cores;
  std::unique_ptr<runtime::BlockingPool> pool;  // last: its jobs use all of the above
};

class FnCallBackend::Worker final : public FnWorker {
 public:
  Worker(std::shared_ptr<WorkerCore> core, os::UniqueFd runner)
      : core_(std::move(core)), runner_(std::move(runner)) {}
  ~Worker() override { core_->Stop(); }
  std::string_view name() const override { return core_->name(); }
  runtime::Task<FnReport> Run(FnRun run, runtime::Deadline deadline) override {
    return core_->Run(std::move(run), deadline);
  }
  runtime::Task<void> WaitEnd() override {
    return WaitFd(runner_.get(), FdEvent::kReadable, runtime::Deadline::Never());
  }

 private:
  const std::shared_ptr<WorkerCore> core_;
  const os::UniqueFd runner_;
};

Result<std::unique_ptr<FnCallBackend>> FnCallBackend::Open(const FnCallOptions& options,
                                                           const NodeParts& parts,
                                                           image::LayerMounts& layers) {
  auto state = std::make_unique<State>(options, parts, layers);
  FnLimitsPolicy& policy = state->options.limits;
  policy.memory_bytes.unenforceable = parts.tree.MemoryUnenforceable();
  policy.processes.unenforceable = parts.tree.PidsUnenforceable();
  struct sysinfo host = {};
  if (::sysinfo(&host) == 0) {
    const uint64_t memory = static_cast<uint64_t>(host.totalram) * host.mem_unit;
    Lower(policy.memory_bytes, memory);
    Lower(policy.disk_bytes, memory);
  }
  state->pool =
      std::make_unique<runtime::BlockingPool>("fncall", options.resolve_threads, kQueueLimit);
  return std::unique_ptr<FnCallBackend>(new FnCallBackend(std::move(state)));
}

FnCallBackend::FnCallBackend(std::unique_ptr<State> state) : state_(std::move(state)) {}

FnCallBackend::~FnCallBackend() {
  state_->pool.reset();
  for (const auto& core : state_->cores) core->Close();
  for (const auto& core : state_->cores) core->Join();
}

std::vector<v1::Capability> FnCallBackend::Capabilities() const {
  v1::Capability item;
  item.set_name("fncall");
  item.set_used("containers");
  const FnLimitsPolicy& policy = state_->options.limits;
  item.set_ok(policy.memory_bytes.unenforceable.empty() && policy.processes.unenforceable.empty());
  item.set_detail(item.ok() ? "calls in pre-created containers; the writable layer is memory"
                            : policy.memory_bytes.unenforceable + policy.processes.unenforceable);
  return {item};
}

runtime::Task<v1::FnEnvironment> FnCallBackend::Resolve(v1::FnEnvironment environment,
                                                        runtime::Deadline deadline) {
  auto resolve = [state = state_.get(),
                  asked = std::move(environment)]() -> Result<v1::FnEnvironment> {
    DSEC_TRY(const auto layers, FindLayers(state->layers.catalog(), RefsOf(asked)));
    v1::FnEnvironment found;
    size_t next = 0;
    found.set_base(layers[next++].id.str());
    if (!asked.workspace().empty()) found.set_workspace(layers[next++].id.str());
    while (next < layers.size()) found.add_toolkits(layers[next++].id.str());
    return found;
  };
  co_return co_await state_->pool->Run(std::move(resolve), deadline);
}

Result<v1::FnLimits> FnCallBackend::Normalize(v1::FnLimits limits, std::string_view prefix) const {
  const FnLimitsPolicy& policy = state_->options.limits;
  for (const LimitField& field : kLimitFields) {
    const model::LimitRule& rule = policy.*field.rule;
    const std::string name = fmt::format("{}{}{}", prefix, prefix.empty() ? "" : ".", field.name);
    if (!rule.unenforceable.empty()) {
      return Error(Code::kFailedPrecondition, "limit.unenforceable", rule.unenforceable)
          .WithField(name);
    }
    uint64_t value = (limits.*field.get)();
    if (value == 0) value = rule.fallback;
    if (value < rule.min || value > rule.max) {
      return Error(Code::kInvalidArgument, "fn.bad_limit",
                   fmt::format("{} {} is not between {} and {}", name, value, rule.min, rule.max))
          .WithField(name);
    }
    (limits.*field.set)(value);
  }
  return limits;
}

runtime::Task<std::unique_ptr<FnWorker>> FnCallBackend::MakeWorker(FnWorkerSpec spec,
                                                                   runtime::Deadline deadline) {
  state_->Collect();
  DSEC_CO_TRY_VOID(CheckWarm(spec.warm));
  auto acquire = [state = state_.get(), asked = spec.environment]() -> Result<HeldLayers> {
    DSEC_TRY(const auto ids, ResolveLayers(state->layers.catalog(), RefsOf(asked)));
    return AcquireLayers(state->layers, ids);
  };
  DSEC_CO_TRY(auto held, co_await state_->pool->Run(std::move(acquire), deadline));
  DSEC_CO_TRY(auto prepared, Normalize({}, ""));
  DSEC_CO_TRY(const SlotName slot, state_->parts.indices.Reserve(SlotKind::kWorker));
  auto core = std::make_shared<WorkerCore>(WorkerCore::Options{
      state_->parts, slot, std::move(held), std::move(spec.warm), std::move(prepared)});
  {
    const std::lock_guard lock(state_->mutex);
    state_->cores.push_back(core);
  }
  auto ready = co_await core->AwaitReady(deadline);
  if (!ready.ok()) {
    core->Stop();
    co_return std::move(ready).error();
  }
  DSEC_CO_TRY(auto runner, core->RunnerFd());
  co_return std::make_unique<Worker>(std::move(core), std::move(runner));
}

runtime::Task<std::vector<std::string>> FnCallBackend::Sweep(const std::vector<v1::SandboxRecord>&,
                                                             runtime::Deadline deadline) {
  auto sweep = [state = state_.get(), deadline]() -> Result<std::vector<std::string>> {
    const std::set<SlotName> foreign = state->parts.indices.Foreign();
    const auto owned = [&](const SlotName& name) { return !foreign.contains(name); };
    DSEC_TRY(auto lines, state->parts.tree.Sweep(SlotKind::kWorker, owned, deadline.at()));
    DSEC_TRY(const auto left, state->parts.tree.List());
    for (const SlotName& name : foreign) {
      if (name.kind == SlotKind::kWorker && std::ranges::find(left, name) == left.end())
        state->parts.indices.Release(name);
    }
    return lines;
  };
  co_return co_await state_->pool->Run(std::move(sweep), deadline);
}

}  // namespace dsec::sandbox

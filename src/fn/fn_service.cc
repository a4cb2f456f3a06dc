// SPDX-License-Identifier: Apache-2.0
#include "fn/fn_service.h"

#include <algorithm>
#include <utility>

#include "base/id.h"
#include "base/log.h"
#include "fn/digest.h"
#include "fn/rules.h"

namespace dsec::fn {
namespace {

using runtime::Deadline;
using std::chrono::seconds;

constexpr seconds kSweepTimeout{60};
constexpr seconds kEndTimeout{5};  // of calls that were cancelled, and of workers
constexpr size_t kDiskQueue = 4096;
constexpr uint64_t kTicksBetweenKeeps = 60;

Error StoppingError() {
  return Error(Code::kUnavailable, "edge.stopping", "the node is stopping; send the call again");
}

// Of all that a call says but its op_id.
std::string CallDigest(const v1::FnCall& call) {
  v1::FnCall rest = call;
  rest.clear_op_id();
  FieldDigest digest;
  digest.Add(rest.SerializeAsString());
  return digest.Finish();
}

std::vector<v1::Capability> GpuCapabilities(const GpuInventory& inventory) {
  std::map<std::string, uint64_t> counts;
  for (const GpuDevice& device : inventory.devices) ++counts[device.kind];
  std::vector<v1::Capability> lines;
  for (const auto& [kind, count] : counts) {
    v1::Capability& line = lines.emplace_back();
    line.set_name("fn.gpu." + kind);
    line.set_used(std::to_string(count));
    line.set_ok(true);
  }
  for (const std::string& problem : inventory.problems) {
    v1::Capability& line = lines.emplace_back();
    line.set_name("fn.gpu");
    line.set_ok(false);
    line.set_detail(problem);
  }
  if (lines.empty()) {
    v1::Capability& line = lines.emplace_back();
    line.set_name("fn.gpu");
    line.set_used("none");
    line.set_ok(true);
    line.set_detail("no device files of NVIDIA's driver; calls that ask for a GPU are refused");
  }
  return lines;
}

boost::asio::awaitable<void> TickOf(FnService* service) { (void)co_await service->Tick(); }

}  // namespace

dsec::Result<std::unique_ptr<FnService>> FnService::Open(FnOptions options, runtime::Shards& shards,
                                                         sandbox::FnBackend& backend) {
  GpuInventory gpus = ReadGpus(options.gpu_root, options.mig_profiles);
  std::unique_ptr<FnService> service(
      new FnService(std::move(options), shards, backend, std::move(gpus)));
  const FnOptions& has = service->options_;
  DSEC_TRY(service->types_,
           TypeRegistry::Open(has.types_dirs, has.state_dir + "/fn_types",
                              [&backend](v1::FnLimits limits, std::string_view prefix) {
                                return backend.Normalize(std::move(limits), prefix);
                              }));
  DSEC_TRY(service->artifacts_,
           ArtifactStore::Open(has.state_dir + "/fn_artifacts", has.artifacts, service->metrics_));
  service->engine_ = std::make_unique<Engine>(
      Engine{has, service->metrics_, backend, service->environments_, service->pools_,
             service->gpus_, service->cache_, *service->artifacts_, *service->disk_, service->home_,
             service->background_});
  return service;
}

FnService::FnService(FnOptions options, runtime::Shards& shards, sandbox::FnBackend& backend,
                     GpuInventory gpus)
    : options_(std::move(options)),
      home_(shards.For("fn")),
      backend_(backend),
      metrics_(*options_.metrics),
      gpu_capabilities_(GpuCapabilities(gpus)),
      pools_(options_.pools, *options_.clock, backend, home_, background_, metrics_),
      gpus_(std::move(gpus), options_.gpu_shared_max),
      cache_(options_.compile_cache_entries, options_.compile_cache_bytes),
      environments_(backend, *options_.clock, options_.environment_age),
      ops_(options_.ops, *options_.clock),
      disk_(std::make_unique<runtime::BlockingPool>("fn", options_.disk_threads, kDiskQueue)) {}

FnService::~FnService() = default;

dsec::Result<std::vector<std::string>> FnService::Start() {
  DSEC_TRY(std::vector<std::string> removed,
           runtime::BlockOn(home_, backend_.Sweep({}, Deadline::After(kSweepTimeout))));
  (void)runtime::Spawn(background_, home_, KeepPools());
  ticker_ = std::make_unique<runtime::Periodic>(home_, "fn.tick", options_.tick,
                                                [this] { return TickOf(this); });
  return removed;
}

runtime::Task<void> FnService::Tick() {
  pools_.Tick();
  ops_.DropOld();
  metrics_.gpu_waiting.Set(static_cast<double>(gpus_.waiting()));
  for (const auto& [kind, count] : gpus_.Counts()) {
    metrics_.Gpus(kind).Set(static_cast<double>(count.total));
    metrics_.GpusFree(kind).Set(static_cast<double>(count.free));
  }
  if (++ticks_ % kTicksBetweenKeeps == 0 && !stopping_) {
    (void)runtime::Spawn(background_, home_, KeepPools());
  }
  co_return Ok();
}

boost::asio::awaitable<void> FnService::KeepPools() {
  for (const v1::FnTaskType& type : types_->List()) {
    if (type.pool().min() == 0) continue;
    auto resolved = co_await environments_.Resolve(type.environment(),
                                                   Deadline::After(options_.resolve_timeout));
    if (!resolved.ok()) {
      log::Warn("fn.pool_not_kept", {{"type", type.name()}, {"error", resolved.error()}});
      continue;
    }
    PoolSpec spec;
    spec.environment = std::move(*resolved);
    spec.warm = type.warm();
    (void)pools_.Find(std::move(spec), type.pool());
  }
  pools_.Tick();
}

boost::asio::awaitable<void> FnService::TypesChanged() {
  pools_.ForgetSizes();
  co_await KeepPools();
}

runtime::Task<v1::FnResult> FnService::Call(v1::FnCall call, Deadline deadline) {
  return runtime::On(home_, CallHere(std::move(call), deadline));
}

runtime::Task<v1::FnResult> FnService::CallHere(v1::FnCall call, Deadline deadline) {
  if (call.op_id().empty()) {
    auto op = co_await Begin(std::move(call));
    if (!op.ok()) co_return std::move(op).error();
    co_return co_await Await(std::move(*op), false, deadline);
  }
  DSEC_CO_TRY_VOID(ParseOpId(call.op_id(), "op_id"));
  const std::string key = OpKey(call.project(), call.op_id());
  if (const OpPtr known = ops_.Find(key)) {
    if (known->digest != CallDigest(call)) {
      co_return Error(Code::kAlreadyExists, "fn.op_id_reused",
                      fmt::format("op_id: {} was given to another call", call.op_id()))
          .WithField("op_id");
    }
    // What the platform did not bring to an end may be tried again under the same name.
    const bool again = known->end && known->end->ok() &&
                       (*known->end)->verdict() == v1::FN_INFRASTRUCTURE &&
                       (*known->end)->retriable();
    if (!again) {
      metrics_.op_joins.Add();
      co_return co_await Await(known, true, deadline);
    }
    ops_.Forget(key);
  }
  auto op = co_await Begin(std::move(call));
  if (!op.ok()) co_return std::move(op).error();
  co_return co_await Await(std::move(*op), false, deadline);
}

runtime::Task<FnService::OpPtr> FnService::Begin(v1::FnCall call) {
  const auto refuse = [this](Error error) {
    metrics_.Refusals(error.reason()).Add();
    return error;
  };
  if (stopping_) co_return refuse(StoppingError());
  auto type = types_->Find(call.type());
  if (!type.ok()) co_return refuse(std::move(type).error());
  auto checked = CheckCall(call, **type);
  if (!checked.ok()) co_return refuse(std::move(checked).error());
  const uint64_t bytes = call.ByteSizeLong();
  auto room = CheckRoom(bytes);
  if (!room.ok()) co_return refuse(std::move(room).error());
  auto op = std::make_shared<Op>();
  op->bytes = bytes;
  op->chosen = !call.op_id().empty();
  if (op->chosen) {
    op->digest = CallDigest(call);
    op->key = OpKey(call.project(), call.op_id());
  } else {
    call.set_op_id(NewUlid(*options_.clock));
  }
  op->call = std::move(call);
  op->type = std::move(*type);
  if (op->chosen) ops_.Add(op);
  running_.insert(op);
  running_bytes_ += op->bytes;
  op->running = runtime::SpawnCancellable(calls_, home_, RunOp(op));
  if (!op->running) {
    running_.erase(op);
    running_bytes_ -= op->bytes;
    if (op->chosen) ops_.Forget(op->key);
    co_return refuse(StoppingError());
  }
  co_return op;
}

dsec::Result<void> FnService::CheckRoom(uint64_t bytes) const {
  if (running_.size() >= size_t{options_.pools.queue_max} + options_.pools.workers_max) {
    return Error(Code::kResourceExhausted, "fn.queue_full",
                 fmt::format("{} calls are under way already", running_.size()));
  }
  if (!running_.empty() && running_bytes_ + bytes > options_.queue_bytes) {
    return Error(Code::kResourceExhausted, "fn.queue_full",
                 fmt::format("calls of {} bytes are under way already", running_bytes_));
  }
  return Ok();
}

boost::asio::awaitable<void> FnService::RunOp(OpPtr op) {
  CallRun run(*engine_, op->call, *op->type);
  auto end = co_await run.Execute();
  if (!end.ok() && end.error().code() == Code::kCancelled && !op->given_up) {
    // The end of the node came first.
    v1::FnResult result;
    result.set_verdict(v1::FN_INFRASTRUCTURE);
    result.set_reason("edge.stopping");
    result.set_message("the node stopped before the call had ended");
    result.set_retriable(true);
    end = std::move(result);
  }
  if (end.ok()) {
    end->set_op_id(op->call.op_id());
    metrics_.Calls(VerdictName(end->verdict())).Add();
    metrics_.queue_seconds.Observe(static_cast<double>(end->queue_usec()) * 1e-6);
  } else {
    metrics_.Refusals(end.error().reason()).Add();
  }
  op->end = std::move(end);
  running_.erase(op);
  running_bytes_ -= op->bytes;
  if (op->chosen) ops_.Ended(op);
  op->done.Set();
}

runtime::Task<v1::FnResult> FnService::Await(OpPtr op, bool existed, Deadline deadline) {
  auto woken = co_await op->done.Wait(deadline);
  if (!woken.ok()) {
    if (op->chosen) {
      if (woken.error().code() != Code::kDeadlineExceeded) co_return std::move(woken).error();
      co_return Error(
          Code::kDeadlineExceeded, "deadline.exceeded",
          fmt::format("{} has not ended yet; it goes on: repeat the op_id", op->call.op_id()));
    }
    op->given_up = true;
    op->running.Cancel();
    co_return std::move(woken).error();
  }
  if (!op->chosen) co_return std::move(*op->end);
  auto end = *op->end;
  if (end.ok()) end->set_existed(existed);
  co_return end;
}

runtime::Task<v1::FnResult> FnService::Result(std::string project, std::string op_id,
                                              Deadline deadline) {
  return runtime::On(home_, ResultHere(std::move(project), std::move(op_id), deadline));
}

runtime::Task<v1::FnResult> FnService::ResultHere(std::string project, std::string op_id,
                                                  Deadline deadline) {
  DSEC_CO_TRY_VOID(ParseOpId(op_id, "op_id"));
  const OpPtr op = ops_.Find(OpKey(project, op_id));
  if (op == nullptr) {
    co_return Error(Code::kNotFound, "fn.op_not_found",
                    fmt::format("op_id: no call {} is known; results are kept for a time", op_id))
        .WithField("op_id");
  }
  auto woken = co_await op->done.Wait(deadline);
  if (!woken.ok()) {
    if (woken.error().code() != Code::kDeadlineExceeded) co_return std::move(woken).error();
    co_return Error(Code::kUnavailable, "fn.still_running",
                    fmt::format("{} has not ended yet", op_id));
  }
  auto end = *op->end;
  if (end.ok()) end->set_existed(true);
  co_return end;
}

std::vector<v1::FnTaskType> FnService::Types() const { return types_->List(); }

runtime::Task<v1::FnTaskType> FnService::PutType(v1::FnTaskType type, Deadline deadline) {
  auto put = [this, type]() -> dsec::Result<void> { return types_->Put(type); };
  DSEC_CO_TRY_VOID(co_await disk_->Run(std::move(put), deadline));
  log::Info("fn.type_put", {{"type", type.name()}});
  (void)runtime::Spawn(background_, home_, TypesChanged());
  co_return type;
}

runtime::Task<void> FnService::RemoveType(std::string name, Deadline deadline) {
  auto remove = [this, name]() -> dsec::Result<void> { return types_->Remove(name); };
  DSEC_CO_TRY_VOID(co_await disk_->Run(std::move(remove), deadline));
  log::Info("fn.type_removed", {{"type", name}});
  (void)runtime::Spawn(background_, home_, TypesChanged());
  co_return Ok();
}

runtime::Task<std::string> FnService::PutArtifact(std::string bytes, Deadline deadline) {
  auto put = [this, bytes = std::move(bytes)] { return artifacts_->Put(bytes); };
  co_return co_await disk_->Run(std::move(put), deadline);
}

runtime::Task<std::string> FnService::GetArtifact(std::string digest, Deadline deadline) {
  if (!IsArtifactDigest(digest)) {
    co_return Invalid("artifact", "is not sha256: and 64 lower-case hex digits");
  }
  auto get = [this, digest = std::move(digest)] { return artifacts_->Get(digest); };
  co_return co_await disk_->Run(std::move(get), deadline);
}

std::vector<v1::FnPoolInfo> FnService::Pools() const { return pools_.Infos(); }

std::vector<v1::Capability> FnService::Capabilities() const {
  std::vector<v1::Capability> lines = backend_.Capabilities();
  lines.insert(lines.end(), gpu_capabilities_.begin(), gpu_capabilities_.end());
  for (const TypeRegistry::Fault& fault : types_->Faults()) {
    v1::Capability& line = lines.emplace_back();
    line.set_name("fn.types");
    line.set_ok(false);
    line.set_detail(fmt::format("{}: {}", fault.file, fault.error));
  }
  return lines;
}

boost::asio::awaitable<void> FnService::CloseGate(runtime::Gate* gate,
                                                  std::shared_ptr<runtime::AsyncEvent> closed) {
  co_await gate->Close();
  closed->Set();
}

runtime::Task<void> FnService::WaitClosed(runtime::Gate& gate, Deadline deadline) {
  auto closed = std::make_shared<runtime::AsyncEvent>();
  (void)runtime::Spawn(closing_, home_, CloseGate(&gate, closed));
  co_return co_await closed->Wait(deadline);
}

runtime::Task<void> FnService::Stop(Deadline deadline) {
  stopping_ = true;
  return runtime::On(home_, StopHere(deadline));
}

runtime::Task<void> FnService::StopHere(Deadline deadline) {
  if (ticker_ != nullptr) co_await ticker_->Join();
  pools_.Refuse();
  auto ended = co_await WaitClosed(calls_, deadline);
  if (!ended.ok()) {
    log::Warn("fn.stop_ends_calls", {{"calls", running_.size()}});
    const std::set<OpPtr> left = running_;
    for (const OpPtr& op : left) op->running.Cancel();
    ended = co_await WaitClosed(calls_, Deadline::After(kEndTimeout));
  }
  pools_.Drain();
  auto closed = co_await WaitClosed(background_, Deadline::After(kEndTimeout));
  co_return ended.ok() ? closed : ended;
}

void FnService::LetGo() {
  pools_.LetGo();
  gpus_.Close();
  ticker_.reset();
  disk_.reset();
}

}  // namespace dsec::fn

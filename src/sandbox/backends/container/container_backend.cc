// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/container/container_backend.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/this_coro.hpp>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "runtime/blocking_pool.h"
#include "sandbox/agent_hello.h"
#include "sandbox/backends/container/container_host.h"
#include "sandbox/backends/container/create_work.h"
#include "sandbox/backends/container/pack_request.h"
#include "sandbox/backends/container/slot_pool.h"
#include "sandbox/fd_wait.h"

namespace dsec::sandbox {
namespace {

using std::chrono::milliseconds;

constexpr size_t kQueueLimit = 10'000;
// A pack is bound by a core and the store; more at once would only take from each other.
constexpr size_t kPackThreads = 2;
constexpr size_t kPackQueue = 256;
constexpr auto kRemoveTime = std::chrono::seconds(10);  // of a slot without a sandbox
// Between the end of the channel and that of the process, when the one comes from the other.
constexpr auto kLastBreath = milliseconds(200);

}  // namespace

struct ContainerBackend::Host {
  std::unique_ptr<ContainerHost> host;
  std::mutex mutex;
  std::set<std::string>
      scratch;  // names of layers that a create, an adoption or a live sandbox of this process owns
  // Layers whose limits a pack has raised; true: a sweep has seen it since.
  std::map<std::string, bool> packed;
  std::atomic<bool> closing = false;
  CreateWorks works;
  std::unique_ptr<SlotPool> slots;
  // Last, so that their jobs find all of the above.
  std::unique_ptr<runtime::BlockingPool> layer_pool;  // waits for the store, never for long
  std::unique_ptr<runtime::BlockingPool> create_pool;
  std::unique_ptr<runtime::BlockingPool> host_pool;
  std::unique_ptr<runtime::BlockingPool> pack_pool;

  std::set<std::string> OwnedScratch() {
    const std::lock_guard lock(mutex);
    return scratch;
  }
  void Own(const std::string& name) {
    const std::lock_guard lock(mutex);
    scratch.insert(name);
  }
  // Takes on the name of its copy.
  void BeginPack(const std::string& name) {
    const std::lock_guard lock(mutex);
    scratch.insert(ContainerHost::CopyOf(name));
    packed[name] = false;
  }
  void MarkPacked(const std::string& name) {
    const std::lock_guard lock(mutex);
    packed[name] = false;
  }
  // Takes a layer whose limits are to be restored off the list: in the second sweep after its pack,
  // when the space of the copy has come back.
  bool TakePacked(const std::string& name) {
    const std::lock_guard lock(mutex);
    const auto found = packed.find(name);
    if (found == packed.end() || scratch.contains(ContainerHost::CopyOf(name))) return false;
    if (!std::exchange(found->second, true)) return false;
    packed.erase(found);
    return true;
  }
  void Disown(const std::string& name) {
    const std::lock_guard lock(mutex);
    scratch.erase(name);
    packed.erase(name);
  }
};

namespace {

// What a pack needs of a record: an instance keeps it for as long as it lives.
v1::SandboxRecord ForPack(const v1::SandboxRecord& record) {
  v1::SandboxRecord kept;
  kept.set_id(record.id());
  kept.set_slot(record.slot());
  kept.set_slot_generation(record.slot_generation());
  kept.set_scratch(record.scratch());
  *kept.mutable_spec()->mutable_limits() = record.spec().limits();
  *kept.mutable_layer_ids() = record.layer_ids();
  return kept;
}

// True once the object that made it is gone.
class Abandoned {
 public:
  ~Abandoned() { *flag_ = true; }
  std::shared_ptr<const std::atomic<bool>> flag() const { return flag_; }

 private:
  const std::shared_ptr<std::atomic<bool>> flag_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

class ContainerBackend::ContainerInstance final : public Instance {
 public:
  ContainerInstance(Host& host, const v1::SandboxRecord& record, os::PidFd agent,
                    std::shared_ptr<rpc::Channel> channel, ContainerHost::Layers layers)
      : host_(host),
        record_(ForPack(record)),
        subject_(ContainerHost::SubjectOf(record)),
        layers_(std::move(layers.held)),
        recording_(std::move(layers.recording)),
        agent_(std::move(agent)),
        channel_(std::move(channel)) {}
  ~ContainerInstance() override { channel_->Close(); }

  std::shared_ptr<rpc::Channel> agent() override { return channel_->closed() ? nullptr : channel_; }

  runtime::Task<AgentEnd> WaitEnd() override {
    DSEC_CO_TRY(bool exited, co_await WaitReadableOrClosed(agent_.fd(), channel_));
    if (!exited) {
      auto last =
          co_await WaitFd(agent_.fd(), FdEvent::kReadable, runtime::Deadline::After(kLastBreath));
      exited = last.ok();
      if (!exited && last.error().code() != Code::kDeadlineExceeded)
        co_return std::move(last).error();
    }
    const v1::Usage before = seen_;
    DSEC_CO_TRY(const auto now, co_await ReadUsage());
    AgentEnd end;
    for (const LimitHit& hit : host_.host->Watch(subject_.limits, before, now))
      end.oom |= hit.limit == "memory";
    end.message = !exited   ? "the agent closed its channel"
                  : end.oom ? "the memory limit killed processes and the sandbox's init ended"
                            : "the agent's process ended";
    co_return end;
  }

  runtime::Task<v1::Usage> ReadUsage() override {
    auto read = [host = host_.host.get(), subject = subject_]() -> Result<v1::Usage> {
      v1::Usage usage;
      host->ReadUsage(subject, usage);
      return usage;
    };
    DSEC_CO_TRY(seen_, co_await host_.host_pool->Run(std::move(read), runtime::Deadline::Never()));
    co_return seen_;
  }

  runtime::Task<v1::PackReply> Pack(v1::PackRequest request, PackProgressFn progress,
                                    runtime::Deadline deadline) override {
    DSEC_CO_TRY_VOID(CheckPackRequest(request));
    auto token = host_.works.Begin(record_.id());
    if (!token.ok()) {
      co_return Error(Code::kConflict, "pack.under_way",
                      fmt::format("{} is being packed already", record_.id()));
    }
    const Abandoned abandoned;
    auto job = [host = &host_, token = *std::move(token), gone = abandoned.flag(), record = record_,
                request = std::move(request),
                progress = std::move(progress)]() -> Result<v1::PackReply> {
      const auto proceed = [&](const v1::PackProgress& state) {
        return !*gone && !host->closing && token->Check().ok() && (!progress || progress(state));
      };
      host->BeginPack(record.scratch());
      auto packed = host->host->Pack(record, request, proceed);
      host->Disown(ContainerHost::CopyOf(record.scratch()));
      if (!packed.ok()) DSEC_TRY_VOID(token->Check());
      return packed;
    };
    co_return co_await host_.pack_pool->Run(std::move(job), deadline);
  }

  runtime::Task<v1::FirstTouchReply> FirstTouch(v1::FirstTouchRequest request,
                                                runtime::Deadline deadline) override {
    if (recording_ == nullptr) {
      co_return Error(Code::kConflict, "trace.not_recording",
                      fmt::format("{} was not created with record_first_touch, or the daemon has "
                                  "been restarted since",
                                  record_.id()));
    }
    auto job = [host = host_.host.get(), recording = recording_,
                request = std::move(request)]() -> Result<v1::FirstTouchReply> {
      return host->TakeFirstTouch(*recording, request);
    };
    co_return co_await host_.pack_pool->Run(std::move(job), deadline);
  }

 private:
  Host& host_;
  const v1::SandboxRecord record_;
  const Subject subject_;
  // While the sandbox lives its layers stay mounted, so that the next one shares them, and nobody
  // removes them.
  const std::shared_ptr<const HeldLayers> layers_;
  const std::shared_ptr<LayerRecording> recording_;  // null: nothing is recorded
  const os::PidFd agent_;
  const std::shared_ptr<rpc::Channel> channel_;
  v1::Usage seen_;  // of the last reading
};

Result<std::unique_ptr<ContainerBackend>> ContainerBackend::Open(const ContainerOptions& options,
                                                                 image::LayerStore& store,
                                                                 image::LayerMounts& layers) {
  auto host = std::make_unique<Host>();
  DSEC_TRY(host->host, ContainerHost::Open(options, &store, &layers));
  DSEC_TRY_VOID(host->host->StartSpawner());
  DSEC_TRY(const auto found, host->host->FindSlots());
  SlotPool::Hooks hooks;
  hooks.make = [h = host->host.get()](const SlotName& slot) { return h->MakeSlot(slot); };
  hooks.remove = [h = host->host.get()](const SlotName& slot) {
    return h->RemoveSlot(slot, Clock::System().Mono() + kRemoveTime);
  };
  SlotPoolOptions pool;
  pool.indices = options.ids.slots;
  pool.ready = options.slot_pool_size;
  host->slots = std::make_unique<SlotPool>(pool, std::move(hooks), found);
  host->layer_pool =
      std::make_unique<runtime::BlockingPool>("mounts", options.layer_threads, kQueueLimit);
  host->create_pool =
      std::make_unique<runtime::BlockingPool>("create", options.create_threads, kQueueLimit);
  host->host_pool =
      std::make_unique<runtime::BlockingPool>("host", options.host_threads, kQueueLimit);
  host->pack_pool = std::make_unique<runtime::BlockingPool>("pack", kPackThreads, kPackQueue);
  return std::unique_ptr<ContainerBackend>(new ContainerBackend(std::move(host)));
}

ContainerBackend::ContainerBackend(std::unique_ptr<Host> host) : host_(std::move(host)) {}
ContainerBackend::~ContainerBackend() {
  if (host_ != nullptr) host_->closing = true;
}

std::vector<v1::Capability> ContainerBackend::Capabilities() const {
  return host_->host->capabilities();
}
std::string ContainerBackend::ScratchPath() const { return host_->host->ScratchPath(); }
NodeParts ContainerBackend::parts() {
  return {host_->host->options().ids, host_->host->tree(), host_->host->views(),
          host_->host->spawner(), *host_->slots};
}
size_t ContainerBackend::ReadySlots() const { return host_->slots->ready(); }

Result<void> ContainerBackend::Normalize(v1::SandboxSpec& spec) const {
  DSEC_TRY_VOID(model::NormalizeSpec(spec, host_->host->policy()));
  if (!host_->host->unusable().empty()) {
    return Error(Code::kFailedPrecondition, "backend.unusable", host_->host->unusable());
  }
  return Ok();
}

runtime::Task<std::shared_ptr<Instance>> ContainerBackend::Create(v1::SandboxRecord& record,
                                                                  Journal journal,
                                                                  runtime::Deadline deadline) {
  ContainerHost* const host = host_->host.get();
  DSEC_CO_TRY(const auto token, host_->works.Begin(record.id()));
  PhaseClock phases;

  // Layers first: most creates that fail do so here, and nothing of their own exists yet.
  auto acquire =
      [host, token,
       copy = record]() mutable -> Result<std::pair<ContainerHost::Layers, v1::SandboxRecord>> {
    DSEC_TRY_VOID(token->Check());
    DSEC_TRY(auto layers, host->AcquireLayers(copy));
    return std::pair(std::move(layers), std::move(copy));
  };
  DSEC_CO_TRY(auto acquired, co_await host_->layer_pool->Run(std::move(acquire), deadline));
  ContainerHost::Layers acquired_layers = std::move(acquired.first);
  const auto layers = acquired_layers.held;
  *record.mutable_layer_ids() = acquired.second.layer_ids();
  phases.Done(record, "layers");

  DSEC_CO_FAULT_POINT("sandbox.create.before_slot");
  DSEC_CO_TRY(auto taken, co_await host_->slots->Take(deadline));
  // From here on Destroy finds everything by these names, whatever becomes of this call.
  record.set_slot(taken.name.index);
  record.set_slot_generation(taken.name.generation);
  record.set_agent_pid(taken.process.agent_pid);
  record.set_agent_start_time(taken.process.agent_start_time);
  record.set_scratch(record.id());
  record.set_boot_id(host->boot_id());
  host_->Own(record.scratch());
  phases.Done(record, "slot");

  const auto slot = std::make_shared<ReadySlot>(std::move(taken));
  auto prepare = [host, token, slot, journal = std::move(journal),
                  copy = record]() -> Result<LaunchParts> {
    DSEC_TRY_VOID(token->Check());
    DSEC_TRY_VOID(journal(copy));
    DSEC_FAULT_POINT("sandbox.create.after_journal");
    return host->Prepare(copy, slot->process.user_ns.get());
  };
  DSEC_CO_TRY(auto prepared, co_await host_->create_pool->Run(std::move(prepare), deadline));
  phases.Done(record, "scratch");

  auto launch = [host, token, slot, layers, deadline,
                 parts = std::move(prepared)]() mutable -> Result<void> {
    DSEC_TRY_VOID(token->Check());
    return host->Launch(*layers, parts, slot->process.launch_socket.get(), deadline);
  };
  DSEC_CO_TRY_VOID(co_await host_->create_pool->Run(std::move(launch), deadline));
  phases.Done(record, "launch");

  DSEC_CO_FAULT_POINT("sandbox.create.before_hello");
  DSEC_CO_TRY(auto channel, co_await Greet(record, deadline));
  DSEC_CO_TRY_VOID(token->Check());
  phases.Done(record, "ready");
  co_return std::make_shared<ContainerInstance>(*host_, record, std::move(slot->process.agent),
                                                std::move(channel), std::move(acquired_layers));
}

runtime::Task<std::shared_ptr<rpc::Channel>> ContainerBackend::Greet(
    const v1::SandboxRecord& record, runtime::Deadline deadline) {
  const SlotName slot = ContainerHost::SubjectOf(record).slot;
  const auto hello = HelloOf(record, host_->host->TokenOf(slot));
  const auto executor = co_await boost::asio::this_coro::executor;
  DSEC_CO_TRY(auto channel, co_await rpc::Channel::ConnectUnix(
                                executor, host_->host->SocketPath(slot), deadline));
  co_return co_await SayHello(std::move(channel), hello, deadline);
}

runtime::Task<std::shared_ptr<Instance>> ContainerBackend::Adopt(const v1::SandboxRecord& record,
                                                                 runtime::Deadline deadline) {
  if (!record.has_slot() || record.agent_pid() == 0) {
    co_return Error(Code::kGone, "sandbox.never_started", "it had no agent yet");
  }
  // The name stays taken until Destroy, whatever comes of this.
  const bool here = host_->slots->Adopt(ContainerHost::SubjectOf(record).slot);
  host_->Own(record.scratch());
  auto find = [host = host_.get(), copy = record]() -> Result<os::PidFd> {
    DSEC_TRY(auto agent, host->host->FindAgent(copy));
    DSEC_TRY_VOID(host->host->EndPack(copy));
    // Whether a pack of the earlier process has raised its limits is not on record.
    host->MarkPacked(copy.scratch());
    return agent;
  };
  DSEC_CO_TRY(auto agent, co_await host_->host_pool->Run(std::move(find), deadline));
  if (!here)
    co_return Error(Code::kGone, "sandbox.slot_gone", "nothing of its slot is on the host");
  using Held = std::shared_ptr<const HeldLayers>;
  auto hold = [host = host_->host.get(), copy = record]() -> Result<Held> {
    return host->HoldLayers(copy);
  };
  DSEC_CO_TRY(auto held, co_await host_->layer_pool->Run(std::move(hold), deadline));
  DSEC_CO_TRY(auto channel, co_await Greet(record, deadline));
  ContainerHost::Layers layers;
  layers.held = std::move(held);
  co_return std::make_shared<ContainerInstance>(*host_, record, std::move(agent),
                                                std::move(channel), std::move(layers));
}

runtime::Task<void> ContainerBackend::AwaitDeath(v1::SandboxRecord record,
                                                 runtime::Deadline deadline) {
  ContainerHost* const host = host_->host.get();
  auto kill = [host, record] { return host->Kill(record); };
  DSEC_CO_TRY(const auto dying, co_await host_->host_pool->Run(std::move(kill), deadline));
  DSEC_CO_FAULT_POINT("sandbox.destroy.after_kill");
  auto gone = co_await WaitGone(dying, deadline);
  if (gone.ok() || gone.error().code() != Code::kDeadlineExceeded) co_return gone;
  auto why = [host, record]() -> Result<Error> {
    return host->Stuck(record, "its processes do not end");
  };
  DSEC_CO_TRY(auto error, co_await host_->host_pool->Run(std::move(why),
                                                         runtime::Deadline::After(kRemoveTime)));
  co_return error;
}

runtime::Task<void> ContainerBackend::Destroy(const v1::SandboxRecord& record,
                                              runtime::Deadline deadline) {
  const v1::SandboxRecord copy = record;
  DSEC_CO_TRY_VOID(co_await host_->works.End(copy.id(), deadline));
  DSEC_CO_TRY_VOID(co_await AwaitDeath(copy, deadline));
  auto cleanup = [host = host_->host.get(), copy, deadline] {
    return host->Cleanup(copy, deadline.at());
  };
  DSEC_CO_TRY_VOID(co_await host_->host_pool->Run(std::move(cleanup), deadline));
  if (copy.has_slot()) host_->slots->Release(ContainerHost::SubjectOf(copy).slot);
  host_->Disown(copy.scratch());
  co_return Ok();
}

runtime::Task<std::vector<std::string>> ContainerBackend::Sweep(
    const std::vector<v1::SandboxRecord>& live, runtime::Deadline deadline) {
  struct Names {
    std::set<SlotName> slots;
    std::set<std::string> scratch;
  };
  Names known;
  std::vector<v1::SandboxRecord> packed;
  for (const v1::SandboxRecord& record : live) {
    if (host_->TakePacked(record.scratch())) packed.push_back(record);
    if (record.has_slot()) known.slots.insert(ContainerHost::SubjectOf(record).slot);
    if (!record.scratch().empty()) known.scratch.insert(record.scratch());
  }
  auto sweep = [host = host_.get(), known, packed,
                deadline]() mutable -> Result<std::vector<std::string>> {
    for (const v1::SandboxRecord& record : packed) {
      auto restored = host->host->RestoreDisk(record);
      if (restored.ok() || restored.error().code() == Code::kNotFound) continue;
      host->MarkPacked(record.scratch());
      log::Warn("sandbox.disk_not_restored",
                {{"sandbox_id", record.id()}, {"error", restored.error()}});
    }
    std::set<SlotName> orphans = host->slots->Foreign();
    std::erase_if(orphans, [&](const SlotName& name) {
      return name.kind != SlotKind::kSandbox || known.slots.contains(name);
    });
    // What this process owns has no record in `live` when its create began later, or its removal
    // has just ended.
    known.slots.merge(host->slots->Owned());
    known.scratch.merge(host->OwnedScratch());
    Owned owned;
    owned.slot = [&](const SlotName& name) {
      return known.slots.contains(name) || host->slots->Owned().contains(name);
    };
    owned.scratch = [&](const std::string& name) {
      return known.scratch.contains(name) || host->OwnedScratch().contains(name);
    };
    DSEC_TRY(auto lines, host->host->Recover(owned, deadline.at()));
    DSEC_TRY(const auto left, host->host->FindSlots());
    for (const SlotName& name : orphans) {
      if (std::ranges::find(left, name) == left.end()) host->slots->Release(name);
    }
    return lines;
  };
  co_return co_await host_->host_pool->Run(std::move(sweep), deadline);
}

Result<std::vector<std::string>> ContainerBackend::Purge(const ContainerOptions& options,
                                                         MonoTime deadline) {
  DSEC_TRY(const auto host, ContainerHost::Open(options, nullptr, nullptr));
  Owned nothing;
  nothing.slot = [](const SlotName&) { return false; };
  nothing.scratch = [](const std::string&) { return false; };
  DSEC_TRY(auto lines, host->Recover(nothing, deadline));
  DSEC_TRY(const auto workers, host->tree().Sweep(SlotKind::kWorker, nothing.slot, deadline));
  std::ranges::copy(workers, std::back_inserter(lines));
  DSEC_TRY(const auto machines, host->tree().Sweep(SlotKind::kVm, nothing.slot, deadline));
  std::ranges::copy(machines, std::back_inserter(lines));
  DSEC_TRY_VOID(host->RemoveRoots());
  return lines;
}

}  // namespace dsec::sandbox

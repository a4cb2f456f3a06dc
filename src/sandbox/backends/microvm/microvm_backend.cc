// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/microvm/microvm_backend.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/this_coro.hpp>
#include <cerrno>
#include <mutex>
#include <set>
#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "os/file.h"
#include "rpc/dial.h"
#include "runtime/blocking_pool.h"
#include "sandbox/agent_hello.h"
#include "sandbox/backends/container/create_work.h"
#include "sandbox/backends/microvm/microvm_host.h"
#include "sandbox/fd_wait.h"
#include "vmm/port_sync.h"

namespace dsec::sandbox {
namespace {

constexpr size_t kQueueLimit = 10'000;
// Between the end of the channel and that of the keeper, when the one comes from the other.
constexpr auto kLastBreath = std::chrono::seconds(2);

// The port of a machine, up to where ttrpc begins (docs/design/vm.md, section 4).
runtime::Task<std::shared_ptr<rpc::Channel>> OpenPort(std::string path, std::string secret,
                                                      runtime::Deadline deadline) {
  const auto executor = co_await boost::asio::this_coro::executor;
  DSEC_CO_TRY(auto dialed, co_await rpc::DialUnix(executor, path, deadline));
  boost::system::error_code error;
  os::UniqueFd socket(dialed.release(error));
  if (error) co_return Error(Code::kInternal, "vm.port", error.message());
  vmm::PortSync sync(secret);
  // An empty socket buffer takes it whole.
  if (::send(socket.get(), sync.sync().data(), sync.sync().size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(sync.sync().size())) {
    co_return Error::FromErrno(errno, "vm.port", "write to the port of the machine");
  }
  std::array<char, 4096> buffer;
  while (true) {
    auto readable = co_await WaitFd(socket.get(), FdEvent::kReadable, deadline);
    if (!readable.ok()) co_return std::move(readable).error().Context("wait for the guest");
    const ssize_t size = ::recv(socket.get(), buffer.data(), buffer.size(), MSG_PEEK);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (size <= 0) {
      co_return Error(Code::kUnavailable, "vm.port", "the virtual machine has ended");
    }
    DSEC_CO_TRY(const auto step, sync.Look({buffer.data(), static_cast<size_t>(size)}));
    if (::recv(socket.get(), buffer.data(), step.take, 0) != static_cast<ssize_t>(step.take))
      co_return Error(Code::kUnavailable, "vm.port", "the port cannot be read");
    if (step.done) break;
  }
  DSEC_CO_TRY(auto channel, rpc::Channel::Over(executor, socket.Release(), std::move(path)));
  co_return channel;
}

Error Unsupported(std::string field, std::string message) {
  return Error(Code::kInvalidArgument, "vm.unsupported", std::move(message))
      .WithField(std::move(field));
}

}  // namespace

struct MicroVmBackend::Host {
  std::unique_ptr<MicroVmHost> host;
  std::mutex mutex;
  std::set<SlotName> owned;  // by a create, an adoption or a live sandbox of this process
  CreateWorks works;
  // Last, so that their jobs find all of the above.
  std::unique_ptr<runtime::BlockingPool> layer_pool;
  std::unique_ptr<runtime::BlockingPool> create_pool;
  std::unique_ptr<runtime::BlockingPool> host_pool;

  bool Owns(const SlotName& slot) {
    const std::lock_guard lock(mutex);
    return owned.contains(slot);
  }
  void Disown(const SlotName& slot) {
    const std::lock_guard lock(mutex);
    owned.erase(slot);
  }
  void Own(const SlotName& slot) {
    const std::lock_guard lock(mutex);
    owned.insert(slot);
  }
  Result<SlotName> Reserve() {
    const std::lock_guard lock(mutex);
    if (owned.size() >= host->options().max_vms) {
      return Error(
          Code::kResourceExhausted, "capacity.vms",
          fmt::format("all {} virtual machines of this node are in use", host->options().max_vms));
    }
    DSEC_TRY(const SlotName slot, host->parts().indices.Reserve(SlotKind::kVm));
    owned.insert(slot);
    return slot;
  }
};

class MicroVmBackend::VmInstance final : public Instance {
 public:
  VmInstance(Host& host, const v1::SandboxRecord& record, os::PidFd keeper,
             std::shared_ptr<rpc::Channel> channel, std::shared_ptr<const HeldLayers> layers)
      : host_(host),
        slot_(MicroVmHost::SlotOf(record)),
        layers_(std::move(layers)),
        keeper_(std::move(keeper)),
        channel_(std::move(channel)) {}
  ~VmInstance() override { channel_->Close(); }

  std::shared_ptr<rpc::Channel> agent() override { return channel_->closed() ? nullptr : channel_; }

  runtime::Task<AgentEnd> WaitEnd() override {
    DSEC_CO_TRY(bool exited, co_await WaitReadableOrClosed(keeper_.fd(), channel_));
    if (!exited) {
      auto last =
          co_await WaitFd(keeper_.fd(), FdEvent::kReadable, runtime::Deadline::After(kLastBreath));
      exited = last.ok();
      if (!exited && last.error().code() != Code::kDeadlineExceeded)
        co_return std::move(last).error();
    }
    if (!exited) {
      AgentEnd end;
      end.message = "the virtual machine closed its channel";
      co_return end;
    }
    auto read = [host = host_.host.get(), slot = slot_]() -> Result<AgentEnd> {
      return host->ReadEnd(slot);
    };
    co_return co_await host_.host_pool->Run(std::move(read), runtime::Deadline::Never());
  }

  runtime::Task<v1::Usage> ReadUsage() override {
    auto read = [host = host_.host.get(), slot = slot_]() -> Result<v1::Usage> {
      v1::Usage usage;
      host->ReadUsage(slot, usage);
      return usage;
    };
    co_return co_await host_.host_pool->Run(std::move(read), runtime::Deadline::Never());
  }

  runtime::Task<v1::PackReply> Pack(v1::PackRequest, PackProgressFn, runtime::Deadline) override {
    co_return Error(Code::kFailedPrecondition, "pack.unsupported",
                    "the writable layer of a microVM cannot be packed yet");
  }
  runtime::Task<v1::FirstTouchReply> FirstTouch(v1::FirstTouchRequest, runtime::Deadline) override {
    co_return Error(Code::kConflict, "trace.not_recording",
                    "first reads of a microVM are not recorded");
  }

 private:
  Host& host_;
  const SlotName slot_;
  const std::shared_ptr<const HeldLayers> layers_;
  const os::PidFd keeper_;
  const std::shared_ptr<rpc::Channel> channel_;
};

Result<std::unique_ptr<MicroVmBackend>> MicroVmBackend::Open(const MicroVmOptions& options,
                                                             const NodeParts& parts,
                                                             image::LayerMounts& layers) {
  auto host = std::make_unique<Host>();
  DSEC_TRY(host->host, MicroVmHost::Open(options, parts, layers));
  host->layer_pool =
      std::make_unique<runtime::BlockingPool>("vm-mounts", options.layer_threads, kQueueLimit);
  host->create_pool =
      std::make_unique<runtime::BlockingPool>("vm-create", options.create_threads, kQueueLimit);
  host->host_pool =
      std::make_unique<runtime::BlockingPool>("vm-host", options.host_threads, kQueueLimit);
  return std::unique_ptr<MicroVmBackend>(new MicroVmBackend(std::move(host)));
}

MicroVmBackend::MicroVmBackend(std::unique_ptr<Host> host) : host_(std::move(host)) {}
MicroVmBackend::~MicroVmBackend() = default;

std::vector<v1::Capability> MicroVmBackend::Capabilities() const {
  return host_->host->Capabilities();
}

Result<void> MicroVmBackend::Normalize(v1::SandboxSpec& spec) const {
  DSEC_TRY_VOID(model::NormalizeSpec(spec, host_->host->policy()));
  const int layers = 1 + (spec.workspace().empty() ? 0 : 1) + spec.toolkits_size();
  if (layers > static_cast<int>(vmm::kMaxLayers)) {
    return Error(Code::kInvalidArgument, "vm.too_many_layers",
                 fmt::format("{} layers; a microVM has room for {}", layers, vmm::kMaxLayers))
        .WithField("toolkits");
  }
  if (spec.record_first_touch())
    return Unsupported("record_first_touch", "first reads of a microVM cannot be recorded");
  if (!host_->host->unusable().empty())
    return Error(Code::kFailedPrecondition, "backend.unusable", host_->host->unusable());
  return Ok();
}

runtime::Task<std::shared_ptr<rpc::Channel>> MicroVmBackend::Greet(const v1::SandboxRecord& record,
                                                                   runtime::Deadline deadline) {
  const SlotName slot = MicroVmHost::SlotOf(record);
  auto read = [host = host_->host.get(), slot] { return host->ReadBootConfig(slot); };
  DSEC_CO_TRY(const auto boot, co_await host_->host_pool->Run(std::move(read), deadline));
  DSEC_CO_TRY(auto channel,
              co_await OpenPort(host_->host->PortPath(slot), boot.port_secret, deadline));
  auto hello = HelloOf(record, boot.token);
  co_return co_await SayHello(std::move(channel), std::move(hello), deadline);
}

runtime::Task<std::shared_ptr<Instance>> MicroVmBackend::Create(v1::SandboxRecord& record,
                                                                Journal journal,
                                                                runtime::Deadline deadline) {
  MicroVmHost* const host = host_->host.get();
  DSEC_CO_TRY(const auto token, host_->works.Begin(record.id()));
  PhaseClock phases;
  using Acquired = std::pair<std::shared_ptr<MicroVmHost::Layers>, v1::SandboxRecord>;
  auto acquire = [host, token, copy = record]() mutable -> Result<Acquired> {
    DSEC_TRY_VOID(token->Check());
    const AccelerationProbe& probe = host->acceleration();
    if (probe.acceleration == vmm::Acceleration::kEmulated) {
      const auto label = copy.spec().labels().find(kAllowEmulationLabel);
      const bool asked = label != copy.spec().labels().end() && label->second == "true";
      if (!host->options().allow_emulation && !asked) {
        return Error(Code::kFailedPrecondition, "vm.no_acceleration",
                     fmt::format("{}; the label {}=true allows emulation", probe.detail,
                                 kAllowEmulationLabel));
      }
      copy.set_emulated(true);
    }
    DSEC_TRY(auto layers, host->AcquireLayers(copy));
    return Acquired(std::make_shared<MicroVmHost::Layers>(std::move(layers)), std::move(copy));
  };
  DSEC_CO_TRY(auto acquired, co_await host_->layer_pool->Run(std::move(acquire), deadline));
  const auto layers = std::move(acquired.first);
  *record.mutable_layer_ids() = acquired.second.layer_ids();
  record.set_emulated(acquired.second.emulated());
  phases.Done(record, "layers");

  DSEC_CO_TRY(const SlotName slot, host_->Reserve());
  // From here on Destroy finds everything by this name, whatever becomes of this call.
  record.set_slot(slot.index);
  record.set_slot_generation(slot.generation);
  record.set_boot_id(host->boot_id());
  phases.Done(record, "slot");

  using Prepared = std::shared_ptr<MicroVmHost::Prepared>;
  auto prepare = [host, token, layers, journal, copy = record]() -> Result<Prepared> {
    DSEC_TRY_VOID(token->Check());
    DSEC_TRY_VOID(journal(copy));
    DSEC_FAULT_POINT("vm.create.after_journal");
    DSEC_TRY(auto prepared, host->Prepare(copy, static_cast<uint32_t>(layers->files.size())));
    return std::make_shared<MicroVmHost::Prepared>(std::move(prepared));
  };
  DSEC_CO_TRY(auto prepared, co_await host_->create_pool->Run(std::move(prepare), deadline));
  phases.Done(record, "scratch");

  auto launch = [host, token, layers, journal, prepared = std::move(prepared),
                 copy = record]() mutable -> Result<os::PidFd> {
    DSEC_TRY_VOID(token->Check());
    DSEC_TRY(auto keeper, host->Start(copy, *prepared, *layers));
    copy.set_agent_pid(keeper.pid());
    copy.set_agent_start_time(keeper.start_time());
    DSEC_TRY_VOID(journal(copy));
    return keeper;
  };
  DSEC_CO_TRY(auto keeper, co_await host_->create_pool->Run(std::move(launch), deadline));
  record.set_agent_pid(keeper.pid());
  record.set_agent_start_time(keeper.start_time());
  layers->files.clear();
  phases.Done(record, "launch");

  DSEC_CO_FAULT_POINT("vm.create.before_hello");
  auto channel = co_await Greet(record, deadline);
  if (!channel.ok()) {
    // How it ended is written down a moment after its port has closed.
    if (channel.error().code() == Code::kUnavailable) {
      static_cast<void>(
          co_await WaitFd(keeper.fd(), FdEvent::kReadable, runtime::Deadline::After(kLastBreath)));
    }
    auto why = [host, slot]() -> Result<std::string> { return host->ReadEnd(slot).message; };
    auto end = co_await host_->host_pool->Run(std::move(why), runtime::Deadline::Never());
    Error error = std::move(channel).error();
    if (end.ok() && error.code() == Code::kUnavailable)
      error = std::move(error).Context("{}", *end);
    co_return error;
  }
  DSEC_CO_TRY_VOID(token->Check());
  phases.Done(record, "ready");
  co_return std::make_shared<VmInstance>(*host_, record, std::move(keeper), *std::move(channel),
                                         layers->held);
}

runtime::Task<std::shared_ptr<Instance>> MicroVmBackend::Adopt(const v1::SandboxRecord& record,
                                                               runtime::Deadline deadline) {
  if (!record.has_slot() || record.agent_pid() == 0) {
    co_return Error(Code::kGone, "sandbox.never_started", "it had no virtual machine yet");
  }
  const SlotName slot = MicroVmHost::SlotOf(record);
  // The name stays taken until Destroy, whatever comes of this.
  const bool here = host_->host->parts().indices.Adopt(slot);
  host_->Own(slot);
  auto find = [host = host_->host.get(), copy = record] { return host->FindKeeper(copy); };
  DSEC_CO_TRY(auto keeper, co_await host_->host_pool->Run(std::move(find), deadline));
  if (!here)
    co_return Error(Code::kGone, "sandbox.slot_gone", "nothing of its slot is on the host");
  using Held = std::shared_ptr<const HeldLayers>;
  auto hold = [host = host_->host.get(), copy = record]() -> Result<Held> {
    return host->HoldLayers(copy);
  };
  DSEC_CO_TRY(auto held, co_await host_->layer_pool->Run(std::move(hold), deadline));
  DSEC_CO_TRY(auto channel, co_await Greet(record, deadline));
  co_return std::make_shared<VmInstance>(*host_, record, std::move(keeper), std::move(channel),
                                         std::move(held));
}

runtime::Task<void> MicroVmBackend::Destroy(const v1::SandboxRecord& record,
                                            runtime::Deadline deadline) {
  const v1::SandboxRecord copy = record;
  DSEC_CO_TRY_VOID(co_await host_->works.End(copy.id(), deadline));
  if (!copy.has_slot()) co_return Ok();
  MicroVmHost* const host = host_->host.get();
  const SlotName slot = MicroVmHost::SlotOf(copy);
  auto kill = [host, copy] { return host->Kill(copy); };
  DSEC_CO_TRY(const auto dying, co_await host_->host_pool->Run(std::move(kill), deadline));
  DSEC_CO_FAULT_POINT("vm.destroy.after_kill");
  auto gone = co_await WaitGone(dying, deadline);
  if (!gone.ok() && gone.error().code() == Code::kDeadlineExceeded) {
    co_return Error(Code::kDeadlineExceeded, "sandbox.stuck",
                    "the processes of the virtual machine do not end");
  }
  if (!gone.ok()) co_return gone;
  if (dying.agent.valid()) vmm::ReapKeeper(dying.agent);
  auto cleanup = [host, slot, deadline] { return host->Cleanup(slot, deadline.at()); };
  DSEC_CO_TRY_VOID(co_await host_->host_pool->Run(std::move(cleanup), deadline));
  host->parts().indices.Release(slot);
  host_->Disown(slot);
  co_return Ok();
}

runtime::Task<std::vector<std::string>> MicroVmBackend::Sweep(
    const std::vector<v1::SandboxRecord>& live, runtime::Deadline deadline) {
  std::set<SlotName> known;
  for (const v1::SandboxRecord& record : live) {
    if (record.has_slot()) known.insert(MicroVmHost::SlotOf(record));
  }
  auto sweep = [host = host_.get(), known = std::move(known),
                deadline]() -> Result<std::vector<std::string>> {
    SlotIndices& indices = host->host->parts().indices;
    const auto owned = [&](const SlotName& slot) {
      return known.contains(slot) || host->Owns(slot);
    };
    std::set<SlotName> orphans = indices.Foreign();
    std::erase_if(orphans,
                  [&](const SlotName& slot) { return slot.kind != SlotKind::kVm || owned(slot); });
    DSEC_TRY(auto lines, host->host->Recover(owned, deadline.at()));
    DSEC_TRY(const auto left, host->host->parts().tree.List());
    for (const SlotName& slot : orphans) {
      if (std::ranges::find(left, slot) == left.end()) indices.Release(slot);
    }
    return lines;
  };
  co_return co_await host_->host_pool->Run(std::move(sweep), deadline);
}

Result<std::vector<std::string>> MicroVmBackend::Purge(const MicroVmOptions& options) {
  DSEC_TRY(auto lines, MicroVmHost::RemoveFolders(options, [](const SlotName&) { return false; }));
  DSEC_TRY_VOID(os::RemoveTree(AT_FDCWD, (options.state_dir + "/vm").c_str()));
  return lines;
}

}  // namespace dsec::sandbox

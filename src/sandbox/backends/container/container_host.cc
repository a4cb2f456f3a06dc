// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/container/container_host.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ranges>

#include "base/fault.h"
#include "base/log.h"
#include "base/rng.h"
#include "os/file.h"
#include "os/memfd.h"
#include "os/process.h"
#include "sandbox/doctor.h"
#include "sandbox/isolators/devices.h"
#include "sandbox/isolators/dir_list.h"
#include "sandbox/isolators/standard.h"
#include "spawn/agent_abi.h"

namespace dsec::sandbox {
namespace {

constexpr std::string_view kSocketSuffix = ".sock";
constexpr int kBacklog = 16;
constexpr auto kMakeTime = std::chrono::seconds(20);
constexpr size_t kRecordingEnds = 64;
constexpr auto kEndPatience = std::chrono::seconds(10);

// The socket of one slot, listening before the agent exists.
Result<os::UniqueFd> Listen(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return Error(Code::kInvalidArgument, "sandbox.run_dir",
                 fmt::format("{} is longer than a socket path may be", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  os::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return os::ErrnoError("sandbox.listen", path);
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    return os::ErrnoError("sandbox.listen", path);
  }
  return socket;
}

std::span<const uint8_t> BytesOf(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::optional<SlotName> SlotOfSocket(std::string_view file) {
  if (!file.ends_with(kSocketSuffix)) return std::nullopt;
  file.remove_suffix(kSocketSuffix.size());
  return SlotName::Parse(file);
}

}  // namespace

ContainerHost::ContainerHost(const ContainerOptions& options)
    : options_(options), recording_ends_(kRecordingEnds) {}

ContainerHost::~ContainerHost() {
  if (!recording_ends_.Wait(kEndPatience)) log::Error("trace.recordings_left_behind", {});
}

Result<std::unique_ptr<ContainerHost>> ContainerHost::Open(const ContainerOptions& options,
                                                           image::LayerStore* store,
                                                           image::LayerMounts* layers) {
  std::unique_ptr<ContainerHost> host(new ContainerHost(options));
  host->store_ = store;
  host->layers_ = layers;
  DSEC_TRY_VOID(options.ids.Check());
  DSEC_TRY(host->boot_id_, os::ReadBootId());
  DSEC_TRY_VOID(host->OpenRunDir());
  DSEC_TRY_VOID(host->LoadKey());
  DSEC_TRY(host->tree_,
           CgroupTree::Open({fmt::format("dsec-{}", options.node_id.str()), "", nullptr}));
  const auto devices = EnforceDeviceRules(host->tree_->top());
  if (!devices.ok()) log::Warn("devices.not_enforced", {{"error", devices.error()}});
  DSEC_TRY(host->views_, Views::Open());
  DSEC_TRY(auto process, ProcessHost::Read());
  host->policy_ = options.limits;
  auto scratch = OpenScratch({options.state_dir, options.scratch_bytes});
  if (!scratch.ok() && scratch.error().code() != Code::kFailedPrecondition)
    return std::move(scratch).error();

  Isolators& all = host->isolators_;
  all.push_back(MakeIdsIsolator(options.ids));
  all.push_back(MakeCgroupIsolator(*host->tree_));
  if (scratch.ok()) {
    host->scratch_ = std::move(*scratch);
    all.push_back(MakeScratchIsolator(*host->scratch_));
  } else {
    host->policy_.disk_bytes.unenforceable = scratch.error().message();
    v1::Capability& none = host->capabilities_.emplace_back();
    none.set_name("disk_quota");
    none.set_used("none");
    none.set_detail(scratch.error().message() + "; every create is refused");
  }
  all.push_back(MakeViewsIsolator(*host->views_));
  all.push_back(MakeProcessIsolator(std::move(process)));
  for (const auto& isolator : all) {
    isolator->Restrict(host->policy_);
    std::ranges::copy(isolator->Capabilities(), std::back_inserter(host->capabilities_));
  }
  host->capabilities_.push_back(DeviceCapability(devices));
  for (HostProbe& probe : ProbeHost(options.state_dir)) {
    if (probe.required && !probe.capability.ok() && host->unusable_.empty()) {
      host->unusable_ = fmt::format("{}: {}", probe.capability.name(), probe.capability.detail());
    }
    host->capabilities_.push_back(std::move(probe.capability));
  }
  return host;
}

Result<void> ContainerHost::OpenRunDir() {
  const char* path = options_.run_dir.c_str();
  auto made = os::MakeDir(AT_FDCWD, path, 0700);
  if (!made.ok() && made.error().sys_errno() != EEXIST) return std::move(made).Context("run_dir");
  DSEC_TRY(run_dir_, os::OpenAt(AT_FDCWD, path, O_RDONLY | O_DIRECTORY));
  struct stat info;
  if (::fstat(run_dir_.get(), &info) != 0)
    return os::ErrnoError("sandbox.run_dir", options_.run_dir);
  // Whoever could put a socket here would speak as an agent.
  if (info.st_uid != ::geteuid() || (info.st_mode & 022) != 0) {
    return Error(Code::kFailedPrecondition, "sandbox.run_dir",
                 fmt::format("{} must belong to the daemon's user and be writable for nobody else",
                             options_.run_dir));
  }
  const std::string longest = SocketPath({options_.ids.slots, ~uint64_t{0}});
  if (longest.size() >= sizeof(sockaddr_un::sun_path)) {
    return Error(Code::kInvalidArgument, "sandbox.run_dir",
                 fmt::format("{} is {} bytes too long for sockets in it", options_.run_dir,
                             longest.size() - sizeof(sockaddr_un::sun_path) + 1));
  }
  return Ok();
}

Result<void> ContainerHost::LoadKey() {
  const std::string path = options_.state_dir + "/agent.key";
  auto key = os::ReadFile(AT_FDCWD, path.c_str(), 64);
  if (key.ok() && key->size() == spawn::abi::kTokenBytes) {
    key_ = std::move(*key);
    return Ok();
  }
  if (!key.ok() && key.error().sys_errno() != ENOENT) return std::move(key).error();
  std::array<uint8_t, spawn::abi::kTokenBytes> random;
  SecureRandom(random);
  key_.assign(random.begin(), random.end());
  const std::string fresh = path + ".new";
  ::unlink(fresh.c_str());
  DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, fresh.c_str(), key_, 0600));
  if (::rename(fresh.c_str(), path.c_str()) != 0) return os::ErrnoError("sandbox.key", path);
  return Ok();
}

std::string ContainerHost::ScratchPath() const {
  return scratch_ != nullptr ? scratch_->space_path() : options_.state_dir;
}

std::string ContainerHost::SocketPath(const SlotName& slot) const {
  return fmt::format("{}/{}{}", options_.run_dir, slot.str(), kSocketSuffix);
}

std::string ContainerHost::TokenOf(const SlotName& slot) const {
  const std::string name = slot.str();
  std::array<uint8_t, EVP_MAX_MD_SIZE> digest;
  unsigned size = 0;
  ::HMAC(::EVP_sha256(), key_.data(), static_cast<int>(key_.size()),
         reinterpret_cast<const uint8_t*>(name.data()), name.size(), digest.data(), &size);
  return {digest.begin(), digest.begin() + size};
}

Subject ContainerHost::SubjectOf(const v1::SandboxRecord& record) {
  return {{record.slot(), record.slot_generation()}, record.scratch(), record.spec().limits()};
}

Result<void> ContainerHost::StartSpawner() {
  DSEC_TRY(spawner_,
           spawn::Spawner::Start({options_.spawner_path, options_.agent_path, options_.log_fd}));
  return Ok();
}

Result<ReadySlot> ContainerHost::MakeSlot(const SlotName& slot) {
  DSEC_FAULT_POINT("sandbox.slot.before_make");
  const Subject subject{slot, "", {}};
  SlotParts parts;
  for (const auto& isolator : isolators_) {
    DSEC_TRY_VOID(isolator->Isolate(subject, parts).Context("isolate {}", isolator->name()));
  }
  DSEC_TRY(const auto listener, Listen(SocketPath(slot)));
  DSEC_TRY(const auto token, os::SealedMemfd("dsec-token", BytesOf(TokenOf(slot))));
  parts.plan.listen_fd = listener.get();
  parts.plan.token_fd = token.get();
  DSEC_TRY(auto process, spawner_->MakeSlot(parts.plan, runtime::Deadline::After(kMakeTime)));
  return ReadySlot{slot, std::move(process)};
}

Result<void> ContainerHost::RemoveSlot(const SlotName& slot, MonoTime deadline) {
  v1::SandboxRecord record;
  record.set_slot(slot.index);
  record.set_slot_generation(slot.generation);
  DSEC_TRY(const auto dying, tree_->Kill(slot));
  DSEC_TRY(const bool gone, CgroupTree::WaitGone(dying, deadline));
  if (!gone) return Stuck(record, "its processes do not end");
  return Cleanup(record, deadline);
}

std::shared_ptr<const HeldLayers> ContainerHost::HoldLayers(const v1::SandboxRecord& record) {
  return sandbox::HoldLayers(*layers_, record);
}

Result<ContainerHost::Layers> ContainerHost::AcquireLayers(v1::SandboxRecord& record) {
  const v1::SandboxSpec& spec = record.spec();
  DSEC_TRY(const auto ids,
           ResolveLayers(
               layers_->catalog(),
               {spec.base(), spec.workspace(), {spec.toolkits().begin(), spec.toolkits().end()}}));
  record.clear_layer_ids();
  for (const LayerId& id : ids) record.add_layer_ids(id.str());
  Layers layers;
  if (!spec.record_first_touch()) {
    DSEC_TRY(auto held, sandbox::AcquireLayers(*layers_, ids));
    layers.held = std::make_shared<const HeldLayers>(std::move(held));
    return layers;
  }
  DSEC_TRY_VOID(image::TouchRecorder::Check());
  DSEC_TRY(auto apart, layers_->AcquireApart(ids));
  layers.held = std::make_shared<const HeldLayers>(std::move(apart));
  DSEC_TRY(layers.recording, Record(record, layers.held));
  return layers;
}

// The end of a recording waits for the kernel, and its last owner may be a shard.
Result<std::shared_ptr<LayerRecording>> ContainerHost::Record(
    const v1::SandboxRecord& record, std::shared_ptr<const HeldLayers> layers) {
  DSEC_TRY(const auto id, ParseSandboxId(record.id()));
  DSEC_TRY(auto begun, LayerRecording::Begin(id, std::move(layers)));
  return std::shared_ptr<LayerRecording>(begun.release(), [this](LayerRecording* ended) {
    if (!recording_ends_.Start([ended] { delete ended; })) delete ended;
  });
}

Result<LaunchParts> ContainerHost::Prepare(const v1::SandboxRecord& record, int user_ns) {
  const Subject subject = SubjectOf(record);
  LaunchParts parts;
  parts.user_ns = user_ns;
  const std::string& given = record.spec().hostname();
  parts.plan.hostname = given.empty() ? record.id() : given;
  parts.plan.hosts = fmt::format(
      "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{}\n",
      parts.plan.hostname);
  parts.plan.resolv_conf = "# network: none\n";
  for (const auto& isolator : isolators_) {
    DSEC_TRY_VOID(isolator->Prepare(subject, parts).Context("prepare {}", isolator->name()));
  }
  return parts;
}

Result<void> ContainerHost::Launch(const HeldLayers& layers, LaunchParts& parts, int launch_socket,
                                   runtime::Deadline deadline) {
  DSEC_TRY(auto lowers, MapLayers(layers, parts.user_ns));
  DSEC_TRY(const auto root, BuildRoot(lowers, parts.scratch));
  closer_.Close(std::move(lowers));
  DSEC_FAULT_POINT("sandbox.create.before_launch");
  std::vector<int> fds = {root.get()};
  for (const os::UniqueFd& view : parts.views) fds.push_back(view.get());
  DSEC_TRY_VOID(spawn::Launch(launch_socket, parts.plan, fds, deadline));
  return Ok();
}

Result<os::PidFd> ContainerHost::FindAgent(const v1::SandboxRecord& record) const {
  if (record.boot_id() != boot_id_) {
    return Error(Code::kGone, "sandbox.host_restarted", "the host has been restarted since");
  }
  auto agent = os::PidFd::Verify(record.agent_pid(), record.agent_start_time());
  if (!agent.ok() && agent.error().code() == Code::kNotFound) {
    return Error(Code::kGone, "sandbox.agent_gone",
                 fmt::format("its agent {} has ended", record.agent_pid()));
  }
  return agent;
}

Result<DyingSlot> ContainerHost::Kill(const v1::SandboxRecord& record) {
  if (!record.has_slot()) return DyingSlot();
  DSEC_TRY(auto dying, tree_->Kill(SubjectOf(record).slot));
  if (dying.agent.valid() || record.agent_pid() == 0) return dying;
  // It has left its cgroup already, or was moved out of it by hand.
  auto agent = FindAgent(record);
  if (!agent.ok()) return dying;
  DSEC_TRY_VOID(agent->Signal(SIGKILL));
  dying.agent = std::move(*agent);
  return dying;
}

Error ContainerHost::Stuck(const v1::SandboxRecord& record, const std::string& why) const {
  std::string who;
  const auto pids = tree_->Processes(SubjectOf(record).slot);
  if (pids.ok()) {
    for (const int pid : *pids | std::views::take(4)) {
      const auto stat = os::ReadProcStat(pid);
      if (stat.ok()) who += fmt::format("; process {} in state {}", pid, stat->state);
    }
  }
  return Error(Code::kDeadlineExceeded, "sandbox.stuck", why + who);
}

Result<void> ContainerHost::Cleanup(const v1::SandboxRecord& record, MonoTime deadline) {
  const Subject subject = SubjectOf(record);
  if (!record.has_slot()) {
    return record.scratch().empty() || scratch_ == nullptr ? Ok()
                                                           : scratch_->Remove(record.scratch());
  }
  for (const auto& isolator : isolators_ | std::views::reverse) {
    DSEC_FAULT_POINT("sandbox.destroy.before_isolator");
    auto cleaned = isolator->Cleanup(subject, deadline);
    if (cleaned.ok()) continue;
    if (cleaned.error().code() == Code::kDeadlineExceeded)
      return Stuck(record, cleaned.error().message());
    return std::move(cleaned).Context("clean up {}", isolator->name());
  }
  if (::unlink(SocketPath(subject.slot).c_str()) != 0 && errno != ENOENT) {
    return os::ErrnoError("sandbox.unlink", SocketPath(subject.slot));
  }
  return Ok();
}

void ContainerHost::ReadUsage(const Subject& subject, v1::Usage& usage) {
  for (const auto& isolator : isolators_) {
    const auto read = isolator->Usage(subject, usage);
    if (!read.ok())
      log::Warn("sandbox.usage_failed", {{"slot", subject.slot.str()}, {"error", read.error()}});
  }
}

std::vector<LimitHit> ContainerHost::Watch(const v1::Limits& limits, const v1::Usage& before,
                                           const v1::Usage& now) const {
  std::vector<LimitHit> hits;
  for (const auto& isolator : isolators_) isolator->Watch(limits, before, now, hits);
  return hits;
}

Result<std::vector<SlotName>> ContainerHost::FindSlots() const {
  DSEC_TRY(auto names, tree_->List());
  DSEC_TRY(const auto files, ListDir(run_dir_.get(), "."));
  for (const DirEntry& file : files) {
    if (const auto slot = SlotOfSocket(file.name); slot.has_value()) names.push_back(*slot);
  }
  std::ranges::sort(names);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

Result<std::vector<std::string>> ContainerHost::Recover(const Owned& owned, MonoTime deadline) {
  std::vector<std::string> lines;
  for (const auto& isolator : isolators_) {
    DSEC_TRY(auto found,
             isolator->Recover(owned, deadline).Context("recover {}", isolator->name()));
    std::ranges::move(found, std::back_inserter(lines));
  }
  DSEC_TRY(const auto files, ListDir(run_dir_.get(), "."));
  for (const DirEntry& file : files) {
    const auto slot = SlotOfSocket(file.name);
    if (!slot.has_value() || owned.slot(*slot)) continue;
    if (::unlinkat(run_dir_.get(), file.name.c_str(), 0) != 0 && errno != ENOENT) {
      return os::ErrnoError("sandbox.unlink", file.name);
    }
    lines.push_back(fmt::format("socket {}: removed", file.name));
  }
  DSEC_TRY(auto traces, image::TouchRecorder::Sweep(options_.node_id));
  std::ranges::move(traces, std::back_inserter(lines));
  return lines;
}

Result<void> ContainerHost::RemoveRoots() {
  DSEC_TRY_VOID(tree_->RemoveTop());
  scratch_.reset();
  for (const char* file : {"/scratch.img", "/scratch.img.boot", "/agent.key"}) {
    const std::string path = options_.state_dir + file;
    if (::unlink(path.c_str()) != 0 && errno != ENOENT)
      return os::ErrnoError("sandbox.purge", path);
  }
  return os::RemoveTree(AT_FDCWD, (options_.state_dir + "/scratch").c_str());
}

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/microvm/microvm_host.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/fault.h"
#include "base/rng.h"
#include "base/units.h"
#include "os/file.h"
#include "sandbox/isolators/dir_list.h"
#include "sandbox/isolators/standard.h"

namespace dsec::sandbox {
namespace {

// For the guest's kernel, its copy of the initramfs, pid 1 and the agent.
constexpr uint64_t kGuestBytes = 96ull << 20;
// For QEMU: its own memory, translated code, stacks of its threads, page cache of what it reads.
constexpr uint64_t kVmmBytes = 192ull << 20;
constexpr uint64_t kVmmThreads = 96;
constexpr auto kProbeTime = std::chrono::seconds(15);
constexpr std::array kSocketSuffixes = {".port", ".qmp"};

std::string Random(size_t bytes) {
  std::string out(bytes, '\0');
  SecureRandom({reinterpret_cast<uint8_t*>(out.data()), out.size()});
  return out;
}

Result<os::UniqueFd> Listen(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return Error(Code::kInvalidArgument, "vm.run_dir",
                 fmt::format("{} is longer than a socket path may be", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  os::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid() ||
      ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(socket.get(), 4) != 0) {
    return os::ErrnoError("vm.listen", path);
  }
  return socket;
}

std::optional<SlotName> VmName(std::string_view text) {
  const auto slot = SlotName::Parse(text);
  return slot.has_value() && slot->kind == SlotKind::kVm ? slot : std::nullopt;
}

}  // namespace

SlotName MicroVmHost::SlotOf(const v1::SandboxRecord& record) {
  return {record.slot(), record.slot_generation(), SlotKind::kVm};
}

std::string MicroVmHost::Folder(const SlotName& slot) const {
  return fmt::format("{}/vm/{}", options_.state_dir, slot.str());
}

std::string MicroVmHost::PortPath(const SlotName& slot) const {
  return fmt::format("{}/{}.port", options_.run_dir, slot.str());
}

std::string MicroVmHost::ControlPath(const SlotName& slot) const {
  return fmt::format("{}/{}.qmp", options_.run_dir, slot.str());
}

MicroVmHost::~MicroVmHost() {
  if (probe_.valid()) probe_.wait();
}

Result<void> MicroVmHost::FindPrograms() {
  qemu_ = options_.qemu_path;
  for (const char* dir : {"/usr/bin/", "/usr/local/bin/"}) {
    if (qemu_.empty() && ::access((dir + std::string(vmm::kQemuProgram)).c_str(), X_OK) == 0)
      qemu_ = dir + std::string(vmm::kQemuProgram);
  }
  guest_ = {options_.guest_dir + "/vmlinuz", options_.guest_dir + "/initrd"};
  if (qemu_.empty() || ::access(qemu_.c_str(), X_OK) != 0) {
    unusable_ = fmt::format("{} is not installed", vmm::kQemuProgram);
  } else if (::access(options_.keeper_path.c_str(), X_OK) != 0) {
    unusable_ = fmt::format("{} is missing", options_.keeper_path);
  } else {
    for (const std::string& file : {guest_.kernel, guest_.initrd}) {
      if (::access(file.c_str(), R_OK) == 0) continue;
      unusable_ = fmt::format("the guest image {} is missing (tools/guest/build_guest.py)", file);
      break;
    }
  }
  return Ok();
}

Result<std::unique_ptr<MicroVmHost>> MicroVmHost::Open(const MicroVmOptions& options,
                                                       const NodeParts& parts,
                                                       image::LayerMounts& layers) {
  std::unique_ptr<MicroVmHost> host(new MicroVmHost(options, parts, layers));
  DSEC_TRY(host->boot_id_, os::ReadBootId());
  const std::string templates = options.state_dir + "/vm/templates";
  for (const std::string& dir : {options.state_dir + "/vm", templates}) {
    auto made = os::MakeDir(AT_FDCWD, dir.c_str(), 0700);
    if (!made.ok() && made.error().sys_errno() != EEXIST) return std::move(made).error();
  }
  host->disks_ = std::make_unique<RawDisks>(templates);
  host->policy_ = options.limits;
  MakeCgroupIsolator(parts.tree)->Restrict(host->policy_);
  DSEC_TRY_VOID(host->FindPrograms());
  if (host->unusable_.empty()) {
    auto probe = [keeper = options.keeper_path, qemu = host->qemu_, guest = host->guest_,
                  uid = parts.ids.AgentUid(parts.ids.slots - 1)] {
      return ProbeAcceleration(keeper, qemu, guest, uid, kProbeTime);
    };
    host->probe_ = std::async(std::launch::async, std::move(probe)).share();
  }
  return host;
}

std::vector<v1::Capability> MicroVmHost::Capabilities() const {
  std::vector<v1::Capability> all;
  auto add = [&all](const char* name, bool ok, std::string used, std::string detail) {
    v1::Capability& item = all.emplace_back();
    item.set_name(name);
    item.set_ok(ok);
    item.set_used(std::move(used));
    item.set_detail(std::move(detail));
  };
  add("vm.vmm", unusable_.empty(), unusable_.empty() ? qemu_ : "none",
      unusable_.empty() ? "microVM sandboxes; guest image " + options_.guest_dir
                        : unusable_ + "; every microVM is refused");
  if (!unusable_.empty()) return all;
  if (probe_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    add("vm.acceleration", false, "unknown", "a guest is being booted to find out");
  } else if (acceleration().acceleration == vmm::Acceleration::kKvm) {
    add("vm.acceleration", true, "kvm", "a guest boots on it");
  } else {
    add("vm.acceleration", false, options_.allow_emulation ? "emulation" : "none",
        acceleration().detail +
            (options_.allow_emulation
                 ? "; QEMU emulates instead: some ten times slower"
                 : fmt::format("; a microVM is refused unless it has the label {}=true or the "
                               "node allows emulation (vm_allow_emulation)",
                               kAllowEmulationLabel)));
  }
  return all;
}

Result<MicroVmHost::Layers> MicroVmHost::AcquireLayers(v1::SandboxRecord& record) {
  const v1::SandboxSpec& spec = record.spec();
  DSEC_TRY(const auto ids,
           ResolveLayers(
               layers_.catalog(),
               {spec.base(), spec.workspace(), {spec.toolkits().begin(), spec.toolkits().end()}}));
  record.clear_layer_ids();
  for (const LayerId& id : ids) record.add_layer_ids(id.str());
  // The mounts serve nobody here, but hold the layers, check them and read ahead.
  DSEC_TRY(auto held, sandbox::AcquireLayers(layers_, ids));
  Layers layers;
  layers.held = std::make_shared<const HeldLayers>(std::move(held));
  DSEC_TRY(layers.files, layers_.OpenFiles(ids));
  size_t disks = 0;
  for (const auto& files : layers.files) disks += 1 + files.content.size();
  if (disks > vmm::kMaxLayerDisks) {
    return Error(Code::kInvalidArgument, "vm.too_many_layers",
                 fmt::format("{} layers with {} files; a microVM has room for {} files",
                             layers.files.size(), disks, vmm::kMaxLayerDisks))
        .WithField("toolkits");
  }
  return layers;
}

// What the whole VMM may take, as limits of the code in a slot.
v1::Limits MicroVmHost::VmmLimits(const v1::Limits& limits) const {
  v1::Limits vmm = limits;
  vmm.set_memory_bytes(limits.memory_bytes() + kGuestBytes + kVmmBytes);
  vmm.set_pids(kVmmThreads + MilliCpu(limits.cpu_millis()).VisibleCores());
  return vmm;
}

Result<MicroVmHost::Prepared> MicroVmHost::Prepare(const v1::SandboxRecord& record,
                                                   uint32_t layers) {
  const SlotName slot = SlotOf(record);
  const v1::Limits& limits = record.spec().limits();
  Prepared made;
  DSEC_TRY(made.cgroups, parts_.tree.Make(slot, 0, 0));
  DSEC_TRY_VOID(parts_.tree.SetLimits(slot, VmmLimits(limits)));
  const std::string folder = Folder(slot);
  DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, folder.c_str(), 0700));
  vmm::BootConfig& boot = made.boot;
  boot.port_secret = Random(vmm::kPortSecretBytes);
  boot.token = Random(vmm::kTokenBytes);
  boot.layers = layers;
  boot.hostname = record.spec().hostname().empty() ? record.id() : record.spec().hostname();
  boot.memory_bytes = limits.memory_bytes();
  boot.cpu_millis = limits.cpu_millis();
  boot.pids = limits.pids();
  boot.shm_bytes = limits.shm_bytes();
  boot.open_files = limits.open_files();
  DSEC_TRY_VOID(boot.Validate());
  DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, (folder + "/config").c_str(), boot.Encode(), 0600));
  DSEC_TRY(made.config, os::OpenAt(AT_FDCWD, (folder + "/config").c_str(), O_RDONLY));
  DSEC_TRY(made.disk,
           disks_->Create(folder + "/disk.img", limits.disk_bytes(), limits.disk_inodes()));
  constexpr int kNew = O_RDWR | O_CREAT | O_EXCL;
  DSEC_TRY(made.console, os::OpenAt(AT_FDCWD, (folder + "/console").c_str(), kNew, 0600));
  DSEC_TRY(made.exit, os::OpenAt(AT_FDCWD, (folder + "/exit").c_str(), kNew, 0600));
  DSEC_TRY(made.port, Listen(PortPath(slot)));
  DSEC_TRY(made.qmp, Listen(ControlPath(slot)));
  return made;
}

Result<os::PidFd> MicroVmHost::Start(const v1::SandboxRecord& record, const Prepared& prepared,
                                     const Layers& layers, bool incoming) {
  const SlotName slot = SlotOf(record);
  const v1::Limits& limits = record.spec().limits();
  DSEC_TRY(const auto kernel, os::OpenAt(AT_FDCWD, guest_.kernel.c_str(), O_RDONLY));
  DSEC_TRY(const auto initrd, os::OpenAt(AT_FDCWD, guest_.initrd.c_str(), O_RDONLY));
  vmm::Machine machine;
  machine.acceleration = record.emulated() ? vmm::Acceleration::kEmulated : vmm::Acceleration::kKvm;
  machine.vcpus = static_cast<uint32_t>(MilliCpu(limits.cpu_millis()).VisibleCores());
  machine.memory_mib = (limits.memory_bytes() + kGuestBytes + (1 << 20) - 1) >> 20;
  machine.kernel_fd = kernel.get();
  machine.initrd_fd = initrd.get();
  machine.port_fd = prepared.port.get();
  machine.qmp_fd = prepared.qmp.get();
  machine.disks.push_back({vmm::kConfigSerial, prepared.config.get(), true});
  machine.disks.push_back({vmm::kDiskSerial, prepared.disk.get(), false});
  for (size_t i = 0; i < layers.files.size(); ++i) {
    machine.disks.push_back({fmt::format("m{}", i), layers.files[i].meta.get(), true});
    const auto& content = layers.files[i].content;
    for (size_t part = 0; part < content.size(); ++part)
      machine.disks.push_back({vmm::ContentSerial(i, part), content[part].get(), true});
  }
  vmm::KeeperPlan plan;
  plan.program = options_.keeper_path;
  plan.qemu = qemu_;
  plan.uid = parts_.ids.AgentUid(slot.index);
  struct stat device = {};
  if (!record.emulated() && ::stat("/dev/kvm", &device) == 0) plan.kvm_gid = device.st_gid;
  plan.console_fd = prepared.console.get();
  plan.exit_fd = prepared.exit.get();
  DSEC_TRY(const auto procs, os::OpenAt(prepared.cgroups.init.get(), "cgroup.procs", O_WRONLY));
  plan.procs_fds.push_back(procs.get());
  for (const os::UniqueFd& v1_procs : prepared.cgroups.v1_procs)
    plan.procs_fds.push_back(v1_procs.get());
  DSEC_FAULT_POINT("vm.create.before_start");
  machine.incoming = incoming;
  return vmm_.Boot(plan, machine);
}

Result<os::PidFd> MicroVmHost::FindKeeper(const v1::SandboxRecord& record) const {
  if (record.boot_id() != boot_id_) {
    return Error(Code::kGone, "sandbox.host_restarted", "the host has been restarted since");
  }
  auto keeper = os::PidFd::Verify(record.agent_pid(), record.agent_start_time());
  if (!keeper.ok() && keeper.error().code() == Code::kNotFound) {
    return Error(Code::kGone, "sandbox.agent_gone",
                 fmt::format("its virtual machine (process {}) has ended", record.agent_pid()));
  }
  return keeper;
}

Result<vmm::BootConfig> MicroVmHost::ReadBootConfig(const SlotName& slot) const {
  DSEC_TRY(const std::string bytes,
           os::ReadFile(AT_FDCWD, (Folder(slot) + "/config").c_str(), vmm::kBootConfigBytes));
  return vmm::BootConfig::Parse(bytes);
}

Result<DyingSlot> MicroVmHost::Kill(const v1::SandboxRecord& record) const {
  if (!record.has_slot()) return DyingSlot();
  DSEC_TRY(auto dying, parts_.tree.Kill(SlotOf(record)));
  auto keeper = record.agent_pid() == 0 ? Result<os::PidFd>(Error(Code::kNotFound, "vm.none", ""))
                                        : FindKeeper(record);
  // It may have been moved out of its cgroup by hand.
  if (keeper.ok()) {
    DSEC_TRY_VOID(keeper->Signal(SIGKILL));
    dying.agent = std::move(*keeper);
  }
  return dying;
}

Result<void> MicroVmHost::Cleanup(const SlotName& slot, MonoTime deadline) {
  DSEC_TRY_VOID(parts_.tree.Remove(slot, deadline));
  for (const char* suffix : kSocketSuffixes) {
    const std::string path = fmt::format("{}/{}{}", options_.run_dir, slot.str(), suffix);
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) return os::ErrnoError("vm.unlink", path);
  }
  return os::RemoveTree(AT_FDCWD, Folder(slot).c_str());
}

void MicroVmHost::ReadUsage(const SlotName& slot, v1::Usage& usage) const {
  static_cast<void>(parts_.tree.ReadUsage(slot, usage));
  // Those are QEMU's threads and what the kernel did to it; what goes on inside is the guest's.
  usage.set_pids(0);
  usage.set_pids_denied(0);
  usage.set_oom_kills(0);
  if (const auto used = disks_->UsedBytes(Folder(slot) + "/disk.img"); used.ok())
    usage.set_disk_bytes(*used);
}

std::string MicroVmHost::ReadConsole(const SlotName& slot) const {
  auto text = os::ReadFile(AT_FDCWD, (Folder(slot) + "/console").c_str(), vmm::kConsoleBytes * 2);
  return text.ok() ? *std::move(text) : "";
}

AgentEnd MicroVmHost::ReadEnd(const SlotName& slot) const {
  const auto text = os::ReadFile(AT_FDCWD, (Folder(slot) + "/exit").c_str(), 256);
  const vmm::VmExit exit = text.ok() ? vmm::ParseExit(*text) : vmm::VmExit();
  const vmm::GuestEnd guest = vmm::ParseConsole(ReadConsole(slot));
  AgentEnd end;
  if (guest.said) {
    end.oom = guest.why == "oom";
    end.message = end.oom ? "the memory limit killed processes and the sandbox's init ended"
                  : guest.why == "agent" ? "the agent's process in the guest ended"
                                         : "the guest has powered off: " + guest.why;
  } else if (guest.panicked) {
    end.message = "the guest's kernel panicked";
  } else if (!exit.known) {
    end.message = "the process that keeps the virtual machine was killed";
  } else if (exit.signaled) {
    end.message = fmt::format("the VMM was killed by signal {}", exit.status);
  } else if (exit.status != 0) {
    end.message = fmt::format("the VMM failed (exit code {})", exit.status);
  } else {
    end.message = "the guest has powered off";
  }
  return end;
}

Result<std::vector<std::string>> MicroVmHost::RemoveFolders(
    const MicroVmOptions& options, const std::function<bool(const SlotName&)>& owned) {
  std::vector<std::string> lines;
  auto list = [](const std::string& path) -> Result<std::vector<DirEntry>> {
    auto dir = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY);
    if (!dir.ok() && dir.error().sys_errno() == ENOENT) return std::vector<DirEntry>();
    if (!dir.ok()) return std::move(dir).error();
    return ListDir(dir->get(), ".");
  };
  const std::string folders = options.state_dir + "/vm";
  DSEC_TRY(const auto found, list(folders));
  for (const DirEntry& entry : found) {
    const auto slot = VmName(entry.name);
    if (!slot.has_value() || owned(*slot)) continue;
    DSEC_TRY_VOID(os::RemoveTree(AT_FDCWD, fmt::format("{}/{}", folders, entry.name).c_str()));
    lines.push_back(fmt::format("machine folder {}: removed", entry.name));
  }
  DSEC_TRY(const auto files, list(options.run_dir));
  for (const DirEntry& entry : files) {
    for (const std::string_view suffix : kSocketSuffixes) {
      if (!entry.name.ends_with(suffix)) continue;
      const auto slot =
          VmName(std::string_view(entry.name).substr(0, entry.name.size() - suffix.size()));
      if (!slot.has_value() || owned(*slot)) continue;
      const std::string path = fmt::format("{}/{}", options.run_dir, entry.name);
      if (::unlink(path.c_str()) != 0 && errno != ENOENT) return os::ErrnoError("vm.unlink", path);
      lines.push_back(fmt::format("socket {}: removed", entry.name));
    }
  }
  return lines;
}

Result<std::vector<std::string>> MicroVmHost::Recover(
    const std::function<bool(const SlotName&)>& owned, MonoTime deadline) {
  DSEC_TRY(auto lines, parts_.tree.Sweep(SlotKind::kVm, owned, deadline));
  DSEC_TRY(auto more, RemoveFolders(options_, owned));
  std::ranges::move(more, std::back_inserter(lines));
  return lines;
}

}  // namespace dsec::sandbox

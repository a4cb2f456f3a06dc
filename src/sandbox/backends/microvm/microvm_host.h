// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <future>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "dsec/v1/edge.pb.h"
#include "image/layer_mounts.h"
#include "os/process.h"
#include "sandbox/backends/microvm/acceleration.h"
#include "sandbox/backends/microvm/microvm_backend.h"
#include "sandbox/backends/microvm/raw_disk.h"
#include "sandbox/rootfs.h"
#include "vmm/boot_config.h"
#include "vmm/keeper.h"
#include "vmm/vmm.h"

namespace dsec::sandbox {

// What the microVM backend does on the host, step by step. Everything blocks; thread-safe for
// different sandboxes.
class MicroVmHost {
 public:
  static Result<std::unique_ptr<MicroVmHost>> Open(const MicroVmOptions& options,
                                                   const NodeParts& parts,
                                                   image::LayerMounts& layers);
  ~MicroVmHost();

  const MicroVmOptions& options() const { return options_; }
  const model::LimitsPolicy& policy() const { return policy_; }
  const NodeParts& parts() const { return parts_; }
  const std::string& boot_id() const { return boot_id_; }
  // Why no machine can be made here; empty when it can.
  const std::string& unusable() const { return unusable_; }
  std::vector<v1::Capability> Capabilities() const;
  // Waits for the probe that Open began.
  const AccelerationProbe& acceleration() const { return probe_.get(); }

  static SlotName SlotOf(const v1::SandboxRecord& record);
  std::string PortPath(const SlotName& slot) const;

  struct Layers {
    std::shared_ptr<const HeldLayers> held;
    std::vector<image::LayerMounts::Files> files;  // bottom to top
  };
  // Fills record.layer_ids from its spec.
  Result<Layers> AcquireLayers(v1::SandboxRecord& record);
  std::shared_ptr<const HeldLayers> HoldLayers(const v1::SandboxRecord& record) {
    return sandbox::HoldLayers(layers_, record);
  }
  // Cgroup, folder, disk, sockets. Everything bears the name of the record's slot.
  struct Prepared {
    vmm::BootConfig boot;
    os::UniqueFd config, disk, console, exit, port, qmp;
    SlotCgroups cgroups;
  };
  Result<Prepared> Prepare(const v1::SandboxRecord& record, uint32_t layers);
  // `incoming`: the machine waits for a snapshot.
  Result<os::PidFd> Start(const v1::SandboxRecord& record, const Prepared& prepared,
                          const Layers& layers, bool incoming = false);
  vmm::Vmm& vmm() { return vmm_; }
  std::string ControlPath(const SlotName& slot) const;

  // Of a machine of an earlier process.
  Result<os::PidFd> FindKeeper(const v1::SandboxRecord& record) const;
  Result<vmm::BootConfig> ReadBootConfig(const SlotName& slot) const;

  Result<DyingSlot> Kill(const v1::SandboxRecord& record) const;
  // After the death of its processes. Idempotent.
  Result<void> Cleanup(const SlotName& slot, MonoTime deadline);
  void ReadUsage(const SlotName& slot, v1::Usage& usage) const;
  // How it ended, by what keeper and guest have written.
  AgentEnd ReadEnd(const SlotName& slot) const;
  std::string ReadConsole(const SlotName& slot) const;

  // Of every machine of which something is on the host and that is not `owned`.
  Result<std::vector<std::string>> Recover(const std::function<bool(const SlotName&)>& owned,
                                           MonoTime deadline);
  static Result<std::vector<std::string>> RemoveFolders(
      const MicroVmOptions& options, const std::function<bool(const SlotName&)>& owned);

 private:
  MicroVmHost(const MicroVmOptions& options, const NodeParts& parts, image::LayerMounts& layers)
      : options_(options), parts_(parts), layers_(layers) {}
  std::string Folder(const SlotName& slot) const;
  Result<void> FindPrograms();
  v1::Limits VmmLimits(const v1::Limits& limits) const;

  const MicroVmOptions options_;
  const NodeParts parts_;
  image::LayerMounts& layers_;
  std::string boot_id_;
  std::string unusable_;
  std::string qemu_;
  GuestImage guest_;
  model::LimitsPolicy policy_;
  std::unique_ptr<WritableDisks> disks_;
  vmm::QemuVmm vmm_;
  std::shared_future<AccelerationProbe> probe_;
};

}  // namespace dsec::sandbox

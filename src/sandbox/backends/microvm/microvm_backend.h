// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/id.h"
#include "image/layer_mounts.h"
#include "model/spec.h"
#include "sandbox/backend.h"
#include "sandbox/node_parts.h"

namespace dsec::sandbox {

struct MicroVmOptions {
  NodeId node_id;
  std::string state_dir;         // vm/: a folder for each machine
  std::string run_dir;           // sockets; exists
  std::string keeper_path;       // dsec-vmkeeper
  std::string qemu_path;         // empty: qemu-system-x86_64 in the system's directories
  std::string guest_dir;         // vmlinuz and initrd, of tools/guest/build_guest.py
  bool allow_emulation = false;  // without KVM, whatever a spec says
  uint32_t max_vms = 256;
  model::LimitsPolicy limits;  // what this host cannot hold is taken off
  size_t host_threads = 2;
  size_t create_threads = 4;
  size_t layer_threads = 8;
};

// The label with which a sandbox says that it may be emulated.
inline constexpr char kAllowEmulationLabel[] = "dsec.io/allow-emulation";

// Sandboxes as virtual machines: docs/design/vm.md. What it makes bears the name of its slot below
// node-specific roots, as with containers, whose tree of cgroups and indices it shares.
class MicroVmBackend final : public SandboxBackend {
 public:
  // Touches nothing of an earlier process. `parts` and `layers` must outlive it. Where a machine
  // cannot be made at all (no QEMU, no guest image), it opens, says so in its capabilities and
  // refuses each create.
  static Result<std::unique_ptr<MicroVmBackend>> Open(const MicroVmOptions& options,
                                                      const NodeParts& parts,
                                                      image::LayerMounts& layers);
  ~MicroVmBackend() override;

  std::string_view name() const override { return "microvm"; }
  std::vector<v1::Capability> Capabilities() const override;
  // Also kFailedPrecondition "backend.unusable", "vm.no_acceleration", kInvalidArgument
  // "vm.too_many_layers", "vm.unsupported".
  Result<void> Normalize(v1::SandboxSpec& spec) const override;
  // Four times as much: an emulated machine on a busy node is slow to boot.
  std::chrono::milliseconds CreateTime(std::chrono::milliseconds usual) const override {
    return 4 * usual;
  }
  // Also kResourceExhausted "capacity.vms".
  runtime::Task<std::shared_ptr<Instance>> Create(v1::SandboxRecord& record, Journal journal,
                                                  runtime::Deadline deadline) override;
  runtime::Task<std::shared_ptr<Instance>> Adopt(const v1::SandboxRecord& record,
                                                 runtime::Deadline deadline) override;
  runtime::Task<void> Destroy(const v1::SandboxRecord& record, runtime::Deadline deadline) override;
  runtime::Task<std::vector<std::string>> Sweep(const std::vector<v1::SandboxRecord>& live,
                                                runtime::Deadline deadline) override;

  // What `dsec purge` does beyond the cgroups, which ContainerBackend::Purge removes. No daemon of
  // the node may run.
  static Result<std::vector<std::string>> Purge(const MicroVmOptions& options);

 private:
  struct Host;
  class VmInstance;
  explicit MicroVmBackend(std::unique_ptr<Host> host);
  runtime::Task<std::shared_ptr<rpc::Channel>> Greet(const v1::SandboxRecord& record,
                                                     runtime::Deadline deadline);

  const std::unique_ptr<Host> host_;
};

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "sandbox/backends/microvm/microvm_backend.h"
#include "sandbox/testing/container_fixture.h"

namespace dsec::sandbox::testing {

// A node as ContainerTest has it, with microVMs beside its containers: real QEMU, the real guest
// image. Where a guest does not boot under KVM it is emulated, which a test sees in its time alone.
class MicroVmTest : public ContainerTest {
 protected:
  void SetUp() override;
  void TearDown() override;
  void OpenVms(bool allow_emulation = true);
  MicroVmOptions VmOptions() const;
  v1::SandboxRecord NewVm() const;
  Result<std::shared_ptr<Instance>> CreateVm(v1::SandboxRecord& record, int seconds = 60);
  std::shared_ptr<Instance> MustCreateVm(v1::SandboxRecord& record);
  Result<std::shared_ptr<Instance>> AdoptVm(const v1::SandboxRecord& record);
  Result<void> DestroyVm(const v1::SandboxRecord& record);
  // Machines from now on boot a guest that has been taken over (src/guest/testdata); what it does
  // is said by the host name of the sandbox.
  void UseHostileGuests();
  // Of the files of a machine.
  std::string VmFolder(const v1::SandboxRecord& record) const;
  std::string Console(const v1::SandboxRecord& record) const;

  std::unique_ptr<MicroVmBackend> vms_;
  std::string guest_dir_ = DSEC_GUEST_DIR;
};

}  // namespace dsec::sandbox::testing

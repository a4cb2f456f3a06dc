// SPDX-License-Identifier: Apache-2.0
#include "sandbox/testing/microvm_fixture.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <stdlib.h>

#include "base/clock.h"
#include "sandbox/backends/microvm/microvm_host.h"

namespace dsec::sandbox::testing {

void MicroVmTest::SetUp() {
  ContainerTest::SetUp();
  if (!dir_.has_value()) return;
  OpenVms();
}

void MicroVmTest::TearDown() {
  vms_.reset();
  if (dir_.has_value()) {
    const auto purged = MicroVmBackend::Purge(VmOptions());
    EXPECT_TRUE(purged.ok()) << purged.error().ToString();
    if (purged.ok()) EXPECT_THAT(*purged, ::testing::IsEmpty());
  }
  ContainerTest::TearDown();
}

MicroVmOptions MicroVmTest::VmOptions() const {
  const ContainerOptions container = Options();
  MicroVmOptions options;
  options.node_id = container.node_id;
  options.state_dir = container.state_dir;
  options.run_dir = container.run_dir;
  options.keeper_path = DSEC_VMKEEPER_PATH;
  options.guest_dir = guest_dir_;
  options.allow_emulation = true;
  return options;
}

void MicroVmTest::OpenVms(bool allow_emulation) {
  vms_.reset();
  MicroVmOptions options = VmOptions();
  options.allow_emulation = allow_emulation;
  auto opened = MicroVmBackend::Open(options, backend_->parts(), layers_->mounts());
  ASSERT_TRUE(opened.ok()) << opened.error().ToString();
  vms_ = std::move(*opened);
}

void MicroVmTest::UseHostileGuests() {
  guest_dir_ = dir_->path() + "/guest";
  const std::string command = fmt::format(
      "/usr/bin/python3 {} --bin {} --init dsec-hostile-guest --cache {} --out {} > {}/guest.log "
      "2>&1",
      DSEC_BUILD_GUEST, DSEC_BIN_DIR, DSEC_GUEST_DIR, guest_dir_, dir_->path());
  const int status = ::system(command.c_str());
  ASSERT_EQ(status, 0)
      << os::ReadFile(AT_FDCWD, (dir_->path() + "/guest.log").c_str(), 4096).value();
  OpenVms();
}

v1::SandboxRecord MicroVmTest::NewVm() const {
  v1::SandboxRecord record;
  record.set_id(NewSandboxId(NodeId("tsbox"), Clock::System()).str());
  record.mutable_spec()->set_backend(v1::BACKEND_MICROVM);
  record.mutable_spec()->set_base("test-base:1");
  record.mutable_spec()->mutable_limits()->set_memory_bytes(128 << 20);
  record.mutable_spec()->mutable_limits()->set_disk_bytes(64 << 20);
  const auto normal = vms_->Normalize(*record.mutable_spec());
  EXPECT_TRUE(normal.ok()) << normal.error().ToString();
  record.set_state(v1::STATE_STARTING);
  return record;
}

Result<std::shared_ptr<Instance>> MicroVmTest::CreateVm(v1::SandboxRecord& record, int seconds) {
  auto journal = [this](const v1::SandboxRecord& saved) -> Result<void> {
    journal_.push_back(saved);
    return Ok();
  };
  return On(vms_->Create(record, journal, runtime::Deadline::After(std::chrono::seconds(seconds))));
}

std::shared_ptr<Instance> MicroVmTest::MustCreateVm(v1::SandboxRecord& record) {
  auto created = CreateVm(record);
  EXPECT_TRUE(created.ok()) << created.error().ToString() << Console(record);
  return created.ok() ? *created : nullptr;
}

Result<std::shared_ptr<Instance>> MicroVmTest::AdoptVm(const v1::SandboxRecord& record) {
  return On(vms_->Adopt(record, runtime::Deadline::After(std::chrono::seconds(30))));
}

Result<void> MicroVmTest::DestroyVm(const v1::SandboxRecord& record) {
  return On(vms_->Destroy(record, runtime::Deadline::After(std::chrono::seconds(30))));
}

std::string MicroVmTest::VmFolder(const v1::SandboxRecord& record) const {
  return fmt::format("{}/state/vm/{}", dir_->path(), MicroVmHost::SlotOf(record).str());
}

std::string MicroVmTest::Console(const v1::SandboxRecord& record) const {
  auto text = os::ReadFile(AT_FDCWD, (VmFolder(record) + "/console").c_str(), 1 << 20);
  return text.ok() ? *text : text.error().ToString();
}

}  // namespace dsec::sandbox::testing

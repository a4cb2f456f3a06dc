// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>

#include "os/file.h"
#include "os/process.h"
#include "sandbox/backends/microvm/microvm_host.h"
#include "sandbox/testing/microvm_fixture.h"

namespace dsec::sandbox {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class MicroVmTest : public testing::MicroVmTest {};

TEST_F(MicroVmTest, RunsCommandsAsAContainerDoes) {
  v1::SandboxRecord record = NewVm();
  const auto vm = MustCreateVm(record);
  ASSERT_NE(vm, nullptr);
  for (const v1::PhaseTime& phase : record.phases())
    RecordProperty(phase.phase(), static_cast<int>(phase.micros() / 1000));
  auto ran = Run(*vm, "id -u; uname -r; echo two >&2; exit 7");
  ASSERT_TRUE(ran.ok()) << ran.error().ToString();
  EXPECT_THAT(ran->out, HasSubstr("0\n6.12."));  // the guest's kernel, not the host's
  EXPECT_EQ(ran->err, "two\n");
  EXPECT_EQ(ran->result.exit_code(), 7);

  EXPECT_TRUE(DestroyVm(record).ok());
  EXPECT_FALSE(std::filesystem::exists(VmFolder(record)));
}

}  // namespace
}  // namespace dsec::sandbox

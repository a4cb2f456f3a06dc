// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/ids.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "os/file.h"

namespace dsec::sandbox {
namespace {

using ::testing::HasSubstr;

class Ids : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(::mkdir((dir_.path() + "/etc").c_str(), 0755), 0); }
  void Write(const char* file, const std::string& text) {
    std::ofstream(dir_.path() + file) << text;
  }
  Result<void> Check(const IdPlan& plan = {}) { return plan.Check(dir_.path()); }
  os::TempDir dir_ = os::TempDir::Create("dsec-ids-").value();
};

TEST_F(Ids, Defaults_FitAUsualHost) {
  Write("/etc/passwd", "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n");
  Write("/etc/subuid", "me:100000:65536\ncontainers:2147483647:2147483648\n");
  const auto checked = Check();
  EXPECT_TRUE(checked.ok()) << checked.error().ToString();
}

TEST_F(Ids, MissingFiles_AreNoClash) { EXPECT_TRUE(Check().ok()); }

TEST_F(Ids, SubordinateRange_IsNamed) {
  Write("/etc/subgid", "# comment\nme:100000:65536\nbig:1879048000:200\n");
  const auto checked = Check();
  ASSERT_FALSE(checked.ok());
  EXPECT_EQ(checked.error().reason(), "ids.overlap");
  EXPECT_THAT(checked.error().message(), HasSubstr("line 3"));
  EXPECT_THAT(checked.error().message(), HasSubstr("/etc/subgid"));
  EXPECT_THAT(checked.error().message(), HasSubstr("big"));
}

TEST_F(Ids, AccountInTheAgentRange_IsNamed) {
  Write("/etc/passwd", "odd:x:2147418113:1::/:/bin/sh\n");
  EXPECT_THAT(Check().error().message(), HasSubstr("odd"));
}

TEST_F(Ids, PlanThatOverlapsItself_IsRefused) {
  IdPlan plan;
  plan.agent_uid_base = plan.id_base + 10 * IdPlan::kIdsPerSlot;
  EXPECT_EQ(Check(plan).error().reason(), "ids.range");
  plan = {};
  plan.slots = 65535;
  EXPECT_EQ(Check(plan).error().reason(), "ids.range");
  plan = {};
  plan.id_base = 1000;
  EXPECT_EQ(Check(plan).error().reason(), "ids.range");
}

TEST_F(Ids, MalformedLines_ArePassedOver) {
  Write("/etc/subuid", "me\nme:\nme:x:1\n:::\nme:99999999999999999999999:1\nme:1879048192:0\n");
  EXPECT_TRUE(Check().ok());
}

}  // namespace
}  // namespace dsec::sandbox

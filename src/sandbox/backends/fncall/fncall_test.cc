// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "sandbox/testing/fncall_fixture.h"

namespace dsec::sandbox {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FnCall : public testing::FnCallTest {};

TEST_F(FnCall, TrivialProgram_Ok) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  const FnReport report = Must(*worker, Program({"true"}));
  EXPECT_EQ(report.step.verdict(), v1::FN_OK) << report.step.DebugString();
  EXPECT_FALSE(report.dirty);
}

TEST_F(FnCall, Output_IsExactAndApart) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  for (int i = 0; i < 5; ++i) {
    const FnReport report = Must(*worker, Shell("printf 'a\\000b'; echo err >&2; exit 3"));
    EXPECT_EQ(report.step.verdict(), v1::FN_WRONG_EXIT) << report.step.DebugString();
    EXPECT_EQ(report.step.exit_code(), 3);
    EXPECT_EQ(report.step.stdout().data(), std::string("a\0b", 3));
    EXPECT_EQ(report.step.stderr().data(), "err\n");
  }
}

}  // namespace
}  // namespace dsec::sandbox

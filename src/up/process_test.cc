// SPDX-License-Identifier: Apache-2.0
#include "up/process.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace dsec::up {
namespace {

TEST(StopLimit, EndsAProcessThatIsStuckAndNamesTheStep) {
  EXPECT_EXIT(
      {
        StopLimit limit(std::chrono::milliseconds(50));
        limit.Step("calls");
        limit.Step("server");
        for (;;) pause();
      },
      ::testing::ExitedWithCode(kExitFailure), "node.stop_stuck.*server");
}

TEST(StopLimit, LeavesOneAloneThatEndsInTime) {
  const auto start = std::chrono::steady_clock::now();
  {
    const StopLimit limit(std::chrono::hours(1));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1));
}

}  // namespace
}  // namespace dsec::up

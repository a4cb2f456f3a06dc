// SPDX-License-Identifier: Apache-2.0
#include "sandbox/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "os/file.h"
#include "sandbox/isolators/dir_list.h"
#include "sandbox/testing/leak_check.h"

namespace dsec::sandbox {
namespace {

TEST(Doctor, ThisHost_HasWhatContainersNeedAndEachRowSaysWhy) {
  if (const std::string missing = testing::WhatIsMissing(); !missing.empty())
    GTEST_SKIP() << missing;
  auto dir = os::TempDir::Create("dsec-tsb-").value();
  const auto before = testing::HostState::Take(0, 0);
  std::set<std::string> names;
  for (const HostProbe& probe : ProbeHost(dir.path())) {
    const v1::Capability& row = probe.capability;
    std::printf("%-22s %-4s %-34s %s\n", row.name().c_str(), row.ok() ? "ok" : "no",
                row.used().c_str(), row.detail().c_str());
    EXPECT_TRUE(names.insert(row.name()).second) << row.name();
    EXPECT_FALSE(row.used().empty()) << row.name();
    EXPECT_FALSE(row.detail().empty()) << row.name();
    if (probe.required) EXPECT_TRUE(row.ok()) << row.name() << ": " << row.detail();
  }
  EXPECT_THAT(ListDir(dir.fd(), ".").value(), ::testing::IsEmpty());
  EXPECT_THAT(testing::Leaks(before, testing::HostState::Take(0, 0)), ::testing::IsEmpty());
}

}  // namespace
}  // namespace dsec::sandbox

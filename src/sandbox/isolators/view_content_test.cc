// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/view_content.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dsec::sandbox {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kHostCpuInfo[] =
    "processor\t: 0\nmodel name\t: Some CPU\ncpu MHz\t\t: 2000\nphysical id\t: 7\nsiblings\t: "
    "64\ncore id\t\t: 9\n"
    "cpu cores\t: 32\napicid\t\t: 5\nflags\t\t: fpu sse avx2\n\nprocessor\t: 1\nmodel name\t: "
    "Other\n\n";

std::string Content(const std::vector<ViewFile>& files, const std::string& path) {
  for (const ViewFile& file : files) {
    if (file.path == path) return file.content;
  }
  return "no such file";
}

HostFacts Facts() {
  return {kHostCpuInfo, "cpu  1 2 3\ncpu0 1 2 3\nbtime 1234567\n", "always [madvise] never\n",
          "2097152\n"};
}

// Acceptance case 69, as far as files go.
TEST(Views, HalfACore_ShowsOne) {
  const auto files = MakeViews({500, 256 << 20}, Facts());
  EXPECT_EQ(Content(files, "sys/devices/system/cpu/online"), "0\n");
  EXPECT_THAT(Content(files, "proc/cpuinfo"), Not(HasSubstr("processor\t: 1")));
  EXPECT_THAT(Content(files, "proc/stat"), Not(HasSubstr("cpu1")));
  EXPECT_EQ(Content(files, "sys/fs/cgroup/cpu.max"), "50000 100000\n");
  EXPECT_THAT(Content(files, "proc/meminfo"), HasSubstr("MemTotal:         262144 kB"));
  EXPECT_EQ(Content(files, "sys/fs/cgroup/memory.max"), "268435456\n");
}

TEST(Views, ManyCores_AreNumberedFromZero) {
  const auto files = MakeViews({39'500, 1ull << 30}, Facts());
  EXPECT_EQ(Content(files, "sys/devices/system/cpu/online"), "0-39\n");
  EXPECT_EQ(Content(files, "sys/devices/system/cpu/cpu39/topology/core_id"), "39\n");
  EXPECT_EQ(Content(files, "sys/devices/system/node/node0/cpumap"), "000000ff,ffffffff\n");
  const std::string cpuinfo = Content(files, "proc/cpuinfo");
  EXPECT_THAT(cpuinfo, HasSubstr("processor\t: 39\n"));
  EXPECT_THAT(cpuinfo, HasSubstr("siblings\t: 40\n"));
  EXPECT_THAT(cpuinfo, HasSubstr("physical id\t: 0\n"));
  EXPECT_THAT(cpuinfo, HasSubstr("core id\t\t: 39\n"));
  EXPECT_THAT(cpuinfo, HasSubstr("flags\t\t: fpu sse avx2\n"));
  EXPECT_THAT(cpuinfo, Not(HasSubstr("Other")));
}

TEST(Views, Stat_KeepsTheHostsBootTime) {
  EXPECT_THAT(StatView(Facts().stat, 2), HasSubstr("\nbtime 1234567\n"));
  EXPECT_THAT(StatView("", 1), HasSubstr("\nbtime 0\n"));
}

TEST(Views, OddHostFiles_GiveWellFormedViews) {
  EXPECT_EQ(CpuInfoView("", 2), "\n\n");
  EXPECT_EQ(CpuInfoView("\n\nprocessor : 3\nno colon\n", 1), "processor : 3\nno colon\n\n");
  HostFacts facts;
  EXPECT_EQ(Content(MakeViews({1000, 1}, facts), "sys/kernel/mm/transparent_hugepage/enabled"),
            "no such file");
}

}  // namespace
}  // namespace dsec::sandbox

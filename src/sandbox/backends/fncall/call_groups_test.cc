// SPDX-License-Identifier: Apache-2.0
// Files in the kernel's place: above all those of cgroup v2, which a host has either or.
#include "sandbox/backends/fncall/call_groups.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <fstream>

#include "os/file.h"

namespace dsec::sandbox {
namespace {

class FakeCallGroups : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_.emplace(os::TempDir::Create("dsec-tsb-groups-").value());
    ASSERT_TRUE(os::MakeDir(dir_->fd(), "code", 0755).ok());
    ASSERT_TRUE(os::MakeDir(dir_->fd(), "code/c1", 0755).ok());
    ASSERT_TRUE(os::MakeDir(dir_->fd(), "v1", 0755).ok());
  }
  void Put(const std::string& path, const std::string& content) {
    const std::string full = dir_->path() + "/" + path;
    // In place: the files of the kernel are kept open.
    std::ofstream file(full, std::ios::trunc);
    file << content;
    ASSERT_TRUE(file.flush().good()) << path;
  }
  std::string Get(const std::string& path) {
    return os::ReadFile(dir_->fd(), path.c_str(), 4096).value();
  }
  os::UniqueFd Dir(const char* path) {
    return os::OpenAt(dir_->fd(), path, O_RDONLY | O_DIRECTORY).value();
  }
  std::optional<os::TempDir> dir_;
};

TEST_F(FakeCallGroups, V2_LimitsAreOnTheCodeAndThePeakIsTheCalls) {
  for (const char* file :
       {"memory.max", "memory.swap.max", "pids.max", "memory.stat", "pids.current"})
    Put(std::string("code/") + file, "");
  Put("code/memory.current", "5000000\n");
  Put("code/memory.events", "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n");
  Put("code/pids.events", "max 4\n");
  Put("code/c1/memory.peak", "1000\n");
  SlotCgroups groups;
  groups.slot = Dir(".");
  auto open = CallGroups::Open(groups);
  ASSERT_TRUE(open.ok()) << open.error().ToString();
  EXPECT_EQ(Get("code/memory.swap.max"), "0");
  ASSERT_TRUE(open->SetLimits(10 << 20, 7).ok());
  EXPECT_EQ(Get("code/memory.max"), fmt::format("{}", (10 << 20) + CallGroups::kOwnMemory));
  EXPECT_EQ(Get("code/pids.max"), "8") << "the init of the cell; the runner is elsewhere";
  Put("code/pids.current", "0\n");
  EXPECT_EQ(*open->Processes(), 0u) << "between calls";
  const auto call = Dir("code/c1");
  ASSERT_TRUE(open->Begin(call.get()).ok());
  Put("code/memory.events", "low 0\nhigh 0\nmax 5\noom 2\noom_kill 3\n");
  Put("code/pids.events", "max 6\n");
  Put("code/c1/memory.peak", "9000\n");
  const auto now = open->Read(call.get());
  ASSERT_TRUE(now.ok());
  EXPECT_EQ(now->memory_peak, 9000u);
  EXPECT_TRUE(now->memory_full);
  EXPECT_EQ(now->oom_kills, 1u);
  EXPECT_EQ(now->forks_denied, 2u);
}

TEST_F(FakeCallGroups, V1_PeakLeavesOutWhatWasThereUntilTheBoundIsHit) {
  for (const char* file : {"memory.limit_in_bytes", "memory.memsw.limit_in_bytes",
                           "memory.max_usage_in_bytes", "pids.max", "memory.stat", "pids.current",
                           "memory.usage_in_bytes", "memory.oom_control", "pids.events"}) {
    Put(std::string("v1/") + file, "");
  }
  Put("v1/memory.usage_in_bytes", "50000000\n");
  Put("v1/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n");
  Put("v1/pids.events", "max 0\n");
  SlotCgroups groups;
  groups.slot = Dir(".");
  groups.memory = Dir("v1");
  groups.pids = Dir("v1");
  auto open = CallGroups::Open(groups);
  ASSERT_TRUE(open.ok()) << open.error().ToString();
  ASSERT_TRUE(open->SetLimits(100'000'000, 1).ok());
  const auto call = Dir("code/c1");
  ASSERT_TRUE(open->Begin(call.get()).ok());
  Put("v1/memory.max_usage_in_bytes", "60000000\n");
  EXPECT_EQ(open->Read(call.get())->memory_peak, 10'000'000u);
  EXPECT_FALSE(open->Read(call.get())->memory_full);
  ASSERT_TRUE(open->SetLimits(58'000'000, 1).ok());
  EXPECT_TRUE(open->Read(call.get())->memory_full);
  EXPECT_EQ(open->Read(call.get())->memory_peak, 60'000'000u - CallGroups::kOwnMemory);
}

TEST_F(FakeCallGroups, Thrashing_IsFullMemoryWhoseFewFilesAreReadAgainAndAgain) {
  for (const char* file : {"memory.limit_in_bytes", "memory.memsw.limit_in_bytes",
                           "memory.max_usage_in_bytes", "pids.max", "memory.stat", "pids.current",
                           "memory.usage_in_bytes", "memory.oom_control", "pids.events"}) {
    Put(std::string("v1/") + file, "");
  }
  const auto look = [&](CallGroups& groups, uint64_t usage, uint64_t cache, uint64_t refaults) {
    Put("v1/memory.usage_in_bytes", fmt::format("{}\n", usage));
    Put("v1/memory.stat", fmt::format("cache {}\nshmem 1048576\nworkingset_refault_file {}\n",
                                      cache + (1 << 20), refaults));
    return groups.Thrashes();
  };
  SlotCgroups slot;
  slot.slot = Dir(".");
  slot.memory = Dir("v1");
  slot.pids = Dir("v1");
  auto groups = CallGroups::Open(slot).value();
  ASSERT_TRUE(groups.SetLimits(64 << 20, 1).ok());
  constexpr uint64_t kFull = 66 << 20;
  EXPECT_FALSE(look(groups, kFull, 160'000, 1'000'000));  // of which none need be this call's
  EXPECT_FALSE(look(groups, kFull, 160'000, 1'020'000));
  EXPECT_TRUE(look(groups, kFull, 160'000, 1'040'000));
  EXPECT_FALSE(look(groups, kFull, 160'000, 1'040'100)) << "it got on in between";
  EXPECT_FALSE(look(groups, 40 << 20, 160'000, 1'080'000)) << "there is room";
  // A program that goes through large files again and again, with its bound as their cache.
  for (uint64_t i = 1; i < 5; ++i)
    EXPECT_FALSE(look(groups, kFull, 50 << 20, 1'080'000 + (i * 50'000)));
}

}  // namespace
}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
// Cgroups, device rules and views on the real kernel.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "os/file.h"
#include "os/syscalls.h"
#include "sandbox/isolators/cgroup_tree.h"
#include "sandbox/isolators/devices.h"
#include "sandbox/isolators/views.h"
#include "sandbox/testing/leak_check.h"

namespace dsec::sandbox {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::HostState;
using ::testing::IsEmpty;

MonoTime In(int seconds) { return Clock::System().Mono() + std::chrono::seconds(seconds); }

class HostTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string missing = testing::WhatIsMissing(); !missing.empty())
      GTEST_SKIP() << missing;
    before_ = HostState::Take(0x7fff0000, 0x7fff0fff);
    auto tree = CgroupTree::Open({"dsec-tsb-host", "", nullptr});
    ASSERT_TRUE(tree.ok()) << tree.error().ToString();
    tree_ = std::move(*tree);
  }
  void TearDown() override {
    if (tree_ == nullptr) return;
    auto slots = tree_->List();
    for (const SlotName& slot : *slots) {
      auto dying = tree_->Kill(slot);
      ASSERT_TRUE(dying.ok());
      EXPECT_TRUE(*CgroupTree::WaitGone(*dying, In(10)));
      const auto removed = tree_->Remove(slot, In(10));
      EXPECT_TRUE(removed.ok()) << removed.error().ToString();
    }
    const auto removed = tree_->RemoveTop();
    EXPECT_TRUE(removed.ok()) << removed.error().ToString();
    tree_.reset();
    EXPECT_THAT(testing::Leaks(before_, HostState::Take(0x7fff0000, 0x7fff0fff)), IsEmpty());
  }

  // Runs `body` in a process that is in every group of a slot; its exit code.
  template <typename F>
  int InSlot(const SlotCgroups& groups, F body) {
    int ready[2];
    EXPECT_EQ(::pipe2(ready, O_CLOEXEC), 0);
    const pid_t pid = os::Clone3(0, nullptr, groups.init.get(), SIGCHLD);
    if (pid == 0) {
      char go = 0;
      if (::read(ready[0], &go, 1) != 1) ::_exit(99);
      ::_exit(body());
    }
    EXPECT_GT(pid, 0);
    for (const os::UniqueFd& procs : groups.v1_procs) {
      const std::string text = fmt::format("{}", pid);
      EXPECT_EQ(::write(procs.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    }
    EXPECT_EQ(::write(ready[1], "g", 1), 1);
    ::close(ready[0]);
    ::close(ready[1]);
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  HostState before_;
  std::unique_ptr<CgroupTree> tree_;
  const SlotName slot_{1, 42};
};

TEST_F(HostTest, Memory_KillIsCounted) {
  auto groups = tree_->Make(slot_, 0x7fff0001, 0x70010000);
  ASSERT_TRUE(groups.ok()) << groups.error().ToString();
  v1::Limits limits;
  limits.set_memory_bytes(32 << 20);
  limits.set_cpu_millis(2000);
  limits.set_pids(10);
  ASSERT_TRUE(tree_->SetLimits(slot_, limits).ok());
  EXPECT_EQ(InSlot(*groups,
                   [] {
                     for (int i = 0; i < 64; ++i) {
                       char* block = static_cast<char*>(::malloc(1 << 20));
                       for (int k = 0; k < 1 << 20; k += 4096)
                         const_cast<volatile char*>(block)[k] = 1;
                     }
                     return 0;
                   }),
            128 + SIGKILL);
  v1::Usage usage;
  ASSERT_TRUE(tree_->ReadUsage(slot_, usage).ok());
  EXPECT_EQ(usage.oom_kills(), 1u);
  EXPECT_GE(usage.memory_peak_bytes(), 31u << 20);
  EXPECT_LE(usage.memory_peak_bytes(), 32u << 20);
  EXPECT_GT(usage.cpu_usec(), 0u);
}

TEST_F(HostTest, Pids_RefusalIsCounted) {
  auto groups = tree_->Make(slot_, 0x7fff0001, 0x70010000);
  ASSERT_TRUE(groups.ok());
  v1::Limits limits;
  limits.set_memory_bytes(64 << 20);
  limits.set_cpu_millis(1000);
  limits.set_pids(4);
  ASSERT_TRUE(tree_->SetLimits(slot_, limits).ok());
  // This process stands where init does: beside it 4 fit.
  EXPECT_EQ(InSlot(*groups,
                   [] {
                     int made = 0;
                     while (made < 20) {
                       const pid_t pid = ::fork();
                       if (pid < 0) break;
                       if (pid == 0) ::pause();
                       ++made;
                     }
                     ::signal(SIGTERM, SIG_IGN);
                     return made;
                   }),
            4);
  v1::Usage usage;
  ASSERT_TRUE(tree_->ReadUsage(slot_, usage).ok());
  EXPECT_GE(usage.pids_denied(), 1u);
  auto dying = tree_->Kill(slot_);
  ASSERT_TRUE(dying.ok());
  EXPECT_TRUE(*CgroupTree::WaitGone(*dying, In(10)));
}

TEST_F(HostTest, SetLimits_UpAndDown) {
  auto groups = tree_->Make(slot_, 0x7fff0001, 0x70010000);
  ASSERT_TRUE(groups.ok());
  for (const uint64_t mib : {64, 16, 128, 32}) {
    v1::Limits limits;
    limits.set_memory_bytes(mib << 20);
    limits.set_cpu_millis(mib * 10);
    limits.set_pids(mib);
    const auto set = tree_->SetLimits(slot_, limits);
    ASSERT_TRUE(set.ok()) << set.error().ToString();
  }
}

TEST_F(HostTest, Remove_BusyUntilTheDeadlineNamesTheProcess) {
  auto groups = tree_->Make(slot_, 0x7fff0001, 0x70010000);
  ASSERT_TRUE(groups.ok());
  // A frozen group's member cannot run, but v2 lets it be killed: only a stopped deadline leaves it
  // there.
  const pid_t pid = os::Clone3(0, nullptr, groups->agent.get(), SIGCHLD);
  if (pid == 0) {
    ::pause();
    ::_exit(0);
  }
  const auto removed = tree_->Remove(slot_, Clock::System().Mono());
  // Kill came with it: the second attempt finds it gone.
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  if (!removed.ok()) {
    EXPECT_EQ(removed.error().reason(), "cgroup.busy");
    EXPECT_EQ(removed.error().code(), Code::kDeadlineExceeded);
  }
  EXPECT_TRUE(tree_->Remove(slot_, In(10)).ok());
  EXPECT_THAT(*tree_->List(), IsEmpty());
}

TEST_F(HostTest, StrangerInAV1Group_DoesNotKeepTheSlot) {
  auto groups = tree_->Make(slot_, 0x7fff0001, 0x70010000);
  ASSERT_TRUE(groups.ok());
  if (groups->v1_procs.empty()) GTEST_SKIP() << "no controller is on v1 here";
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::pause();
    ::_exit(0);
  }
  const std::string text = fmt::format("{}", pid);
  ASSERT_EQ(::write(groups->v1_procs[0].get(), text.data(), text.size()),
            static_cast<ssize_t>(text.size()));
  EXPECT_TRUE(tree_->Remove(slot_, In(10)).ok());
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
}

TEST_F(HostTest, Reopened_SeesTheSlots) {
  ASSERT_TRUE(tree_->Make(slot_, 0x7fff0001, 0x70010000).ok());
  auto second = CgroupTree::Open({"dsec-tsb-host", "", nullptr});
  ASSERT_TRUE(second.ok());
  EXPECT_THAT(*(*second)->List(), ElementsAre(slot_));
}

TEST_F(HostTest, Devices_OnlyTheUsualOnes) {
  auto groups = tree_->Make(slot_, 0x7fff0001, 0x70010000);
  ASSERT_TRUE(groups.ok());
  for (int i = 0; i < 3; ++i) {  // as at every start of a node
    const auto enforced = EnforceDeviceRules(tree_->top());
    ASSERT_TRUE(enforced.ok()) << enforced.error().ToString();
  }
  auto can_open = [&](const char* path) {
    return InSlot(*groups, [path] {
      const int fd = ::open(path, O_RDONLY | O_NONBLOCK);
      return fd >= 0 ? 0 : errno;
    });
  };
  for (const char* path : {"/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/ptmx"}) {
    EXPECT_EQ(can_open(path), 0) << path;
  }
  for (const char* path : {"/dev/loop-control", "/dev/loop0", "/dev/kmsg"}) {
    EXPECT_EQ(can_open(path), EPERM) << path;
  }
}

TEST_F(HostTest, Views_AreSharedMappedAndReadOnly) {
  auto views = Views::Open();
  ASSERT_TRUE(views.ok()) << views.error().ToString();
  // A user namespace with root at id 0x70010000.
  int go[2];
  ASSERT_EQ(::pipe2(go, O_CLOEXEC), 0);
  const pid_t holder = os::Clone3(CLONE_NEWUSER, nullptr, -1, SIGCHLD);
  if (holder == 0) {
    char end = 0;
    ::close(go[1]);
    (void)!::read(go[0], &end, 1);
    ::_exit(0);
  }
  for (const char* map : {"uid_map", "gid_map"}) {
    const std::string path = fmt::format("/proc/{}/{}", holder, map);
    ASSERT_TRUE(os::WriteExisting(AT_FDCWD, path.c_str(), "0 1879113728 65536").ok());
  }
  {
    const auto user_ns =
        os::OpenAt(AT_FDCWD, fmt::format("/proc/{}/ns/user", holder).c_str(), O_RDONLY);
    ASSERT_TRUE(user_ns.ok());
    auto first = (*views)->For({500, 64 << 20}, user_ns->get());
    ASSERT_TRUE(first.ok()) << first.error().ToString();
    auto second = (*views)->For({500, 64 << 20}, user_ns->get());
    ASSERT_TRUE(second.ok());
    struct stat a, b;
    for (size_t i = 0; i < first->size(); ++i) {
      ASSERT_EQ(::fstat((*first)[i].mount.get(), &a), 0);
      ASSERT_EQ(::fstat((*second)[i].mount.get(), &b), 0);
      EXPECT_EQ(a.st_dev, b.st_dev) << "one file system for both";
      EXPECT_EQ(a.st_uid, 0x70010000u) << (*first)[i].target;
      EXPECT_EQ(S_ISDIR(a.st_mode), (*first)[i].target == "/sys");
    }
    EXPECT_EQ(*os::ReadFile((*first)[0].mount.get(), "devices/system/cpu/online", 64), "0\n");
    EXPECT_EQ(os::MakeDir((*first)[0].mount.get(), "x", 0755).error().sys_errno(), EROFS);
  }
  ::close(go[0]);
  ::close(go[1]);
  ::waitpid(holder, nullptr, 0);
}

}  // namespace
}  // namespace dsec::sandbox

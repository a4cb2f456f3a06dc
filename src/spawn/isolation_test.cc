// SPDX-License-Identifier: Apache-2.0
// What code in a sandbox sees of the host and of the platform, and what root in it can do.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sstream>

#include "spawn/testing/sandbox.h"

namespace dsec::spawn {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::Sandbox;

class Isolation : public testing::SpawnTest {};

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST_F(Isolation, RootReachingOut_EveryAttemptRefused) {
  ASSERT_NE(Launched(), nullptr);
  auto result = sandbox_->Guest({"attack"});
  ASSERT_TRUE(result->Exited(0)) << result->err;
  EXPECT_GT(Lines(result->out).size(), 60u);
  for (const std::string& line : Lines(result->out)) EXPECT_THAT(line, Not(HasSubstr("ALLOWED")));
  // init took the signals and the rest without harm.
  EXPECT_TRUE(sandbox_->Guest({"true"})->Exited(0));
}

TEST_F(Isolation, Identity_RootOfItsOwnNamespaces) {
  ASSERT_NE(Launched(), nullptr);
  auto result = sandbox_->Guest({"ids"});
  EXPECT_THAT(result->out, HasSubstr("uid 0 0 0 gid 0 0 0 groups\n"));
  EXPECT_THAT(result->out,
              HasSubstr(fmt::format("pid {0} ppid 1 sid {0} pgid {0}\n", result->pid)));
  EXPECT_LT(result->pid, 10);
  EXPECT_THAT(result->out, HasSubstr("dumpable 1 no_new_privs 0 umask 22\n"));
  EXPECT_THAT(result->out, HasSubstr("blocked 0 handled 0\n"));
  auto status = sandbox_->Guest({"cat", "/proc/self/status"});
  EXPECT_THAT(status->out, HasSubstr(fmt::format("CapEff:\t{:016x}\n", kCodeCapabilities)));
  EXPECT_THAT(status->out, HasSubstr(fmt::format("CapBnd:\t{:016x}\n", kCodeCapabilities)));
  EXPECT_THAT(status->out, HasSubstr("CapInh:\t0000000000000000\n"));
  EXPECT_THAT(status->out, HasSubstr("CapAmb:\t0000000000000000\n"));
  EXPECT_THAT(status->out, HasSubstr("Seccomp_filters:\t3\n"));
}

TEST_F(Isolation, ProcessList_InitAndItsOwnOnly) {
  ASSERT_NE(Launched(), nullptr);
  std::vector<std::string> pids;
  for (const std::string& name : Lines(sandbox_->Guest({"ls", "/proc"})->out)) {
    if (name.find_first_not_of("0123456789") == std::string::npos) pids.push_back(name);
  }
  EXPECT_EQ(pids.size(), 2u);
  auto init = sandbox_->Guest({"cat", "/proc/1/cmdline", "/proc/1/status"});
  EXPECT_THAT(init->out, HasSubstr("Name:\tinit\n"));
  EXPECT_THAT(init->out, Not(HasSubstr("dsec")));
}

TEST_F(Isolation, Masks_HideWhatTheHostHas) {
  ASSERT_NE(Launched(), nullptr);
  const char* const files[] = {
      "buddyinfo",  "cgroups",  "cmdline",      "config.gz",  "diskstats",   "dma",
      "interrupts", "iomem",    "ioports",      "kallsyms",   "kcore",       "key-users",
      "keys",       "kmsg",     "kpagecgroup",  "kpagecount", "kpageflags",  "misc",
      "modules",    "mtrr",     "pagetypeinfo", "partitions", "sched_debug", "schedstat",
      "slabinfo",   "softirqs", "swaps",        "timer_list", "timer_stats", "vmallocinfo",
      "vmstat",     "zoneinfo", "latency_stats"};
  int present = 0;
  for (const char* name : files) {
    std::string path = fmt::format("/proc/{}", name);
    if (::access(path.c_str(), F_OK) != 0) continue;
    ++present;
    EXPECT_EQ(sandbox_->Guest({"cat", path})->out, "") << path;
    EXPECT_THAT(sandbox_->Guest({"probe", path})->out, HasSubstr("mode 20666")) << path;
  }
  EXPECT_GT(present, 15);
  for (const char* name : {"acpi", "asound", "driver", "scsi", "sysvipc", "pressure"}) {
    std::string path = fmt::format("/proc/{}", name);
    if (::access(path.c_str(), F_OK) != 0) continue;
    EXPECT_EQ(sandbox_->Guest({"ls", path})->out, ".\n..\n") << path;
    EXPECT_EQ(sandbox_->Guest({"write", path + "/x", "x"})->out, "EROFS\n") << path;
  }
  for (const char* name : {"bus", "fs", "irq", "sys", "sysrq-trigger"}) {
    std::string path = fmt::format("/proc/{}", name);
    if (::access(path.c_str(), F_OK) != 0) continue;
    EXPECT_THAT(sandbox_->Guest({"cat", "/proc/self/mountinfo"})->out,
                HasSubstr(fmt::format(" {} ro,", path)));
  }
}

TEST_F(Isolation, Mountinfo_NamesNothingOfTheHost) {
  ASSERT_NE(Slot(), nullptr);
  auto root = sandbox_->NewHostImageRoot();
  if (!root.ok() && root.error().code() == Code::kFailedPrecondition)
    GTEST_SKIP() << root.error().message();
  ASSERT_TRUE(root.ok()) << root.error().ToString();
  // bin is a link to usr/bin in the image; the guest needs another place.
  auto source = os::OpenAt(AT_FDCWD, testing::GuestPath().c_str(), O_RDONLY);
  ASSERT_TRUE(
      os::CreateFile(root->get(), "guest", *os::ReadAll(source->get(), 64 << 20), 0755).ok());
  auto report = sandbox_->Launch(Sandbox::DefaultPlan(), std::move(*root));
  ASSERT_TRUE(report.ok()) << report.error().ToString();
  testing::ExecSpec spec;
  spec.argv = {"/guest", "cat", "/proc/self/mountinfo", "/proc/1/mountinfo", "/proc/self/mounts"};
  auto result = sandbox_->Exec(spec);
  ASSERT_TRUE(result->Exited(0));
  EXPECT_THAT(result->out, HasSubstr(" - overlay "));
  for (const std::string& line : Lines(result->out)) {
    for (const char* word : {"/dev/vd", "/dev/sd", "/dev/nvme", "/var/", "/tmp/", "/run/", "/home",
                             "dsec", "/sys/fs", " cgroup"}) {
      EXPECT_THAT(line, Not(HasSubstr(word)));
    }
    size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    EXPECT_THAT(line.substr(dash + 3),
                ::testing::MatchesRegex("(proc|tmpfs|devpts|overlay) (none|proc|devpts|shm) .*"));
  }
}

TEST_F(Isolation, Cgroup_OwnDirectoryIsTheRoot) {
  ASSERT_NE(Launched(), nullptr);
  std::vector<os::UniqueFd> fds;
  ASSERT_EQ(*sandbox_->Ask("cx1", &fds), "ok");
  testing::ExecSpec spec;
  spec.argv = {"/bin/guest", "cat", "/proc/self/cgroup"};
  spec.cgroup = fds[0].get();
  auto result = sandbox_->Exec(spec);
  ASSERT_TRUE(result->Exited(0));
  for (const std::string& line : Lines(result->out)) {
    // Hierarchies that the slot has no group in show the spawner's own as their root.
    EXPECT_THAT(line, ::testing::EndsWith(":/")) << line;
  }
}

TEST_F(Isolation, Devices_UsualOnesOwnedByRoot) {
  ASSERT_NE(Launched(), nullptr);
  for (const char* name : {"null", "zero", "full", "random", "urandom", "tty"}) {
    auto probe = sandbox_->Guest({"probe", fmt::format("/dev/{}", name)});
    EXPECT_THAT(probe->out, HasSubstr("mode 20666 uid 0 gid 0")) << name;
  }
  std::string list = sandbox_->Guest({"ls", "/dev"})->out;
  std::vector<std::string> names = Lines(list);
  EXPECT_THAT(names, ::testing::UnorderedElementsAre(".", "..", "null", "zero", "full", "random",
                                                     "urandom", "tty", "pts", "shm", "ptmx", "fd",
                                                     "stdin", "stdout", "stderr"));
  EXPECT_TRUE(sandbox_->Guest({"write", "/dev/null", "x"})->Exited(0));
  EXPECT_EQ(sandbox_->Guest({"write", "/dev/full", "x"})->out, "ENOSPC\n");
  EXPECT_TRUE(sandbox_->Guest({"write", "/dev/shm/file", "x"})->Exited(0));
  EXPECT_EQ(sandbox_->Guest({"write", "/dev/file", "x"})->out, "EROFS\n");
}

TEST_F(Isolation, Terminals_BoundedForEachSandbox) {
  ASSERT_NE(Launched(), nullptr);
  EXPECT_EQ(sandbox_->Guest({"terminals"})->out, "256 ENOSPC\n");
}

TEST_F(Isolation, DeviceNodeOfTheImage_NotOpened) {
  ASSERT_NE(Slot(), nullptr);
  auto root = sandbox_->NewRoot().value();
  ASSERT_EQ(::mknodat(root.get(), "null", S_IFCHR | 0666, (1 << 8) | 3), 0);
  ASSERT_TRUE(sandbox_->Launch(Sandbox::DefaultPlan(), std::move(root)).ok());
  EXPECT_EQ(sandbox_->Guest({"cat", "/null"})->out, "/null: EACCES\n");
}

TEST_F(Isolation, Network_LoopbackUpAndLowPortsUsable) {
  ASSERT_NE(Launched(), nullptr);
  EXPECT_EQ(sandbox_->Guest({"serve", "80"})->out,
            "bind ALLOWED\nlisten ALLOWED\nconnect ALLOWED\n");
  auto devices = Lines(sandbox_->Guest({"cat", "/proc/net/dev"})->out);
  EXPECT_EQ(devices.size(), 3u) << "two lines of heading and lo";
}

TEST_F(Isolation, FilesMadeInside_BelongToTheSandboxOnTheHost) {
  ASSERT_NE(Launched(), nullptr);
  ASSERT_TRUE(sandbox_->Guest({"write", "/made", "x"})->Exited(0));
  struct stat info;
  ASSERT_EQ(::fstatat(sandbox_->root.get(), "made", &info, 0), 0);
  EXPECT_EQ(info.st_uid, sandbox_->id_base);
  EXPECT_EQ(info.st_gid, sandbox_->id_base);
}

TEST_F(Isolation, TwoSandboxes_ShareNoIdAndSeeNothingOfOneAnother) {
  ASSERT_NE(Launched(), nullptr);
  auto other = Sandbox::MakeSlot(*spawner_);
  ASSERT_TRUE(other.ok());
  ASSERT_TRUE((*other)->Launch(Sandbox::DefaultPlan()).ok());
  testing::ExecSpec spec;
  spec.argv = {"/bin/guest", "pause"};
  auto run = (*other)->Start(spec);
  ASSERT_EQ(*(*other)->ReadLine(*run), "ready");
  EXPECT_NE((*other)->id_base, sandbox_->id_base);
  std::string list = sandbox_->Guest({"ls", "/proc"})->out;
  size_t pids = 0;
  for (const std::string& name : Lines(list))
    pids += name.find_first_not_of("0123456789") == std::string::npos;
  EXPECT_EQ(pids, 2u);
}

}  // namespace
}  // namespace dsec::spawn

// SPDX-License-Identifier: Apache-2.0
// The init side of exec: how programs start, end and fail to start.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <functional>

#include "os/fd_passing.h"
#include "os/memfd.h"
#include "spawn/testing/sandbox.h"

namespace dsec::spawn {
namespace {

using testing::ExecSpec;
using ::testing::HasSubstr;
using testing::In;
using testing::Sandbox;

class Exec : public testing::SpawnTest {
 protected:
  void ExpectFailure(const ExecSpec& spec, abi::ExecStep step, int error) {
    auto result = sandbox_->Exec(spec);
    ASSERT_TRUE(result.ok()) << result.error().ToString();
    ASSERT_TRUE(result->failure.has_value()) << "started: " << result->out;
    EXPECT_EQ(abi::ExecStepName(result->failure->step), std::string(abi::ExecStepName(step)));
    EXPECT_EQ(result->failure->sys_errno, error);
    EXPECT_EQ(result->out, "");
  }
  static ExecSpec Guest(std::vector<std::string> arguments) {
    ExecSpec spec;
    spec.argv = {"/bin/guest"};
    spec.argv.insert(spec.argv.end(), arguments.begin(), arguments.end());
    return spec;
  }
  // A sandbox on the host's own system, for its shells. False: skipped or failed.
  bool LaunchHostImage() {
    if (Slot() == nullptr) return false;
    auto root = sandbox_->NewHostImageRoot();
    if (!root.ok()) {
      if (root.error().code() == Code::kFailedPrecondition) skip_ = root.error().message();
      EXPECT_TRUE(!skip_.empty()) << root.error().ToString();
      return false;
    }
    auto report = sandbox_->Launch(Sandbox::DefaultPlan(), std::move(*root));
    EXPECT_TRUE(report.ok()) << report.error().ToString();
    return report.ok();
  }
  std::string skip_;
};

TEST_F(Exec, Descriptors_StandardThreeOnly) {
  ASSERT_NE(Launched(), nullptr);
  EXPECT_EQ(sandbox_->Guest({"fds"})->out, "0\n1\n2\n");
}

TEST_F(Exec, Ends_ToldApart) {
  ASSERT_NE(Launched(), nullptr);
  EXPECT_TRUE(sandbox_->Guest({"true"})->Exited(0));
  EXPECT_TRUE(sandbox_->Guest({"exit", "255"})->Exited(255));
  EXPECT_TRUE(sandbox_->Guest({"exit", "137"})->Exited(137));
  auto killed = sandbox_->Guest({"kill", "9"});
  EXPECT_TRUE(WIFSIGNALED(killed->wait_status) && WTERMSIG(killed->wait_status) == SIGKILL);
  auto crashed = sandbox_->Guest({"kill", "11"});
  EXPECT_TRUE(WIFSIGNALED(crashed->wait_status) && WTERMSIG(crashed->wait_status) == SIGSEGV);
  EXPECT_FALSE(WCOREDUMP(crashed->wait_status));
}

TEST_F(Exec, Failures_StepAndErrnoOfTheKernel) {
  ASSERT_NE(Slot(), nullptr);
  auto root = sandbox_->NewRoot().value();
  ASSERT_TRUE(os::CreateFile(root.get(), "bin/plain", "text", 0644).ok());
  ASSERT_TRUE(os::CreateFile(root.get(), "bin/lost-interpreter", "#!/no/such\n", 0755).ok());
  ASSERT_TRUE(os::CreateFile(root.get(), "bin/no-header", "echo hi\n", 0755).ok());
  ASSERT_TRUE(os::MakeDir(root.get(), "bin/directory", 0755).ok());
  ASSERT_TRUE(sandbox_->Launch(Sandbox::DefaultPlan(), std::move(root)).ok());
  ExecSpec spec;
  using enum abi::ExecStep;
  struct {
    const char* name;
    int error;
  } const cases[] = {{"missing", ENOENT},
                     {"plain", EACCES},
                     {"directory", EACCES},
                     {"lost-interpreter", ENOENT},
                     {"no-header", ENOEXEC}};
  for (const auto& c : cases) {
    for (const char* prefix : {"", "/bin/"}) {
      spec.argv = {std::string(prefix) + c.name};
      ExpectFailure(spec, kExec, c.error);
    }
  }
  spec.argv = {""};
  ExpectFailure(spec, kExec, ENOENT);
  spec.argv = {"/bin/guest", std::string(200000, 'x')};
  ExpectFailure(spec, kExec, E2BIG);
  spec.argv = {std::string(300, 'n')};
  ExpectFailure(spec, kExec, ENAMETOOLONG);
}

TEST_F(Exec, PathSearch_FirstExecutableOfTheSandboxsPath) {
  ASSERT_NE(Slot(), nullptr);
  auto root = sandbox_->NewRoot().value();
  ASSERT_TRUE(os::MakeDir(root.get(), "first", 0755).ok());
  ASSERT_TRUE(os::CreateFile(root.get(), "first/guest", "not executable", 0644).ok());
  ASSERT_TRUE(sandbox_->Launch(Sandbox::DefaultPlan(), std::move(root)).ok());
  ExecSpec spec;
  spec.argv = {"guest", "args"};
  spec.env = {"A=1", "PATH=/missing:/first:/bin/guest:/bin"};
  EXPECT_EQ(sandbox_->Exec(spec)->out, "guest\nargs\n");
  spec.env = {"PATH=/missing:/first"};
  ExpectFailure(spec, abi::ExecStep::kExec, EACCES);
  spec.env = {"PATH=/missing"};
  ExpectFailure(spec, abi::ExecStep::kExec, ENOENT);
  spec.env = {};  // kDefaultPath
  EXPECT_TRUE(sandbox_->Exec(spec)->Exited(0));
  spec.env = {"PATH="};
  spec.cwd = "/bin";
  EXPECT_TRUE(sandbox_->Exec(spec)->Exited(0)) << "an empty element is the working directory";
}

TEST_F(Exec, WorkingDirectory_TypedErrorAndNoFallback) {
  ASSERT_NE(Slot(), nullptr);
  auto root = sandbox_->NewRoot().value();
  ASSERT_TRUE(os::MakeDir(root.get(), "private", 0700).ok());
  ASSERT_EQ(::fchownat(root.get(), "private", sandbox_->id_base, sandbox_->id_base, 0), 0);
  ASSERT_TRUE(os::MakeDir(root.get(), "only-inside", 0755).ok());
  ASSERT_TRUE(sandbox_->Launch(Sandbox::DefaultPlan(), std::move(root)).ok());
  ExecSpec spec = Guest({"pwd"});
  using enum abi::ExecStep;
  spec.cwd = "/missing";
  ExpectFailure(spec, kCwd, ENOENT);
  spec.cwd = "/bin/guest";
  ExpectFailure(spec, kCwd, ENOTDIR);
  spec.cwd = "/private";
  EXPECT_EQ(sandbox_->Exec(spec)->out, "/private\n");
  spec.uid = spec.gid = 1000;
  ExpectFailure(spec, kCwd, EACCES);
  spec.cwd = "/only-inside";
  EXPECT_EQ(sandbox_->Exec(spec)->out, "/only-inside\n");
  spec.uid = spec.gid = 0;
  for (const char* link : {"/proc/1/root", "/proc/1/cwd", "/proc/1/fd/4"}) {
    spec.cwd = link;
    ExpectFailure(spec, kCwd, EACCES);
  }
  for (int fd = 3; fd < 40; ++fd) {
    spec.cwd = fmt::format("/proc/self/fd/{}", fd);
    auto result = sandbox_->Exec(spec);
    ASSERT_TRUE(result->failure.has_value()) << spec.cwd << " leads to " << result->out;
    EXPECT_EQ(result->failure->step, kCwd);
  }
}

TEST_F(Exec, Environment_ByteExact) {
  ASSERT_NE(Launched(), nullptr);
  ExecSpec spec = Guest({"env"});
  spec.env = {"A=", "B=x=y", "C=\xff\xfe", "D=$(touch /PWNED)"};
  EXPECT_EQ(sandbox_->Exec(spec)->out, "A=\nB=x=y\nC=\xff\xfe\nD=$(touch /PWNED)\n");
  spec.env.clear();
  for (int i = 0; i < 10000; ++i) spec.env.push_back(fmt::format("VARIABLE_{}={}", i, i));
  auto many = sandbox_->Exec(spec);
  ASSERT_TRUE(many->Exited(0));
  EXPECT_EQ(std::count(many->out.begin(), many->out.end(), '\n'), 10000);
}

TEST_F(Exec, OtherUser_NoCapabilityLeft) {
  ASSERT_NE(Launched(), nullptr);
  ExecSpec spec = Guest({"ids"});
  spec.uid = 1000;
  spec.gid = 1001;
  spec.groups = {27, 100};
  EXPECT_THAT(sandbox_->Exec(spec)->out,
              HasSubstr("uid 1000 1000 1000 gid 1001 1001 1001 groups 27 100\n"));
  spec.argv = {"/bin/guest", "cat", "/proc/self/status"};
  auto status = sandbox_->Exec(spec);
  EXPECT_THAT(status->out, HasSubstr("CapEff:\t0000000000000000\n"));
  EXPECT_THAT(status->out, HasSubstr("CapPrm:\t0000000000000000\n"));
  EXPECT_THAT(status->out, HasSubstr(fmt::format("CapBnd:\t{:016x}\n", kCodeCapabilities)));
  spec.uid = 70000;
  ExpectFailure(spec, abi::ExecStep::kUser, EINVAL);
}

TEST_F(Exec, GrantedCapability_InTheBoundingSet) {
  LaunchPlan plan = Sandbox::DefaultPlan();
  constexpr uint64_t kNetRaw = 1ull << 13;
  plan.GrantCapabilities(kNetRaw, rights::ExtraCapabilities());
  ASSERT_NE(Launched(plan), nullptr);
  auto status = sandbox_->Guest({"cat", "/proc/self/status"});
  EXPECT_THAT(status->out,
              HasSubstr(fmt::format("CapEff:\t{:016x}\n", kCodeCapabilities | kNetRaw)));
}

TEST_F(Exec, Limits_OfPlanAndOfExec) {
  LaunchPlan plan = Sandbox::DefaultPlan();
  plan.rlimits = {{RLIMIT_NOFILE, 1000, 2000}};
  plan.cpus = {0};
  ASSERT_NE(Launched(plan), nullptr);
  ExecSpec spec = Guest({"ids"});
  auto own = sandbox_->Exec(spec);
  EXPECT_THAT(own->out, HasSubstr("core 1 files 1000\n"));
  EXPECT_THAT(own->out, HasSubstr("cores 1\n"));
  spec.rlimits = {{RLIMIT_NOFILE, 0, 64, 64}};
  EXPECT_THAT(sandbox_->Exec(spec)->out, HasSubstr("files 64\n"));
  spec.rlimits = {{RLIMIT_NOFILE, 0, 64, 3000}};
  ExpectFailure(spec, abi::ExecStep::kLimits, EPERM);
}

TEST_F(Exec, Stdin_ReadToItsEnd) {
  ASSERT_NE(Launched(), nullptr);
  ExecSpec spec = Guest({"echo-stdin"});
  EXPECT_EQ(sandbox_->Exec(spec)->out, "");
  spec.input = std::string("a\0b\n", 4);
  EXPECT_EQ(sandbox_->Exec(spec)->out, spec.input);
}

TEST_F(Exec, OomScore_AboveInits) {
  ASSERT_NE(Launched(), nullptr);
  auto result = sandbox_->Guest({"cat", "/proc/1/oom_score_adj", "/proc/self/oom_score_adj"});
  int init = 0, own = 0;
  ASSERT_EQ(std::sscanf(result->out.c_str(), "%d %d", &init, &own), 2) << result->out;
  EXPECT_GT(own, init);
}

TEST_F(Exec, Terminal_ControllingAndOwnedByTheUser) {
  ASSERT_NE(Launched(), nullptr);
  for (int uid : {0, 1000}) {
    std::vector<os::UniqueFd> fds;
    // The agent numbers the sandbox's ids one higher.
    std::string answer = *sandbox_->Ask(fmt::format("t{}", uid + 1), &fds);
    ASSERT_EQ(fds.size(), 2u) << answer;
    EXPECT_EQ(answer, fmt::format("ok owner {} group 6 mode 620", uid + 1));
    winsize size = {33, 100, 0, 0};
    ASSERT_EQ(::ioctl(fds[0].get(), TIOCSWINSZ, &size), 0);
    ExecSpec spec = Guest({"tty"});
    spec.uid = spec.gid = static_cast<uint32_t>(uid);
    spec.tty = fds[1].get();
    auto run = sandbox_->Start(spec);
    ASSERT_TRUE(run.ok());
    auto result = sandbox_->Finish(*run);
    ASSERT_TRUE(result->Exited(0));
    std::string shown;
    while (std::count(shown.begin(), shown.end(), '\n') < 3) {
      ASSERT_TRUE(*os::WaitReadable(fds[0].get(), In(10))) << shown;
      char text[4096];
      ssize_t n = ::read(fds[0].get(), text, sizeof(text));
      ASSERT_GT(n, 0) << shown;
      shown.append(text, static_cast<size_t>(n));
    }
    EXPECT_EQ(shown, "tty 1 ctty 1 pgrp 1 rows 33\r\npush_back EPERM\r\nname /dev/pts/0\r\n");
  }
}

TEST_F(Exec, CgroupKill_EndsTheTreeOfThatExecOnly) {
  ASSERT_NE(Launched(), nullptr);
  std::vector<os::UniqueFd> first, second;
  ASSERT_EQ(*sandbox_->Ask("cx1", &first), "ok");
  ASSERT_EQ(*sandbox_->Ask("cx2", &second), "ok");
  ExecSpec spec = Guest({"ignore-term"});
  spec.cgroup = first[0].get();
  auto doomed = sandbox_->Start(spec);
  spec.cgroup = second[0].get();
  auto other = sandbox_->Start(spec);
  ASSERT_EQ(*sandbox_->ReadLine(*doomed), "ready");
  ASSERT_EQ(*sandbox_->ReadLine(*other), "ready");
  ASSERT_EQ(*sandbox_->Ask("kx1"), "ok");
  auto result = sandbox_->Finish(*doomed);
  EXPECT_TRUE(WIFSIGNALED(result->wait_status) && WTERMSIG(result->wait_status) == SIGKILL);
  EXPECT_FALSE(sandbox_->ended.contains(other->id));
  EXPECT_EQ(*sandbox_->Ask("dx1"), "ok");
  ASSERT_EQ(*sandbox_->Ask("kx2"), "ok");
  EXPECT_TRUE(sandbox_->Finish(*other).ok());
}

TEST_F(Exec, CgroupOfSomebodyElse_CloneRefused) {
  ASSERT_NE(Launched(), nullptr);
  ExecSpec spec = Guest({"true"});
  spec.cgroup = sandbox_->cgroups->agent_dir.get();
  ExpectFailure(spec, abi::ExecStep::kClone, EACCES);
}

TEST_F(Exec, SignalAll_ReachesEveryProcessButInit) {
  ASSERT_NE(Launched(), nullptr);
  auto a = sandbox_->Start(Guest({"pause"}));
  auto b = sandbox_->Start(Guest({"ignore-term"}));
  ASSERT_EQ(*sandbox_->ReadLine(*a), "ready");
  ASSERT_EQ(*sandbox_->ReadLine(*b), "ready");
  ASSERT_TRUE(sandbox_->SignalAll(SIGTERM).ok());
  EXPECT_EQ(WTERMSIG(sandbox_->Finish(*a)->wait_status), SIGTERM);
  ASSERT_TRUE(sandbox_->SignalAll(SIGKILL).ok());
  EXPECT_EQ(WTERMSIG(sandbox_->Finish(*b)->wait_status), SIGKILL);
  EXPECT_TRUE(sandbox_->Guest({"true"})->Exited(0));
}

TEST_F(Exec, PrivateFileSystem_BoundedAndOfTheSandboxsIds) {
  ASSERT_NE(Launched(), nullptr);
  auto ask = [&](uint64_t bytes, uint32_t inodes) {
    sandbox_->fs_errno.reset();
    EXPECT_TRUE(sandbox_->MakeFs(bytes, inodes).ok());
    while (!sandbox_->fs_errno.has_value()) ASSERT_TRUE(sandbox_->TakeMessage(In(10)).ok());
  };
  ask(0, 10);
  EXPECT_EQ(*sandbox_->fs_errno, EINVAL);
  ask(65536, 0);
  EXPECT_EQ(*sandbox_->fs_errno, EINVAL);
  EXPECT_FALSE(sandbox_->fs.valid());
  ask(65536, 4);
  ASSERT_EQ(*sandbox_->fs_errno, 0);
  ASSERT_TRUE(sandbox_->fs.valid());
  struct stat info;
  ASSERT_EQ(::fstat(sandbox_->fs.get(), &info), 0);
  EXPECT_EQ(info.st_uid, sandbox_->id_base);
  EXPECT_EQ(info.st_mode, S_IFDIR | 0700u);
  // The test is root of the host, whom the file system does not know.
  ::setfsgid(sandbox_->id_base);
  ::setfsuid(sandbox_->id_base);
  auto big = os::CreateFile(sandbox_->fs.get(), "big", std::string(100000, 'x'), 0600);
  auto second = os::CreateFile(sandbox_->fs.get(), "second", "", 0600);
  auto third = os::CreateFile(sandbox_->fs.get(), "third", "", 0600);
  auto fourth = os::CreateFile(sandbox_->fs.get(), "fourth", "", 0600);
  ::setfsuid(0);
  ::setfsgid(0);
  EXPECT_EQ(big.error().sys_errno(), ENOSPC);
  EXPECT_TRUE(second.ok()) << second.error().ToString();
  EXPECT_TRUE(third.ok());
  EXPECT_EQ(fourth.error().sys_errno(), ENOSPC);
  EXPECT_THAT(sandbox_->Guest({"cat", "/proc/self/mountinfo"})->out,
              ::testing::Not(HasSubstr("size=64k")));
}

TEST_F(Exec, Orphans_AllReaped) {
  ASSERT_NE(Launched(), nullptr);
  ASSERT_TRUE(sandbox_->Guest({"orphans", "200"})->Exited(0));
  // init answers after it has reaped what had ended before the request.
  ASSERT_TRUE(sandbox_->Guest({"true"})->Exited(0));
  auto pids = sandbox_->cgroups->Processes();
  EXPECT_EQ(pids->size(), 2u) << "agent and init";
}

TEST_F(Exec, ForkBomb_SpawnErrorAndInitServesOn) {
  ASSERT_NE(Launched(), nullptr);
  std::string limit_path;
  for (const std::string& path : sandbox_->cgroups->v1_paths) {
    if (path.find("/pids/") != std::string::npos) limit_path = path + "/pids.max";
  }
  if (limit_path.empty()) limit_path = sandbox_->cgroups->v2_path + "/code/pids.max";
  auto limited = os::WriteExisting(AT_FDCWD, limit_path.c_str(), "40");
  if (!limited.ok()) GTEST_SKIP() << "no pids controller here: " << limited.error().ToString();
  std::vector<os::UniqueFd> fds;
  ASSERT_EQ(*sandbox_->Ask("cx1", &fds), "ok");
  ExecSpec bomb = Guest({"forkbomb"});
  bomb.cgroup = fds[0].get();
  auto run = sandbox_->Start(bomb);
  ASSERT_EQ(*sandbox_->ReadLine(*run), "full EAGAIN");
  for (int i = 0; i < 3; ++i) ExpectFailure(Guest({"true"}), abi::ExecStep::kClone, EAGAIN);
  ASSERT_EQ(*sandbox_->Ask("kx1"), "ok");
  ASSERT_TRUE(sandbox_->Finish(*run).ok());
  // The group may for a moment still hold processes that are being torn down.
  for (MonoTime end = In(10); sandbox_->Exec(Guest({"true"}))->failure.has_value();) {
    ASSERT_LT(Clock::System().Mono(), end);
  }
  EXPECT_TRUE(sandbox_->Guest({"true"})->Exited(0));
}

TEST_F(Exec, AgentThatDoesNotRead_NothingIsLost) {
  ASSERT_NE(Launched(), nullptr);
  // Requests until both directions are full: init stops taking requests when its answers find no
  // room.
  int channel = sandbox_->channel.get();
  ASSERT_EQ(::fcntl(channel, F_SETFL, O_NONBLOCK), 0);
  std::vector<testing::RunningExec> runs;
  bool full = false;
  while (!full && runs.size() < 3000) {
    auto run = sandbox_->Start(Guest({"exit", std::to_string(runs.size() % 200)}));
    full = !run.ok();
    if (full) EXPECT_EQ(run.error().sys_errno(), EAGAIN);
    if (!full) runs.push_back(std::move(*run));
  }
  EXPECT_TRUE(full) << runs.size();
  for (size_t i = 0; i < runs.size(); ++i) {
    while (!sandbox_->ended.contains(runs[i].id)) ASSERT_TRUE(sandbox_->TakeMessage(In(20)).ok());
    EXPECT_EQ(WEXITSTATUS(sandbox_->ended[runs[i].id].wait_status), static_cast<int>(i % 200));
  }
}

TEST_F(Exec, ManyAtOnce_EachEndsAsItsOwn) {
  ASSERT_NE(Launched(), nullptr);
  std::vector<testing::RunningExec> runs;
  for (int i = 0; i < 100; ++i) {
    auto run = sandbox_->Start(Guest({"exit", std::to_string(i)}));
    ASSERT_TRUE(run.ok());
    runs.push_back(std::move(*run));
  }
  for (int i = 0; i < 100; ++i)
    EXPECT_TRUE(sandbox_->Finish(runs[static_cast<size_t>(i)])->Exited(i)) << i;
}

TEST_F(Exec, MalformedRequest_RefusedAndInitServesOn) {
  ASSERT_NE(Launched(), nullptr);
  int channel = sandbox_->channel.get();
  int zero = 0;
  // Neither fits a request nor carries a status pipe: dropped.
  ASSERT_EQ(os::SendPacketRaw(channel, "x", 1, nullptr, 0, 0), 0);
  std::string huge(1000, 'x');
  ASSERT_EQ(os::SendPacketRaw(channel, huge.data(), huge.size(), &zero, 1, 0), 0);
  abi::ExecRequest request;
  ASSERT_EQ(os::SendPacketRaw(channel, &request, sizeof(request), nullptr, 0, 0), 0);
  int many[40] = {};
  ASSERT_EQ(os::SendPacketRaw(channel, &request, sizeof(request), many, 40, 0), 0);

  // With a status pipe, the reason comes back.
  auto expect_refused = [&](const abi::ExecRequest& bad, int payload, int error) {
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    os::UniqueFd read(ends[0]), write(ends[1]);
    int fds[] = {payload, write.get(), 0, 1, 2};
    ASSERT_EQ(os::SendPacketRaw(channel, &bad, sizeof(bad), fds, 5, 0), 0);
    write.Reset();
    auto text = os::ReadAll(read.get(), 64);
    abi::ExecFailure failure;
    ASSERT_EQ(text->size(), sizeof(failure));
    std::memcpy(&failure, text->data(), sizeof(failure));
    EXPECT_EQ(failure.step, abi::ExecStep::kRequest);
    EXPECT_EQ(failure.sys_errno, error);
  };
  request.id = 1'000'000;
  abi::ExecRequest wrong_count = request;
  wrong_count.flags = abi::kHasCgroup;
  expect_refused(wrong_count, 0, EINVAL);
  wrong_count = request;
  wrong_count.extra_fds = 0xffffffff;
  expect_refused(wrong_count, 0, EINVAL);

  abi::ExecPayload payload;
  auto with = [&](const std::function<void(abi::ExecPayload&)>& change,
                  const std::string& strings) {
    abi::ExecPayload changed = payload;
    changed.argc = 1;
    changed.strings_bytes = static_cast<uint32_t>(strings.size());
    change(changed);
    std::string blob(reinterpret_cast<const char*>(&changed), sizeof(changed));
    blob += strings;
    return os::SealedMemfd("bad", {reinterpret_cast<const uint8_t*>(blob.data()), blob.size()})
        .value();
  };
  const std::string good("a\0/\0", 4);
  const std::function<void(abi::ExecPayload&)> changes[] = {
      [](auto& p) { p.magic = 0; },         [](auto& p) { p.version = 99; },
      [](auto& p) { p.argc = 0; },          [](auto& p) { p.argc = 2; },
      [](auto& p) { p.envc = 1; },          [](auto& p) { p.argc = 0xffffffff; },
      [](auto& p) { p.group_count = 65; },  [](auto& p) { p.rlimit_count = 17; },
      [](auto& p) { p.strings_bytes = 3; },
  };
  for (const auto& change : changes) expect_refused(request, with(change, good).get(), EINVAL);
  auto same = [](auto&) {};
  expect_refused(request, with(same, std::string("a\0/", 3)).get(), EINVAL);    // not terminated
  expect_refused(request, with(same, std::string("a\0x\0", 4)).get(), EINVAL);  // cwd not absolute
  expect_refused(request, with(same, std::string("a\0/\0b\0", 6)).get(),
                 EINVAL);  // more than announced
  os::UniqueFd open_memfd(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  expect_refused(request, open_memfd.get(), EPERM);

  // The children of refused payloads still end in messages; they are taken on the way.
  EXPECT_TRUE(sandbox_->Guest({"true"})->Exited(0));
}

TEST_F(Exec, Script_ByDescriptorLeavesNoTrace) {
  if (!LaunchHostImage()) {
    if (!skip_.empty()) GTEST_SKIP() << skip_;
    return;
  }
  for (const char* shell_path : {"/bin/sh", "/bin/bash"}) {
    auto shell = os::OpenAt(AT_FDCWD, shell_path, O_RDONLY);
    if (!shell.ok()) continue;
    ExecSpec spec;
    spec.env = {"PATH=/usr/bin:/bin", "SECRET=x"};
    spec.program = shell->get();
    spec.input = "from stdin\n";
    spec.script =
        "ls -1 /proc/self/fd | tr '\\n' ' '; echo\n"
        "tr '\\0' ' ' < /proc/$$/cmdline; echo\n"
        "cat\n"
        "cat <<'EOF'\n\"quoted\" $HOME `x` \\\nEOF\n"
        "test -n \"$BASH_VERSION\" || LINENO=8\n"
        "echo line $LINENO\n"
        "exit 7";
    auto result = sandbox_->Exec(spec);
    ASSERT_TRUE(result.ok()) << result.error().ToString();
    ASSERT_TRUE(result->Exited(7)) << shell_path << result->out << result->err;
    // 3 is the directory that ls reads.
    EXPECT_EQ(result->out,
              "0 1 2 3 \nsh /proc/self/fd/3 \nfrom stdin\n\"quoted\" $HOME `x` \\\nline 8\n")
        << shell_path;
    spec.script = std::string(1 << 20, '#') + "\necho end";
    EXPECT_EQ(sandbox_->Exec(spec)->out, "end\n") << shell_path;
  }
}

TEST_F(Exec, OverwrittenShell_ProgramByDescriptorUnaffected) {
  if (!LaunchHostImage()) {
    if (!skip_.empty()) GTEST_SKIP() << skip_;
    return;
  }
  auto shell = os::OpenAt(AT_FDCWD, "/bin/sh", O_RDONLY);
  ASSERT_TRUE(shell.ok());
  ExecSpec spec;
  spec.env = {"PATH=/usr/bin:/bin"};
  spec.program = shell->get();
  spec.script = "echo fake > /tmp/sh && mv /tmp/sh $(readlink -f /bin/sh); echo $?";
  EXPECT_EQ(sandbox_->Exec(spec)->out, "0\n");
  spec.script = "echo still a shell";
  EXPECT_EQ(sandbox_->Exec(spec)->out, "still a shell\n");
  ExecSpec own;
  own.argv = {"/bin/sh", "-c", "echo x"};
  EXPECT_TRUE(sandbox_->Exec(own)->failure.has_value())
      << "the sandbox's own copy is what it made of it";
  struct stat info;
  ASSERT_EQ(::stat("/bin/sh", &info), 0);
  EXPECT_GT(info.st_size, 10000) << "the host's is untouched";
}

}  // namespace
}  // namespace dsec::spawn

// SPDX-License-Identifier: Apache-2.0
// A slot and its launch: what is made, what a failure leaves, who survives whom.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "os/memfd.h"
#include "os/mount.h"
#include "spawn/testing/sandbox.h"

namespace dsec::spawn {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::In;
using testing::Sandbox;
using testing::SlotCgroups;
using testing::SpawnTest;

class Slots : public SpawnTest {};

std::string HostFile(const std::string& path) {
  auto text = os::ReadFile(AT_FDCWD, path.c_str(), 1 << 16);
  return text.ok() ? *text : text.error().ToString();
}

TEST_F(Slots, Agent_HasItsDescriptorsAndNothingElse) {
  Sandbox* sandbox = Launched();
  ASSERT_NE(sandbox, nullptr);
  // The last two are the connection to this test and the root that init has sent.
  const SlotCgroups& groups = *sandbox->cgroups;
  std::string expected = "0 1 2 3 4 5 ";
  int free = 2;
  for (auto [dir, fd] : {std::pair(&groups.memory_dir, 6), std::pair(&groups.pids_dir, 7)}) {
    if (dir->valid() || free-- > 0) expected += fmt::format("{} ", fd);
  }
  expected += "8 9 ";
  if (groups.cpu_dir.valid() || free-- > 0) expected += "10 ";
  for (int fd = 11; free > 0; --free) expected += fmt::format("{} ", fd++);
  EXPECT_EQ(*sandbox->Ask("n"), expected);
  std::string hex;
  for (char c : sandbox->token) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
  EXPECT_EQ(*sandbox->Ask("K"), fmt::format("{} {}", abi::kTokenBytes, hex));
}

TEST_F(Slots, Agent_IsAnUnprivilegedUserOfTheHost) {
  Sandbox* sandbox = Launched();
  ASSERT_NE(sandbox, nullptr);
  std::string status = HostFile(fmt::format("/proc/{}/status", sandbox->process.agent_pid));
  EXPECT_THAT(status, HasSubstr(fmt::format("Uid:\t{0}\t{0}\t{0}\t{0}\n", sandbox->agent_uid)));
  EXPECT_THAT(status, HasSubstr(fmt::format("Gid:\t{0}\t{0}\t{0}\t{0}\n", sandbox->agent_uid)));
  EXPECT_THAT(status, HasSubstr("Groups:\t \n"));
  EXPECT_THAT(status, HasSubstr(fmt::format("CapBnd:\t{:016x}\n", abi::kAgentCapabilities)));
  EXPECT_THAT(status, HasSubstr("SigBlk:\t0000000000000000\n"));
  EXPECT_THAT(status, HasSubstr("Seccomp_filters:\t2\n"));
  std::string map = HostFile(fmt::format("/proc/{}/uid_map", sandbox->process.agent_pid));
  EXPECT_THAT(map, HasSubstr(fmt::format("{} ", sandbox->agent_uid)));
  EXPECT_THAT(map, HasSubstr(fmt::format("{} ", sandbox->id_base)));
  EXPECT_THAT(HostFile(fmt::format("/proc/{}/cgroup", sandbox->process.agent_pid)),
              HasSubstr("/agent\n"));
}

TEST_F(Slots, Agent_SeesNoProcessOfTheHost) {
  Sandbox* sandbox = Launched();
  ASSERT_NE(sandbox, nullptr);
  EXPECT_THAT(*sandbox->Ask("f/proc/1/status"), HasSubstr("NSpid:\t1\n"));
  EXPECT_THAT(*sandbox->Ask(fmt::format("f/proc/{}/status", ::getpid())), HasSubstr("errno 2"));
  EXPECT_EQ(*sandbox->Ask("m"), fmt::format("errno {}", EPERM))
      << "the host's /proc lies below its own";
}

TEST_F(Slots, Files_OwnerSeenByTheAgentIsShiftedByOne) {
  Sandbox* sandbox = Launched();
  ASSERT_NE(sandbox, nullptr);
  EXPECT_THAT(*sandbox->Ask("setc/hosts"), HasSubstr("uid 1 gid 1"));
  EXPECT_THAT(*sandbox->Ask("s."), HasSubstr("uid 1 gid 1"));
}

TEST_F(Slots, Init_IsInTheCodeGroups) {
  Sandbox* sandbox = Launched();
  ASSERT_NE(sandbox, nullptr);
  auto init =
      os::PidFd::Adopt(os::UniqueFd(::fcntl(sandbox->init_pidfd.get(), F_DUPFD_CLOEXEC, 3)));
  ASSERT_TRUE(init.ok());
  std::string groups = HostFile(fmt::format("/proc/{}/cgroup", init->pid()));
  EXPECT_THAT(groups, HasSubstr("/code/init\n"));
  for (const std::string& path : sandbox->cgroups->v1_paths) {
    std::string name = path.substr(path.find("/dsec-tspawn"));
    EXPECT_THAT(groups, HasSubstr(name)) << path;
  }
}

TEST_F(Slots, AgentKilled_EverythingEnds) {
  Sandbox* sandbox = Launched();
  ASSERT_NE(sandbox, nullptr);
  testing::ExecSpec spec;
  spec.argv = {"/bin/guest", "ignore-term"};
  auto run = sandbox->Start(spec);
  ASSERT_TRUE(run.ok());
  ASSERT_EQ(*sandbox->ReadLine(*run), "ready");
  ASSERT_TRUE(sandbox->process.agent.Signal(SIGKILL).ok());
  EXPECT_TRUE(*sandbox->process.agent.WaitExit(In(10)));
  EXPECT_TRUE(*sandbox->cgroups->WaitEmpty(In(10)));
}

TEST_F(Slots, InitKilled_AgentEndsToo) {
  Sandbox* sandbox = Launched();
  ASSERT_NE(sandbox, nullptr);
  ASSERT_TRUE(os::PidFd::Adopt(std::move(sandbox->init_pidfd))->Signal(SIGKILL).ok());
  EXPECT_TRUE(*sandbox->process.agent.WaitExit(In(10)));
  EXPECT_TRUE(*sandbox->cgroups->WaitEmpty(In(10)));
}

TEST_F(Slots, LaunchSocketDropped_SlotEnds) {
  Sandbox* sandbox = Slot();
  ASSERT_NE(sandbox, nullptr);
  EXPECT_EQ(sandbox->cgroups->Processes()->size(), 2u);
  sandbox->process.launch_socket.Reset();
  EXPECT_TRUE(*sandbox->process.agent.WaitExit(In(10)));
  EXPECT_TRUE(*sandbox->cgroups->WaitEmpty(In(10)));
}

TEST_F(Slots, SpawnerGone_SlotStaysUsable) {
  Sandbox* sandbox = Slot();
  ASSERT_NE(sandbox, nullptr);
  spawner_.reset();
  auto report = sandbox->Launch(Sandbox::DefaultPlan());
  ASSERT_TRUE(report.ok()) << report.error().ToString();
  EXPECT_TRUE(sandbox->Guest({"true"})->Exited(0));
}

TEST_F(Slots, SpawnerKilled_NextSlotStartsANewOne) {
  pid_t before = spawner_->pid();
  ASSERT_EQ(::kill(before, SIGKILL), 0);
  auto first = Sandbox::MakeSlot(*spawner_);
  // The kill may show before or during the request.
  if (!first.ok())
    EXPECT_EQ(first.error().reason(), "spawn.spawner_died") << first.error().ToString();
  auto second = Sandbox::MakeSlot(*spawner_);
  ASSERT_TRUE(second.ok()) << second.error().ToString();
  EXPECT_NE(spawner_->pid(), before);
}

// A slot whose making stops in the middle: the spawner blocks on a full pipe where a cgroup.procs
// file should be.
class StuckSlot : public SpawnTest {
 protected:
  void SetUp() override {
    SpawnTest::SetUp();
    if (spawner_ == nullptr) return;
    auto cgroups = SlotCgroups::Create(1'899'000'000, 1'899'100'000);
    ASSERT_TRUE(cgroups.ok()) << cgroups.error().ToString();
    cgroups_ = std::move(cgroups).value();
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    pipe_read_.Reset(ends[0]);
    pipe_write_.Reset(ends[1]);
    ::fcntl(ends[1], F_SETFL, O_NONBLOCK);
    char block[4096] = {};
    while (::write(ends[1], block, sizeof(block)) > 0) {
    }
    ::fcntl(ends[1], F_SETFL, 0);
    listener_.Reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un any = {};
    any.sun_family = AF_UNIX;
    ASSERT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&any), sizeof(sa_family_t)), 0);
    ASSERT_EQ(::listen(listener_.get(), 1), 0);
    uint8_t token[abi::kTokenBytes] = {};
    token_ = os::SealedMemfd("token", token).value();
    plan_.agent_uid = 1'899'000'000;
    plan_.id_base = 1'899'100'000;
    plan_.listen_fd = listener_.get();
    plan_.token_fd = token_.get();
    plan_.slot_dir_fd = cgroups_->slot_dir.get();
    plan_.agent_dir_fd = cgroups_->agent_dir.get();
    plan_.init_dir_fd = cgroups_->init_dir.get();
  }
  void TearDown() override {
    cgroups_.reset();
    for (os::UniqueFd* fd : {&pipe_read_, &pipe_write_, &listener_, &token_}) fd->Reset();
    SpawnTest::TearDown();
  }
  Result<SlotProcess> Make(std::chrono::milliseconds timeout) {
    return spawner_->MakeSlot(plan_, runtime::Deadline::After(timeout));
  }
  // Both processes of the slot exist, so the spawner is at the blocked step or just before it.
  void AwaitBoth() {
    for (MonoTime end = In(10); cgroups_->Processes()->size() < 2 && Clock::System().Mono() < end;)
      std::this_thread::yield();
    ASSERT_EQ(cgroups_->Processes()->size(), 2u);
  }

  std::unique_ptr<SlotCgroups> cgroups_;
  os::UniqueFd pipe_read_, pipe_write_, listener_, token_;
  SlotPlan plan_;
};

TEST_F(StuckSlot, SpawnerKilledInTheMiddle_NothingStaysAlive) {
  plan_.v1_procs_fds = {pipe_write_.get()};
  pid_t pid = spawner_->pid();
  std::thread killer([&] {
    AwaitBoth();
    ::kill(pid, SIGKILL);
  });
  auto made = Make(std::chrono::seconds(20));
  killer.join();
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().reason(), "spawn.spawner_died");
  EXPECT_EQ(made.error().code(), Code::kUnavailable);
  EXPECT_TRUE(*cgroups_->WaitEmpty(In(10)));
}

TEST_F(StuckSlot, Deadline_ReportedAndNothingStaysAlive) {
  plan_.v1_procs_fds = {pipe_write_.get()};
  auto made = Make(std::chrono::milliseconds(500));
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code(), Code::kDeadlineExceeded);
  EXPECT_TRUE(*cgroups_->WaitEmpty(In(10)));
  // The next one is not affected.
  plan_.v1_procs_fds = {};
  auto next = Make(std::chrono::seconds(20));
  EXPECT_TRUE(next.ok()) << next.error().ToString();
}

TEST_F(StuckSlot, BadValue_StepNamedAndNothingStaysAlive) {
  struct {
    const char* step;
    std::function<void()> spoil;
  } const cases[] = {
      {"clone_agent", [&] { plan_.agent_dir_fd = token_.get(); }},
      {"clone_init", [&] { plan_.init_dir_fd = listener_.get(); }},
      {"cgroups", [&] { plan_.v1_procs_fds = {pipe_read_.get()}; }},
  };
  const SlotPlan good = plan_;
  for (const auto& c : cases) {
    plan_ = good;
    c.spoil();
    auto made = Make(std::chrono::seconds(20));
    ASSERT_FALSE(made.ok()) << c.step;
    EXPECT_EQ(made.error().reason(), "spawn.slot_failed");
    EXPECT_THAT(made.error().message(), HasSubstr(fmt::format("step {}", c.step)));
    EXPECT_TRUE(*cgroups_->WaitEmpty(In(10))) << c.step;
  }
  plan_ = good;
  auto made = Make(std::chrono::seconds(20));
  EXPECT_TRUE(made.ok()) << made.error().ToString();
}

TEST_F(StuckSlot, CgroupNotGivenToTheAgent_CloneInitRefused) {
  ASSERT_EQ(::fchownat(cgroups_->init_dir.get(), "cgroup.procs", 0, 0, 0), 0);
  auto made = Make(std::chrono::seconds(20));
  ASSERT_FALSE(made.ok());
  EXPECT_THAT(made.error().message(), HasSubstr("step clone_init"));
  EXPECT_EQ(made.error().sys_errno(), EACCES);
  EXPECT_TRUE(*cgroups_->WaitEmpty(In(10)));
}

TEST_F(StuckSlot, AgentNotExecutable_StepNamedAndNothingStaysAlive) {
  SpawnerOptions options = testing::TestSpawnerOptions();
  auto dir = os::TempDir::Create("dsec-spawn-");
  ASSERT_TRUE(os::CreateFile(dir->fd(), "agent", "no program\n", 0755).ok());
  options.agent_path = dir->path() + "/agent";
  auto spawner = Spawner::Start(options);
  ASSERT_TRUE(spawner.ok()) << spawner.error().ToString();
  auto made = (*spawner)->MakeSlot(plan_, runtime::Deadline::After(std::chrono::seconds(20)));
  ASSERT_FALSE(made.ok());
  EXPECT_THAT(made.error().message(), HasSubstr("step exec_agent"));
  EXPECT_EQ(made.error().sys_errno(), ENOEXEC);
  EXPECT_TRUE(*cgroups_->WaitEmpty(In(10)));
}

class Launching : public SpawnTest {
 protected:
  void ExpectFailure(const char* step, int error, const LaunchPlan& plan, os::UniqueFd root,
                     const std::vector<os::UniqueFd>& views = {}) {
    auto report = sandbox_->Launch(plan, std::move(root), views);
    ASSERT_FALSE(report.ok()) << step;
    EXPECT_EQ(report.error().reason(), "spawn.launch_failed") << report.error().ToString();
    EXPECT_THAT(report.error().message(), HasSubstr(fmt::format("step {}", step)));
    EXPECT_EQ(report.error().sys_errno(), error) << step;
    EXPECT_TRUE(*sandbox_->process.agent.WaitExit(In(10))) << step;
    EXPECT_TRUE(*sandbox_->cgroups->WaitEmpty(In(10))) << step;
  }
  os::UniqueFd View(const char* content) {
    auto context = os::FsContext::Open("tmpfs");
    auto mount = std::move(*context).Mount(0);
    EXPECT_TRUE(os::CreateFile(mount->get(), "view", content, 0444).ok());
    return os::CloneMount(mount->get(), "view", false).value();
  }
};

TEST_F(Launching, RootIsNotAMount_StepNamed) {
  ASSERT_NE(Slot(), nullptr);
  ExpectFailure("root", EINVAL, Sandbox::DefaultPlan(),
                os::OpenAt(AT_FDCWD, "/tmp", O_PATH | O_DIRECTORY).value());
}

TEST_F(Launching, RootIsReadOnly_StepNamed) {
  ASSERT_NE(Slot(), nullptr);
  auto root = sandbox_->NewRoot().value();
  ASSERT_TRUE(os::SetMountAttributes(root.get(), MOUNT_ATTR_RDONLY, 0).ok());
  ExpectFailure("directories", EROFS, Sandbox::DefaultPlan(), std::move(root));
}

TEST_F(Launching, FileInTheWay_StepNamed) {
  ASSERT_NE(Slot(), nullptr);
  auto root = sandbox_->NewRoot().value();
  ASSERT_TRUE(os::MakeDir(root.get(), "etc", 0755).ok());
  ASSERT_TRUE(os::MakeDir(root.get(), "etc/hosts", 0755).ok());
  ASSERT_EQ(::fchownat(root.get(), "etc", sandbox_->id_base, sandbox_->id_base, 0), 0);
  ExpectFailure("files", EISDIR, Sandbox::DefaultPlan(), std::move(root));
}

TEST_F(Launching, ViewWithoutTarget_StepNamed) {
  ASSERT_NE(Slot(), nullptr);
  LaunchPlan plan = Sandbox::DefaultPlan();
  plan.views = {{"/proc/no-such-entry"}};
  std::vector<os::UniqueFd> views;
  views.push_back(View("x"));
  ExpectFailure("views", ENOENT, plan, sandbox_->NewRoot().value(), views);
}

TEST_F(Launching, LimitAboveTheHosts_StepNamed) {
  ASSERT_NE(Slot(), nullptr);
  rlimit files;
  ::getrlimit(RLIMIT_NOFILE, &files);
  LaunchPlan plan = Sandbox::DefaultPlan();
  plan.rlimits = {{RLIMIT_NOFILE, files.rlim_max, files.rlim_max + 1}};
  ExpectFailure("limits", EPERM, plan, sandbox_->NewRoot().value());
}

TEST_F(Launching, Twice_SlotGoneForTheSecond) {
  ASSERT_NE(Launched(), nullptr);
  auto again = sandbox_->Launch(Sandbox::DefaultPlan());
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().reason(), "spawn.slot_gone");
  EXPECT_TRUE(sandbox_->Guest({"true"})->Exited(0)) << "the first launch stands";
}

TEST_F(Launching, Views_ShowTheirContentReadOnly) {
  ASSERT_NE(Slot(), nullptr);
  LaunchPlan plan = Sandbox::DefaultPlan();
  plan.views = {{"/proc/cpuinfo"}, {"/proc/loadavg"}, {"/sys"}};
  std::vector<os::UniqueFd> views;
  views.push_back(View("one core\n"));
  views.push_back(View("0 0 0\n"));
  auto sys = os::FsContext::Open("tmpfs");
  auto sys_mount = std::move(*sys).Mount(0);
  ASSERT_TRUE(os::MakeDir(sys_mount->get(), "devices", 0755).ok());
  views.push_back(std::move(*sys_mount));
  auto report = sandbox_->Launch(plan, {}, views);
  ASSERT_TRUE(report.ok()) << report.error().ToString();
  auto cat = sandbox_->Guest({"cat", "/proc/cpuinfo", "/proc/loadavg"});
  EXPECT_EQ(cat->out, "one core\n0 0 0\n");
  EXPECT_THAT(sandbox_->Guest({"ls", "/sys"})->out, HasSubstr("devices"));
  EXPECT_EQ(sandbox_->Guest({"write", "/proc/cpuinfo", "x"})->out, "EROFS\n");
  EXPECT_EQ(sandbox_->Guest({"write", "/sys/x", "x"})->out, "EROFS\n");
}

TEST_F(Launching, EmptyImage_Furnished) {
  ASSERT_NE(Launched(), nullptr);
  auto files = sandbox_->Guest({"cat", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf"});
  EXPECT_EQ(files->out, "sandbox-1\n127.0.0.1 localhost sandbox-1\nnameserver 127.0.0.1\n");
  auto probe =
      sandbox_->Guest({"probe", "/tmp", "/etc", "/etc/hosts", "/dev/shm", "/proc", "/sys"});
  EXPECT_THAT(probe->out, HasSubstr("/tmp mode 41777 uid 0 gid 0"));
  EXPECT_THAT(probe->out, HasSubstr("/etc mode 40755 uid 0 gid 0"));
  EXPECT_THAT(probe->out, HasSubstr("/etc/hosts mode 100644 uid 0 gid 0"));
  EXPECT_THAT(probe->out, HasSubstr("/dev/shm mode 41777 uid 0 gid 0"));
  EXPECT_THAT(sandbox_->Guest({"ids"})->out, HasSubstr("host sandbox-1\n"));
}

TEST_F(Launching, HostileImage_NothingWrittenOutside) {
  ASSERT_NE(Slot(), nullptr);
  auto outside = os::TempDir::Create("dsec-spawn-outside-");
  ASSERT_TRUE(os::CreateFile(outside->fd(), "hosts", "host's\n", 0666).ok());
  auto root = sandbox_->NewRoot().value();
  std::string up = "../../../../../.." + outside->path();
  ASSERT_TRUE(os::MakeDir(root.get(), "real-etc", 0755).ok());
  ASSERT_EQ(::symlinkat("real-etc", root.get(), "etc"), 0);
  ASSERT_EQ(::symlinkat((up + "/hosts").c_str(), root.get(), "real-etc/hosts"), 0);
  ASSERT_EQ(::symlinkat((outside->path() + "/hosts").c_str(), root.get(), "real-etc/resolv.conf"),
            0);
  ASSERT_EQ(::symlinkat(up.c_str(), root.get(), "proc"), 0);
  ASSERT_EQ(::symlinkat("/etc", root.get(), "sys"), 0);
  ASSERT_TRUE(os::CreateFile(root.get(), "dev", "", 0644).ok());
  ASSERT_EQ(::symlinkat(up.c_str(), root.get(), "tmp"), 0);
  ASSERT_EQ(::fchownat(root.get(), "real-etc", sandbox_->id_base, sandbox_->id_base, 0), 0);
  auto report = sandbox_->Launch(Sandbox::DefaultPlan(), std::move(root));
  ASSERT_TRUE(report.ok()) << report.error().ToString();
  EXPECT_EQ(HostFile(outside->path() + "/hosts"), "host's\n");
  auto entries = os::OpenAt(AT_FDCWD, outside->path().c_str(), O_RDONLY | O_DIRECTORY);
  EXPECT_EQ(::unlinkat(outside->fd(), "hosts", 0), 0);
  EXPECT_EQ(::unlinkat(AT_FDCWD, outside->path().c_str(), AT_REMOVEDIR), 0)
      << "something was added outside";
  EXPECT_EQ(sandbox_->Guest({"cat", "/etc/hosts"})->out, "127.0.0.1 localhost sandbox-1\n");
  EXPECT_THAT(sandbox_->Guest({"cat", "/proc/self/status"})->out, HasSubstr("Name:\tguest"));
  EXPECT_THAT(sandbox_->Guest({"probe", "/dev/null"})->out, HasSubstr("mode 20666"));
}

TEST_F(Launching, EtcLeadsOutOfTheImage_Replaced) {
  for (const char* target : {"/nowhere", "etc", "../../etc", "/proc/1"}) {
    ASSERT_NE(Slot(), nullptr);
    auto root = sandbox_->NewRoot().value();
    ASSERT_EQ(::symlinkat(target, root.get(), "etc"), 0);
    auto report = sandbox_->Launch(Sandbox::DefaultPlan(), std::move(root));
    ASSERT_TRUE(report.ok()) << target << ": " << report.error().ToString();
    EXPECT_THAT(sandbox_->Guest({"probe", "/etc", "/etc/hosts"})->out,
                HasSubstr("/etc mode 40755"));
  }
}

TEST_F(Launching, EmptyTexts_ImageFilesStay) {
  ASSERT_NE(Slot(), nullptr);
  auto root = sandbox_->NewRoot().value();
  ASSERT_TRUE(os::MakeDir(root.get(), "etc", 0755).ok());
  ASSERT_TRUE(os::CreateFile(root.get(), "etc/hosts", "image's\n", 0644).ok());
  ASSERT_EQ(::fchownat(root.get(), "etc", sandbox_->id_base, sandbox_->id_base, 0), 0);
  LaunchPlan plan;
  plan.hostname = "h";
  ASSERT_TRUE(sandbox_->Launch(plan, std::move(root)).ok());
  EXPECT_EQ(sandbox_->Guest({"cat", "/etc/hosts", "/etc/resolv.conf"})->out,
            "image's\n/etc/resolv.conf: ENOENT\n");
}

TEST_F(Launching, Steps_AllTimed) {
  ASSERT_NE(Slot(), nullptr);
  auto report = sandbox_->Launch(Sandbox::DefaultPlan());
  ASSERT_TRUE(report.ok());
  std::vector<std::string> names;
  for (const StepTime& step : sandbox_->process.steps) names.emplace_back(step.step);
  EXPECT_EQ(names, (std::vector<std::string>{"clone_agent", "map_agent", "agent_proc", "network",
                                             "clone_init", "map_init", "cgroups", "init_proc",
                                             "init_dev", "exec_agent"}));
  names.clear();
  for (const StepTime& step : report->steps) names.emplace_back(step.step);
  EXPECT_EQ(names,
            (std::vector<std::string>{"root", "directories", "files", "proc", "dev", "shm", "views",
                                      "hostname", "enter_root", "limits", "handover"}));
}

}  // namespace
}  // namespace dsec::spawn

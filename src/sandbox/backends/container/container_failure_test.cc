// SPDX-License-Identifier: Apache-2.0
// The container backend when things go wrong: steps that fail or hang, daemons that die, things
// that nobody owns, processes that do not die.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/fault.h"
#include "sandbox/testing/container_fixture.h"

namespace dsec::sandbox {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class ContainerFailure : public testing::ContainerTest {
 protected:
  void TearDown() override {
    fault::DisarmAll();
    ContainerTest::TearDown();
  }
  // Makes a sandbox with a running command and dies by SIGKILL, in a process of its own: what a
  // crash of the daemon leaves. The record, or an empty one.
  v1::SandboxRecord MakeAndCrash(uint32_t slot_pool_size, const std::string& faults) {
    backend_.reset();
    shards_.reset();
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    const pid_t pid = ::fork();
    if (pid == 0) {
      layers_->AfterFork();
      shards_ = std::make_unique<runtime::Shards>(1);
      Open(slot_pool_size);
      while (backend_->ReadySlots() < slot_pool_size) std::this_thread::yield();
      v1::SandboxRecord record = NewRecord();
      if (!faults.empty() && !fault::Arm(faults).ok()) ::_exit(1);
      auto journal = [&](const v1::SandboxRecord& saved) -> Result<void> {
        const std::string text = saved.SerializeAsString();
        const auto size = static_cast<uint32_t>(text.size());
        if (::write(ends[1], &size, 4) != 4 || ::write(ends[1], text.data(), size) != size)
          ::_exit(1);
        return Ok();
      };
      auto made =
          On(backend_->Create(record, journal, runtime::Deadline::After(std::chrono::seconds(30))));
      if (made.ok())
        (void)Start(**made, "beat", "i=0; while sleep 0.05; do i=$((i+1)); echo beat $i; done",
                    "beat 1\n");
      ::kill(::getpid(), SIGKILL);
    }
    ::close(ends[1]);
    v1::SandboxRecord record;
    uint32_t size = 0;
    while (::read(ends[0], &size, 4) == 4) {
      std::string text(size, '\0');
      EXPECT_EQ(::read(ends[0], text.data(), size), static_cast<ssize_t>(size));
      EXPECT_TRUE(record.ParseFromString(text));
    }
    ::close(ends[0]);
    int status = 0;
    ::waitpid(pid, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    shards_ = std::make_unique<runtime::Shards>(2);
    return record;
  }
};

TEST_F(ContainerFailure, DaemonDropsBackend_SandboxIsAdoptedWithItsCommand) {
  v1::SandboxRecord record = NewRecord();
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  ASSERT_TRUE(Start(*instance, "beat", "i=0; while sleep 0.05; do i=$((i+1)); echo beat $i; done",
                    "beat 1\n")
                  .ok());
  instance.reset();
  Open();
  auto adopted = Adopt(record);
  ASSERT_TRUE(adopted.ok()) << adopted.error().ToString();
  v1::PollRequest poll;
  poll.set_op_id("beat");
  poll.set_max_bytes(1 << 16);
  poll.set_wait_ms(5000);
  auto reply = Poll(**adopted, poll);
  ASSERT_TRUE(reply.ok()) << reply.error().ToString();
  EXPECT_TRUE(reply->running());
  EXPECT_EQ(Run(**adopted, "echo ok")->out, "ok\n");
  EXPECT_THAT(*Sweep({record}), IsEmpty());
  adopted = std::shared_ptr<Instance>();
  EXPECT_TRUE(Destroy(record).ok());
}

// Acceptance case 93.
TEST_F(ContainerFailure, DaemonKilled_SandboxIsAdoptedAndThePoolIsSwept) {
  const v1::SandboxRecord record = MakeAndCrash(3, "");
  ASSERT_TRUE(record.has_slot());
  Open();
  auto adopted = Adopt(record);
  ASSERT_TRUE(adopted.ok()) << adopted.error().ToString();
  auto swept = Sweep({record});
  ASSERT_TRUE(swept.ok()) << swept.error().ToString();
  // Three slots that waited, or were being made when the daemon died: their processes went with the
  // launch sockets.
  EXPECT_THAT(*swept, Contains(HasSubstr("cgroup s")));
  EXPECT_THAT(*Sweep({record}), IsEmpty());
  EXPECT_EQ(Run(**adopted, "echo ok")->out, "ok\n");
  // Indices of what was swept are in use again.
  v1::SandboxRecord next = NewRecord();
  EXPECT_NE(MustCreate(next), nullptr);
  EXPECT_TRUE(Destroy(next).ok());
  adopted = std::shared_ptr<Instance>();
  EXPECT_TRUE(Destroy(record).ok());
}

TEST_F(ContainerFailure, DaemonKilledAtAnyStepOfACreate_DestroyAndSweepLeaveNothing) {
  for (const char* point : {"sandbox.create.after_journal", "sandbox.create.before_launch",
                            "sandbox.create.before_hello"}) {
    const v1::SandboxRecord record = MakeAndCrash(0, fmt::format("{}=kill", point));
    ASSERT_TRUE(record.has_slot()) << point;
    Open();
    auto adopted = Adopt(record);
    const auto destroyed = Destroy(record);
    EXPECT_TRUE(destroyed.ok()) << point << ": " << destroyed.error().ToString();
    EXPECT_TRUE(Sweep({}).ok());
    EXPECT_THAT(*Sweep({}), IsEmpty()) << point;
  }
}

TEST_F(ContainerFailure, DaemonKilledWhileItMakesASlot_SweepLeavesNothing) {
  MakeAndCrash(0, "sandbox.slot.before_make=kill");
  Open();
  EXPECT_TRUE(Sweep({}).ok());
  EXPECT_THAT(*Sweep({}), IsEmpty());
}

TEST_F(ContainerFailure, StepFails_DestroyLeavesNothing) {
  for (const char* point : {"sandbox.create.before_slot", "sandbox.create.after_journal",
                            "sandbox.create.before_launch", "sandbox.create.before_hello",
                            "sandbox.slot.before_make"}) {
    ASSERT_TRUE(fault::Arm(fmt::format("{}=error:EIO*1", point)).ok());
    v1::SandboxRecord record = NewRecord();
    auto made = Create(record);
    // A slot whose making fails for want of the spawner is made again.
    if (made.ok()) EXPECT_EQ(point, std::string_view("sandbox.slot.before_make"));
    made = std::shared_ptr<Instance>();
    EXPECT_TRUE(Destroy(record).ok()) << point;
    EXPECT_THAT(*Sweep({}), IsEmpty()) << point;
  }
}

TEST_F(ContainerFailure, JournalFails_NothingIsMadeForTheRecord) {
  v1::SandboxRecord record = NewRecord();
  auto refuse = [](const v1::SandboxRecord&) -> Result<void> {
    return Error(Code::kUnavailable, "test.journal", "no");
  };
  auto made =
      On(backend_->Create(record, refuse, runtime::Deadline::After(std::chrono::seconds(20))));
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().reason(), "test.journal");
  EXPECT_FALSE(std::filesystem::exists(UpperPath(record, "")));
  EXPECT_TRUE(Destroy(record).ok());
}

// A create that hangs past its deadline: Destroy neither races with it nor misses what it makes.
TEST_F(ContainerFailure, CreateHangs_DestroyWaitsForItAndOthersGoOn) {
  ASSERT_TRUE(fault::Arm("sandbox.create.after_journal=block*1").ok());
  v1::SandboxRecord record = NewRecord();
  auto none = [](const v1::SandboxRecord&) -> Result<void> { return Ok(); };
  auto made =
      On(backend_->Create(record, none, runtime::Deadline::After(std::chrono::milliseconds(800))));
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code(), Code::kDeadlineExceeded);
  ASSERT_TRUE(record.has_slot());
  auto stuck =
      On(backend_->Destroy(record, runtime::Deadline::After(std::chrono::milliseconds(300))));
  ASSERT_FALSE(stuck.ok());
  EXPECT_EQ(stuck.error().reason(), "sandbox.stuck");
  v1::SandboxRecord other = NewRecord();
  EXPECT_NE(MustCreate(other), nullptr);
  EXPECT_TRUE(Destroy(other).ok());
  EXPECT_THAT(*Sweep({}), IsEmpty()) << "what hangs still has an owner";
  fault::DisarmAll();
  EXPECT_TRUE(Destroy(record).ok());
  EXPECT_THAT(*Sweep({}), IsEmpty());
}

// Acceptance case 92.
TEST_F(ContainerFailure, PlantedOrphans_AreRemovedAndNothingElse) {
  v1::SandboxRecord record = NewRecord();
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  const std::string unified = "/sys/fs/cgroup/unified/", memory = "/sys/fs/cgroup/memory/";
  // Ours by name, owned by nobody: a cgroup with a process, a group of one controller, a socket, a
  // writable layer.
  ASSERT_EQ(::mkdir((unified + "dsec-tsbox/s9-1").c_str(), 0755), 0);
  ASSERT_EQ(::mkdir((memory + "dsec-tsbox/s10-1").c_str(), 0755), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::pause();
    ::_exit(0);
  }
  std::ofstream(unified + "dsec-tsbox/s9-1/cgroup.procs") << pid;
  std::ofstream(dir_->path() + "/run/s11-1.sock") << "";
  v1::SandboxRecord ghost = record;
  ghost.set_id("sb-tsbox-ghost");
  // Not ours: another node's cgroup, a directory and a file of somebody in our folders.
  ASSERT_EQ(::mkdir((unified + "dsec-tsother").c_str(), 0755), 0);
  ASSERT_EQ(::mkdir((unified + "dsec-tsother/s1-1").c_str(), 0755), 0);
  ASSERT_EQ(::mkdir((unified + "dsec-tsbox/somebody").c_str(), 0755), 0);
  std::ofstream(dir_->path() + "/run/edge.lock") << "";

  auto swept = Sweep({record});
  ASSERT_TRUE(swept.ok()) << swept.error().ToString();
  EXPECT_THAT(*swept, ::testing::UnorderedElementsAre(HasSubstr("cgroup s9-1: killed 1 processes"),
                                                      HasSubstr("cgroup s10-1"),
                                                      HasSubstr("socket s11-1.sock")));
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(Run(*instance, "echo ok")->out, "ok\n");
  EXPECT_TRUE(std::filesystem::exists(unified + "dsec-tsother/s1-1"));
  EXPECT_TRUE(std::filesystem::exists(unified + "dsec-tsbox/somebody"));
  EXPECT_TRUE(std::filesystem::exists(dir_->path() + "/run/edge.lock"));
  for (const char* dir : {"dsec-tsother/s1-1", "dsec-tsother", "dsec-tsbox/somebody"}) {
    EXPECT_EQ(::rmdir((unified + dir).c_str()), 0);
  }
  instance.reset();
  EXPECT_TRUE(Destroy(record).ok());
}

TEST_F(ContainerFailure, ScratchWithoutRecord_IsSweptByTheNextDaemon) {
  v1::SandboxRecord record = NewRecord();
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  instance.reset();
  Open();
  auto swept = Sweep({});
  ASSERT_TRUE(swept.ok());
  EXPECT_THAT(*swept, Contains(HasSubstr("scratch " + record.scratch())));
  EXPECT_THAT(*swept, Contains(HasSubstr("cgroup s")));
  EXPECT_EQ(Adopt(record).error().code(), Code::kGone);
  EXPECT_TRUE(Destroy(record).ok());
}

TEST_F(ContainerFailure, RecordWithoutThing_IsGone) {
  v1::SandboxRecord record = NewRecord();
  EXPECT_EQ(Adopt(record).error().code(), Code::kGone) << "never started";
  record.set_slot(7);
  record.set_slot_generation(7);
  record.set_agent_pid(1);
  record.set_agent_start_time(12345);
  record.set_scratch(record.id());
  record.set_boot_id("another boot");
  EXPECT_EQ(Adopt(record).error().reason(), "sandbox.host_restarted");
  auto instance = MustCreate(record);
  const std::string boot = record.boot_id();
  instance.reset();
  ASSERT_TRUE(Destroy(record).ok());
  EXPECT_EQ(Adopt(record).error().code(), Code::kGone) << "its agent has ended";
  // The pid belongs to somebody else by now: init of this host must survive our Destroy.
  record.set_agent_pid(1);
  EXPECT_TRUE(Destroy(record).ok());
}

// Acceptance case 54: SIGKILL is not acted upon while a v1 freezer holds the process.
TEST_F(ContainerFailure, Unkillable_IsStuckInBoundedTimeAndGoesLater) {
  const std::string freezer = "/sys/fs/cgroup/freezer/dsec-tsb-freezer";
  if (::access("/sys/fs/cgroup/freezer/cgroup.procs", W_OK) != 0)
    GTEST_SKIP() << "no v1 freezer here";
  v1::SandboxRecord record = NewRecord();
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  ASSERT_TRUE(Start(*instance, "sleep", "echo go; exec sleep 1000", "go").ok());
  ASSERT_EQ(::mkdir(freezer.c_str(), 0755), 0);
  {
    std::ifstream procs(CgroupPath("pids", record) + "/cgroup.procs");
    for (int pid = 0; procs >> pid;) std::ofstream(freezer + "/cgroup.procs") << pid;
  }
  std::ofstream(freezer + "/freezer.state") << "FROZEN";
  const MonoTime start = Clock::System().Mono();
  auto stuck = Destroy(record, 1);
  EXPECT_LT(Clock::System().Mono() - start, std::chrono::seconds(4));
  ASSERT_FALSE(stuck.ok());
  EXPECT_EQ(stuck.error().reason(), "sandbox.stuck");
  EXPECT_EQ(stuck.error().code(), Code::kDeadlineExceeded);
  EXPECT_THAT(stuck.error().message(), HasSubstr("process"));
  // Healthy ones are not affected, and its slot is not given away.
  v1::SandboxRecord other = NewRecord();
  EXPECT_NE(MustCreate(other), nullptr);
  EXPECT_NE(other.slot(), record.slot());
  EXPECT_TRUE(Destroy(other).ok());
  std::ofstream(freezer + "/freezer.state") << "THAWED";
  const auto destroyed = Destroy(record);
  EXPECT_TRUE(destroyed.ok()) << destroyed.error().ToString();
  EXPECT_EQ(::rmdir(freezer.c_str()), 0);
  instance.reset();
}

TEST_F(ContainerFailure, SpawnerKilled_NextCreateWorks) {
  v1::SandboxRecord first = NewRecord();
  auto instance = MustCreate(first);
  ASSERT_NE(instance, nullptr);
  // The spawner is the only child of this process.
  std::ifstream children(fmt::format("/proc/self/task/{}/children", ::getpid()));
  std::vector<pid_t> spawners;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream of_task(task.path() / "children");
    for (pid_t pid = 0; of_task >> pid;) spawners.push_back(pid);
  }
  ASSERT_THAT(spawners, SizeIs(1));
  ASSERT_EQ(::kill(spawners[0], SIGKILL), 0);
  EXPECT_EQ(Run(*instance, "echo ok")->out, "ok\n") << "sandboxes live on";
  v1::SandboxRecord second = NewRecord();
  EXPECT_NE(MustCreate(second), nullptr);
  instance.reset();
  EXPECT_TRUE(Destroy(first).ok());
  EXPECT_TRUE(Destroy(second).ok());
}

TEST_F(ContainerFailure, WrongToken_IsRefusedByTheAgent) {
  v1::SandboxRecord record = NewRecord();
  ASSERT_NE(MustCreate(record), nullptr);
  ASSERT_EQ(::unlink((dir_->path() + "/state/agent.key").c_str()), 0);
  Open();
  auto adopted = Adopt(record);
  ASSERT_FALSE(adopted.ok());
  EXPECT_NE(adopted.error().code(), Code::kGone);
  EXPECT_TRUE(Destroy(record).ok()) << "without the agent's consent";
}

TEST_F(ContainerFailure, Purge_RemovesRunningSandboxes) {
  v1::SandboxRecord record = NewRecord();
  ASSERT_NE(MustCreate(record), nullptr);
  backend_.reset();
  auto purged =
      ContainerBackend::Purge(Options(), Clock::System().Mono() + std::chrono::seconds(20));
  ASSERT_TRUE(purged.ok()) << purged.error().ToString();
  EXPECT_THAT(*purged, SizeIs(3)) << "cgroup, scratch, socket";
}

TEST_F(ContainerFailure, RunDirOfOthers_IsRefused) {
  backend_.reset();
  ASSERT_EQ(::chmod((dir_->path() + "/run").c_str(), 0777), 0);
  auto opened = ContainerBackend::Open(Options(), layers_->store(), layers_->mounts());
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().reason(), "sandbox.run_dir");
  ASSERT_EQ(::chmod((dir_->path() + "/run").c_str(), 0700), 0);
}

}  // namespace
}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
// The container backend with the real spawner, agent, layers and kernel: what a sandbox is, and
// what is left of it.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "sandbox/testing/container_fixture.h"

namespace dsec::sandbox {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::HostState;
using ::testing::IsEmpty;
using ::testing::Not;

class Container : public testing::ContainerTest {};

TEST_F(Container, Create_RunsCommandsAndDestroyLeavesNothing) {
  v1::SandboxRecord record = NewRecord();
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  std::vector<std::string> phases;
  for (const v1::PhaseTime& phase : record.phases()) phases.push_back(phase.phase());
  EXPECT_THAT(phases, ElementsAre("layers", "slot", "scratch", "launch", "ready"));
  EXPECT_EQ(record.layer_ids_size(), 1);
  EXPECT_EQ(record.scratch(), record.id());
  EXPECT_GT(record.agent_pid(), 0);
  ASSERT_FALSE(journal_.empty());
  EXPECT_EQ(journal_.back().slot_generation(), record.slot_generation())
      << "on record before it was made";

  auto ran =
      Run(*instance,
          "id -u; pwd; hostname; echo $DSEC_CPU_LIMIT_MILLIS $DSEC_MEMORY_LIMIT_BYTES; exit 7");
  ASSERT_TRUE(ran.ok()) << ran.error().ToString();
  EXPECT_EQ(ran->out, fmt::format("0\n/\n{}\n1000 {}\n", record.id(), 128 << 20));
  EXPECT_EQ(ran->result.kind(), v1::END_EXITED);
  EXPECT_EQ(ran->result.exit_code(), 7);

  instance.reset();
  const auto destroyed = Destroy(record);
  EXPECT_TRUE(destroyed.ok()) << destroyed.error().ToString();
  EXPECT_TRUE(Destroy(record).ok()) << "again";
  EXPECT_THAT(*Sweep({}), IsEmpty());
}

TEST_F(Container, Layers_AreMountedOnceAndHeldWhileUsed) {
  ASSERT_TRUE(layers_->AddLayer(image::LayerKind::kWorkspace, "held:1", "/held", "x").ok());
  std::vector<v1::SandboxRecord> records;
  std::vector<std::shared_ptr<Instance>> instances;
  for (int i = 0; i < 3; ++i) {
    records.push_back(NewRecord());
    records.back().mutable_spec()->set_workspace("held:1");
    instances.push_back(MustCreate(records.back()));
    EXPECT_EQ(layers_->mounts().mounted(), 2u);
  }
  EXPECT_EQ(layers_->Remove("held:1").error().reason(), "layer.in_use");
  // A daemon that finds the sandbox running holds its layers as well.
  instances.clear();
  EXPECT_EQ(layers_->mounts().mounted(), 0u);
  Open();
  auto adopted = Adopt(records[0]);
  ASSERT_TRUE(adopted.ok()) << adopted.error().ToString();
  EXPECT_EQ(layers_->Remove("held:1").error().reason(), "layer.in_use");
  adopted->reset();
  for (const v1::SandboxRecord& record : records) EXPECT_TRUE(Destroy(record).ok());
  ASSERT_TRUE(layers_->mounts().Settle());
  const auto removed = layers_->Remove("held:1");
  EXPECT_TRUE(removed.ok()) << removed.error().ToString();
}

TEST_F(Container, HostMountTable_StaysAsItWas) {
  std::vector<v1::SandboxRecord> records;
  std::vector<std::shared_ptr<Instance>> instances;
  for (int i = 0; i < 5; ++i) {
    records.push_back(NewRecord());
    instances.push_back(MustCreate(records.back()));
    ASSERT_NE(instances.back(), nullptr);
  }
  EXPECT_EQ(HostState::Take(0, 0).mounts, before_.mounts);
  instances.clear();
  for (const v1::SandboxRecord& record : records) EXPECT_TRUE(Destroy(record).ok());
}

TEST_F(Container, Daemon_HoldsTwoDescriptorsASandbox) {
  v1::SandboxRecord first = NewRecord();
  auto warm = MustCreate(first);  // opens what is opened once
  const size_t before = HostState::Take(0, 0).fds.size();
  std::vector<v1::SandboxRecord> records;
  std::vector<std::shared_ptr<Instance>> instances;
  for (int i = 0; i < 4; ++i) {
    records.push_back(NewRecord());
    instances.push_back(MustCreate(records.back()));
  }
  EXPECT_LE(HostState::Take(0, 0).fds.size(), before + 4 * 2);
  instances.clear();
  warm.reset();
  records.push_back(first);
  for (const v1::SandboxRecord& record : records) EXPECT_TRUE(Destroy(record).ok());
}

// Acceptance cases 56 and 61.
TEST_F(Container, Memory_OverTheLimitIsAnOomKill) {
  v1::SandboxRecord record = NewRecord();
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  auto ran = Run(*instance, "tail /dev/zero; echo alive");
  ASSERT_TRUE(ran.ok()) << ran.error().ToString();
  EXPECT_THAT(ran->out, HasSubstr("alive"));
  EXPECT_GE(ran->result.oom_events(), 1u);
  const v1::Usage usage = Usage(*instance);
  EXPECT_GE(usage.oom_kills(), 1u);
  EXPECT_LE(usage.memory_peak_bytes(), 128u << 20);
  EXPECT_GT(usage.memory_peak_bytes(), 120u << 20);
  EXPECT_GT(usage.cpu_usec(), 0u);
  EXPECT_NE(instance->agent(), nullptr) << "the agent is not the victim";
  instance.reset();
  EXPECT_TRUE(Destroy(record).ok());
}

// Acceptance case 50.
TEST_F(Container, Pids_ForkBombIsContainedAndCounted) {
  v1::SandboxRecord record = NewRecord();
  record.mutable_spec()->mutable_limits()->set_pids(32);
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  ASSERT_TRUE(Start(*instance, "bomb", "echo go; b() { b | b & b; }; b", "go").ok());
  const MonoTime end = Clock::System().Mono() + std::chrono::seconds(20);
  while (Usage(*instance).pids_denied() == 0 && Clock::System().Mono() < end)
    std::this_thread::yield();
  EXPECT_GT(Usage(*instance).pids_denied(), 0u);
  EXPECT_LE(Usage(*instance).pids(), 32u);
  instance.reset();
  const MonoTime start = Clock::System().Mono();
  EXPECT_TRUE(Destroy(record).ok());
  EXPECT_LT(Clock::System().Mono() - start, std::chrono::seconds(5));
}

// Acceptance cases 63 and 64.
TEST_F(Container, Disk_StopsAtTheLimitAndTheRestWorks) {
  v1::SandboxRecord record = NewRecord();
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  auto ran =
      Run(*instance,
          "dd if=/dev/zero of=/big bs=64k count=4096 2>/dev/null; echo rc=$?; stat -c %s /big");
  ASSERT_TRUE(ran.ok()) << ran.error().ToString();
  EXPECT_THAT(ran->out, HasSubstr("rc=1"));
  const uint64_t size = std::stoull(ran->out.substr(ran->out.find('\n') + 1));
  EXPECT_LE(size, 64u << 20);
  EXPECT_GT(size, 60u << 20);
  v1::Usage usage = Usage(*instance);
  EXPECT_GE(usage.disk_bytes(), 60u << 20);
  EXPECT_LE(usage.disk_bytes(), 64u << 20);
  ran = Run(*instance,
            "fallocate -l 10G /huge; echo rc=$?; rm -f /big /huge; echo again > /f && cat /f");
  ASSERT_TRUE(ran.ok());
  EXPECT_THAT(ran->out, AllOf(HasSubstr("rc=1"), HasSubstr("again")));
  instance.reset();
  EXPECT_TRUE(Destroy(record).ok());
}

// Acceptance case 60.
TEST_F(Container, Shm_IsFullAtItsSizeWithoutAKill) {
  v1::SandboxRecord record = NewRecord();
  record.mutable_spec()->mutable_limits()->set_shm_bytes(8 << 20);
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  auto ran = Run(*instance,
                 "dd if=/dev/zero of=/dev/shm/f bs=1M count=64 2>/dev/null; echo rc=$?; stat -c %s "
                 "/dev/shm/f; rm /dev/shm/f; "
                 "i=0; while true > /dev/shm/$i; do i=$((i+1)); done 2>/dev/null; echo files=$i");
  ASSERT_TRUE(ran.ok()) << ran.error().ToString();
  EXPECT_THAT(ran->out, HasSubstr("rc=1\n8388608\n"));
  EXPECT_EQ(Usage(*instance).oom_kills(), 0u);
  instance.reset();
  EXPECT_TRUE(Destroy(record).ok());
}

// Acceptance case 151.
TEST_F(Container, RootInside_IsNobodyOutside) {
  v1::SandboxRecord record = NewRecord();
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  auto ran = Run(*instance,
                 "cp /bin/cat /suid && chmod 6755 /suid; echo x > /f; chown 1000:1000 /f; mkdir "
                 "/d; mknod /dev-node c 1 3; "
                 "echo rc=$?; stat -c '%u %g %a' /suid /f / /bin/cat");
  ASSERT_TRUE(ran.ok()) << ran.error().ToString();
  EXPECT_THAT(ran->out, HasSubstr("rc=1\n")) << "no device nodes";
  EXPECT_THAT(ran->out, HasSubstr("0 0 6755\n1000 1000 644\n0 0 755\n0 0 755\n"));
  const uint32_t root = kIdBase + record.slot() * IdPlan::kIdsPerSlot;
  struct stat info;
  ASSERT_EQ(::stat(UpperPath(record, "/suid").c_str(), &info), 0);
  EXPECT_EQ(info.st_uid, root);
  EXPECT_EQ(info.st_gid, root);
  EXPECT_EQ(info.st_mode & 07777, 06755u);
  ASSERT_EQ(::stat(UpperPath(record, "/f").c_str(), &info), 0);
  EXPECT_EQ(info.st_uid, root + 1000);
  // Nothing at all in the writable layer is the host's, nor a device.
  for (const auto& entry : std::filesystem::recursive_directory_iterator(UpperPath(record, ""))) {
    ASSERT_EQ(::lstat(entry.path().c_str(), &info), 0);
    EXPECT_GE(info.st_uid, root) << entry.path();
    EXPECT_LT(info.st_uid, root + IdPlan::kIdsPerSlot) << entry.path();
    EXPECT_FALSE(S_ISBLK(info.st_mode) || (S_ISCHR(info.st_mode) && info.st_rdev != 0))
        << entry.path();
  }
  // The processes' owner on the host: the sandbox's root, and for init the agent's own id.
  const uint32_t agent = kAgentUidBase + record.slot();
  ASSERT_TRUE(Start(*instance, "sleep", "echo go; exec sleep 1000", "go").ok());
  std::ifstream procs(CgroupPath("pids", record) + "/cgroup.procs");
  int pid = 0, count = 0;
  while (procs >> pid) {
    ASSERT_EQ(::stat(fmt::format("/proc/{}", pid).c_str(), &info), 0);
    std::ifstream status(fmt::format("/proc/{}/status", pid));
    const std::string text((std::istreambuf_iterator<char>(status)), {});
    EXPECT_THAT(text, AnyOf(HasSubstr(fmt::format("Uid:\t{0}\t{0}\t{0}\t{0}\n", root)),
                            HasSubstr(fmt::format("Uid:\t{0}\t{0}\t{0}\t{1}\n", agent, root))));
    ++count;
  }
  EXPECT_EQ(count, 2) << "init and sleep";
  instance.reset();
  EXPECT_TRUE(Destroy(record).ok());
}

// Acceptance case 69.
TEST_F(Container, Machine_LooksAsItsLimitsSay) {
  v1::SandboxRecord record = NewRecord();
  record.mutable_spec()->mutable_limits()->set_cpu_millis(500);
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  auto ran = Run(
      *instance,
      "nproc; getconf _NPROCESSORS_ONLN; cat /sys/devices/system/cpu/online; grep -c ^processor "
      "/proc/cpuinfo; "
      "grep MemTotal /proc/meminfo; cat /sys/fs/cgroup/memory.max; stat -c %u /sys /proc/meminfo; "
      "echo x > /sys/x; ulimit -n; ulimit -c");
  ASSERT_TRUE(ran.ok()) << ran.error().ToString();
  EXPECT_THAT(ran->out,
              HasSubstr(fmt::format("1\n1\n0\n1\nMemTotal:         131072 kB\n{}\n0\n0\n16384\n",
                                    128 << 20)));
  EXPECT_THAT(ran->err, HasSubstr("Read-only file system"));
  instance.reset();
  EXPECT_TRUE(Destroy(record).ok());
}

// Acceptance case 116.
TEST_F(Container, Layers_LaterOnesCoverEarlierOnes) {
  ASSERT_TRUE(layers_->AddLayer(image::LayerKind::kWorkspace, "ws:1", "/w/file", "workspace").ok());
  ASSERT_TRUE(
      layers_->AddLayer(image::LayerKind::kToolkit, "tk:1", "/w/file", "first toolkit").ok());
  ASSERT_TRUE(
      layers_->AddLayer(image::LayerKind::kToolkit, "tk:2", "/w/file", "second toolkit").ok());
  for (const auto& [toolkits, expected] :
       {std::pair(std::vector<std::string>{}, "workspace"),
        std::pair(std::vector<std::string>{"tk:2", "tk:1"}, "first toolkit"),
        std::pair(std::vector<std::string>{"tk:1", "tk:2"}, "second toolkit")}) {
    v1::SandboxRecord record = NewRecord();
    record.mutable_spec()->set_workspace("ws:1");
    for (const std::string& toolkit : toolkits) record.mutable_spec()->add_toolkits(toolkit);
    auto instance = MustCreate(record);
    ASSERT_NE(instance, nullptr);
    EXPECT_EQ(Run(*instance, "cat /w/file")->out, expected);
    EXPECT_EQ(Run(*instance, "rm /w/file && echo mine > /w/file && cat /w/file")->out, "mine\n");
    EXPECT_EQ(record.layer_ids_size(), 2 + static_cast<int>(toolkits.size()));
    instance.reset();
    EXPECT_TRUE(Destroy(record).ok());
  }
}

TEST_F(Container, UnknownLayer_NamesTheFieldAndCostsNoSlot) {
  v1::SandboxRecord record = NewRecord();
  record.mutable_spec()->set_base("no-such:1");
  auto made = Create(record);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code(), Code::kNotFound);
  EXPECT_EQ(made.error().field(), "base");
  EXPECT_FALSE(record.has_slot());
  record.mutable_spec()->set_base("test-base:1");
  record.mutable_spec()->add_toolkits("test-base:1");
  made = Create(record);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().reason(), "layer.wrong_kind");
  EXPECT_EQ(made.error().field(), "toolkits[0]");
  EXPECT_TRUE(Destroy(record).ok());
}

TEST_F(Container, AgentKilled_EndIsSeen) {
  v1::SandboxRecord record = NewRecord();
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  ASSERT_EQ(::kill(record.agent_pid(), SIGKILL), 0);
  auto end = On(instance->WaitEnd());
  ASSERT_TRUE(end.ok()) << end.error().ToString();
  EXPECT_FALSE(end->oom);
  EXPECT_THAT(end->message, HasSubstr("agent"));
  instance.reset();
  EXPECT_TRUE(Destroy(record).ok());
}

TEST_F(Container, Pool_IsFilledUsedAndRemovedWithTheBackend) {
  Open(4);
  const MonoTime end = Clock::System().Mono() + std::chrono::seconds(20);
  while (backend_->ReadySlots() < 4 && Clock::System().Mono() < end) std::this_thread::yield();
  ASSERT_EQ(backend_->ReadySlots(), 4u);
  v1::SandboxRecord record = NewRecord();
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  EXPECT_THAT(*Sweep({record}), IsEmpty()) << "slots that wait are no orphans";
  EXPECT_EQ(Run(*instance, "echo ok")->out, "ok\n");
  instance.reset();
  EXPECT_TRUE(Destroy(record).ok());
}

// Acceptance case 73, smaller.
TEST_F(Container, Burst_AllReadyAndAllGone) {
  Open(8);
  constexpr int kCount = 60;
  std::vector<v1::SandboxRecord> records;
  for (int i = 0; i < kCount; ++i) records.push_back(NewRecord());
  std::atomic<int> ready = 0, failed = 0;
  auto life = [&](v1::SandboxRecord& record) -> runtime::Task<void> {
    auto none = [](const v1::SandboxRecord&) -> Result<void> { return Ok(); };
    auto made =
        co_await backend_->Create(record, none, runtime::Deadline::After(std::chrono::seconds(60)));
    if (made.ok()) {
      ++ready;
    } else {
      ++failed;
      ADD_FAILURE() << made.error().ToString();
    }
    made = std::shared_ptr<Instance>();
    co_return co_await backend_->Destroy(record,
                                         runtime::Deadline::After(std::chrono::seconds(60)));
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kCount; ++i) {
    threads.emplace_back([&, i] {
      const auto done = runtime::BlockOn(shards_->at(static_cast<size_t>(i) % 2),
                                         life(records[static_cast<size_t>(i)]));
      EXPECT_TRUE(done.ok()) << done.error().ToString();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ready, kCount);
  EXPECT_EQ(failed, 0);
  EXPECT_THAT(*Sweep({}), IsEmpty());
}

}  // namespace
}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
// Workers: their making, their end, what is left on the host.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "base/fault.h"
#include "os/process.h"
#include "sandbox/isolators/control_file.h"
#include "sandbox/testing/fncall_fixture.h"

namespace dsec::sandbox {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class FnCall : public testing::FnCallTest {
 protected:
  void TearDown() override {
    fault::DisarmAll();
    FnCallTest::TearDown();
  }
  // The one worker's runner.
  static pid_t RunnerOf(const FnWorker& worker) {
    const auto text = os::ReadFile(
        AT_FDCWD,
        fmt::format("/sys/fs/cgroup/unified/dsec-tsbox/{}/agent/cgroup.procs", worker.name())
            .c_str(),
        4096);
    return text.ok() ? static_cast<pid_t>(ControlValue(*text)) : 0;
  }
  Result<std::vector<std::string>> Sweep() {
    return On(fncall_->Sweep({}, runtime::Deadline::After(seconds(20))));
  }
};

TEST_F(FnCall, Environment_IsResolvedToLayerIds) {
  v1::FnEnvironment named;
  named.set_base("test-base:1");
  const auto resolved = On(fncall_->Resolve(named, runtime::Deadline::After(seconds(5))));
  ASSERT_TRUE(resolved.ok()) << resolved.error().ToString();
  EXPECT_EQ(resolved->base(), layers_->store().Find("test-base:1")->id.str());
  named.add_toolkits("test-base:1");
  const auto wrong = On(fncall_->Resolve(named, runtime::Deadline::After(seconds(5))));
  ASSERT_FALSE(wrong.ok());
  EXPECT_EQ(wrong.error().reason(), "layer.wrong_kind");
  EXPECT_EQ(wrong.error().field(), "toolkits[0]");
}

TEST_F(FnCall, Limits_TakeDefaultsAndAreRefusedByName) {
  v1::FnLimits limits;
  limits.set_processes(7);
  const auto normal = fncall_->Normalize(limits, "");
  ASSERT_TRUE(normal.ok());
  EXPECT_EQ(normal->processes(), 7u);
  EXPECT_NE(normal->memory_bytes(), 0u);
  limits.set_memory_bytes(1);
  const auto refused = fncall_->Normalize(limits, "compile_limits");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().field(), "compile_limits.memory_bytes");
}

TEST_F(FnCall, Worker_RunsCallsAndLeavesNothing) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  for (int i = 0; i < 20; ++i) {
    const FnReport report = Must(*worker, Shell(fmt::format("echo {}; exit {}", i, i)));
    EXPECT_EQ(report.step.stdout().data(), fmt::format("{}\n", i));
    EXPECT_EQ(report.step.exit_code(), i);
    EXPECT_GT(report.step.cpu_usec(), 0u);
    EXPECT_GT(report.step.wall_usec(), 0u);
  }
}

TEST_F(FnCall, Workers_AtOnceDoNotMix) {
  std::vector<std::unique_ptr<FnWorker>> workers;
  for (int i = 0; i < 4; ++i) workers.push_back(MakeWorker());
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (size_t w = 0; w < workers.size(); ++w) {
    ASSERT_NE(workers[w], nullptr);
    threads.emplace_back([&, w] {
      for (int i = 0; i < 25; ++i) {
        const auto report = Run(*workers[w], Shell(fmt::format("echo {}-{}", w, i)));
        if (!report.ok() || report->step.stdout().data() != fmt::format("{}-{}\n", w, i)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(FnCall, Cell_ShowsTheViewsAndAPlainSystem) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  const FnReport report = Must(
      *worker, Shell("hostname; head -1 /proc/meminfo; cat /sys/fs/cgroup/memory.max; head -1 "
                     "/etc/hosts; ls /dev; cat /proc/self/cgroup; ls /dev/shm; cat /proc/vmstat"));
  EXPECT_EQ(report.step.verdict(), v1::FN_OK) << report.step.stderr().data();
  EXPECT_EQ(report.step.stdout().data().substr(0, 8), "sandbox\n");
  EXPECT_THAT(report.step.stdout().data(), HasSubstr("1073741824\n127.0.0.1\tlocalhost"));
  EXPECT_THAT(report.step.stdout().data(), ::testing::Not(HasSubstr("tsbox")));
}

TEST_F(FnCall, Network_ThatACallHasUsedIsReplaced) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  // By file: no program of the layer speaks over the network.
  const FnRun show = Shell("cat /proc/net/dev /proc/net/snmp /proc/net/unix");
  const std::string before = Must(*worker, show).step.stdout().data();
  EXPECT_EQ(Must(*worker, Program({"call-guest", "plant"})).step.verdict(), v1::FN_OK);
  EXPECT_EQ(Must(*worker, show).step.stdout().data(), before);
}

TEST_F(FnCall, RunnerDies_CallIsTheNodesFaultAndTheWorkerIsOver) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  const pid_t runner = RunnerOf(*worker);
  ASSERT_GT(runner, 0);
  std::thread killer([&] {
    ::usleep(200'000);
    ::kill(runner, SIGKILL);
  });
  const auto report = Run(*worker, Shell("sleep 30"));
  killer.join();
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().reason(), "fn.worker_died");
  EXPECT_TRUE(On(worker->WaitEnd()).ok());
  const auto again = Run(*worker, Program({"true"}));
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().code(), Code::kUnavailable);
}

TEST_F(FnCall, RunnerDiesIdle_IsNoticed) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  ::kill(RunnerOf(*worker), SIGKILL);
  EXPECT_TRUE(On(worker->WaitEnd()).ok());
  const auto report = Run(*worker, Program({"true"}));
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().reason(), "fn.worker_died");
}

TEST_F(FnCall, WorkerDropped_EndsItsCallAndGoes) {
  auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  const pid_t runner = RunnerOf(*worker);
  const auto watch = os::PidFd::Open(runner);
  ASSERT_TRUE(watch.ok());
  worker.reset();
  EXPECT_TRUE(*watch->WaitExit(Clock::System().Mono() + seconds(10)));
}

TEST_F(FnCall, CellCannotBeMade_WorkerIsBroken) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  ASSERT_TRUE(fault::Arm("fn.worker.before_cell=error:EIO").ok());
  EXPECT_EQ(Must(*worker, Program({"true"})).step.verdict(), v1::FN_OK);
  const auto report = Run(*worker, Program({"true"}));
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().reason(), "fn.worker_broken");
  EXPECT_TRUE(On(worker->WaitEnd()).ok());
}

TEST_F(FnCall, Sweep_RemovesWhatADeadDaemonLeft) {
  fncall_.reset();
  backend_.reset();
  shards_.reset();
  // In place of kill -9: a process of its own that makes a worker and a call and never returns.
  const pid_t child = ::fork();
  if (child == 0) {
    layers_->AfterFork();
    shards_ = std::make_unique<runtime::Shards>(1);
    OpenAnew();
    const auto worker = MakeWorker();
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  shards_ = std::make_unique<runtime::Shards>(1);
  OpenAnew();
  ASSERT_NE(fncall_, nullptr);
  EXPECT_THAT(*On(backend_->Sweep({}, runtime::Deadline::After(seconds(20)))), IsEmpty());
  EXPECT_THAT(*Sweep(), SizeIs(1));
  EXPECT_THAT(*Sweep(), IsEmpty());
}

TEST_F(FnCall, Unkillable_WorkerIsOverAndItsIndexStaysTaken) {
  const std::string freezer = "/sys/fs/cgroup/freezer/dsec-tsb-fnfreezer";
  if (::access("/sys/fs/cgroup/freezer/cgroup.procs", W_OK) != 0)
    GTEST_SKIP() << "no v1 freezer here";
  auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  const std::string name(worker->name());
  ASSERT_EQ(::mkdir(freezer.c_str(), 0755), 0);
  std::thread freeze([&] {
    // Runner, init and the program.
    std::vector<int> pids;
    while (pids.size() < 3) {
      pids.clear();
      std::ifstream procs(fmt::format("/sys/fs/cgroup/pids/dsec-tsbox/{}/cgroup.procs", name));
      for (int pid = 0; procs >> pid;) pids.push_back(pid);
    }
    for (const int pid : pids) {
      if (pid != RunnerOf(*worker)) std::ofstream(freezer + "/cgroup.procs") << pid;
    }
    std::ofstream(freezer + "/freezer.state") << "FROZEN";
  });
  FnRun run = Shell("sleep 1000");
  run.limits.set_wall_ms(1000);
  const MonoTime start = Clock::System().Mono();
  const auto report = Run(*worker, run);
  freeze.join();
  EXPECT_LT(Clock::System().Mono() - start, seconds(20));
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().reason(), "fn.worker_broken");
  worker.reset();
  const auto other = MakeWorker();
  EXPECT_NE(other, nullptr);
  if (other != nullptr)
    EXPECT_NE(SlotName::Parse(other->name())->index, SlotName::Parse(name)->index);
  std::ofstream(freezer + "/freezer.state") << "THAWED";
  // Its processes were killed long ago and go now.
  const MonoTime end = Clock::System().Mono() + seconds(20);
  while (::rmdir(freezer.c_str()) != 0) ASSERT_LT(Clock::System().Mono(), end);
}

TEST_F(FnCall, Devices_AreThereForTheOneCall) {
  // FUSE stands for any device that the rules of the node refuse.
  const std::string path = dir_->path() + "/fake0";
  ASSERT_EQ(::mknod(path.c_str(), S_IFCHR | 0600, ::makedev(10, 229)), 0);
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  FnRun run = Shell("exec 3</dev/fake0 && ls /dev");
  EXPECT_NE(Must(*worker, run).step.verdict(), v1::FN_OK);
  run.devices = {path};
  const FnReport with = Must(*worker, run);
  EXPECT_EQ(with.step.verdict(), v1::FN_OK) << with.step.stderr().data();
  EXPECT_THAT(with.step.stdout().data(), HasSubstr("fake0"));
  run = Shell("echo x > /dev/null && exec 3</dev/zero && exec 4</dev/ptmx; ls /dev");
  EXPECT_THAT(Must(*worker, run).step.stdout().data(), ::testing::Not(HasSubstr("fake0")));
  const auto other = MakeWorker();
  ASSERT_NE(other, nullptr);
  EXPECT_NE(Must(*other, Shell("exec 3</dev/fake0")).step.verdict(), v1::FN_OK);
}

}  // namespace
}  // namespace dsec::sandbox

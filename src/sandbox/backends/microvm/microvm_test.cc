// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <cstdio>
#include <filesystem>

#include "base/fault.h"
#include "os/file.h"
#include "os/process.h"
#include "sandbox/backends/microvm/microvm_host.h"
#include "sandbox/testing/microvm_fixture.h"

namespace dsec::sandbox {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class MicroVmTest : public testing::MicroVmTest {};

TEST_F(MicroVmTest, RunsCommandsAsAContainerDoes) {
  v1::SandboxRecord record = NewVm();
  const auto vm = MustCreateVm(record);
  ASSERT_NE(vm, nullptr);
  for (const v1::PhaseTime& phase : record.phases())
    RecordProperty(phase.phase(), static_cast<int>(phase.micros() / 1000));
  auto ran = Run(*vm, "id -u; uname -r; echo two >&2; exit 7");
  ASSERT_TRUE(ran.ok()) << ran.error().ToString();
  EXPECT_THAT(ran->out, HasSubstr("0\n6.12."));  // the guest's kernel, not the host's
  EXPECT_EQ(ran->err, "two\n");
  EXPECT_EQ(ran->result.exit_code(), 7);

  EXPECT_TRUE(DestroyVm(record).ok());
  EXPECT_FALSE(std::filesystem::exists(VmFolder(record)));
}

TEST_F(MicroVmTest, LivesOnWithoutTheDaemonAndIsAdopted) {
  v1::SandboxRecord record = NewVm();
  auto vm = MustCreateVm(record);
  ASSERT_NE(vm, nullptr);
  ASSERT_TRUE(Start(*vm, "before", "echo begun; sleep 2; echo went-on", "begun\n").ok());
  // As after kill -9: the channel is cut, nothing is told to anybody.
  vm->agent()->Close();
  vm.reset();
  OpenVms();
  auto adopted = AdoptVm(record);
  ASSERT_TRUE(adopted.ok()) << adopted.error().ToString();
  v1::PollRequest poll;
  poll.set_op_id("before");
  poll.set_wait_ms(20'000);
  poll.set_stdout_offset(6);
  std::string out;
  for (int i = 0; i < 20 && out.empty(); ++i) {
    const auto reply = Poll(**adopted, poll);
    ASSERT_TRUE(reply.ok()) << reply.error().ToString();
    for (const v1::StreamChunk& chunk : reply->stdout_chunks()) out += chunk.data();
  }
  EXPECT_EQ(out, "went-on\n");
  // An orphan of nobody's is left alone while its record is live, and goes when it is not.
  adopted->reset();
  OpenVms();
  EXPECT_THAT(*On(vms_->Sweep({record}, runtime::Deadline::After(std::chrono::seconds(20)))),
              ::testing::IsEmpty());
  EXPECT_TRUE(os::PidFd::Verify(record.agent_pid(), record.agent_start_time()).ok());
  EXPECT_THAT(*On(vms_->Sweep({}, runtime::Deadline::After(std::chrono::seconds(20)))),
              Not(::testing::IsEmpty()));
  EXPECT_TRUE(DestroyVm(record).ok());
}

TEST_F(MicroVmTest, ItsLimitsHoldInside) {
  v1::SandboxRecord record = NewVm();
  const auto vm = MustCreateVm(record);
  ASSERT_NE(vm, nullptr);
  auto full = Run(*vm, "head -c 200M /dev/zero > /root/big; ls -l /root/big | wc -l");
  ASSERT_TRUE(full.ok()) << full.error().ToString();
  EXPECT_THAT(full->err, HasSubstr("No space left on device"));
  ASSERT_TRUE(Run(*vm, "rm /root/big").ok());
  auto hungry = Run(*vm, "head -c 400M /dev/zero | tail -c 400M");
  ASSERT_TRUE(hungry.ok()) << hungry.error().ToString();
  EXPECT_GT(hungry->result.oom_events(), 0u);
  // The sandbox itself goes on, and so does the machine.
  auto after = Run(*vm, "nproc; cat /sys/fs/cgroup/memory.max");
  ASSERT_TRUE(after.ok()) << after.error().ToString();
  EXPECT_EQ(after->out, fmt::format("1\n{}\n", 128 << 20));
  const v1::Usage usage = Usage(*vm);
  EXPECT_GT(usage.cpu_usec(), 0u);
  EXPECT_GT(usage.memory_bytes(), 16u << 20);
  EXPECT_GT(usage.disk_bytes(), 0u);
  EXPECT_TRUE(DestroyVm(record).ok());
}

TEST_F(MicroVmTest, TellsHowAMachineEnds) {
  v1::SandboxRecord record = NewVm();
  auto vm = MustCreateVm(record);
  ASSERT_NE(vm, nullptr);
  const auto keeper = os::PidFd::Verify(record.agent_pid(), record.agent_start_time());
  ASSERT_TRUE(keeper.ok());
  // QEMU is the only other process in its cgroup.
  const auto pids = backend_->parts().tree.Processes(MicroVmHost::SlotOf(record));
  ASSERT_TRUE(pids.ok());
  for (const int pid : *pids) {
    if (pid != record.agent_pid()) ASSERT_EQ(::kill(pid, SIGKILL), 0);
  }
  auto end = On(vm->WaitEnd());
  ASSERT_TRUE(end.ok()) << end.error().ToString();
  EXPECT_EQ(end->message, "the VMM was killed by signal 9");
  EXPECT_FALSE(end->oom);
  vm.reset();
  EXPECT_TRUE(DestroyVm(record).ok());
}

TEST_F(MicroVmTest, RefusesEmulationUnlessItIsWanted) {
  OpenVms(false);
  v1::SandboxRecord record = NewVm();
  const auto refused = CreateVm(record);
  if (refused.ok()) {
    // KVM works here: then it is used.
    EXPECT_FALSE(record.emulated());
  } else {
    EXPECT_EQ(refused.error().reason(), "vm.no_acceleration");
    EXPECT_EQ(refused.error().code(), Code::kFailedPrecondition);
  }
  EXPECT_TRUE(DestroyVm(record).ok());
}

TEST_F(MicroVmTest, LeavesNothingOfACreateThatFails) {
  for (const char* point :
       {"vm.create.after_journal", "vm.create.before_start", "vm.create.before_hello"}) {
    ASSERT_TRUE(fault::Arm(fmt::format("{}=error:EIO*1", point)).ok());
    v1::SandboxRecord record = NewVm();
    EXPECT_FALSE(CreateVm(record).ok()) << point;
    fault::DisarmAll();
    EXPECT_TRUE(DestroyVm(record).ok()) << point;
    EXPECT_FALSE(std::filesystem::exists(VmFolder(record))) << point;
  }
}

// The driver alone: what pause, resume and fork of sandboxes are to be made of.
TEST_F(MicroVmTest, AMachineComesBackFromItsSnapshot) {
  v1::SandboxRecord record = NewVm();
  auto vm = MustCreateVm(record);
  ASSERT_NE(vm, nullptr);
  ASSERT_TRUE(Run(*vm, "echo kept > /tmp/file").ok());
  ASSERT_TRUE(
      Start(*vm, "counter", "i=0; while :; do echo $i; i=$((i+1)); sleep 0.2; done", "0\n").ok());

  auto host = MicroVmHost::Open(VmOptions(), backend_->parts(), layers_->mounts());
  ASSERT_TRUE(host.ok()) << host.error().ToString();
  vmm::Vmm& driver = (*host)->vmm();
  const auto soon = [] { return runtime::Deadline::After(std::chrono::seconds(20)); };
  const std::string control = (*host)->ControlPath(MicroVmHost::SlotOf(record));
  EXPECT_EQ(*driver.Status(control, soon()), vmm::RunState::kRunning);
  ASSERT_TRUE(driver.Pause(control, soon()).ok());
  EXPECT_EQ(*driver.Status(control, soon()), vmm::RunState::kPaused);
  const auto file = os::OpenAt(dir_->fd(), "snapshot", O_RDWR | O_CREAT, 0600);
  ASSERT_TRUE(file.ok());
  const auto saved = driver.Snapshot(control, file->get(), soon());
  ASSERT_TRUE(saved.ok()) << saved.error().ToString();
  const std::string kept = dir_->path() + "/kept";
  std::filesystem::copy(VmFolder(record), kept);
  const SlotName first = MicroVmHost::SlotOf(record);
  vm.reset();
  ASSERT_TRUE(DestroyVm(record).ok());

  // Another machine with the same devices, of the same sandbox.
  const auto slot = backend_->parts().indices.Reserve(SlotKind::kVm);
  ASSERT_TRUE(slot.ok());
  EXPECT_NE(*slot, first);
  record.set_slot(slot->index);
  record.set_slot_generation(slot->generation);
  auto layers = (*host)->AcquireLayers(record);
  ASSERT_TRUE(layers.ok()) << layers.error().ToString();
  auto prepared = (*host)->Prepare(record, 1);
  ASSERT_TRUE(prepared.ok()) << prepared.error().ToString();
  for (const char* name : {"/config", "/disk.img"}) {
    // Into the files that are open already.
    const auto content = os::ReadFile(AT_FDCWD, (kept + name).c_str(), 1 << 30);
    ASSERT_TRUE(content.ok());
    const auto to = os::OpenAt(AT_FDCWD, (VmFolder(record) + name).c_str(), O_WRONLY);
    ASSERT_TRUE(to.ok() && os::WriteAll(to->get(), *content).ok());
  }
  const MonoTime begun = Clock::System().Mono();
  auto keeper = (*host)->Start(record, *prepared, *layers, true);
  ASSERT_TRUE(keeper.ok()) << keeper.error().ToString();
  record.set_agent_pid(keeper->pid());
  record.set_agent_start_time(keeper->start_time());
  const std::string control_again = (*host)->ControlPath(*slot);
  ASSERT_EQ(::lseek(file->get(), 0, SEEK_SET), 0);
  const auto restored = driver.Restore(control_again, file->get(), soon());
  ASSERT_TRUE(restored.ok()) << restored.error().ToString() << Console(record);
  EXPECT_EQ(*driver.Status(control_again, soon()), vmm::RunState::kPaused);
  ASSERT_TRUE(driver.Resume(control_again, soon()).ok());
  auto back = AdoptVm(record);
  ASSERT_TRUE(back.ok()) << back.error().ToString() << Console(record);
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::System().Mono() - begun);
  RecordProperty("restore_ms", static_cast<int>(ms.count()));
  std::printf("restored in %d ms, snapshot of %lld bytes\n", static_cast<int>(ms.count()),
              static_cast<long long>(std::filesystem::file_size(dir_->path() + "/snapshot")));
  auto ran = Run(**back, "cat /tmp/file");
  ASSERT_TRUE(ran.ok()) << ran.error().ToString();
  EXPECT_EQ(ran->out, "kept\n");
  // The command goes on where it was.
  v1::PollRequest poll;
  poll.set_op_id("counter");
  const auto reply = Poll(**back, poll);
  ASSERT_TRUE(reply.ok()) << reply.error().ToString();
  EXPECT_TRUE(reply->running());
  back->reset();
  layers->files.clear();
  EXPECT_TRUE(DestroyVm(record).ok());
}

TEST_F(MicroVmTest, AGuestThatWasTakenOverHarmsItselfAlone) {
  UseHostileGuests();
  for (const auto& [what, reason, message] :
       {std::tuple("poweroff", "vm.port", "the guest has powered off"),
        std::tuple("panic", "vm.port", "the guest's kernel panicked"),
        std::tuple("flood", "vm.port", "bytes came from the guest without an answer"),
        // What is no frame ends the channel.
        std::tuple("garbage", "rpc.closed", ""), std::tuple("console", "vm.port", "")}) {
    v1::SandboxRecord record = NewVm();
    record.mutable_spec()->set_hostname(what);
    const auto created = CreateVm(record);
    ASSERT_FALSE(created.ok()) << what;
    EXPECT_EQ(created.error().reason(), reason) << what << ": " << created.error().ToString();
    EXPECT_THAT(created.error().ToString(), HasSubstr(message)) << what << Console(record);
    EXPECT_LE(std::filesystem::file_size(VmFolder(record) + "/console"), vmm::kConsoleBytes);
    EXPECT_TRUE(DestroyVm(record).ok()) << what;
  }
}

}  // namespace
}  // namespace dsec::sandbox

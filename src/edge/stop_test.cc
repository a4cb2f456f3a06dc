// SPDX-License-Identifier: Apache-2.0
#include "edge/testing/edge_fixture.h"
#include "model/lifecycle.h"

namespace dsec::edge::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class EdgeStop : public EdgeFixture {};

TEST_F(EdgeStop, RunningSandbox_LeavesNothingButItsRecord) {
  Start();
  v1::Usage usage;
  usage.set_cpu_usec(1234);
  host_->SetUsage(usage);
  const std::string id = Create("r1");
  const auto view = Delete(id);
  ASSERT_TRUE(view.ok()) << view.error().ToString();
  EXPECT_EQ(view->record().state(), v1::STATE_STOPPED);
  EXPECT_EQ(view->record().termination().cause(), model::cause::kUserStop);
  EXPECT_EQ(view->record().termination().who(), "tester");
  EXPECT_EQ(view->record().termination().fault(), v1::FAULT_NONE);
  EXPECT_EQ(Run(edge_->Stats(SandboxId(id), Soon()))->cpu_usec(), 1234u);
  EXPECT_THAT(EventTypes(id), ElementsAre("created", "starting", "running", "stopping", "ended"));
  EXPECT_THAT(host_->Things(), IsEmpty());
  CheckInvariants();
}

TEST_F(EdgeStop, Repeated_AnswersTheSameEnd) {
  Start();
  const std::string id = Create("r1");
  std::vector<std::future<Result<v1::SandboxView>>> pending;
  v1::DeleteRequest request;
  request.set_id(id);
  request.set_wait(true);
  for (int i = 0; i < 10; ++i) pending.push_back(Begin(edge_->Delete(request, Soon())));
  for (auto& one : pending) EXPECT_EQ(one.get()->record().state(), v1::STATE_STOPPED);
  Crash();
  Start();
  EXPECT_EQ(Delete(id)->record().state(), v1::STATE_STOPPED);
  EXPECT_EQ(Delete("sb-n1-01h00000000000000000000000").error().reason(), "sandbox.not_found");
  EXPECT_EQ(Delete("\xff/../x").error().reason(), "sandbox.not_found");
  CheckInvariants();
}

TEST_F(EdgeStop, DuringCreate_WinsAtEveryStep) {
  Start();
  for (uint64_t step = 1; step <= 3; ++step) {
    const uint64_t fired = fault::Fired("fake.create.step");
    ASSERT_TRUE(fault::Arm("fake.create.step=block").ok());
    auto creating = Begin(edge_->Create(CreateRequestOf(fmt::format("r{}", step)), Soon()));
    for (uint64_t pass = 1; pass < step; ++pass) {
      ASSERT_TRUE(fault::WaitFired("fake.create.step", fired + pass, milliseconds(10'000)));
      ASSERT_TRUE(fault::Arm("fake.create.step=block").ok());
    }
    ASSERT_TRUE(fault::WaitFired("fake.create.step", fired + step, milliseconds(10'000)));
    const auto live = Run(edge_->List({}, Soon()));
    ASSERT_EQ(live->records_size(), 1);
    const std::string id = live->records(0).id();
    v1::DeleteRequest request;
    request.set_id(id);
    request.set_wait(true);
    auto deleting = Begin(edge_->Delete(request, Soon()));
    // Once this one has run into its deadline, the stop is known.
    EXPECT_EQ(
        Run(edge_->Delete(request, runtime::Deadline::After(milliseconds(5)))).error().reason(),
        "delete.deadline");
    fault::DisarmAll();
    EXPECT_EQ(deleting.get()->record().termination().cause(), model::cause::kUserStop);
    const auto created = creating.get();
    // A stop that comes after the last step finds a sandbox that has run.
    if (!created.ok()) EXPECT_EQ(created.error().reason(), "sandbox.ended.user_stop");
    EXPECT_THAT(host_->Things(), IsEmpty());
    const auto again = TryCreate(CreateRequestOf(fmt::format("r{}", step)));
    ASSERT_TRUE(again.ok()) << again.error().ToString();
    EXPECT_EQ(again->view.record().id(), id);
    CheckInvariants();
  }
}

TEST_F(EdgeStop, InLine_EndsTheWait) {
  options_.admission.creates_at_once = 1;
  options_.admission.max_sandboxes = 2;
  Start();
  const uint64_t fired = fault::Fired("fake.create.step");
  ASSERT_TRUE(fault::Arm("fake.create.step=block*1").ok());
  auto first = Begin(edge_->Create(CreateRequestOf("first"), Soon()));
  ASSERT_TRUE(fault::WaitFired("fake.create.step", fired + 1, milliseconds(10'000)));
  auto turn = Begin(edge_->Create(CreateRequestOf("turn"), Soon()));
  Await([&] { return Run(edge_->Node(Soon()))->live() == 2; });
  auto patient = CreateRequestOf("room");
  patient.set_capacity_wait_ms(60'000);
  auto room = Begin(edge_->Create(patient, Soon()));
  Await([&] { return Run(edge_->List({}, Soon()))->records_size() == 3; });
  const auto records = Run(edge_->List({}, Soon()))->records();
  for (const auto& record : records) {
    if (record.request_id() == "first") continue;
    EXPECT_EQ(record.state(), v1::STATE_PENDING);
    const auto view = Delete(record.id());
    ASSERT_TRUE(view.ok()) << view.error().ToString();
    EXPECT_EQ(view->record().state(), v1::STATE_STOPPED);
    EXPECT_THAT(EventTypes(record.id()), ElementsAre("created", "stopping", "ended"));
  }
  EXPECT_EQ(turn.get().error().code(), Code::kGone);
  EXPECT_EQ(room.get().error().code(), Code::kGone);
  fault::DisarmAll();
  auto made = first.get();
  ASSERT_TRUE(made.ok());
  made->claim->Delivered();
  CheckInvariants();
}

TEST_F(EdgeStop, WithoutWait_AnswersWhenItIsOnRecord) {
  Start();
  const std::string id = Create("r1");
  host_->HoldShutdown(true);
  const auto view = Delete(id, 60'000, false);
  EXPECT_EQ(view->record().state(), v1::STATE_STOPPING);
  EXPECT_EQ(view->record().stop().cause(), model::cause::kUserStop);
  EXPECT_EQ(Exec(id, ExecOf("op", {"exit", "0"})).error().reason(), "sandbox.stopping");
  // A second one with less patience shortens the grace.
  EXPECT_EQ(Delete(id, 0)->record().state(), v1::STATE_STOPPED);
  CheckInvariants();
}

TEST_F(EdgeStop, Grace_EndsWithTheLastProcess) {
  Start();
  const std::string id = Create("r1");
  ASSERT_TRUE(Exec(id, ExecOf("op", {"serve"})).ok());
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(Delete(id, 60'000)->record().state(), v1::STATE_STOPPED);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST_F(EdgeStop, Crash_IsCarriedOnByTheNextEdge) {
  Start();
  const std::string id = Create("r1");
  host_->HoldShutdown(true);
  ASSERT_TRUE(Delete(id, 60'000, false).ok());
  Crash();
  Start();
  AwaitState(id, v1::STATE_STOPPED);
  EXPECT_EQ(Get(id).termination().cause(), model::cause::kUserStop);
  EXPECT_EQ(Get(id).termination().who(), "tester");
  CheckInvariants();
}

TEST_F(EdgeStop, StuckSandbox_IsNamedKeepsItsPlaceAndIsTriedAgain) {
  options_.admission.max_sandboxes = 2;
  Start();
  const std::string id = Create("r1");
  const std::string healthy = Create("r2");
  host_->SetStuck(id, true);
  const auto stuck = Delete(id);
  EXPECT_EQ(stuck.error().reason(), "sandbox.stuck");
  EXPECT_THAT(stuck.error().message(), ::testing::HasSubstr("state D"));
  EXPECT_EQ(Get(id).state(), v1::STATE_STOPPING);
  EXPECT_THAT(Get(id).stuck(), ::testing::HasSubstr("state D"));
  EXPECT_EQ(TryCreate(CreateRequestOf("r3")).error().reason(), "capacity.count");
  EXPECT_TRUE(Delete(healthy).ok());
  Crash();
  Start();
  EXPECT_EQ(Delete(id).error().reason(), "sandbox.stuck");
  EXPECT_EQ(Run(edge_->Node(Soon()))->live(), 1u);
  host_->SetStuck(id, false);
  const auto view = Delete(id);
  ASSERT_TRUE(view.ok()) << view.error().ToString();
  EXPECT_EQ(view->record().stuck(), "");
  EXPECT_EQ(Run(edge_->Node(Soon()))->live(), 0u);
  CheckInvariants();
}

TEST_F(EdgeStop, FailingStore_DelaysTheEndButLosesNothing) {
  Start();
  const std::string id = Create("r1");
  ASSERT_TRUE(fault::Arm("edge.store.before_write=error:ENOSPC*2").ok());
  const auto view = Delete(id);
  ASSERT_TRUE(view.ok()) << view.error().ToString();
  EXPECT_EQ(view->record().state(), v1::STATE_STOPPED);
  EXPECT_THAT(EventTypes(id), ElementsAre("created", "starting", "running", "stopping", "ended"));
  CheckInvariants();
}

TEST_F(EdgeStop, AgentDeath_IsOneInfrastructureFailure) {
  Start();
  const std::string id = Create("r1");
  host_->KillAgent(id, false);
  AwaitState(id, v1::STATE_FAILED);
  EXPECT_EQ(Get(id).termination().cause(), model::cause::kAgentDied);
  EXPECT_EQ(Get(id).termination().fault(), v1::FAULT_INFRASTRUCTURE);
  const auto call = Exec(id, ExecOf("op", {"exit", "0"}));
  EXPECT_EQ(call.error().code(), Code::kGone);
  EXPECT_EQ(call.error().reason(), "sandbox.ended.agent_died");
  CheckInvariants();
}

TEST_F(EdgeStop, OutOfMemory_IsTheWorkloadsFault) {
  Start();
  const std::string id = Create("r1");
  host_->KillAgent(id, true);
  AwaitState(id, v1::STATE_FAILED);
  EXPECT_EQ(Get(id).termination().cause(), model::cause::kOom);
  EXPECT_EQ(Get(id).termination().fault(), v1::FAULT_WORKLOAD);
  EXPECT_EQ(Get(id).termination().limit(), Get(id).spec().limits().memory_bytes());
  CheckInvariants();
}

TEST_F(EdgeStop, EntrypointEnd_StopsTheSandboxWithItsCode) {
  Start();
  const auto entrypoint = [](v1::CreateRequest& request) {
    request.mutable_spec()->add_entrypoint("exit");
    request.mutable_spec()->add_entrypoint("5");
  };
  auto request = CreateRequestOf("r1");
  entrypoint(request);
  const std::string at_once = TryCreate(request)->view.record().id();
  AwaitState(at_once, v1::STATE_STOPPED);
  EXPECT_EQ(Get(at_once).termination().cause(), model::cause::kEntrypointExit);
  EXPECT_EQ(Get(at_once).termination().exit_code(), 5);
  EXPECT_EQ(Get(at_once).termination().fault(), v1::FAULT_WORKLOAD);
  const std::string later = Create(
      "r2", [](v1::CreateRequest& request) { request.mutable_spec()->add_entrypoint("serve"); });
  Await([&] { return host_->Running(later, kEntrypointOp); });
  Crash();
  Start();
  host_->FinishExec(later, kEntrypointOp, 0);
  AwaitState(later, v1::STATE_STOPPED);
  EXPECT_EQ(Get(later).termination().fault(), v1::FAULT_NONE);
  CheckInvariants();
}

TEST_F(EdgeStop, StoppingEdge_RefusesNewWorkAndLeavesSandboxes) {
  Start();
  const std::string id = Create("r1");
  ASSERT_TRUE(Run(edge_->Stop(Soon())).ok());
  EXPECT_EQ(TryCreate(CreateRequestOf("r2")).error().reason(), "edge.stopping");
  EXPECT_EQ(Delete(id).error().reason(), "edge.stopping");
  Crash();
  EXPECT_EQ(host_->agents(), 1u);
  Start();
  EXPECT_EQ(report_.adopted, 1u);
  ASSERT_TRUE(Run(edge_->StopSandboxes(milliseconds(0), Soon())).ok());
  EXPECT_EQ(Get(id).termination().who(), "edge");
  CheckInvariants();
}

}  // namespace
}  // namespace dsec::edge::testing

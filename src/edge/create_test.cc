// SPDX-License-Identifier: Apache-2.0
#include <set>

#include "edge/testing/edge_fixture.h"
#include "model/lifecycle.h"

namespace dsec::edge::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class EdgeCreate : public EdgeFixture {};

TEST_F(EdgeCreate, NewRequest_RunsWithItsPhasesOnRecord) {
  Start();
  const std::string id = Create("r1");
  EXPECT_THAT(host_->Things(), ElementsAre("agent " + id, "cgroup s0", "scratch " + id));
  EXPECT_THAT(EventTypes(id), ElementsAre("created", "starting", "running"));
  const auto record = Get(id);
  EXPECT_TRUE(record.has_slot());
  EXPECT_GT(record.agent_pid(), 0);
  EXPECT_EQ(record.boot_id(), "boot-1");
  EXPECT_GT(record.spec().limits().memory_bytes(), 0u);
  ASSERT_GE(record.phases_size(), 2);
  EXPECT_EQ(record.phases(0).phase(), "admission");
  CheckInvariants();
}

TEST_F(EdgeCreate, SameRequestInParallel_IsOneSandbox) {
  Start();
  std::vector<std::future<Result<Created>>> pending;
  for (int i = 0; i < 20; ++i)
    pending.push_back(Begin(edge_->Create(CreateRequestOf("r1"), Soon())));
  std::set<std::string> ids;
  size_t fresh = 0;
  for (auto& one : pending) {
    auto created = one.get();
    ASSERT_TRUE(created.ok()) << created.error().ToString();
    created->claim->Delivered();
    ids.insert(created->view.record().id());
    fresh += created->view.existed() ? 0 : 1;
  }
  for (int i = 0; i < 5; ++i) ids.insert(Create("r1"));
  EXPECT_EQ(ids.size(), 1u);
  EXPECT_EQ(fresh, 1u);
  Crash();
  Start();
  ids.insert(Create("r1"));
  EXPECT_EQ(ids.size(), 1u);
  CheckInvariants();
}

TEST_F(EdgeCreate, SameRequestOtherBody_IsAConflictAlsoAfterTheEndAndARestart) {
  Start();
  const std::string id = Create("r1");
  auto other = CreateRequestOf("r1");
  other.mutable_spec()->mutable_limits()->set_pids(77);
  EXPECT_EQ(TryCreate(other).error().reason(), "create.request_id_reused");
  ASSERT_TRUE(Delete(id).ok());
  EXPECT_EQ(TryCreate(other).error().reason(), "create.request_id_reused");
  Crash();
  Start();
  EXPECT_EQ(TryCreate(other).error().code(), Code::kAlreadyExists);
}

TEST_F(EdgeCreate, RequestOfAnEndedSandbox_AnswersIt) {
  Start();
  const std::string id = Create("r1");
  ASSERT_TRUE(Delete(id).ok());
  for (int i = 0; i < 2; ++i) {
    const auto again = TryCreate(CreateRequestOf("r1"));
    ASSERT_TRUE(again.ok());
    EXPECT_TRUE(again->view.existed());
    EXPECT_EQ(again->view.record().id(), id);
    EXPECT_EQ(again->view.record().state(), v1::STATE_STOPPED);
    EXPECT_EQ(again->claim, nullptr);
    Crash();
    Start();
  }
}

TEST_F(EdgeCreate, FailedCreate_CleansUpAndFreesItsRequest) {
  Start();
  ASSERT_TRUE(fault::Arm("fake.create.step=error:EIO*1").ok());
  const auto failed = TryCreate(CreateRequestOf("r1"));
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().reason(), "fault.injected");
  v1::ListRequestAll request;
  request.add_states(v1::STATE_FAILED);
  Await([&] { return Run(edge_->List(request, Soon()))->records_size() == 1; });
  const auto record = Run(edge_->List(request, Soon()))->records(0);
  EXPECT_EQ(record.termination().cause(), model::cause::kCreateFailed);
  EXPECT_EQ(record.termination().fault(), v1::FAULT_INFRASTRUCTURE);
  EXPECT_EQ(record.termination().reason(), "fault.injected");
  EXPECT_THAT(host_->Things(), IsEmpty());
  const std::string id = Create("r1");
  EXPECT_NE(id, record.id());
  CheckInvariants();
}

TEST_F(EdgeCreate, NameInUse_IsRefusedUntilItsOwnerHasEnded) {
  Start();
  const auto named = [](v1::CreateRequest& request) { request.mutable_spec()->set_name("web"); };
  for (int round = 0; round < 20; ++round) {
    const std::string id = Create(fmt::format("a{}", round), named);
    auto second = CreateRequestOf(fmt::format("b{}", round));
    named(second);
    const auto refused = TryCreate(second);
    EXPECT_EQ(refused.error().reason(), "sandbox.name_in_use");
    EXPECT_EQ(refused.error().field(), "name");
    if (round % 5 == 4) {
      Crash();
      Start();
    }
    ASSERT_TRUE(Delete(id).ok());
  }
  CheckInvariants();
}

TEST_F(EdgeCreate, BadValues_NameTheFieldAndLeaveNothing) {
  Start();
  auto request = CreateRequestOf("");
  EXPECT_EQ(TryCreate(request).error().field(), "request_id");
  request = CreateRequestOf("r1");
  request.mutable_spec()->clear_base();
  EXPECT_EQ(TryCreate(request).error().field(), "base");
  request = CreateRequestOf("r1");
  request.set_sandbox_id("sb-other-01h00000000000000000000000");
  EXPECT_EQ(TryCreate(request).error().field(), "sandbox_id");
  request = CreateRequestOf("r1");
  request.set_project("\xff");
  EXPECT_EQ(TryCreate(request).error().field(), "project");
  request = CreateRequestOf("r1");
  request.mutable_spec()->set_backend(v1::BACKEND_MICROVM);
  EXPECT_EQ(TryCreate(request).error().reason(), "backend.unavailable");
  CheckInvariants();
}

TEST_F(EdgeCreate, FullNode_RefusesAtOnceByName) {
  options_.admission.max_sandboxes = 2;
  Start();
  const std::string first = Create("r1");
  Create("r2");
  const auto refused = TryCreate(CreateRequestOf("r3"));
  EXPECT_EQ(refused.error().code(), Code::kResourceExhausted);
  EXPECT_EQ(refused.error().reason(), "capacity.count");
  EXPECT_GT(RetryAfter(refused.error()).count(), 0);
  ASSERT_TRUE(Delete(first).ok());
  Create("r3");
  CheckInvariants();
}

TEST_F(EdgeCreate, FullNodeWithWait_IsPlacedWhenRoomComes) {
  options_.admission.max_sandboxes = 1;
  Start();
  const std::string first = Create("r1");
  auto request = CreateRequestOf("r2");
  request.set_capacity_wait_ms(20'000);
  auto waiting = Begin(edge_->Create(request, Soon()));
  auto impatient = CreateRequestOf("r3");
  impatient.set_capacity_wait_ms(1);
  EXPECT_EQ(TryCreate(impatient).error().reason(), "capacity.count");
  ASSERT_TRUE(Delete(first).ok());
  auto placed = waiting.get();
  ASSERT_TRUE(placed.ok()) << placed.error().ToString();
  placed->claim->Delivered();
  CheckInvariants();
}

TEST_F(EdgeCreate, Burst_AllBecomeReadyAndAllGo) {
  options_.admission.creates_at_once = 4;
  Start();
  for (int round = 0; round < 2; ++round) {
    std::vector<std::future<Result<Created>>> creates;
    for (int i = 0; i < 200; ++i) {
      creates.push_back(
          Begin(edge_->Create(CreateRequestOf(fmt::format("r{}-{}", round, i)), Soon())));
    }
    std::vector<std::future<Result<v1::SandboxView>>> deletes;
    for (auto& create : creates) {
      auto created = create.get();
      ASSERT_TRUE(created.ok()) << created.error().ToString();
      created->claim->Delivered();
      v1::DeleteRequest request;
      request.set_id(created->view.record().id());
      request.set_wait(true);
      deletes.push_back(Begin(edge_->Delete(request, Soon())));
    }
    for (auto& one : deletes) ASSERT_TRUE(one.get().ok());
    CheckInvariants();
  }
}

TEST_F(EdgeCreate, CallerWithoutPatience_LeavesACreateThatARepeatFinds) {
  Start();
  ASSERT_TRUE(fault::Arm("fake.create.step=block*1").ok());
  const auto late =
      Run(edge_->Create(CreateRequestOf("r1"), runtime::Deadline::After(milliseconds(5))));
  EXPECT_EQ(late.error().reason(), "create.deadline");
  fault::DisarmAll();
  Create("r1");
  EXPECT_EQ(host_->agents(), 1u);
}

TEST_F(EdgeCreate, ReplyThatNobodyTook_EndsTheSandboxAfterTheGrace) {
  Start();
  ASSERT_TRUE(fault::Arm("fake.create.step=block*1").ok());
  const auto late =
      Run(edge_->Create(CreateRequestOf("r1"), runtime::Deadline::After(milliseconds(5))));
  EXPECT_FALSE(late.ok());
  fault::DisarmAll();
  v1::ListRequestAll all;
  all.add_states(v1::STATE_RUNNING);
  Await([&] { return Run(edge_->List(all, Soon()))->records_size() == 1; });
  const std::string id = Run(edge_->List(all, Soon()))->records(0).id();
  EXPECT_GT(Get(id).claim_until_unix_ms(), 0);
  Advance(milliseconds(59'000));
  EXPECT_EQ(Get(id).state(), v1::STATE_RUNNING);
  Advance(milliseconds(2'000));
  AwaitState(id, v1::STATE_STOPPED);
  EXPECT_EQ(Get(id).termination().cause(), model::cause::kUnclaimed);
  CheckInvariants();
}

TEST_F(EdgeCreate, LostReply_IsForgivenByARepeatOrByUse) {
  Start();
  {
    auto lost = Run(edge_->Create(CreateRequestOf("r1"), Soon()));
  }
  {
    auto lost = Run(edge_->Create(CreateRequestOf("r2"), Soon()));
  }
  const std::string repeated = Create("r1");
  v1::ListRequestAll all;
  std::string used;
  const auto page = Run(edge_->List(all, Soon()));
  for (const auto& record : page->records()) {
    if (record.id() != repeated) used = record.id();
  }
  Await([&] { return Get(used).claim_until_unix_ms() > 0; });
  ASSERT_TRUE(Exec(used, ExecOf("op", {"exit", "0"})).ok());
  Crash();  // what lifted the claim is on record
  Start();
  Advance(milliseconds(600'000));
  EXPECT_EQ(Get(used).state(), v1::STATE_RUNNING);
  EXPECT_EQ(Get(repeated).state(), v1::STATE_RUNNING);
}

TEST_F(EdgeCreate, HungStep_DoesNotHoldUpOthers) {
  options_.create_timeout = milliseconds(300);
  Start();
  const uint64_t fired = fault::Fired("fake.create.step");
  ASSERT_TRUE(fault::Arm("fake.create.step=block*1").ok());
  auto hung = Begin(edge_->Create(CreateRequestOf("hung"), Soon()));
  ASSERT_TRUE(fault::WaitFired("fake.create.step", fired + 1, milliseconds(10'000)));
  for (int i = 0; i < 50; ++i) {
    const std::string id = Create(fmt::format("r{}", i));
    ASSERT_TRUE(Delete(id).ok());
  }
  EXPECT_EQ(hung.get().error().code(), Code::kDeadlineExceeded);
  // What hangs keeps its place and is tried again.
  EXPECT_EQ(Run(edge_->Node(Soon()))->live(), 1u);
  fault::DisarmAll();
  Await([&] { return Run(edge_->Node(Soon()))->live() == 0; });
  CheckInvariants();
}

}  // namespace
}  // namespace dsec::edge::testing

// SPDX-License-Identifier: Apache-2.0
#include "edge/testing/edge_fixture.h"
#include "model/lifecycle.h"

namespace dsec::edge::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;

class EdgeExec : public EdgeFixture {
 protected:
  std::unique_ptr<Attachment> Attach(const std::string& id, const std::string& op_id,
                                     OnDisconnect rule = OnDisconnect::kKill) {
    auto attached = Run(edge_->Attach(SandboxId(id), op_id, rule, Soon()));
    if (!attached.ok()) {
      ADD_FAILURE() << attached.error().ToString();
      return nullptr;
    }
    return *std::move(attached);
  }
  v1::PollRequest PollOf(const std::string& op_id, uint64_t wait_ms) {
    v1::PollRequest request;
    request.set_op_id(op_id);
    request.set_wait_ms(wait_ms);
    return request;
  }
  // An exec that runs, with its follower.
  std::unique_ptr<Attachment> StartFollowed(const std::string& id, const std::string& op_id,
                                            OnDisconnect rule = OnDisconnect::kKill) {
    auto follower = Attach(id, op_id, rule);
    const auto reply = Exec(id, ExecOf(op_id, {"serve"}), follower.get());
    EXPECT_TRUE(reply.ok() && reply->running());
    return follower;
  }
};

TEST_F(EdgeExec, ShortCommand_TakesOneCallAndTwoEvents) {
  Start();
  const std::string id = Create("r1");
  auto request = ExecOf("op", {"echo", "hi"});
  request.set_wait_ms(1'000);
  const auto reply = Exec(id, request);
  ASSERT_TRUE(reply.ok()) << reply.error().ToString();
  EXPECT_FALSE(reply->running());
  EXPECT_EQ(reply->stdout_chunks(0).data(), "hi\n");
  EXPECT_EQ(reply->result().exit_code(), 0);
  Await([&] { return EventTypes(id).size() == 5; });
  const auto events = Events(id);
  EXPECT_EQ(events[3].type(), "exec_started");
  EXPECT_EQ(events[3].op_id(), "op");
  EXPECT_EQ(events[4].type(), "exec_ended");
  EXPECT_EQ(events[4].detail(), "exited 0");
  CheckInvariants();
}

TEST_F(EdgeExec, KnownOpId_NeverRunsTwice) {
  Start();
  const std::string id = Create("r1");
  const auto request = ExecOf("op", {"serve"});
  EXPECT_FALSE(Exec(id, request)->known());
  EXPECT_TRUE(Exec(id, request)->known());
  Await([&] { return EventTypes(id).size() == 4; });
  Crash();
  Start();
  EXPECT_TRUE(Exec(id, request)->known());
  EXPECT_EQ(host_->Starts(id, "op"), 1u);
  EXPECT_EQ(Exec(id, ExecOf("op", {"other"})).error().reason(), "exec.op_id_reused");
  EXPECT_EQ(Exec(id, ExecOf("bad op", {"true"})).error().field(), "op_id");
  EXPECT_THAT(EventTypes(id),
              ElementsAre("created", "starting", "running", "exec_started", "adopted"));
}

TEST_F(EdgeExec, CallOnNoSandbox_TellsUnknownFromEnded) {
  Start();
  EXPECT_EQ(Exec("sb-n1-01h00000000000000000000000", ExecOf("op", {"exit", "0"})).error().reason(),
            "sandbox.not_found");
  const std::string id = Create("r1");
  ASSERT_TRUE(Delete(id).ok());
  const auto ended = Exec(id, ExecOf("op", {"exit", "0"}));
  EXPECT_EQ(ended.error().code(), Code::kGone);
  EXPECT_EQ(ended.error().reason(), "sandbox.ended.user_stop");
  EXPECT_EQ(Run(edge_->Attach(SandboxId(id), "op", OnDisconnect::kKill, Soon())).error().code(),
            Code::kGone);
  v1::PathRequest path;
  path.set_path("/etc");
  EXPECT_EQ(Run(edge_->StatFile(SandboxId(id), path, Soon())).error().code(), Code::kGone);
}

TEST_F(EdgeExec, Stop_TellsTheFollowerSo) {
  Start();
  const std::string id = Create("r1");
  auto follower = StartFollowed(id, "op");
  auto polling = Begin(edge_->Poll(SandboxId(id), PollOf("op", 10'000), follower.get(), Soon()));
  v1::DeleteRequest request;
  request.set_id(id);
  request.set_wait(true);
  auto deleting = Begin(edge_->Delete(request, Soon()));
  const auto end = polling.get();
  ASSERT_TRUE(end.ok()) << end.error().ToString();
  EXPECT_EQ(end->result().kind(), v1::END_KILLED);
  EXPECT_EQ(end->result().killed_by(), "stop");
  follower->Finish();
  follower.reset();
  EXPECT_TRUE(deleting.get().ok());
  CheckInvariants();
}

TEST_F(EdgeExec, Ttl_IsNeverANormalResult) {
  Start();
  const std::string id =
      Create("r1", [](v1::CreateRequest& request) { request.mutable_spec()->set_ttl_ms(10'000); });
  auto follower = StartFollowed(id, "op");
  auto polling = Begin(edge_->Poll(SandboxId(id), PollOf("op", 15'000), follower.get(), Soon()));
  Advance(milliseconds(10'000));
  const auto end = polling.get();
  ASSERT_TRUE(end.ok()) << end.error().ToString();
  EXPECT_FALSE(end->running());
  EXPECT_TRUE(end->drained());
  EXPECT_EQ(end->result().kind(), v1::END_SANDBOX_ENDED);
  EXPECT_EQ(end->result().killed_by(), "ttl");
  EXPECT_EQ(end->result().limit(), 10'000u);
  AwaitState(id, v1::STATE_STOPPED);
  // Asked again between two polls: the follower is told the same.
  const auto again = Run(edge_->Poll(SandboxId(id), PollOf("op", 0), follower.get(), Soon()));
  EXPECT_EQ(again->result().kind(), v1::END_SANDBOX_ENDED);
  const auto stranger = Run(edge_->Poll(SandboxId(id), PollOf("op", 0), nullptr, Soon()));
  EXPECT_EQ(stranger.error().reason(), "sandbox.ended.ttl");
  CheckInvariants();
}

TEST_F(EdgeExec, TtlThatWaits_LetsTheFollowedExecFinish) {
  Start();
  const std::string id = Create("r1", [](v1::CreateRequest& request) {
    request.mutable_spec()->set_ttl_ms(10'000);
    request.mutable_spec()->set_ttl_waits_for_exec(true);
    request.mutable_spec()->set_ttl_extension_ms(60'000);
  });
  auto follower = StartFollowed(id, "op");
  Advance(milliseconds(13'000));
  EXPECT_EQ(Get(id).state(), v1::STATE_RUNNING);
  host_->FinishExec(id, "op", 0);
  const auto end = Run(edge_->Poll(SandboxId(id), PollOf("op", 1'000), follower.get(), Soon()));
  EXPECT_EQ(end->result().kind(), v1::END_EXITED);
  follower->Finish();
  follower.reset();
  AwaitState(id, v1::STATE_STOPPED);
  EXPECT_EQ(Get(id).termination().cause(), model::cause::kTtl);
  CheckInvariants();
}

TEST_F(EdgeExec, AgentDeathUnderACall_IsNamed) {
  Start();
  const std::string id = Create("r1");
  auto follower = StartFollowed(id, "op");
  auto followed = Begin(edge_->Poll(SandboxId(id), PollOf("op", 15'000), follower.get(), Soon()));
  auto stranger = Begin(edge_->Poll(SandboxId(id), PollOf("op", 15'000), nullptr, Soon()));
  host_->KillAgent(id, true);
  const auto end = followed.get();
  ASSERT_TRUE(end.ok()) << end.error().ToString();
  EXPECT_EQ(end->result().kind(), v1::END_SANDBOX_ENDED);
  EXPECT_EQ(end->result().killed_by(), "oom");
  EXPECT_EQ(stranger.get().error().reason(), "sandbox.ended.oom");
}

TEST_F(EdgeExec, VanishedFollower_KillsTheExecAfterTheGrace) {
  Start();
  const std::string id = Create("r1");
  auto follower = StartFollowed(id, "op");
  ASSERT_TRUE(Exec(id,
                   [&] {
                     auto request = ExecOf("detached", {"serve"});
                     request.set_detached(true);
                     return request;
                   }())
                  .ok());
  follower.reset();
  Advance(milliseconds(4'900));
  EXPECT_TRUE(host_->Running(id, "op"));
  Await([&] {
    Advance(milliseconds(100));
    return !host_->Running(id, "op");
  });
  EXPECT_EQ(host_->KilledBy(id, "op"), "disconnect");
  EXPECT_TRUE(host_->Running(id, "detached"));
}

TEST_F(EdgeExec, FollowerThatComesBack_SavesTheExec) {
  Start();
  const std::string id = Create("r1");
  auto follower = StartFollowed(id, "op");
  follower.reset();
  Advance(milliseconds(4'000));
  follower = Attach(id, "op");
  Advance(milliseconds(100'000));
  EXPECT_TRUE(Run(edge_->Poll(SandboxId(id), PollOf("op", 0), follower.get(), Soon()))->running());
}

TEST_F(EdgeExec, KeepRule_IsTheAgentsDetached) {
  Start();
  const std::string id = Create("r1");
  auto follower = StartFollowed(id, "op", OnDisconnect::kKeep);
  follower.reset();
  Advance(milliseconds(100'000));
  EXPECT_TRUE(host_->Running(id, "op"));
  EXPECT_TRUE(Run(edge_->ListExecs(SandboxId(id), Soon()))->execs(0).detached());
  // The rule outlives this daemon.
  Crash();
  Start();
  Advance(milliseconds(100'000));
  EXPECT_TRUE(Run(edge_->ListExecs(SandboxId(id), Soon()))->execs(0).running());
}

TEST_F(EdgeExec, Restart_GivesFollowersAMinuteToComeBack) {
  Start();
  const std::string id = Create("r1");
  auto lost = StartFollowed(id, "lost");
  auto found = StartFollowed(id, "found");
  lost.reset();
  found.reset();
  Crash();
  Start();
  Advance(milliseconds(59'000));
  found = Attach(id, "found");
  EXPECT_TRUE(host_->Running(id, "lost"));
  Advance(milliseconds(2'000));
  Await([&] { return !host_->Running(id, "lost"); });
  EXPECT_EQ(host_->KilledBy(id, "lost"), "disconnect");
  EXPECT_TRUE(host_->Running(id, "found"));
}

TEST_F(EdgeExec, DetachedExecThatEndsUnseen_IsFoundByTheCheckUp) {
  Start();
  const std::string id = Create("r1");
  auto request = ExecOf("op", {"serve"});
  request.set_detached(true);
  ASSERT_TRUE(Exec(id, request).ok());
  EXPECT_EQ(Run(edge_->Get(SandboxId(id), Soon()))->execs_running(), 1u);
  host_->FinishExec(id, "op", 3);
  ASSERT_TRUE(Run(edge_->Reconcile()).ok());
  Await([&] { return EventTypes(id).back() == "exec_ended"; });
  EXPECT_EQ(Events(id).back().detail(), "exited 3");
  EXPECT_EQ(Run(edge_->Get(SandboxId(id), Soon()))->execs_running(), 0u);
  ASSERT_TRUE(Run(edge_->Reconcile()).ok());
  CheckInvariants();
}

TEST_F(EdgeExec, Idle_CallsHoldItReadsDoNot) {
  Start();
  const auto idle = [](v1::CreateRequest& request) { request.mutable_spec()->set_idle_ms(10'000); };
  const std::string used = Create("r1", idle);
  const std::string read = Create("r2", idle);
  const std::string followed = Create("r3", idle);
  auto follower = StartFollowed(followed, "op");
  v1::PathRequest path;
  path.set_path("/etc");
  for (int i = 0; i < 4; ++i) {
    Advance(milliseconds(4'000));
    ASSERT_TRUE(Run(edge_->StatFile(SandboxId(used), path, Soon())).ok());
    ASSERT_TRUE(Run(edge_->Stats(SandboxId(read), Soon())).ok());
    Get(read);
    EXPECT_GE(Get(used).last_activity_unix_ms(), Get(read).last_activity_unix_ms());
  }
  AwaitState(read, v1::STATE_STOPPED);
  EXPECT_EQ(Get(read).termination().cause(), model::cause::kIdle);
  EXPECT_EQ(Get(read).termination().limit(), 10'000u);
  EXPECT_EQ(Get(used).state(), v1::STATE_RUNNING);
  EXPECT_EQ(Get(followed).state(), v1::STATE_RUNNING);
}

TEST_F(EdgeExec, Renew_MovesTheEndAndSurvivesARestart) {
  Start();
  const std::string id =
      Create("r1", [](v1::CreateRequest& request) { request.mutable_spec()->set_ttl_ms(10'000); });
  const std::string expired =
      Create("r2", [](v1::CreateRequest& request) { request.mutable_spec()->set_ttl_ms(15'000); });
  v1::RenewRequest renew;
  renew.set_id(id);
  renew.set_ttl_ms(60'000);
  const auto renewed = Run(edge_->Renew(renew, Soon()));
  ASSERT_TRUE(renewed.ok()) << renewed.error().ToString();
  EXPECT_EQ(renewed->record().expires_unix_ms(), UnixMillis(clock_.Wall()) + 60'000);
  Advance(milliseconds(5'000));
  Crash();
  clock_.Advance(milliseconds(20'000));
  Start();
  AwaitState(expired, v1::STATE_STOPPED);
  EXPECT_EQ(Get(expired).termination().cause(), model::cause::kTtl);
  EXPECT_EQ(Get(id).state(), v1::STATE_RUNNING);
  Advance(milliseconds(36'000));
  AwaitState(id, v1::STATE_STOPPED);
  EXPECT_THAT(EventTypes(id), IsSupersetOf({"renewed", "adopted", "ended"}));
  renew.set_ttl_ms(1'000);
  EXPECT_EQ(Run(edge_->Renew(renew, Soon())).error().reason(), "sandbox.ended.ttl");
  CheckInvariants();
}

TEST_F(EdgeExec, RenewToNone_LivesOnAndBadValuesAreRefused) {
  Start();
  const std::string id =
      Create("r1", [](v1::CreateRequest& request) { request.mutable_spec()->set_ttl_ms(10'000); });
  v1::RenewRequest renew;
  renew.set_id(id);
  renew.set_ttl_ms(1'000'000'000'000'000'000);
  EXPECT_EQ(Run(edge_->Renew(renew, Soon())).error().field(), "ttl_ms");
  renew.set_ttl_ms(0);
  ASSERT_TRUE(Run(edge_->Renew(renew, Soon())).ok());
  EXPECT_EQ(Get(id).expires_unix_ms(), 0);
  Advance(milliseconds(100'000'000));
  EXPECT_EQ(Get(id).state(), v1::STATE_RUNNING);
}

}  // namespace
}  // namespace dsec::edge::testing

// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>

#include "edge/testing/edge_fixture.h"
#include "model/lifecycle.h"

namespace dsec::edge::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class EdgeRecover : public EdgeFixture {
 protected:
  // The state of everything that outlives the daemon, as it was when a thread stood at some point.
  struct Moment {
    std::string dir;
    std::unique_ptr<FakeHost> host;
  };

  ~EdgeRecover() override {
    for (const std::string& dir : old_dirs_) std::filesystem::remove_all(dir);
  }

  // Runs `action` and takes the state each time that it passes `point`.
  template <typename F>
  std::vector<Moment> MomentsOf(const std::string& point, F action) {
    std::vector<Moment> moments;
    uint64_t fired = fault::Fired(point);
    EXPECT_TRUE(fault::Arm(point + "=block").ok());
    auto done = action();
    while (done.wait_for(milliseconds(0)) != std::future_status::ready) {
      if (!fault::WaitFired(point, fired + 1, milliseconds(20))) continue;
      ++fired;
      Moment moment{fmt::format("{}-{}", dir_, moments.size()), host_->Clone()};
      std::filesystem::create_directory(moment.dir);
      for (const auto& file : std::filesystem::directory_iterator(dir_)) {
        if (file.is_regular_file()) std::filesystem::copy(file.path(), moment.dir);
      }
      moments.push_back(std::move(moment));
      EXPECT_TRUE(fault::Arm(point + "=block").ok());  // lets it go on to the next pass
    }
    fault::DisarmAll();
    (void)done.get();
    return moments;
  }

  // What the next daemon makes of a moment.
  void RestartAt(Moment moment) {
    Crash();
    old_dirs_.push_back(dir_);
    dir_ = moment.dir;
    std::filesystem::create_directory(dir_);
    host_ = std::move(moment.host);
    options_.state_dir = dir_;
    Start();
  }
  // A node without a past.
  void StartFresh() {
    RestartAt({fmt::format("{}-{}", first_dir_, old_dirs_.size()), std::make_unique<FakeHost>()});
  }

  void AwaitSettled() {
    v1::ListRequestAll all;
    all.set_include_ended(true);
    Await([&] {
      const auto page = Run(edge_->List(all, Soon()));
      return std::all_of(page->records().begin(), page->records().end(), [](const auto& record) {
        return record.state() == v1::STATE_RUNNING || model::IsTerminal(record.state());
      });
    });
  }

  std::future<Result<Created>> BeginCreate() {
    return Begin(edge_->Create(CreateRequestOf("r1"), Soon()));
  }
  std::future<Result<v1::SandboxView>> BeginDelete() {
    v1::DeleteRequest request;
    request.set_id(id_);
    request.set_wait(true);
    return Begin(edge_->Delete(request, Soon()));
  }

  std::string id_;

 private:
  const std::string first_dir_ = dir_ + "-fresh";
  std::vector<std::string> old_dirs_;
};

TEST_F(EdgeRecover, CrashAtAnyMomentOfACreate_LeavesOneSandboxOrNone) {
  size_t moments_seen = 0;
  for (const std::string point :
       {"edge.store.before_write", "edge.store.after_write", "edge.create.after_insert",
        "edge.create.before_journal", "edge.create.after_journal", "fake.create.step",
        "edge.create.before_running", "edge.create.after_running"}) {
    SCOPED_TRACE(point);
    StartFresh();
    auto moments = MomentsOf(point, [this] { return BeginCreate(); });
    EXPECT_FALSE(moments.empty());
    moments_seen += moments.size();
    for (Moment& moment : moments) {
      RestartAt(std::move(moment));
      AwaitSettled();
      CheckInvariants();
      const std::string id = Create("r1");
      CheckInvariants();
      EXPECT_EQ(Run(edge_->List({}, Soon()))->records_size(), 1);
      ASSERT_TRUE(Delete(id).ok());
      EXPECT_THAT(host_->Things(), IsEmpty());
    }
  }
  EXPECT_GE(moments_seen, 20u);
}

TEST_F(EdgeRecover, CrashAtAnyMomentOfAStop_EndsItOnce) {
  for (const std::string point :
       {"edge.store.before_write", "edge.store.after_write", "edge.stop.after_record",
        "edge.stop.before_destroy", "edge.stop.after_destroy", "edge.stop.after_end"}) {
    SCOPED_TRACE(point);
    StartFresh();
    const std::string request_id = "stop-" + point;
    id_ = Create(request_id);
    auto moments = MomentsOf(point, [this] { return BeginDelete(); });
    EXPECT_FALSE(moments.empty());
    for (Moment& moment : moments) {
      RestartAt(std::move(moment));
      AwaitSettled();
      CheckInvariants();
      EXPECT_TRUE(model::IsTerminal(Delete(id_)->record().state()));
      CheckInvariants();
      EXPECT_THAT(host_->Things(), IsEmpty());
      EXPECT_EQ(TryCreate(CreateRequestOf(request_id))->view.record().id(), id_);
    }
  }
}

TEST_F(EdgeRecover, RunningSandboxes_AreAdoptedWithTheirExecs) {
  Start();
  const std::string id = Create("r1");
  ASSERT_TRUE(Exec(id, ExecOf("op", {"serve"})).ok());
  Crash();
  Start();
  EXPECT_EQ(report_.adopted, 1u);
  EXPECT_EQ(report_.ended, 0u);
  EXPECT_THAT(EventTypes(id), Contains("adopted"));
  host_->FinishExec(id, "op", 7);
  v1::PollRequest poll;
  poll.set_op_id("op");
  EXPECT_EQ(Run(edge_->Poll(SandboxId(id), poll, nullptr, Soon()))->result().exit_code(), 7);
  host_->KillAgent(id, false);
  AwaitState(id, v1::STATE_FAILED);
  CheckInvariants();
}

TEST_F(EdgeRecover, SandboxThatDiedMeanwhile_EndsWithItsCause) {
  Start();
  const std::string id = Create("r1");
  Crash();
  host_->KillAgent(id, false);
  Start();
  AwaitState(id, v1::STATE_FAILED);
  EXPECT_EQ(report_.adopted, 0u);
  EXPECT_EQ(Get(id).termination().cause(), model::cause::kAgentDied);
  CheckInvariants();
}

TEST_F(EdgeRecover, HostRestart_LosesAllAndSaysSo) {
  Start();
  const std::string id = Create("r1");
  Reboot();
  Start();
  AwaitState(id, v1::STATE_LOST);
  EXPECT_EQ(Get(id).termination().cause(), model::cause::kHostRestarted);
  EXPECT_EQ(Get(id).termination().fault(), v1::FAULT_INFRASTRUCTURE);
  EXPECT_EQ(Exec(id, ExecOf("op", {"exit", "0"})).error().reason(), "sandbox.ended.host_restarted");
  CheckInvariants();
}

TEST_F(EdgeRecover, SilentAgent_DoesNotHoldUpTheStartAndIsAdoptedLater) {
  Start();
  const std::string silent = Create("r1");
  const std::string healthy = Create("r2");
  Crash();
  host_->SetSilent(silent, true);
  Start();
  EXPECT_EQ(report_.adopted, 1u);
  EXPECT_EQ(report_.unanswered, 1u);
  EXPECT_TRUE(Exec(healthy, ExecOf("op", {"exit", "0"})).ok());
  const auto call = Run(edge_->Exec(SandboxId(silent), ExecOf("op", {"exit", "0"}), nullptr,
                                    runtime::Deadline::After(milliseconds(20))));
  EXPECT_EQ(call.error().reason(), "sandbox.unreachable");
  auto patient =
      Begin(edge_->Exec(SandboxId(silent), ExecOf("op", {"exit", "0"}), nullptr, Soon()));
  host_->SetSilent(silent, false);
  EXPECT_TRUE(patient.get().ok());
  EXPECT_EQ(Get(silent).state(), v1::STATE_RUNNING);
  CheckInvariants();
}

TEST_F(EdgeRecover, AgentSilentForTooLong_IsGivenUp) {
  options_.adopt_patience = milliseconds(0);
  Start();
  const std::string id = Create("r1");
  Crash();
  host_->SetSilent(id, true);
  Start();
  AwaitState(id, v1::STATE_FAILED);
  EXPECT_EQ(Get(id).termination().cause(), model::cause::kAgentDied);
  CheckInvariants();
}

TEST_F(EdgeRecover, ThingsThatNobodyOwns_AreRemovedWithOneEventEach) {
  host_->Plant("cgroup s77");
  Start();
  EXPECT_EQ(report_.repairs, 1u);
  const std::string id = Create("r1");
  host_->Plant("mount /x");
  host_->Plant("scratch y");
  EXPECT_EQ(Run(edge_->Reconcile())->size(), 2u);
  EXPECT_THAT(*Run(edge_->Reconcile()), IsEmpty());
  std::vector<std::string> repaired;
  for (const v1::Event& event : Events("")) {
    if (event.type() == "repaired") repaired.push_back(event.detail());
  }
  EXPECT_THAT(repaired, ElementsAre("removed cgroup s77", "removed mount /x", "removed scratch y"));
  EXPECT_EQ(Get(id).state(), v1::STATE_RUNNING);
  CheckInvariants();
}

TEST_F(EdgeRecover, SandboxWithoutARecord_IsRemoved) {
  Start();
  Create("r1");
  Crash();
  std::filesystem::remove(dir_ + "/edge.db");
  std::filesystem::remove(dir_ + "/edge.db-wal");
  Start();
  EXPECT_EQ(report_.repairs, 1u);
  EXPECT_THAT(host_->Things(), IsEmpty());
}

TEST_F(EdgeRecover, FullDisk_IsToldOnce) {
  Start();
  const std::string id = Create("r1");
  v1::Usage usage;
  usage.set_disk_bytes(Get(id).spec().limits().disk_bytes());
  host_->SetUsage(usage);
  ASSERT_TRUE(Run(edge_->Reconcile()).ok());
  ASSERT_TRUE(Run(edge_->Reconcile()).ok());
  Await([&] { return EventTypes(id).back() == "disk_full"; });
  EXPECT_THAT(EventTypes(id), ElementsAre("created", "starting", "running", "disk_full"));
}

TEST_F(EdgeRecover, DamagedStore_IsRefusedUnlessTheHostRestarted) {
  Start();
  for (int i = 0; i < 40; ++i) Create(fmt::format("r{}", i));
  const auto damage = [&] {
    std::fstream file(dir_ + "/edge.db", std::ios::binary | std::ios::in | std::ios::out);
    file.write(std::string(512, 'x').data(), 512);
  };
  Crash();
  damage();
  runtime::Shards shards(1);
  FakeBackend backend(*host_);
  const auto refused = Edge::Open(options_, shards, {{v1::BACKEND_CONTAINER, &backend}});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().reason(), "store.corrupt");
  EXPECT_THAT(refused.error().ToString(), ::testing::HasSubstr("dsec purge"));
  EXPECT_EQ(host_->agents(), 40u);
  Reboot();
  Start();
  EXPECT_THAT(host_->Things(), IsEmpty());
  EXPECT_TRUE(std::filesystem::exists(dir_ + "/edge.db.damaged"));
  CheckInvariants();
}

TEST_F(EdgeRecover, Thousand_AreAdoptedInFiveSeconds) {
  Start();
  std::vector<std::future<Result<Created>>> creates;
  for (int i = 0; i < 1000; ++i)
    creates.push_back(Begin(edge_->Create(CreateRequestOf(fmt::format("r{}", i)), Soon())));
  for (auto& create : creates) {
    auto created = create.get();
    ASSERT_TRUE(created.ok()) << created.error().ToString();
    created->claim->Delivered();
  }
  Crash();
  const auto start = std::chrono::steady_clock::now();
  Start();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_EQ(report_.adopted, 1000u);
}

TEST_F(EdgeRecover, Retention_ForgetsTheOldestEnded) {
  options_.retention = {.ended_records = 3, .ended_age_ms = 3'600'000, .events = 1000};
  Start();
  std::vector<std::string> ids;
  for (int i = 0; i < 5; ++i) {
    ids.push_back(Create(fmt::format("r{}", i)));
    ASSERT_TRUE(Delete(ids.back()).ok());
    Advance(milliseconds(10));
  }
  ASSERT_TRUE(Run(edge_->Reconcile()).ok());
  EXPECT_EQ(Run(edge_->Get(SandboxId(ids[0]), Soon())).error().reason(), "sandbox.not_found");
  EXPECT_EQ(Get(ids[4]).state(), v1::STATE_STOPPED);
  Advance(milliseconds(3'700'000));
  ASSERT_TRUE(Run(edge_->Reconcile()).ok());
  EXPECT_EQ(Run(edge_->Get(SandboxId(ids[4]), Soon())).error().code(), Code::kNotFound);
}

}  // namespace
}  // namespace dsec::edge::testing

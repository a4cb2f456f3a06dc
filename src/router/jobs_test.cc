// SPDX-License-Identifier: Apache-2.0
// Jobs under leases, cordons and drains, on virtual time.
#include "router/jobs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "router/testing/sim_cluster.h"

namespace dsec::router {
namespace {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::SimCluster;
using testing::SimClusterOptions;
using testing::SimNode;

class JobsTest : public ::testing::Test {
 protected:
  JobsTest() {
    sim_ = std::make_unique<SimCluster>(SimClusterOptions{.nodes = 3});
    EXPECT_TRUE(sim_->RunUntilReady());
    for (size_t i = 0; i < sim_->api_count(); ++i) StartReaper(i);
  }
  ~JobsTest() override {
    for (size_t i = 0; i < reapers_.size(); ++i) KillApi(i);
    sim_.reset();
  }
  void StartReaper(size_t api) {
    auto& one = sim_->api(api);
    ReaperOptions options;
    options.metrics = &sim_->metrics();
    reapers_.push_back(
        std::make_unique<Reaper>(*one.store, sim_->world().at(one.process), *one.edge, options));
    reapers_.back()->Start();
  }
  void KillApi(size_t api) {
    sim_->world().Kill(sim_->api(api).process);
    reapers_[api].reset();
    sim_->KillApi(api);
  }
  template <typename T>
  Result<T> Run(Task<T> task) {
    return sim_->world().Await(sim_->main(), std::move(task));
  }
  static Deadline Soon() { return Deadline::After(seconds(5)); }
  Result<JobLease> Begin(const std::string& job, milliseconds grace,
                         milliseconds ttl = seconds(5)) {
    v1::JobRecord record;
    record.set_grace_ms(static_cast<uint64_t>(grace.count()));
    record.set_owner("me");
    return Run(
        BeginJob(sim_->store(), *iam::ProjectPath::Parse("root/p", "p"), job, record, ttl, Soon()));
  }
  std::string Make(const std::string& request_id, const std::string& job, bool keep = false,
                   const std::string& project = "root/p") {
    auto request = sim_->Request(request_id, project);
    (*request.mutable_spec()->mutable_labels())[std::string(kJobLabel)] = job;
    if (keep) (*request.mutable_spec()->mutable_labels())[std::string(kKeepLabel)] = "true";
    const auto made = sim_->Create(0, request);
    EXPECT_TRUE(made.ok());
    return made->record().id();
  }
  v1::SandboxRecord Get(const std::string& id) {
    const size_t api = sim_->api(0).edge != nullptr ? 0 : 1;
    auto view = sim_->world().Await(sim_->api(api).process,
                                    sim_->api(api).edge->Get(SandboxId(id), Soon()));
    EXPECT_TRUE(view.ok());
    return view->record();
  }
  bool Lives(const std::string& id) { return Get(id).ended_unix_ms() == 0; }
  size_t Keys(const std::string& prefix) {
    return Run(sim_->store().Range(store::KeyRange::Prefix(prefix), 100, Soon()))->entries.size();
  }

  std::unique_ptr<SimCluster> sim_;
  std::vector<std::unique_ptr<Reaper>> reapers_;
};

TEST_F(JobsTest, JobThatIsRenewed_Lives) {
  const auto lease = Begin("j", seconds(2));
  ASSERT_TRUE(lease.ok()) << lease.error().ToString();
  const std::string id = Make("r", "j");
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(Run(RenewJob(sim_->store(), lease->lease, Soon())).ok());
    sim_->world().RunFor(seconds(2));
  }
  EXPECT_TRUE(Lives(id));
}

TEST_F(JobsTest, ClientThatDies_LosesItsSandboxesAfterTheGraceButWhatItKept) {
  ASSERT_TRUE(Begin("j", seconds(20)).ok());
  std::vector<std::string> ids;
  for (int i = 0; i < 30; ++i) ids.push_back(Make(fmt::format("r{}", i), "j"));
  const std::string kept = Make("kept", "j", true);
  const std::string other = Make("other", "k");
  const std::string below = Make("below", "j", false, "root/p/q");
  const std::string beside = Make("beside", "j", false, "root/pq");
  sim_->world().RunFor(seconds(20));
  for (const std::string& id : ids) EXPECT_TRUE(Lives(id));
  sim_->world().RunFor(seconds(10));
  for (const std::string& id : ids) EXPECT_EQ(Get(id).termination().cause(), "job_ended");
  EXPECT_TRUE(Lives(kept));
  EXPECT_TRUE(Lives(other));
  EXPECT_TRUE(Lives(below));
  EXPECT_TRUE(Lives(beside));
  EXPECT_EQ(Keys("job/"), 0u);
}

TEST_F(JobsTest, ClientThatComesBackWithinTheGrace_KeepsAll) {
  const auto first = Begin("j", seconds(20));
  const std::string id = Make("r", "j");
  sim_->world().RunFor(seconds(15));
  EXPECT_EQ(Run(RenewJob(sim_->store(), first->lease, Soon())).error().reason(), "job.ended");
  const auto again = Begin("j", seconds(20));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(Begin("j", seconds(20)).error().reason(), "job.held");
  for (int i = 0; i < 10; ++i) {
    sim_->world().RunFor(seconds(3));
    ASSERT_TRUE(Run(RenewJob(sim_->store(), again->lease, Soon())).ok());
  }
  EXPECT_TRUE(Lives(id));
  // In order: the grace begins at once.
  ASSERT_TRUE(Run(EndJob(sim_->store(), again->lease, Soon())).ok());
  ASSERT_TRUE(Run(EndJob(sim_->store(), again->lease, Soon())).ok());
  sim_->world().RunFor(seconds(15));
  EXPECT_TRUE(Lives(id));
  sim_->world().RunFor(seconds(10));
  EXPECT_FALSE(Lives(id));
}

TEST_F(JobsTest, NodeThatIsAway_IsEndedWhenItIsBack) {
  ASSERT_TRUE(Begin("j", seconds(1)).ok());
  std::vector<std::string> ids;
  for (int i = 0; i < 12; ++i) ids.push_back(Make(fmt::format("r{}", i), "j"));
  sim_->node(0).SetLink(SimNode::Link::kRefuses);
  sim_->world().RunFor(seconds(7));
  EXPECT_EQ(Keys("job/"), 1u);
  sim_->node(0).SetLink(SimNode::Link::kUp);
  sim_->world().RunFor(seconds(10));
  for (const std::string& id : ids) EXPECT_FALSE(Lives(id));
  EXPECT_EQ(Keys("job/"), 0u);
}

TEST_F(JobsTest, ApiserverThatDiesInTheMiddle_IsFollowedByAnother) {
  ASSERT_TRUE(Begin("j", seconds(3)).ok());
  std::vector<std::string> ids;
  for (int i = 0; i < 30; ++i) ids.push_back(Make(fmt::format("r{}", i), "j"));
  const auto& ended = sim_->metrics().GetCounter("dsec_router_reaped_total", "");
  ASSERT_TRUE(sim_->world().RunUntil([&] { return ended.value() > 5; }, seconds(30)));
  KillApi(0);
  sim_->world().RunFor(seconds(20));
  for (const std::string& id : ids) EXPECT_FALSE(Lives(id));
  EXPECT_EQ(Keys("job/"), 0u);
}

TEST_F(JobsTest, BadJobs_AreRefusedWithTheField) {
  EXPECT_EQ(Begin("a/b", seconds(1)).error().field(), "job");
  EXPECT_EQ(Begin("", seconds(1)).error().reason(), "job.name");
  EXPECT_EQ(Begin("j", seconds(1), milliseconds(10)).error().field(), "ttl_ms");
  EXPECT_EQ(Begin("j", std::chrono::hours(25)).error().field(), "grace_ms");
  EXPECT_EQ(Keys("job/") + Keys("held/"), 0u);
}

TEST_F(JobsTest, Drain_EndsWhatIsLeftAtItsDeadline) {
  std::vector<std::string> there;
  for (int i = 0; i < 30; ++i) {
    const std::string id = Make(fmt::format("r{}", i), "j");
    if (NodeOf(SandboxId(id))->str() == "n00001") there.push_back(id);
  }
  ASSERT_FALSE(there.empty());
  const auto drained =
      Run(Drain(sim_->store(), "n00001", seconds(30), "me", Clock::System(), Soon()));
  ASSERT_TRUE(drained.ok()) << drained.error().ToString();
  EXPECT_EQ(drained->state(), v1::NODE_DRAINING);
  sim_->world().RunFor(seconds(1));
  for (int i = 0; i < 20; ++i)
    EXPECT_NE(NodeOf(SandboxId(Make(fmt::format("s{}", i), "j")))->str(), "n00001");
  sim_->world().RunFor(seconds(20));
  for (const std::string& id : there) EXPECT_TRUE(Lives(id));
  sim_->world().RunFor(seconds(15));
  for (const std::string& id : there) {
    EXPECT_EQ(Get(id).termination().cause(), "drained");
  }
  EXPECT_EQ(Keys("drain/"), 0u);
  EXPECT_EQ(sim_->Record("n00001").state(), v1::NODE_DRAINING);
  ASSERT_TRUE(Run(Uncordon(sim_->store(), "n00001", Soon())).ok());
  EXPECT_EQ(sim_->Record("n00001").state(), v1::NODE_JOINED);
}

TEST_F(JobsTest, Uncordon_StopsADrain) {
  std::vector<std::string> ids;
  for (int i = 0; i < 10; ++i) ids.push_back(Make(fmt::format("r{}", i), "j"));
  ASSERT_TRUE(Run(Drain(sim_->store(), "n00001", seconds(10), "me", Clock::System(), Soon())).ok());
  sim_->world().RunFor(seconds(5));
  ASSERT_TRUE(Run(Uncordon(sim_->store(), "n00001", Soon())).ok());
  sim_->world().RunFor(seconds(20));
  for (const std::string& id : ids) EXPECT_TRUE(Lives(id));
  ASSERT_TRUE(Run(Cordon(sim_->store(), "n00001", Soon())).ok());
  EXPECT_EQ(sim_->Record("n00001").state(), v1::NODE_CORDONED);
  EXPECT_EQ(Run(Cordon(sim_->store(), "zz", Soon())).error().reason(), "node.unknown");
  EXPECT_EQ(Run(Cordon(sim_->store(), "../x", Soon())).error().reason(), "node.unknown");
}

TEST_F(JobsTest, DeadNode_IsNotCordoned) {
  sim_->node(2).SetLink(SimNode::Link::kHangs);
  sim_->world().RunFor(seconds(15));
  ASSERT_EQ(sim_->Record("n00002").state(), v1::NODE_DEAD);
  EXPECT_EQ(Run(Cordon(sim_->store(), "n00002", Soon())).error().reason(), "node.dead");
  EXPECT_EQ(sim_->Record("n00002").state(), v1::NODE_DEAD);
}

}  // namespace
}  // namespace dsec::router

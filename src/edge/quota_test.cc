// SPDX-License-Identifier: Apache-2.0
// Sandboxes and the quotas of their projects: charged before they are made, given back once.
#include "edge/testing/edge_fixture.h"
#include "iam/layout.h"
#include "iam/quota_keeper.h"
#include "store/sqlite_store.h"

namespace dsec::edge {
namespace {

using iam::ProjectPath;
using iam::Resource;
using std::chrono::milliseconds;

ProjectPath Path(const std::string& text) { return ProjectPath::Parse(text, "project").value(); }

// The keeper lives on shards of its own, so that an edge can crash without it.
class EdgeQuota : public testing::EdgeFixture {
 protected:
  void SetUp() override {
    store_ =
        store::SqliteStore::Open(dir_ + "/control.db", control_.at(0), Clock::System()).value();
    for (const char* path : {"root", "root/a", "root/b"}) {
      v1::IamLedger ledger;
      if (std::string_view(path) == "root/a")
        ledger.mutable_limits()->mutable_amounts()->set_live(2);
      ASSERT_TRUE(
          runtime::BlockOn(control_.at(0), store_->Put(iam::layout::Ledger(Path(path)),
                                                       ledger.SerializeAsString(), 0, 0, Soon()))
              .ok());
    }
    NewKeeper();
    Start();
  }
  void TearDown() override {
    Crash();
    StopKeeper();
    control_.Stop();
    store_.reset();
  }
  void NewKeeper() {
    iam::QuotaOptions options;
    options.node_id = "n1";
    options.limits = [](const ProjectPath& project) -> std::optional<iam::Limits> {
      iam::Limits limits;
      if (project == Path("root/a")) limits[Resource::kLive] = 2;
      return limits;
    };
    options.freed = [this] {
      if (edge_ != nullptr) edge_->QuotaFreed();
    };
    keeper_ = std::make_unique<iam::QuotaKeeper>(*store_, control_.at(0), std::move(options));
    options_.quota = keeper_.get();
  }
  void StopKeeper() {
    (void)runtime::BlockOn(control_.at(0), keeper_->Stop());
    keeper_.reset();
  }
  static v1::CreateRequest In(const std::string& project, const std::string& request_id,
                              uint64_t wait_ms = 0) {
    v1::CreateRequest request = CreateRequestOf(request_id);
    request.set_project(project);
    request.set_capacity_wait_ms(wait_ms);
    return request;
  }
  std::string Make(const std::string& project, const std::string& request_id) {
    auto made = TryCreate(In(project, request_id));
    EXPECT_TRUE(made.ok()) << made.error().ToString();
    return made.ok() ? made->view.record().id() : "";
  }
  uint64_t Live(const std::string& project) {
    return keeper_->Used(Path(project))[Resource::kLive];
  }

  runtime::Shards control_{1};
  std::unique_ptr<store::SqliteStore> store_;
  std::unique_ptr<iam::QuotaKeeper> keeper_;
};

TEST_F(EdgeQuota, Limit_RefusesByNameAndTheEndGivesBack) {
  const std::string one = Make("root/a", "r1");
  (void)Make("root/a", "r2");
  const auto refused = TryCreate(In("root/a", "r3"));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kResourceExhausted);
  EXPECT_EQ(refused.error().reason(), "quota.live");
  (void)Make("root/b", "r3");
  EXPECT_EQ(Live("root/a"), 2u);
  EXPECT_EQ(keeper_->Used(Path("root"))[Resource::kCreating], 0u);
  ASSERT_TRUE(Delete(one).ok());
  ASSERT_TRUE(Delete(one).ok());
  EXPECT_EQ(Live("root/a"), 1u);
  (void)Make("root/a", "r3");
  EXPECT_EQ(Live("root"), 3u);
}

TEST_F(EdgeQuota, Waiting_GoesOnWhenAnotherEndsAndHoldsNoOtherProjectUp) {
  const std::string one = Make("root/a", "r1");
  (void)Make("root/a", "r2");
  auto waiting = Begin(edge_->Create(In("root/a", "r3", 20'000), Soon()));
  (void)Make("root/b", "r3");
  EXPECT_EQ(waiting.wait_for(milliseconds(0)), std::future_status::timeout);
  ASSERT_TRUE(Delete(one).ok());
  const auto made = waiting.get();
  ASSERT_TRUE(made.ok()) << made.error().ToString();
  EXPECT_EQ(Live("root/a"), 2u);
}

TEST_F(EdgeQuota, FailedCreate_GivesBack) {
  ASSERT_TRUE(fault::Arm("fake.create.step=error:EIO*1").ok());
  EXPECT_FALSE(TryCreate(In("root/a", "r1")).ok());
  Await([&] { return Live("root/a") == 0; });
  fault::DisarmAll();
  (void)Make("root/a", "r1");
  (void)Make("root/a", "r2");
}

TEST_F(EdgeQuota, Crash_CountsTheLivingAgain) {
  const std::string one = Make("root/a", "r1");
  const std::string two = Make("root/a", "r2");
  ASSERT_TRUE(Delete(two).ok());
  Crash();
  StopKeeper();
  NewKeeper();
  Start();
  ASSERT_TRUE(runtime::BlockOn(control_.at(0), keeper_->Restore()).ok());
  EXPECT_EQ(Live("root/a"), 1u);
  (void)Make("root/a", "r3");
  EXPECT_EQ(TryCreate(In("root/a", "r4")).error().reason(), "quota.live");
  ASSERT_TRUE(Delete(one).ok());
  EXPECT_EQ(Live("root/a"), 1u);
}

// What one project calls its own is no concern of another.
TEST_F(EdgeQuota, RequestIdsAndNames_AreTheProjectsOwn) {
  v1::CreateRequest request = In("", "same");
  request.mutable_spec()->set_name("same");
  // What is created may not outlive the edge, so the ids alone are kept.
  const auto create = [&](const std::string& project) {
    request.set_project(project);
    const auto made = TryCreate(request);
    EXPECT_TRUE(made.ok()) << made.error().ToString();
    return made.ok() ? made->view.record().id() : project;
  };
  const std::string one = create("root/a");
  const std::string two = create("root/b");
  const std::string three = create("");
  EXPECT_NE(one, two);
  EXPECT_NE(two, three);
  EXPECT_EQ(create(""), three);
  Crash();
  Start();
  EXPECT_EQ(create("root/a"), one);
}

}  // namespace
}  // namespace dsec::edge

// SPDX-License-Identifier: Apache-2.0
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "edge/testing/edge_fixture.h"
#include "model/lifecycle.h"

namespace dsec::edge::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class EdgeList : public EdgeFixture {
 protected:
  std::vector<std::string> Pages(v1::ListRequestAll request) {
    std::vector<std::string> ids;
    do {
      const auto page = Run(edge_->List(request, Soon()));
      if (!page.ok()) {
        ADD_FAILURE() << page.error().ToString();
        return ids;
      }
      for (const auto& record : page->records()) ids.push_back(record.id());
      request.set_page_token(page->next_page_token());
    } while (!request.page_token().empty());
    return ids;
  }
};

TEST_F(EdgeList, Filters_ApplyBeforeThePageIsCut) {
  Start();
  std::vector<std::string> odd_live;
  std::vector<std::string> all;
  for (int i = 0; i < 14; ++i) {
    const std::string id = Create(fmt::format("r{}", i), [&](v1::CreateRequest& request) {
      (*request.mutable_spec()->mutable_labels())["odd"] = i % 2 == 1 ? "yes" : "no";
      request.mutable_spec()->set_name(fmt::format("name{}", i));
      request.set_project(i < 7 ? "p1" : "p2");
    });
    all.push_back(id);
    if (i < 4) {
      ASSERT_TRUE(Delete(id).ok());
    } else if (i % 2 == 1) {
      odd_live.push_back(id);
    }
  }
  v1::ListRequestAll request;
  request.set_page_size(2);
  (*request.mutable_labels())["odd"] = "yes";
  EXPECT_THAT(Pages(request), ::testing::UnorderedElementsAreArray(odd_live));
  request.Clear();
  request.set_page_size(3);
  request.set_include_ended(true);
  EXPECT_THAT(Pages(request), ::testing::UnorderedElementsAreArray(all));
  request.Clear();
  request.add_states(v1::STATE_STOPPED);
  EXPECT_EQ(Pages(request).size(), 4u);
  request.Clear();
  request.set_name("name9");
  EXPECT_THAT(Pages(request), ElementsAre(all[9]));
  request.Clear();
  request.set_project("p2");
  EXPECT_EQ(Pages(request).size(), 7u);
}

TEST_F(EdgeList, BadPage_IsRefusedByName) {
  Start();
  v1::ListRequestAll request;
  request.set_page_size(1001);
  EXPECT_EQ(Run(edge_->List(request, Soon())).error().field(), "page_size");
  request.set_page_size(1);
  request.set_page_token("nonsense");
  EXPECT_EQ(Run(edge_->List(request, Soon())).error().field(), "page_token");
}

TEST_F(EdgeList, WhatLivesThroughout_IsSeenOnceWhileOthersComeAndGo) {
  Start();
  std::set<std::string> lasting;
  for (int i = 0; i < 120; ++i) lasting.insert(Create(fmt::format("lasting{}", i)));
  std::atomic<bool> done = false;
  std::thread churn([&] {
    for (int i = 0; !done; ++i) {
      const auto created = runtime::BlockOn(
          shards_->at(1), edge_->Create(CreateRequestOf(fmt::format("churn{}", i)), Soon()));
      if (!created.ok()) continue;
      created->claim->Delivered();
      v1::DeleteRequest request;
      request.set_id(created->view.record().id());
      request.set_wait(true);
      (void)runtime::BlockOn(shards_->at(1), edge_->Delete(request, Soon()));
    }
  });
  v1::ListRequestAll request;
  request.set_page_size(7);
  request.set_include_ended(true);
  for (int round = 0; round < 5; ++round) {
    std::map<std::string, int> seen;
    for (const std::string& id : Pages(request)) ++seen[id];
    for (const std::string& id : lasting) EXPECT_EQ(seen[id], 1) << id;
    for (const auto& [id, count] : seen) EXPECT_EQ(count, 1) << id;
  }
  done = true;
  churn.join();
}

TEST_F(EdgeList, Events_FollowASandboxToItsEnd) {
  Start();
  const std::string id = Create("r1");
  v1::EventsRequest request;
  request.set_id(id);
  request.set_after_seq(3);
  request.set_wait_ms(15'000);
  request.set_max_events(1);
  auto waiting = Begin(edge_->Events(request, Soon()));
  EXPECT_EQ(waiting.wait_for(milliseconds(5)), std::future_status::timeout);
  ASSERT_TRUE(Delete(id).ok());
  auto reply = waiting.get();
  ASSERT_TRUE(reply.ok()) << reply.error().ToString();
  ASSERT_EQ(reply->events_size(), 1);
  EXPECT_EQ(reply->events(0).state(), v1::STATE_STOPPING);
  EXPECT_EQ(reply->next_seq(), 4u);
  request.set_after_seq(4);
  reply = Run(edge_->Events(request, Soon()));
  EXPECT_EQ(reply->events(0).type(), "ended");
  EXPECT_EQ(reply->events(0).termination().cause(), model::cause::kUserStop);
  request.set_after_seq(5);
  reply = Run(edge_->Events(request, Soon()));  // nothing can come: does not wait
  EXPECT_THAT(reply->events(), IsEmpty());
  EXPECT_EQ(reply->next_seq(), 5u);
  request.set_id("sb-n1-01h00000000000000000000000");
  EXPECT_EQ(Run(edge_->Events(request, Soon())).error().reason(), "sandbox.not_found");
}

TEST_F(EdgeList, NodeEvents_CoverAllSandboxesInOneOrder) {
  Start();
  v1::EventsRequest request;
  request.set_wait_ms(15'000);
  request.set_max_events(100);
  auto waiting = Begin(edge_->Events(request, Soon()));
  const std::string a = Create("r1");
  const std::string b = Create("r2");
  EXPECT_GT(waiting.get()->events_size(), 0);
  const auto events = Events("");
  ASSERT_EQ(events.size(), 6u);
  for (size_t i = 0; i < events.size(); ++i) EXPECT_EQ(events[i].node_seq(), i + 1);
  EXPECT_EQ(events[0].sandbox_id(), a);
  EXPECT_EQ(events[5].sandbox_id(), b);
}

TEST_F(EdgeList, Node_TellsCapacityAndMechanisms) {
  options_.admission.max_sandboxes = 17;
  Start();
  Create("r1");
  const auto node = Run(edge_->Node(Soon()));
  ASSERT_TRUE(node.ok()) << node.error().ToString();
  EXPECT_EQ(node->node_id(), "n1");
  EXPECT_EQ(node->live(), 1u);
  EXPECT_EQ(node->capacity(), 17u);
  EXPECT_EQ(node->memory_total_bytes(), 16'000'000'000u / 1000 * 1024);
  ASSERT_EQ(node->capabilities_size(), 1);
  EXPECT_GT(node->cpus(), 0u);
}

// Every metric of the edge stands in docs/metrics.md, and nothing else does under its prefix.
TEST_F(EdgeList, Metrics_AreThoseOfTheReferencePage) {
  Start();
  const std::string id = Create("r1");
  ASSERT_TRUE(Exec(id, ExecOf("op", {"exit", "0"})).ok());
  options_.admission.max_sandboxes = 1;
  Crash();
  Start();
  EXPECT_FALSE(TryCreate(CreateRequestOf("r2")).ok());
  ASSERT_TRUE(Delete(id).ok());
  const auto names = [](const std::string& text, const std::regex& pattern) {
    std::set<std::string> found;
    for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it)
      found.insert((*it)[1]);
    return found;
  };
  std::ifstream file(DSEC_METRICS_PAGE);
  std::stringstream page;
  page << file.rdbuf();
  const auto documented = names(page.str(), std::regex("`(dsec_edge_[a-z_]+)"));
  const auto exported =
      names(metrics_->RenderPrometheus(), std::regex("# TYPE (dsec_edge_[a-z_]+)"));
  EXPECT_THAT(exported, ::testing::ContainerEq(documented));
}

}  // namespace
}  // namespace dsec::edge::testing

// SPDX-License-Identifier: Apache-2.0
// The real router over simulated nodes, on virtual time.
#include "router/cluster_edge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

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

class ClusterEdgeTest : public ::testing::Test {
 protected:
  void Start(SimClusterOptions options = {}) {
    sim_ = std::make_unique<SimCluster>(std::move(options));
    ASSERT_TRUE(sim_->RunUntilReady());
  }
  SimCluster& sim() { return *sim_; }
  ClusterEdge& edge(size_t api = 0) { return *sim_->api(api).edge; }
  template <typename T>
  Result<T> Run(Task<T> task, size_t api = 0) {
    return sim_->world().Await(sim_->api(api).process, std::move(task));
  }
  static Deadline In(std::chrono::nanoseconds time) { return Deadline::After(time); }
  // Starts a create and does not wait.
  std::shared_ptr<std::optional<Result<v1::SandboxView>>> Begin(
      size_t api, v1::CreateRequest request, std::chrono::nanoseconds time = seconds(60)) {
    auto result = std::make_shared<std::optional<Result<v1::SandboxView>>>();
    auto work = [](ClusterEdge& to, v1::CreateRequest one, Deadline deadline,
                   decltype(result) into) -> boost::asio::awaitable<void> {
      auto made = co_await SimCluster::CreateAndDeliver(to, std::move(one), deadline);
      into->emplace(std::move(made));
    };
    runtime::internal::StartDetached(
        sim_->world().at(sim_->api(api).process),
        work(edge(api), std::move(request), Deadline::After(time), result));
    return result;
  }
  std::string NodeOfId(const std::string& id) { return NodeOf(SandboxId(id))->str(); }
  // Live sandboxes of a request, over all nodes.
  std::vector<std::string> LiveOf(const std::string& request_id) {
    std::vector<std::string> live;
    for (size_t i = 0; i < sim_->node_count(); ++i) {
      for (const auto& [id, sandbox] : sim_->node(i).sandboxes()) {
        if (sandbox->live() && sandbox->request_key == std::string("root/p") + '\0' + request_id)
          live.push_back(id);
      }
    }
    return live;
  }
  void WaitDead(const std::string& id) {
    ASSERT_TRUE(sim_->world().RunUntil(
        [&] {
          const NodePtr node = edge().nodes().Find(id);
          return node->dead();
        },
        seconds(30)));
    sim_->world().RunFor(seconds(2));
  }

  std::unique_ptr<SimCluster> sim_;
};

TEST_F(ClusterEdgeTest, Creates_SpreadAndAreFoundAgain) {
  Start({.nodes = 5});
  std::map<std::string, int> per_node;
  std::set<std::string> ids;
  for (int i = 0; i < 200; ++i) {
    const auto made =
        sim().Create(static_cast<size_t>(i % 2), sim().Request(fmt::format("r{}", i)));
    ASSERT_TRUE(made.ok()) << made.error().ToString();
    ids.insert(made->record().id());
    ++per_node[NodeOfId(made->record().id())];
  }
  EXPECT_EQ(per_node.size(), 5u);
  for (const auto& [node, count] : per_node) EXPECT_GT(count, 25) << node;
  // All of it in order, page by page.
  std::vector<std::string> listed;
  v1::ListRequestAll request;
  request.set_page_size(33);
  do {
    const auto page = Run(edge().List(request, In(seconds(5))));
    ASSERT_TRUE(page.ok()) << page.error().ToString();
    EXPECT_LE(page->records_size(), 33);
    EXPECT_EQ(page->missing_nodes_size(), 0);
    for (const auto& record : page->records()) listed.push_back(record.id());
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  EXPECT_EQ(std::vector<std::string>(ids.begin(), ids.end()), listed);
  for (const std::string& id : ids) {
    const auto view = Run(edge(1).Get(SandboxId(id), In(seconds(5))), 1);
    ASSERT_TRUE(view.ok());
    EXPECT_EQ(view->record().id(), id);
  }
  EXPECT_EQ(*Run(edge(1).ProjectOf(SandboxId(*ids.begin())), 1), "root/p");
}

TEST_F(ClusterEdgeTest, UnknownIds_AreNotFound) {
  Start();
  const auto none = NewSandboxId(NodeId("n00000"), Clock::System());
  EXPECT_EQ(Run(edge().Get(none, In(seconds(5)))).error().reason(), "sandbox.not_found");
  const auto elsewhere = NewSandboxId(NodeId("zz"), Clock::System());
  EXPECT_EQ(Run(edge().Get(elsewhere, In(seconds(5)))).error().reason(), "sandbox.not_found");
  EXPECT_EQ(Run(edge().Get(SandboxId("x"), In(seconds(5)))).error().reason(), "sandbox.not_found");
}

TEST_F(ClusterEdgeTest, RepeatOfARequest_IsTheSameSandboxThroughAnyApiserver) {
  Start();
  const auto first = sim().Create(0, sim().Request("same"));
  ASSERT_TRUE(first.ok());
  EXPECT_FALSE(first->existed());
  const auto again = sim().Create(1, sim().Request("same"));
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->existed());
  EXPECT_EQ(again->record().id(), first->record().id());
  auto other = sim().Request("same");
  other.mutable_spec()->set_base("base:2");
  EXPECT_EQ(sim().Create(1, other).error().reason(), "create.request_id_reused");
  // Another project's request of that name is another one.
  EXPECT_TRUE(sim().Create(1, sim().Request("same", "root/q")).ok());
}

TEST_F(ClusterEdgeTest, SameRequestAtOnceThroughTwoApiservers_IsOneSandbox) {
  Start();
  for (int i = 0; i < 20; ++i) {
    const std::string id = fmt::format("r{}", i);
    auto a = Begin(0, sim().Request(id));
    auto b = Begin(1, sim().Request(id));
    auto c = Begin(0, sim().Request(id));
    ASSERT_TRUE(sim().world().RunUntil(
        [&] { return a->has_value() && b->has_value() && c->has_value(); }, seconds(20)));
    ASSERT_TRUE((*a)->ok() && (*b)->ok() && (*c)->ok());
    EXPECT_EQ((**a)->record().id(), (**b)->record().id());
    EXPECT_EQ((**a)->record().id(), (**c)->record().id());
    EXPECT_EQ(LiveOf(id).size(), 1u);
  }
}

TEST_F(ClusterEdgeTest, RefusedCreate_GoesToAnotherNode) {
  Start({.nodes = 3});
  for (size_t i = 0; i < 2; ++i) {
    sim().node(i).RefuseNext({Error(Code::kResourceExhausted, "capacity.memory", "full"),
                              Error(Code::kUnavailable, "edge.stopping", "stopping")});
  }
  for (int i = 0; i < 6; ++i) {
    const auto made = sim().Create(0, sim().Request(fmt::format("r{}", i)));
    ASSERT_TRUE(made.ok()) << made.error().ToString();
    EXPECT_EQ(LiveOf(fmt::format("r{}", i)).size(), 1u);
  }
  EXPECT_GE(sim().metrics().GetCounter("dsec_router_creates_moved_total", "").value(), 2u);
}

TEST_F(ClusterEdgeTest, AnswerThatIsLost_IsAskedForAtTheSameNode) {
  Start({.nodes = 3});
  for (size_t i = 0; i < 3; ++i) sim().node(i).LoseAnswers(2);
  const auto made = sim().Create(0, sim().Request("r"), seconds(60));
  ASSERT_TRUE(made.ok()) << made.error().ToString();
  EXPECT_TRUE(made->existed());
  EXPECT_EQ(LiveOf("r").size(), 1u);
  uint64_t creates = 0;
  for (size_t i = 0; i < 3; ++i) creates += sim().node(i).creates();
  EXPECT_EQ(creates, 1u);
}

TEST_F(ClusterEdgeTest, InvalidCreate_LeavesItsRequestFree) {
  Start({.nodes = 1});
  sim().node(0).RefuseNext({Error(Code::kInvalidArgument, "spec.too_long", "no")});
  EXPECT_EQ(sim().Create(0, sim().Request("r")).error().reason(), "spec.too_long");
  auto other = sim().Request("r");
  other.mutable_spec()->set_base("base:2");
  EXPECT_TRUE(sim().Create(1, other).ok());
}

TEST_F(ClusterEdgeTest, NodeThatDiesUnderACreate_IsLeftOnlyWhenItIsDead) {
  Start({.nodes = 4});
  std::vector<std::shared_ptr<std::optional<Result<v1::SandboxView>>>> begun;
  sim().node(1).SetLink(SimNode::Link::kHangs);
  for (int i = 0; i < 40; ++i) begun.push_back(Begin(0, sim().Request(fmt::format("r{}", i))));
  sim().world().RunFor(seconds(5));
  size_t waiting = 0;
  for (const auto& one : begun) waiting += one->has_value() ? 0 : 1;
  EXPECT_GT(waiting, 0u);
  WaitDead("n00001");
  ASSERT_TRUE(sim().world().RunUntil(
      [&] {
        return std::all_of(begun.begin(), begun.end(), [](auto& r) { return r->has_value(); });
      },
      seconds(30)));
  sim().node(1).LoseAll();
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE((*begun[static_cast<size_t>(i)])->ok())
        << (*begun[static_cast<size_t>(i)])->error().ToString();
    EXPECT_EQ(LiveOf(fmt::format("r{}", i)).size(), 1u);
  }
}

TEST_F(ClusterEdgeTest, ApiserverThatDiesAfterItsRecord_IsFollowedToTheSameNode) {
  Start({.nodes = 4});
  auto begun = Begin(0, sim().Request("r"));
  // The record is written, the node is at work.
  ASSERT_TRUE(sim().world().RunUntil([&] { return LiveOf("r").size() == 1; }, seconds(5)));
  sim().KillApi(0);
  const auto made = sim().Create(1, sim().Request("r"));
  ASSERT_TRUE(made.ok()) << made.error().ToString();
  EXPECT_TRUE(made->existed());
  EXPECT_EQ(LiveOf("r"), std::vector<std::string>{made->record().id()});
}

TEST_F(ClusterEdgeTest, CreateThatNobodyHeardOf_EndsAfterItsGrace) {
  Start({.nodes = 2});
  auto begun = Begin(0, sim().Request("r"));
  ASSERT_TRUE(sim().world().RunUntil([&] { return LiveOf("r").size() == 1; }, seconds(5)));
  sim().world().RunFor(milliseconds(200));
  begun.reset();
  const auto other = Begin(0, sim().Request("r2"));
  ASSERT_TRUE(sim().world().RunUntil([&] { return LiveOf("r2").size() == 1; }, seconds(5)));
  sim().KillApi(0);
  sim().world().RunFor(seconds(70));
  EXPECT_EQ(LiveOf("r").size(), 1u);
  EXPECT_EQ(LiveOf("r2").size(), 0u);
}

TEST_F(ClusterEdgeTest, DeleteByRequest_WinsWheneverItComes) {
  SimClusterOptions options;
  options.nodes = 3;
  options.node.create_time = milliseconds(500);
  Start(options);
  // Before the create.
  ASSERT_TRUE(Run(edge(1).DeleteByRequest("root/p", "before", "me", In(seconds(5))), 1).ok());
  EXPECT_EQ(sim().Create(0, sim().Request("before")).error().reason(), "create.deleted");
  // At any moment of it.
  for (int i = 0; i < 60; ++i) {
    const std::string id = fmt::format("r{}", i);
    auto begun = Begin(0, sim().Request(id));
    sim().world().RunFor(milliseconds(10 * i));
    ASSERT_TRUE(Run(edge(1).DeleteByRequest("root/p", id, "me", In(seconds(5))), 1).ok());
    ASSERT_TRUE(sim().world().RunUntil([&] { return begun->has_value(); }, seconds(5)));
    sim().world().RunFor(seconds(1));
    EXPECT_EQ(LiveOf(id).size(), 0u) << i;
    // Made and told before the delete, or never.
    if (!(*begun)->ok()) {
      EXPECT_THAT(std::string((*begun)->error().reason()),
                  ::testing::AnyOf("create.deleted", "sandbox.ended.user_stop"));
    }
    EXPECT_EQ(sim().Create(0, sim().Request(id)).error().reason(), "create.deleted");
  }
}

TEST_F(ClusterEdgeTest, LostSandbox_HasOneEndAndIsNeverReplaced) {
  Start({.nodes = 4});
  std::vector<std::string> lost;
  for (int i = 0; i < 40; ++i) {
    auto request = sim().Request(fmt::format("r{}", i));
    (*request.mutable_spec()->mutable_labels())["k"] = "v";
    const auto made = sim().Create(0, request);
    ASSERT_TRUE(made.ok());
    if (NodeOfId(made->record().id()) == "n00002") lost.push_back(made->record().id());
  }
  ASSERT_FALSE(lost.empty());
  sim().world().RunFor(seconds(3));
  // One that no mirror has yet.
  const auto young = NewSandboxId(NodeId("n00002"), Clock::System());
  sim().node(2).SetLink(SimNode::Link::kHangs);
  WaitDead("n00002");
  const auto check = [&](size_t api) {
    for (const std::string& text : lost) {
      const SandboxId id(text);
      const auto view = Run(edge(api).Get(id, In(seconds(5))), api);
      ASSERT_TRUE(view.ok()) << view.error().ToString();
      EXPECT_EQ(view->record().state(), v1::STATE_LOST);
      EXPECT_EQ(view->record().project(), "root/p");
      EXPECT_EQ(view->record().spec().labels().at("k"), "v");
      EXPECT_EQ(view->record().termination().cause(), "node_lost");
      EXPECT_EQ(view->record().termination().fault(), v1::FAULT_INFRASTRUCTURE);
      v1::EventsRequest events;
      events.set_id(text);
      const auto told = Run(edge(api).Events(events, In(seconds(5))), api);
      ASSERT_TRUE(told.ok());
      ASSERT_EQ(told->events_size(), 1);
      EXPECT_EQ(told->events(0).type(), "ended");
      EXPECT_EQ(told->events(0).seq(), 3u);
      EXPECT_EQ(told->events(0).termination().cause(), "node_lost");
      events.set_after_seq(told->next_seq());
      EXPECT_EQ(Run(edge(api).Events(events, In(seconds(5))), api)->events_size(), 0);
      const auto call = Run(edge(api).StatFile(id, v1::PathRequest(), In(seconds(5))), api);
      EXPECT_EQ(call.error().code(), Code::kGone);
      EXPECT_EQ(call.error().reason(), "sandbox.ended.node_lost");
      v1::DeleteRequest request;
      request.set_id(text);
      const auto deleted = Run(edge(api).Delete(request, In(seconds(5))), api);
      ASSERT_TRUE(deleted.ok());
      EXPECT_EQ(deleted->record().termination().cause(), "node_lost");
    }
    EXPECT_EQ(
        Run(edge(api).StatFile(young, v1::PathRequest(), In(seconds(5))), api).error().reason(),
        "sandbox.ended.node_lost");
    v1::ListRequestAll list;
    list.set_include_ended(true);
    list.set_page_size(1000);
    const auto page = Run(edge(api).List(list, In(seconds(5))), api);
    ASSERT_TRUE(page.ok());
    EXPECT_EQ(page->missing_nodes_size(), 0);
    std::set<std::string> ended;
    for (const auto& record : page->records()) {
      if (record.state() == v1::STATE_LOST) ended.insert(record.id());
    }
    EXPECT_EQ(ended, std::set<std::string>(lost.begin(), lost.end()));
  };
  check(0);
  // The request that made one is answered by its end, not by another sandbox.
  const size_t before = sim().node(0).live() + sim().node(1).live() + sim().node(3).live();
  for (int i = 0; i < 40; ++i) {
    auto request = sim().Request(fmt::format("r{}", i));
    (*request.mutable_spec()->mutable_labels())["k"] = "v";
    EXPECT_TRUE(sim().Create(1, request).ok());
  }
  EXPECT_EQ(sim().node(0).live() + sim().node(1).live() + sim().node(3).live(), before);
  // It comes back: what it had stays lost, and it takes new ones.
  sim().node(2).SetLink(SimNode::Link::kUp);
  sim().Rejoin("n00002");
  sim().world().RunFor(seconds(5));
  EXPECT_EQ(sim().node(2).live(), 0u);
  check(1);
  bool taken = false;
  for (int i = 0; i < 20; ++i) {
    const auto made = sim().Create(0, sim().Request(fmt::format("s{}", i)));
    ASSERT_TRUE(made.ok());
    taken |= NodeOfId(made->record().id()) == "n00002";
    const auto view = Run(edge().Get(SandboxId(made->record().id()), In(seconds(5))));
    EXPECT_EQ(view->record().state(), v1::STATE_RUNNING);
  }
  EXPECT_TRUE(taken);
}

TEST_F(ClusterEdgeTest, NodeThatIsCordonedOrDraining_GetsNothingNew) {
  Start({.nodes = 3});
  auto record = sim().Record("n00000");
  record.set_state(v1::NODE_CORDONED);
  sim().PutRecord(record);
  record = sim().Record("n00001");
  record.set_state(v1::NODE_DRAINING);
  sim().PutRecord(record);
  sim().world().RunFor(milliseconds(100));
  for (int i = 0; i < 20; ++i) {
    const auto made = sim().Create(0, sim().Request(fmt::format("r{}", i)));
    ASSERT_TRUE(made.ok());
    EXPECT_EQ(NodeOfId(made->record().id()), "n00002");
  }
}

TEST_F(ClusterEdgeTest, FullCluster_RefusesOrLetsWait) {
  SimClusterOptions options;
  options.nodes = 2;
  options.node.capacity = 5;
  Start(options);
  std::vector<std::string> ids;
  for (int i = 0; i < 10; ++i) {
    const auto made = sim().Create(0, sim().Request(fmt::format("r{}", i)));
    ASSERT_TRUE(made.ok()) << i << made.error().ToString();
    ids.push_back(made->record().id());
  }
  const auto refused = sim().Create(0, sim().Request("more"));
  EXPECT_EQ(refused.error().code(), Code::kResourceExhausted);
  // A repeat of one that was made is answered all the same.
  EXPECT_TRUE(sim().Create(1, sim().Request("r3")).ok());
  auto request = sim().Request("patient");
  request.set_capacity_wait_ms(20'000);
  auto begun = Begin(0, request);
  sim().world().RunFor(seconds(5));
  EXPECT_FALSE(begun->has_value());
  v1::DeleteRequest gone;
  gone.set_id(ids[0]);
  ASSERT_TRUE(Run(edge(1).Delete(gone, In(seconds(5))), 1).ok());
  ASSERT_TRUE(sim().world().RunUntil([&] { return begun->has_value(); }, seconds(4)));
  EXPECT_TRUE((*begun)->ok()) << (*begun)->error().ToString();
  // Nothing comes free: the last refusal, when the time is over.
  request.set_request_id("too_patient");
  request.set_capacity_wait_ms(3'000);
  begun = Begin(0, request);
  sim().world().RunFor(milliseconds(2'900));
  EXPECT_FALSE(begun->has_value());
  sim().world().RunFor(milliseconds(500));
  ASSERT_TRUE(begun->has_value());
  EXPECT_EQ((*begun)->error().code(), Code::kResourceExhausted);
}

TEST_F(ClusterEdgeTest, WithoutAnyWatcher_CreatesGoOnAndItIsSaid) {
  Start({.nodes = 4, .watchers = 1});
  EXPECT_FALSE(edge().load().without_watcher());
  sim().KillWatcher(0);
  sim().world().RunFor(seconds(10));
  EXPECT_TRUE(edge().load().without_watcher());
  std::map<std::string, int> per_node;
  for (int i = 0; i < 100; ++i) {
    const auto made = sim().Create(0, sim().Request(fmt::format("r{}", i)));
    ASSERT_TRUE(made.ok());
    ++per_node[NodeOfId(made->record().id())];
  }
  EXPECT_EQ(per_node.size(), 4u);
  sim().AddWatcher();
  sim().world().RunFor(seconds(10));
  EXPECT_FALSE(edge().load().without_watcher());
}

TEST_F(ClusterEdgeTest, ListOverANodeThatDoesNotAnswer_NamesItAndGoesOn) {
  Start({.nodes = 5});
  for (int i = 0; i < 50; ++i)
    ASSERT_TRUE(sim().Create(0, sim().Request(fmt::format("r{}", i))).ok());
  sim().node(2).SetLink(SimNode::Link::kHangs);
  std::set<std::string> nodes;
  std::set<std::string> missing;
  v1::ListRequestAll request;
  request.set_page_size(7);
  do {
    const auto page = Run(edge().List(request, In(seconds(20))));
    ASSERT_TRUE(page.ok()) << page.error().ToString();
    for (const auto& record : page->records()) nodes.insert(NodeOfId(record.id()));
    for (const auto& node : page->missing_nodes()) missing.insert(node);
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  EXPECT_EQ(nodes, (std::set<std::string>{"n00000", "n00001", "n00003", "n00004"}));
  EXPECT_EQ(missing, std::set<std::string>{"n00002"});
  request.set_page_token("nonsense");
  EXPECT_EQ(Run(edge().List(request, In(seconds(5)))).error().reason(), "list.page_token");
  request.clear_page_token();
  request.set_page_size(1001);
  EXPECT_EQ(Run(edge().List(request, In(seconds(5)))).error().reason(), "list.page_size");
}

TEST_F(ClusterEdgeTest, StoreAway_StopsNothingThatRuns) {
  Start({.nodes = 3});
  const auto made = sim().Create(0, sim().Request("r"));
  ASSERT_TRUE(made.ok());
  sim().api(0).store->SetAway(true);
  sim().world().RunFor(seconds(30));
  EXPECT_TRUE(Run(edge().Get(SandboxId(made->record().id()), In(seconds(5)))).ok());
  EXPECT_TRUE(Run(edge().List(v1::ListRequestAll(), In(seconds(5)))).ok());
  const auto refused = sim().Create(0, sim().Request("s"), seconds(5));
  EXPECT_EQ(refused.error().code(), Code::kUnavailable);
  sim().api(0).store->SetAway(false);
  sim().world().RunFor(seconds(5));
  EXPECT_TRUE(sim().Create(0, sim().Request("s")).ok());
  EXPECT_EQ(LiveOf("s").size(), 1u);
}

TEST_F(ClusterEdgeTest, RecordWhoseAnswerWasLost_IsTheOwn) {
  Start({.nodes = 3});
  for (int i = 0; i < 5; ++i) {
    sim().api(0).store->LoseAnswers(2);
    const auto made = sim().Create(0, sim().Request(fmt::format("r{}", i)));
    ASSERT_TRUE(made.ok()) << made.error().ToString();
    EXPECT_FALSE(made->existed());
    EXPECT_EQ(LiveOf(fmt::format("r{}", i)).size(), 1u);
  }
}

TEST_F(ClusterEdgeTest, EventsOfAll_GoOnWhereTheCursorStands) {
  Start({.nodes = 3});
  std::set<std::string> made;
  for (int i = 0; i < 30; ++i)
    made.insert(sim().Create(0, sim().Request(fmt::format("r{}", i)))->record().id());
  v1::EventsRequest request;
  request.set_max_events(7);
  std::map<std::string, std::vector<uint64_t>> seen;
  while (true) {
    const auto reply = Run(edge().Events(request, In(seconds(10))));
    ASSERT_TRUE(reply.ok()) << reply.error().ToString();
    if (reply->events_size() == 0) break;
    for (const auto& event : reply->events()) seen[event.sandbox_id()].push_back(event.seq());
    request.set_cursor(reply->next_cursor());
  }
  EXPECT_EQ(seen.size(), made.size());
  for (const auto& [id, seqs] : seen) EXPECT_EQ(seqs, (std::vector<uint64_t>{1, 2})) << id;
  // A wait ends with the first event of any node.
  request.set_wait_ms(20'000);
  auto waiting = std::make_shared<std::optional<Result<v1::EventsReply>>>();
  auto wait = [](ClusterEdge& to, v1::EventsRequest one,
                 decltype(waiting) into) -> boost::asio::awaitable<void> {
    auto reply = co_await to.Events(std::move(one), Deadline::After(seconds(30)));
    into->emplace(std::move(reply));
  };
  runtime::internal::StartDetached(sim().world().at(sim().api(0).process),
                                   wait(edge(), request, waiting));
  sim().world().RunFor(seconds(3));
  EXPECT_FALSE(waiting->has_value());
  ASSERT_TRUE(sim().Create(1, sim().Request("late")).ok());
  ASSERT_TRUE(sim().world().RunUntil([&] { return waiting->has_value(); }, seconds(1)));
  EXPECT_GT((**waiting)->events_size(), 0);
  request.set_cursor("n1=x");
  EXPECT_EQ(Run(edge().Events(request, In(seconds(5)))).error().reason(), "events.cursor");
}

TEST_F(ClusterEdgeTest, FollowerGoesToTheNodeOfItsSandbox) {
  Start({.nodes = 2});
  const auto made = sim().Create(0, sim().Request("r"));
  const SandboxId id(made->record().id());
  auto follower = Run(edge().Attach(id, "op", edge::OnDisconnect::kKill, In(seconds(5))));
  ASSERT_TRUE(follower.ok());
  const auto reply = Run(edge().Exec(id, v1::ExecRequest(), follower->get(), In(seconds(5))));
  EXPECT_TRUE(reply->known());
  EXPECT_FALSE(Run(edge().Exec(id, v1::ExecRequest(), nullptr, In(seconds(5))))->known());
}

TEST_F(ClusterEdgeTest, ProjectWithAThousandCreates_DoesNotHoldUpAnother) {
  SimClusterOptions options;
  options.nodes = 4;
  options.node.create_time = milliseconds(100);
  options.change = [](ClusterOptions& change) { change.creates_at_once = 10; };
  Start(options);
  std::vector<std::shared_ptr<std::optional<Result<v1::SandboxView>>>> many;
  for (int i = 0; i < 1'000; ++i)
    many.push_back(Begin(0, sim().Request(fmt::format("r{}", i), "root/big")));
  sim().world().RunFor(milliseconds(300));
  auto few = Begin(0, sim().Request("one", "root/small"));
  ASSERT_TRUE(sim().world().RunUntil([&] { return few->has_value(); }, seconds(1)));
  EXPECT_TRUE((*few)->ok());
  size_t done = 0;
  for (const auto& one : many) done += one->has_value() ? 1 : 0;
  EXPECT_LT(done, 200u);
}

TEST_F(ClusterEdgeTest, NodeInfo_IsTheSum) {
  SimClusterOptions options;
  options.nodes = 3;
  options.node.capacity = 100;
  Start(options);
  for (int i = 0; i < 9; ++i)
    ASSERT_TRUE(sim().Create(0, sim().Request(fmt::format("r{}", i))).ok());
  sim().world().RunFor(seconds(3));
  const auto info = Run(edge().Node(In(seconds(1))));
  EXPECT_EQ(info->node_id(), "sim");
  EXPECT_EQ(info->live(), 9u);
  EXPECT_EQ(info->capacity(), 300u);
}

}  // namespace
}  // namespace dsec::router

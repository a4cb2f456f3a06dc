// SPDX-License-Identifier: Apache-2.0
// Watchers over nodes that only answer probes, on virtual time. Each watcher is a process that can
// be stopped, killed and cut off.
#include "watcher/service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/id.h"
#include "cluster/node_record.h"
#include "runtime/testing/virtual_time.h"
#include "store/testing/memory_store.h"
#include "watcher/layout.h"

namespace dsec::watcher {
namespace {

using runtime::Deadline;
using runtime::Task;
using runtime::testing::VirtualNow;
using runtime::testing::World;
using std::chrono::milliseconds;
using std::chrono::seconds;

// The nodes, as every watcher's probes find them.
struct Nodes {
  std::set<std::string> down;                // dead or paused: nobody gets an answer
  std::map<std::string, milliseconds> slow;  // takes so long for each answer
  std::map<std::string, std::vector<std::string>> sandboxes;
  std::set<std::string> fencing;  // serve nobody yet
  uint64_t probes = 0;
};

// One watcher's way to them.
class TestProbe final : public NodeProbe {
 public:
  explicit TestProbe(Nodes& nodes) : nodes_(nodes) {}
  bool cut = false;
  std::set<std::string> unreachable;

  Task<Seen> Probe(v1::NodeRecord node, uint64_t place, Deadline deadline) override {
    ++nodes_.probes;
    const std::string id = node.node_id();
    auto slept = co_await runtime::SleepUntil(Deadline::After(milliseconds(3)));
    if (!slept.ok()) co_return std::move(slept).error();
    if (const auto slow = nodes_.slow.find(id); slow != nodes_.slow.end()) {
      slept = co_await runtime::SleepUntil(Deadline::After(slow->second));
      if (!slept.ok()) co_return std::move(slept).error();
    }
    // A node that was stopped answers what has piled up when it goes on.
    while (cut || nodes_.down.contains(id) || unreachable.contains(id)) {
      slept = co_await runtime::SleepUntil(deadline.Sooner(Deadline::After(milliseconds(10))));
      if (!slept.ok()) co_return std::move(slept).error();
      if (deadline.Expired())
        co_return Error(Code::kDeadlineExceeded, "deadline.exceeded", "no answer");
    }
    if (nodes_.fencing.contains(id))
      co_return Error(Code::kUnavailable, "edge.fencing", "ends what it had");
    Seen seen;
    seen.info.set_live(nodes_.sandboxes[id].size());
    seen.info.set_capacity(100);
    seen.next = 1;
    if (place == 0) {
      seen.whole = true;
      for (const std::string& sandbox : nodes_.sandboxes[id]) {
        v1::LostSandbox lost;
        lost.set_id(sandbox);
        lost.set_last_event_seq(3);
        lost.set_created_unix_ms(1);
        seen.changed.push_back(std::move(lost));
      }
    }
    co_return seen;
  }

 private:
  Nodes& nodes_;
};

// A store as one watcher reaches it. `before_commit` is called with each commit of it.
class TestStore final : public store::Store {
 public:
  explicit TestStore(store::Store& of) : of_(of) {}
  bool cut = false;
  // false: it hangs for `hang`, then goes on.
  std::function<bool(const std::vector<store::Write>&)> before_commit;
  milliseconds hang = milliseconds::max();

  Task<std::optional<store::Entry>> Get(std::string key, Deadline deadline) override {
    if (cut) co_return co_await Away<std::optional<store::Entry>>(deadline);
    co_return co_await of_.Get(std::move(key), deadline);
  }
  Task<store::Page> Range(store::KeyRange range, uint32_t limit, Deadline deadline) override {
    if (cut) co_return co_await Away<store::Page>(deadline);
    co_return co_await of_.Range(std::move(range), limit, deadline);
  }
  Task<store::Revision> Commit(std::vector<store::Condition> conditions,
                               std::vector<store::Write> writes, Deadline deadline) override {
    if (cut) co_return co_await Away<store::Revision>(deadline);
    if (before_commit && !before_commit(writes)) {
      auto slept = co_await runtime::SleepUntil(
          hang == milliseconds::max() ? Deadline::Never() : Deadline::After(hang));
      if (!slept.ok()) co_return std::move(slept).error();
    }
    co_return co_await of_.Commit(std::move(conditions), std::move(writes), deadline);
  }
  Task<store::LeaseId> Grant(milliseconds ttl, Deadline deadline) override {
    if (cut) co_return co_await Away<store::LeaseId>(deadline);
    co_return co_await of_.Grant(ttl, deadline);
  }
  Task<void> KeepAlive(store::LeaseId lease, Deadline deadline) override {
    if (cut) co_return co_await Away<void>(deadline);
    co_return co_await of_.KeepAlive(lease, deadline);
  }
  Task<void> Revoke(store::LeaseId lease, Deadline deadline) override {
    if (cut) co_return co_await Away<void>(deadline);
    co_return co_await of_.Revoke(lease, deadline);
  }
  Task<store::Changes> Watch(store::KeyRange range, store::Revision after,
                             Deadline deadline) override {
    if (cut) co_return co_await Away<store::Changes>(deadline);
    co_return co_await of_.Watch(std::move(range), after, deadline);
  }

 private:
  template <typename T>
  Task<T> Away(Deadline deadline) {
    auto slept = co_await runtime::SleepUntil(deadline);
    if (!slept.ok()) co_return std::move(slept).error();
    co_return Error(Code::kDeadlineExceeded, "deadline.exceeded", "cut off");
  }
  store::Store& of_;
};

class WatcherServiceTest : public ::testing::Test {
 protected:
  struct One {
    World::Process process = 0;
    std::unique_ptr<TestStore> store;
    std::unique_ptr<TestProbe> probe;
    std::unique_ptr<Watcher> watcher;
  };

  WatcherServiceTest() : main_(world_.Add()) {}
  ~WatcherServiceTest() override {
    for (size_t i = 0; i < watchers_.size(); ++i) Kill(i);
  }

  void AddNodes(int count) {
    for (int i = 0; i < count; ++i) {
      v1::NodeRecord record;
      record.set_node_id(fmt::format("n{:03}", i));
      record.set_address("127.0.0.1:1");
      record.set_epoch(1);
      record.set_state(v1::NODE_JOINED);
      record.set_backends(2);
      record.set_capacity(100);
      Put(record);
    }
  }
  void Put(const v1::NodeRecord& record) {
    const auto value = cluster::EncodeNodeRecord(record);
    ASSERT_TRUE(value.ok()) << value.error().ToString();
    const auto put = world_.Await(main_, store_.Put(cluster::NodeKey(record.node_id()), *value,
                                                    std::nullopt, 0, Deadline::Never()));
    ASSERT_TRUE(put.ok());
  }
  v1::NodeRecord Node(const std::string& id) {
    const auto entry = world_.Await(main_, store_.Get(cluster::NodeKey(id), Deadline::Never()));
    return *cluster::ParseNodeRecord((*entry)->value);
  }
  One& AddWatcher(const std::string& id) {
    auto one = std::make_unique<One>();
    one->process = world_.Add();
    one->store = std::make_unique<TestStore>(store_);
    one->probe = std::make_unique<TestProbe>(nodes_);
    WatcherOptions options;
    options.id = id;
    options.address = "127.0.0.1:2";
    options.metrics = &metrics_;
    one->watcher = std::make_unique<Watcher>(*one->store, world_.at(one->process), *one->probe,
                                             std::move(options));
    one->watcher->Start();
    watchers_.push_back(std::move(one));
    return *watchers_.back();
  }
  void Kill(size_t index) {
    world_.Kill(watchers_[index]->process);
    watchers_[index]->watcher.reset();
  }
  Watcher::Status StatusOf(const One& one) {
    return *world_.Await(one.process, one.watcher->GetStatus());
  }
  int Dead() {
    int dead = 0;
    const auto page = world_.Await(
        main_, store_.Range(store::KeyRange::Prefix("node/"), 1000, Deadline::Never()));
    for (const auto& entry : page->entries)
      dead += cluster::ParseNodeRecord(entry.value)->state() == v1::NODE_DEAD ? 1 : 0;
    return dead;
  }
  std::vector<store::Entry> Lost() {
    return world_
        .Await(main_, store_.Range(store::KeyRange::Prefix("lost/"), 1000, Deadline::Never()))
        ->entries;
  }
  size_t Leaders() {
    size_t leaders = 0;
    for (const auto& one : watchers_) {
      if (one->watcher != nullptr && StatusOf(*one).leads) ++leaders;
    }
    return leaders;
  }
  void FillNode(const std::string& id, int count) {
    for (int i = 0; i < count; ++i)
      nodes_.sandboxes[id].push_back(NewSandboxId(NodeId(id), Clock::System()).str());
  }

  World world_;
  const World::Process main_;
  metrics::Registry metrics_;
  Nodes nodes_;
  store::testing::MemoryStore store_{{.latency = milliseconds(2)}};
  std::vector<std::unique_ptr<One>> watchers_;
};

TEST_F(WatcherServiceTest, DeadNode_IsDeclaredWithinTenSecondsAndLeavesItsSandboxes) {
  AddNodes(5);
  FillNode("n002", 2'345);
  AddWatcher("w1");
  AddWatcher("w2");
  world_.RunFor(seconds(20));
  EXPECT_EQ(Leaders(), 1u);
  EXPECT_EQ(Dead(), 0);
  const MonoTime died = VirtualNow();
  nodes_.down.insert("n002");
  ASSERT_TRUE(world_.RunUntil(
      [&] { return metrics_.GetCounter("dsec_watcher_deaths_total", "").value() > 0; },
      seconds(20)));
  EXPECT_LE(VirtualNow() - died, seconds(10));
  EXPECT_GE(VirtualNow() - died, seconds(7));
  const auto record = Node("n002");
  EXPECT_EQ(record.state(), v1::NODE_DEAD);
  EXPECT_EQ(record.epoch(), 2u);
  const auto lost = Lost();
  ASSERT_EQ(lost.size(), 3u);
  std::set<std::string> ids;
  v1::LostPart first;
  ASSERT_TRUE(first.ParseFromString(lost[0].value));
  EXPECT_EQ(lost[0].key, layout::LostPart("n002", 1, 0));
  EXPECT_EQ(first.parts(), 3u);
  for (const auto& entry : lost) {
    v1::LostPart part;
    ASSERT_TRUE(part.ParseFromString(entry.value));
    for (const auto& sandbox : part.sandboxes()) ids.insert(sandbox.id());
  }
  EXPECT_EQ(
      ids, std::set<std::string>(nodes_.sandboxes["n002"].begin(), nodes_.sandboxes["n002"].end()));
  world_.RunFor(seconds(30));
  EXPECT_EQ(Dead(), 1);
}

TEST_F(WatcherServiceTest, NodePausedForSevenSeconds_IsNotDead) {
  AddNodes(5);
  AddWatcher("w1");
  world_.RunFor(seconds(10));
  for (int i = 0; i < 5; ++i) {
    nodes_.down.insert("n001");
    world_.RunFor(milliseconds(6'800 + 50 * i));
    EXPECT_EQ(StatusOf(*watchers_[0]).suspect, 1u);
    nodes_.down.clear();
    world_.RunFor(seconds(5));
    EXPECT_EQ(StatusOf(*watchers_[0]).suspect, 0u);
  }
  EXPECT_EQ(Dead(), 0);
}

TEST_F(WatcherServiceTest, NodeThatTakesSecondsForEachAnswer_IsNotDead) {
  AddNodes(5);
  AddWatcher("w1");
  world_.RunFor(seconds(10));
  nodes_.slow["n001"] = milliseconds(5'000);
  world_.RunFor(seconds(120));
  EXPECT_EQ(Dead(), 0);
  EXPECT_EQ(StatusOf(*watchers_[0]).suspect, 0u);
}

TEST_F(WatcherServiceTest, WatcherThatReachesNoNode_KillsNone) {
  AddNodes(6);
  AddWatcher("w1");
  world_.RunFor(seconds(10));
  ASSERT_TRUE(StatusOf(*watchers_[0]).leads);
  watchers_[0]->probe->cut = true;
  world_.RunFor(seconds(60));
  EXPECT_EQ(Dead(), 0);
  EXPECT_EQ(StatusOf(*watchers_[0]).suspect, 6u);
}

TEST_F(WatcherServiceTest, WatcherThatReachesFew_KillsNone) {
  AddNodes(6);
  AddWatcher("w1");
  world_.RunFor(seconds(10));
  watchers_[0]->probe->unreachable = {"n000", "n001", "n002"};
  world_.RunFor(seconds(60));
  EXPECT_EQ(Dead(), 0);
}

TEST_F(WatcherServiceTest, LeaderCutOffFromOneNode_IsOutvoted) {
  AddNodes(6);
  AddWatcher("w1");
  world_.RunFor(seconds(5));
  AddWatcher("w2");
  world_.RunFor(seconds(5));
  ASSERT_TRUE(StatusOf(*watchers_[0]).leads);
  watchers_[0]->probe->unreachable = {"n003"};
  world_.RunFor(seconds(60));
  EXPECT_EQ(Dead(), 0);
  // With both cut off from it the node is as good as dead.
  watchers_[1]->probe->unreachable = {"n003"};
  world_.RunFor(seconds(12));
  EXPECT_EQ(Dead(), 1);
}

TEST_F(WatcherServiceTest, WatcherThatSlept_KillsNone) {
  AddNodes(6);
  AddWatcher("w1");
  world_.RunFor(seconds(10));
  for (int i = 0; i < 10; ++i) {
    // The whole machine stands still, nodes included; they are a little later than the watcher.
    world_.Pause(watchers_[0]->process);
    for (int n = 0; n < 2; ++n) nodes_.down.insert(fmt::format("n{:03}", n));
    world_.RunFor(milliseconds(8'000 + 1'300 * i));
    world_.Continue(watchers_[0]->process);
    world_.RunFor(milliseconds(6'500));
    nodes_.down.clear();
    world_.RunFor(seconds(3));
  }
  EXPECT_EQ(Dead(), 0);
  EXPECT_GE(metrics_.GetCounter("dsec_watcher_slept_total", "").value(), 10u);
}

TEST_F(WatcherServiceTest, LeaderThatIsStopped_LosesTheLead) {
  AddNodes(6);
  AddWatcher("w1");
  world_.RunFor(seconds(5));
  AddWatcher("w2");
  world_.RunFor(seconds(5));
  ASSERT_TRUE(StatusOf(*watchers_[0]).leads);
  world_.Pause(watchers_[0]->process);
  world_.RunFor(seconds(7));
  EXPECT_TRUE(StatusOf(*watchers_[1]).leads);
  nodes_.down.insert("n001");
  world_.RunFor(seconds(10));
  EXPECT_EQ(Dead(), 1);
  world_.Continue(watchers_[0]->process);
  world_.RunFor(seconds(20));
  EXPECT_EQ(Leaders(), 1u);
  EXPECT_TRUE(StatusOf(*watchers_[1]).leads);
  EXPECT_EQ(Dead(), 1);
}

TEST_F(WatcherServiceTest, LeaderThatStopsInOrder_IsFollowedAtOnce) {
  AddNodes(3);
  AddWatcher("w1");
  world_.RunFor(seconds(5));
  AddWatcher("w2");
  world_.RunFor(seconds(5));
  ASSERT_TRUE(world_.Await(watchers_[0]->process, watchers_[0]->watcher->Stop()).ok());
  Kill(0);
  world_.RunFor(seconds(1));
  EXPECT_TRUE(StatusOf(*watchers_[1]).leads);
}

TEST_F(WatcherServiceTest, LeaderThatDiesBeforeTheDeath_LeavesPartsThatTheNextOverwrites) {
  AddNodes(5);
  FillNode("n001", 1'500);
  One& first = AddWatcher("w1");
  world_.RunFor(seconds(5));
  bool reached = false;
  first.store->before_commit = [&](const std::vector<store::Write>& writes) {
    const bool death = writes.size() == 2 && writes[0].key == "node/n001";
    reached |= death;
    return !death;
  };
  AddWatcher("w2");
  world_.RunFor(seconds(5));
  nodes_.down.insert("n001");
  ASSERT_TRUE(world_.RunUntil([&] { return reached; }, seconds(12)));
  Kill(0);
  EXPECT_EQ(Node("n001").state(), v1::NODE_JOINED);
  auto lost = Lost();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].key, layout::LostPart("n001", 1, 1));
  world_.RunFor(seconds(12));
  EXPECT_EQ(Node("n001").state(), v1::NODE_DEAD);
  EXPECT_EQ(Node("n001").epoch(), 2u);
  lost = Lost();
  ASSERT_EQ(lost.size(), 2u);
  size_t count = 0;
  for (const auto& entry : lost) {
    v1::LostPart part;
    ASSERT_TRUE(part.ParseFromString(entry.value));
    count += static_cast<size_t>(part.sandboxes_size());
  }
  EXPECT_EQ(count, 1'500u);
}

TEST_F(WatcherServiceTest, NodeThatAnswersBeforeTheLastStep_Lives) {
  AddNodes(5);
  FillNode("n001", 1'500);
  One& one = AddWatcher("w1");
  world_.RunFor(seconds(5));
  nodes_.down.insert("n001");
  bool woke = false;
  one.store->hang = seconds(3);
  one.store->before_commit = [&](const std::vector<store::Write>& writes) {
    // While the parts are on their way the node answers again.
    if (writes[0].key.starts_with("lost/n001/") && !woke) {
      woke = true;
      nodes_.down.clear();
      return false;  // and this write takes a while
    }
    return true;
  };
  world_.RunFor(seconds(30));
  EXPECT_TRUE(woke);
  EXPECT_EQ(Dead(), 0);
}

TEST_F(WatcherServiceTest, OldLeader_CannotCommitADeath) {
  AddNodes(5);
  FillNode("n001", 10);
  One& first = AddWatcher("w1");
  world_.RunFor(seconds(5));
  AddWatcher("w2");
  world_.RunFor(seconds(5));
  // The first leader stops right before its commit, and goes on when another leads and the node
  // has come back as a new one.
  nodes_.down.insert("n001");
  bool stopped = false;
  first.store->before_commit = [&](const std::vector<store::Write>& writes) {
    if (!stopped && writes.size() == 2 && writes[0].key == "node/n001") {
      stopped = true;
      world_.Pause(first.process);
    }
    return true;
  };
  ASSERT_TRUE(world_.RunUntil([&] { return stopped; }, seconds(12)));
  world_.RunFor(seconds(20));
  ASSERT_EQ(Node("n001").epoch(), 2u);
  v1::NodeRecord back = Node("n001");
  back.set_state(v1::NODE_JOINED);
  Put(back);
  nodes_.down.clear();
  world_.Continue(first.process);
  world_.RunFor(seconds(20));
  EXPECT_EQ(Node("n001").epoch(), 2u);
  EXPECT_EQ(Node("n001").state(), v1::NODE_JOINED);
  EXPECT_EQ(metrics_.GetCounter("dsec_watcher_deaths_total", "").value(), 1u);
  EXPECT_EQ(Leaders(), 1u);
}

TEST_F(WatcherServiceTest, LeaderThatNeverSawTheNode_LeavesItToOneThatDid) {
  AddNodes(5);
  FillNode("n001", 20);
  One& first = AddWatcher("w1");
  world_.RunFor(seconds(5));
  nodes_.down.insert("n001");
  world_.RunFor(seconds(1));
  AddWatcher("w2");
  world_.Pause(first.process);
  ASSERT_TRUE(world_.RunUntil([&] { return StatusOf(*watchers_[1]).leads; }, seconds(7)));
  world_.Continue(first.process);
  world_.RunFor(seconds(20));
  EXPECT_EQ(Node("n001").state(), v1::NODE_DEAD);
  ASSERT_EQ(Lost().size(), 1u);
  v1::LostPart part;
  ASSERT_TRUE(part.ParseFromString(Lost()[0].value));
  EXPECT_EQ(part.sandboxes_size(), 20);
  EXPECT_EQ(Leaders(), 1u);
}

TEST_F(WatcherServiceTest, NodeThatNobodyEverSaw_IsDeclaredAllTheSame) {
  AddNodes(5);
  nodes_.down.insert("n001");
  AddWatcher("w1");
  AddWatcher("w2");
  world_.RunFor(seconds(20));
  EXPECT_EQ(Node("n001").state(), v1::NODE_DEAD);
}

TEST_F(WatcherServiceTest, StoreAway_NothingDiesAndAllGoesOnAfter) {
  AddNodes(5);
  One& one = AddWatcher("w1");
  world_.RunFor(seconds(5));
  one.store->cut = true;
  nodes_.down.insert("n001");
  world_.RunFor(seconds(30));
  EXPECT_EQ(Dead(), 0);
  one.store->cut = false;
  world_.RunFor(seconds(25));
  EXPECT_EQ(Dead(), 1);
}

TEST_F(WatcherServiceTest, HalfOfAllNodesAtOnce_NeedAnOperatorsWord) {
  AddNodes(4);
  FillNode("n000", 3);
  One& one = AddWatcher("w1");
  world_.RunFor(seconds(5));
  const auto early = world_.Await(one.process, one.watcher->DeclareDead("n000", "operator"));
  EXPECT_EQ(early.error().reason(), "node.answers");
  nodes_.down = {"n000", "n001"};
  world_.RunFor(seconds(30));
  EXPECT_EQ(Dead(), 0);
  const auto unknown = world_.Await(one.process, one.watcher->DeclareDead("n9", "operator"));
  EXPECT_EQ(unknown.error().reason(), "node.unknown");
  const auto declared = world_.Await(one.process, one.watcher->DeclareDead("n000", "operator"));
  ASSERT_TRUE(declared.ok()) << declared.error().ToString();
  EXPECT_EQ(Node("n000").state(), v1::NODE_DEAD);
  v1::LostPart part;
  ASSERT_EQ(Lost().size(), 1u);
  ASSERT_TRUE(part.ParseFromString(Lost()[0].value));
  EXPECT_EQ(part.sandboxes_size(), 3);
  EXPECT_EQ(part.declared_by(), "operator");
}

TEST_F(WatcherServiceTest, NodeThatEndsWhatItHad_IsHeard) {
  AddNodes(5);
  AddWatcher("w1");
  world_.RunFor(seconds(10));
  nodes_.fencing.insert("n001");
  world_.RunFor(seconds(60));
  EXPECT_EQ(Dead(), 0);
  EXPECT_EQ(StatusOf(*watchers_[0]).suspect, 0u);
}

// The leader has never reached the node: it knows nothing of what lives there.
TEST_F(WatcherServiceTest, LeaderThatNeverSawTheNode_LeavesItToOneThatHas) {
  AddNodes(5);
  FillNode("n002", 7);
  AddWatcher("w2").probe->unreachable = {"n002"};
  world_.RunFor(seconds(4));
  AddWatcher("w1");
  world_.RunFor(seconds(20));
  ASSERT_TRUE(StatusOf(*watchers_[0]).leads);
  EXPECT_EQ(Dead(), 0);
  nodes_.down.insert("n002");
  ASSERT_TRUE(world_.RunUntil([&] { return Dead() == 1; }, seconds(40)));
  v1::LostPart part;
  ASSERT_EQ(Lost().size(), 1u);
  ASSERT_TRUE(part.ParseFromString(Lost()[0].value));
  EXPECT_EQ(part.sandboxes_size(), 7);
  EXPECT_FALSE(part.unknown());
  EXPECT_EQ(part.declared_by(), "w1");
}

TEST_F(WatcherServiceTest, NodeThatNobodyHasSeen_DiesUnknown) {
  AddNodes(5);
  nodes_.down.insert("n002");
  AddWatcher("w1");
  ASSERT_TRUE(world_.RunUntil([&] { return Dead() == 1; }, seconds(40)));
  v1::LostPart part;
  ASSERT_TRUE(part.ParseFromString(Lost()[0].value));
  EXPECT_TRUE(part.unknown());
}

TEST_F(WatcherServiceTest, Stop_EndsLongPollsAndHandsTheLeadOver) {
  AddNodes(5);
  One& one = AddWatcher("w1");
  world_.RunFor(seconds(10));
  AddWatcher("w2");
  world_.RunFor(seconds(5));
  ASSERT_TRUE(StatusOf(one).leads);
  bool answered = false;
  v1::SnapshotRequest request;
  request.set_run("");
  request.set_after_version(0);
  auto first = world_.Await(one.process, one.watcher->Snapshot(request, Deadline::Never()));
  ASSERT_TRUE(first.ok());
  runtime::internal::StartDetached(
      world_.at(one.process),
      [](Watcher& watcher, std::string run, bool& done) -> boost::asio::awaitable<void> {
        v1::SnapshotRequest poll;
        poll.set_run(run);
        poll.set_after_version(1'000'000);
        poll.set_wait_ms(60'000);
        // Beyond what there is: begins anew and has all at once; then there is nothing new.
        auto all = co_await watcher.Snapshot(poll, Deadline::Never());
        poll.set_after_version(all->version());
        (void)co_await watcher.Snapshot(poll, Deadline::Never());
        done = true;
      }(*one.watcher, first->run(), answered));
  const MonoTime begun = VirtualNow();
  ASSERT_TRUE(world_.Await(one.process, one.watcher->Stop()).ok());
  EXPECT_LT(VirtualNow() - begun, seconds(8));
  EXPECT_TRUE(answered);
  world_.RunFor(seconds(3));
  EXPECT_TRUE(StatusOf(*watchers_[1]).leads);
}

TEST_F(WatcherServiceTest, Stop_EndsWithoutTheStoreAndWithADeadNodesQuotaToGiveBack) {
  AddNodes(5);
  One& one = AddWatcher("w1");
  world_.RunFor(seconds(10));
  nodes_.down.insert("n001");
  one.store->before_commit = [](const std::vector<store::Write>&) { return true; };
  ASSERT_TRUE(world_.RunUntil([&] { return Dead() == 1; }, seconds(40)));
  one.store->cut = true;
  world_.RunFor(seconds(1));
  const MonoTime begun = VirtualNow();
  (void)world_.Await(one.process, one.watcher->Stop());
  EXPECT_LT(VirtualNow() - begun, seconds(20));
}

TEST_F(WatcherServiceTest, Snapshot_TellsChangesOnceAndAllToANewcomer) {
  AddNodes(3);
  FillNode("n000", 7);
  One& one = AddWatcher("w1");
  world_.RunFor(seconds(5));
  v1::SnapshotRequest request;
  auto reply = world_.Await(one.process, one.watcher->Snapshot(request, Deadline::Never()));
  ASSERT_TRUE(reply.ok());
  EXPECT_TRUE(reply->reset());
  ASSERT_EQ(reply->nodes_size(), 3);
  for (const auto& node : reply->nodes()) {
    EXPECT_TRUE(node.measured());
    EXPECT_EQ(node.live(), node.node_id() == "n000" ? 7u : 0u);
    EXPECT_LE(node.age_ms(), 1'500u);
  }
  request.set_run(reply->run());
  request.set_after_version(reply->version());
  nodes_.down.insert("n001");
  world_.RunFor(seconds(4));
  reply = world_.Await(one.process, one.watcher->Snapshot(request, Deadline::Never()));
  EXPECT_FALSE(reply->reset());
  bool suspect = false;
  for (const auto& node : reply->nodes()) suspect |= node.node_id() == "n001" && node.suspect();
  EXPECT_TRUE(suspect);
  const auto removed =
      world_.Await(main_, store_.Commit({}, {{"node/n002", std::nullopt, 0}}, Deadline::Never()));
  ASSERT_TRUE(removed.ok());
  world_.RunFor(seconds(1));
  request.set_after_version(reply->version());
  reply = world_.Await(one.process, one.watcher->Snapshot(request, Deadline::Never()));
  EXPECT_THAT(reply->gone(), ::testing::ElementsAre("n002"));
}

TEST_F(WatcherServiceTest, Snapshot_OfManyNodesComesInBoundedReplies) {
  AddNodes(4'500);
  One& one = AddWatcher("w1");
  world_.RunFor(seconds(5));
  v1::SnapshotRequest request;
  std::set<std::string> seen;
  for (int i = 0; i < 3; ++i) {
    const auto reply = world_.Await(one.process, one.watcher->Snapshot(request, Deadline::Never()));
    ASSERT_TRUE(reply.ok());
    EXPECT_LE(reply->nodes_size(), 2'000);
    EXPECT_EQ(reply->more(), i < 2);
    for (const auto& node : reply->nodes()) seen.insert(node.node_id());
    request.set_run(reply->run());
    request.set_after_version(reply->version());
  }
  EXPECT_EQ(seen.size(), 4'500u);
}

}  // namespace
}  // namespace dsec::watcher

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "placement/choose.h"
#include "placement/testing/herd.h"

namespace dsec::placement {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

MonoTime At(milliseconds since) { return MonoTime(seconds(1000) + since); }

NodeView Node(std::string id, uint32_t used = 0, uint32_t limit = 100) {
  NodeView node;
  node.id = std::move(id);
  node.backends = kContainer | kFnCall;
  node.capacity.sandboxes = limit;
  node.used.sandboxes = used;
  return node;
}

class PlacementTest : public ::testing::Test {
 protected:
  void Use(std::vector<NodeView> nodes, uint32_t instances = 1) {
    overlay_.emplace(Overlay::Options(),
                     std::make_shared<Snapshot>(std::move(nodes), At({}), instances));
  }
  Decision Place(const Request& request) { return Choose(*overlay_, request, options_, rng_); }
  std::map<std::string, uint32_t> ById(const Decision& decision) const {
    std::map<std::string, uint32_t> out;
    for (const Placed& placed : decision.placed)
      out[overlay_->snapshot().node(placed.node).id] += placed.count;
    return out;
  }
  static uint32_t Refused(const Decision& decision, Refusal why) {
    return decision.refused[static_cast<size_t>(why)];
  }

  std::optional<Overlay> overlay_;
  Options options_;
  Rng rng_{7};
};

TEST_F(PlacementTest, LeastLoaded_ByTheFullestResource) {
  NodeView roomy = Node("roomy", 10);
  NodeView full_memory = Node("full-memory", 1);
  full_memory.capacity.memory_bytes = roomy.capacity.memory_bytes = 100;
  full_memory.used.memory_bytes = 90;
  Use({full_memory, roomy, Node("busy", 50)});
  Request request;
  request.each.memory_bytes = 1;
  EXPECT_THAT(ById(Place(request)), ElementsAre(Pair("roomy", 1)));
}

TEST_F(PlacementTest, Filters_SayWhyNothingFits) {
  NodeView cordoned = Node("cordoned");
  cordoned.state = NodeState::kCordoned;
  NodeView other = Node("other");
  other.backends = kMicroVm;
  NodeView cloud = Node("cloud");
  cloud.cloud = true;
  NodeView owned = Node("owned");
  owned.owner = "someone";
  NodeView label = Node("label");
  label.labels = {{"gpu", "none"}};
  Use({cordoned, other, cloud, owned, label, Node("full", 100), Node("said-no")});
  Request request;
  request.labels = {{"gpu", "mig"}};
  Decision decision = Place(request);
  EXPECT_EQ(decision.missing, 1u);
  EXPECT_EQ(Refused(decision, Refusal::kState), 2u);
  EXPECT_EQ(Refused(decision, Refusal::kPool), 1u);
  EXPECT_EQ(Refused(decision, Refusal::kOwner), 1u);
  EXPECT_EQ(Refused(decision, Refusal::kLabels), 3u);
  request.labels.clear();
  request.excluded = {4, 6};
  decision = Place(request);
  EXPECT_EQ(decision.missing, 1u);
  EXPECT_EQ(Refused(decision, Refusal::kExcluded), 2u);
  EXPECT_EQ(Refused(decision, Refusal::kFull), 1u);
}

TEST_F(PlacementTest, Batch_FillsUnevenNodesToOneLevel) {
  Use({Node("a", 40), Node("b", 10), Node("c", 0)});
  Request request;
  request.count = 40;
  EXPECT_THAT(ById(Place(request)), ElementsAre(Pair("b", 15), Pair("c", 25)));
  request.count = 260;
  const Decision decision = Place(request);
  EXPECT_THAT(ById(decision), ElementsAre(Pair("a", 60), Pair("b", 90), Pair("c", 100)));
  EXPECT_EQ(decision.missing, 10u);
}

TEST_F(PlacementTest, MemoryAndDisk_BoundABatch) {
  NodeView small = Node("small");
  small.capacity.memory_bytes = 1000;
  small.used.memory_bytes = 300;
  NodeView tight = Node("tight");
  tight.capacity.disk_bytes = 50;
  Use({small, tight});
  Request request;
  request.count = 20;
  request.each.memory_bytes = 100;
  request.each.disk_bytes = 10;
  const Decision decision = Place(request);
  EXPECT_THAT(ById(decision), ElementsAre(Pair("small", 7), Pair("tight", 5)));
  EXPECT_EQ(decision.missing, 8u);
}

TEST_F(PlacementTest, OwnPlacements_CountUntilASnapshotShowsThem) {
  Use({Node("a"), Node("b", 3)});
  Request request;
  std::map<std::string, uint32_t> sum;
  for (int i = 0; i < 9; ++i) {
    const Decision decision = Place(request);
    ASSERT_EQ(decision.placed.size(), 1u);
    overlay_->Add(decision.placed[0].node, request.each, At(milliseconds(10)));
    for (const auto& [id, count] : ById(decision)) sum[id] += count;
  }
  EXPECT_EQ(sum["a"] + sum["b"], 9u);
  EXPECT_GE(sum["a"], 6u);  // evened out at 6 and 6
  EXPECT_EQ(overlay_->pending(), 9u);
  // One that was taken too soon to show them, then one that does.
  overlay_->Use(
      std::make_shared<Snapshot>(std::vector{Node("b", 3), Node("a")}, At(milliseconds(100)), 1),
      At(milliseconds(200)));
  EXPECT_EQ(overlay_->on(1).sandboxes, sum["a"]);
  overlay_->Use(std::make_shared<Snapshot>(std::vector{Node("b", 6)}, At(milliseconds(600)), 1),
                At(milliseconds(700)));
  EXPECT_EQ(overlay_->pending(), 0u);
  EXPECT_EQ(overlay_->on(0).sandboxes, 0u);
}

TEST_F(PlacementTest, FailedPlacement_CountsNoMore) {
  Use({Node("a")});
  const auto first = overlay_->Add(0, {1, 10, 20}, At({}));
  const auto second = overlay_->Add(0, {1, 1, 2}, At({}));
  overlay_->Fail(first);
  overlay_->Fail(first);
  overlay_->Fail(second + 1);
  EXPECT_EQ(overlay_->on(0).sandboxes, 1u);
  EXPECT_EQ(overlay_->on(0).memory_bytes, 1u);
  // A watcher that is down: the same old snapshot, but what was placed long ago is forgotten.
  overlay_->Use(std::make_shared<Snapshot>(std::vector{Node("a")}, At({}), 1), At(seconds(31)));
  EXPECT_EQ(overlay_->pending(), 0u);
}

TEST_F(PlacementTest, CloudPool_TakesItsShareAboveTheThreshold) {
  NodeView cloud = Node("cloud", 0, 1000);
  cloud.cloud = true;
  Request request;
  request.count = 10;
  request.in_cloud_set = true;
  Use({Node("a", 80), cloud});
  EXPECT_THAT(ById(Place(request)), ElementsAre(Pair("a", 10)));  // at the threshold, not above
  Use({Node("a", 81, 100), Node("b", 8'100, 10'000), cloud});
  request.count = 1'000;
  const auto shared = ById(Place(request));
  EXPECT_GT(shared.at("cloud"), 400u);
  EXPECT_LT(shared.at("cloud"), 600u);
  request.in_cloud_set = false;
  EXPECT_EQ(ById(Place(request)).count("cloud"), 0u);
  // All else is full.
  Use({Node("a", 100), cloud});
  EXPECT_EQ(Place(request).missing, 1'000u);
  request.in_cloud_set = true;
  EXPECT_THAT(ById(Place(request)), ElementsAre(Pair("cloud", 1'000)));
}

TEST_F(PlacementTest, Isolation_KeepsProjectsOnNodesOfTheirOwn) {
  NodeView mine = Node("mine", 99);
  mine.owner = "p";
  NodeView theirs = Node("theirs");
  theirs.owner = "q";
  Use({mine, theirs, Node("shared", 5), Node("empty")});
  Request request;
  request.project = "p";
  request.isolate = true;
  EXPECT_THAT(ById(Place(request)), ElementsAre(Pair("mine", 1)));
  request.count = 3;
  EXPECT_THAT(ById(Place(request)), ElementsAre(Pair("empty", 2), Pair("mine", 1)));
  request.isolate = false;
  request.count = 300;
  EXPECT_THAT(ById(Place(request)), UnorderedElementsAre(Pair("empty", 100), Pair("shared", 95)));
}

TEST_F(PlacementTest, Decision_IsAFunctionOfItsArguments) {
  std::vector<NodeView> nodes;
  for (int i = 0; i < 500; ++i) nodes.push_back(Node(fmt::format("n{}", i), i % 40));
  Use(nodes);
  Request request;
  request.count = 20;
  Rng one(3);
  Rng two(3);
  const auto first = ById(Choose(*overlay_, request, options_, one));
  EXPECT_EQ(first, ById(Choose(*overlay_, request, options_, two)));
}

// Whatever the cluster and the request: nothing beyond what fits, nothing lost, nothing on a node
// that refuses.
TEST_F(PlacementTest, RandomRequests_KeepTheRules) {
  Rng rng(11);
  for (int round = 0; round < 2'000; ++round) {
    std::vector<NodeView> nodes;
    const size_t size = rng.Below(40);
    for (size_t i = 0; i < size; ++i) {
      NodeView node = Node(fmt::format("n{}", rng.Below(60)), static_cast<uint32_t>(rng.Below(12)),
                           static_cast<uint32_t>(rng.Below(12)));
      node.state = static_cast<NodeState>(rng.Below(2));
      node.cloud = rng.Below(4) == 0;
      if (rng.Below(3) == 0) node.owner = "p";
      node.capacity.memory_bytes = rng.Below(3) * 20;
      node.used.memory_bytes = rng.Below(30);
      nodes.push_back(std::move(node));
    }
    Use(std::move(nodes), static_cast<uint32_t>(1 + rng.Below(4)));
    const Snapshot& snapshot = overlay_->snapshot();
    for (size_t i = 0; i < snapshot.size(); ++i) {
      if (rng.Below(3) == 0) overlay_->Add(i, {1, rng.Below(5), 0}, At({}));
    }
    Request request;
    request.count = static_cast<uint32_t>(1 + rng.Below(80));
    request.each.memory_bytes = rng.Below(6);
    request.in_cloud_set = rng.Below(2) == 0;
    request.isolate = rng.Below(2) == 0;
    request.project = "p";
    const Decision decision = Place(request);
    uint32_t placed = decision.missing;
    for (const Placed& here : decision.placed) {
      const NodeView& node = snapshot.node(here.node);
      placed += here.count;
      EXPECT_EQ(node.state, NodeState::kReady);
      EXPECT_LE(node.used.sandboxes + overlay_->on(here.node).sandboxes + here.count,
                node.capacity.sandboxes);
      if (node.capacity.memory_bytes > 0) {
        EXPECT_LE(node.used.memory_bytes + overlay_->on(here.node).memory_bytes +
                      here.count * request.each.memory_bytes,
                  node.capacity.memory_bytes);
      }
      EXPECT_TRUE(node.owner.empty() || request.isolate);
      EXPECT_TRUE(!node.cloud || request.in_cloud_set);
    }
    EXPECT_EQ(placed, request.count);
  }
}

// Four instances, none of which sees what the others place within a second.
TEST(Herd, BurstOverStaleSnapshots_StaysEven) {
  for (const bool batches : {true, false}) {
    testing::HerdOptions options;
    options.batches = batches;
    const testing::HerdResult result = testing::RunHerd(options);
    EXPECT_EQ(result.placed, 32'000u);
    EXPECT_LE(result.imbalance, 1.05) << "batches " << batches;
    options.skewed = true;  // a tenth of the nodes begins 60 sandboxes below the others
    EXPECT_LE(testing::RunHerd(options).imbalance, 1.05) << "batches " << batches;
  }
}

}  // namespace
}  // namespace dsec::placement

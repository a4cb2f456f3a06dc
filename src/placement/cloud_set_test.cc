// SPDX-License-Identifier: Apache-2.0
#include "placement/cloud_set.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "base/rng.h"

namespace dsec::placement {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(CloudSetTest, BaseThatManyShare_IsTakenForAllOfThem) {
  // Alone each workspace on it is worth less a byte than the odd one.
  std::vector<EnvironmentUse> uses = {{{"odd"}, 5}};
  std::map<std::string, uint64_t> bytes = {{"base", 1000}, {"odd", 200}};
  for (int i = 0; i < 100; ++i) {
    const std::string workspace = fmt::format("w{:02}", i);
    uses.push_back({{"base", workspace}, 3});
    bytes[workspace] = 1;
  }
  const CloudSet set = ComputeCloudSet(uses, bytes, 1100);
  EXPECT_TRUE(set.layers.contains("base"));
  EXPECT_FALSE(set.layers.contains("odd"));
  EXPECT_EQ(set.bytes, 1100u);
  EXPECT_DOUBLE_EQ(set.covered, 300.0 / 305);
}

TEST(CloudSetTest, LayersOfTheSet_AreFreeForWhatComesAfter) {
  const std::vector<EnvironmentUse> uses = {
      {{"a", "b"}, 10}, {{"a"}, 1}, {{"b"}, 1}, {{"a", "c"}, 1}};
  const std::map<std::string, uint64_t> bytes = {{"a", 50}, {"b", 50}, {"c", 1}};
  const CloudSet set = ComputeCloudSet(uses, bytes, 100);
  EXPECT_THAT(set.layers, ElementsAre("a", "b"));
  EXPECT_DOUBLE_EQ(set.covered, 12.0 / 13);
}

TEST(CloudSetTest, OneLargeEnvironment_BeatsWhatIsWorthMoreAByte) {
  const std::vector<EnvironmentUse> uses = {{{"small"}, 2}, {{"large"}, 100}};
  const std::map<std::string, uint64_t> bytes = {{"small", 1}, {"large", 100}};
  const CloudSet set = ComputeCloudSet(uses, bytes, 100);
  EXPECT_THAT(set.layers, ElementsAre("large"));
  EXPECT_EQ(set.bytes, 100u);
}

TEST(CloudSetTest, UnknownLayersAndEmptyUse_CoverNothing) {
  EXPECT_THAT(ComputeCloudSet({}, {}, 100).layers, IsEmpty());
  const std::vector<EnvironmentUse> uses = {{{"known", "unknown"}, 3}, {{}, 1}, {{"known"}, 0}};
  const CloudSet set = ComputeCloudSet(uses, {{"known", 1}}, 100);
  EXPECT_THAT(set.layers, IsEmpty());
  EXPECT_EQ(set.covered, 0);
}

TEST(CloudSetTest, SizesBeyondAnyBudget_DoNotWrapAround) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  const std::vector<EnvironmentUse> uses = {{{"a", "b"}, 9}, {{"c"}, 1}};
  const CloudSet set = ComputeCloudSet(uses, {{"a", kMost}, {"b", kMost}, {"c", 5}}, 10);
  EXPECT_THAT(set.layers, ElementsAre("c"));
}

// The best of all subsets of layers.
uint64_t BestCovered(std::span<const EnvironmentUse> uses,
                     const std::map<std::string, uint64_t>& bytes, uint64_t budget) {
  const std::vector<std::pair<std::string, uint64_t>> layers(bytes.begin(), bytes.end());
  uint64_t best = 0;
  for (uint32_t mask = 0; mask < (1u << layers.size()); ++mask) {
    uint64_t size = 0;
    std::set<std::string> chosen;
    for (size_t i = 0; i < layers.size(); ++i) {
      if ((mask >> i & 1) == 0) continue;
      size += layers[i].second;
      chosen.insert(layers[i].first);
    }
    if (size > budget) continue;
    uint64_t covered = 0;
    for (const EnvironmentUse& use : uses) {
      bool all = true;
      for (const std::string& id : use.layers) all = all && chosen.contains(id);
      if (all) covered += use.creations;
    }
    best = std::max(best, covered);
  }
  return best;
}

TEST(CloudSetTest, RandomHerds_KeepTheBudgetAndComeNearTheBest) {
  Rng rng(11);
  double sum = 0;
  constexpr int kRounds = 200;
  for (int round = 0; round < kRounds; ++round) {
    std::map<std::string, uint64_t> bytes;
    for (int i = 0; i < 8; ++i) bytes[fmt::format("l{}", i)] = 1 + rng.Below(50);
    std::vector<EnvironmentUse> uses;
    for (int i = 0; i < 12; ++i) {
      EnvironmentUse use{{}, 1 + rng.Below(9)};
      for (int j = 0; j < 3; ++j) use.layers.push_back(fmt::format("l{}", rng.Below(8)));
      uses.push_back(std::move(use));
    }
    const uint64_t budget = 60 + rng.Below(60);
    const CloudSet set = ComputeCloudSet(uses, bytes, budget);
    uint64_t size = 0;
    uint64_t covered = 0;
    uint64_t all = 0;
    for (const std::string& id : set.layers) size += bytes[id];
    for (const EnvironmentUse& use : uses) {
      bool inside = true;
      for (const std::string& id : use.layers) inside = inside && set.layers.contains(id);
      covered += inside ? use.creations : 0;
      all += use.creations;
    }
    EXPECT_EQ(size, set.bytes);
    EXPECT_LE(size, budget);
    EXPECT_DOUBLE_EQ(set.covered, static_cast<double>(covered) / static_cast<double>(all));
    const uint64_t best = BestCovered(uses, bytes, budget);
    ASSERT_GE(best, covered);
    sum += best == 0 ? 1 : static_cast<double>(covered) / static_cast<double>(best);
  }
  EXPECT_GE(sum / kRounds, 0.9);
}

}  // namespace
}  // namespace dsec::placement

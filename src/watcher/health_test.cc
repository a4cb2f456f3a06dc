// SPDX-License-Identifier: Apache-2.0
#include "watcher/health.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "base/rng.h"

namespace dsec::watcher {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr milliseconds kStep{500};

// Watchers that probe nodes twice a second, on virtual time.
class Cluster {
 public:
  Cluster(size_t nodes, size_t watchers) {
    for (size_t i = 0; i < nodes; ++i) nodes_.push_back(fmt::format("n{}", i));
    for (size_t i = 0; i < watchers; ++i) {
      watchers_.emplace_back(HealthOptions());
      watchers_.back().SetNodes(nodes_, now_);
    }
  }

  // Whether a watcher's probe of a node is answered, and whether a watcher is awake.
  std::function<bool(size_t watcher, size_t node)> answers = [](size_t, size_t) { return true; };
  std::function<bool(size_t watcher)> awake = [](size_t) { return true; };

  void Run(milliseconds time) {
    for (const MonoTime end = now_ + time; now_ < end;) {
      now_ += kStep;
      for (size_t w = 0; w < watchers_.size(); ++w) {
        if (!awake(w)) continue;
        watchers_[w].Tick(now_);
        for (size_t n = 0; n < nodes_.size(); ++n) {
          if (answers(w, n)) watchers_[w].Heard(nodes_[n], now_);
        }
      }
      for (size_t w = 0; w < watchers_.size(); ++w) {
        if (!awake(w)) continue;
        for (const std::string& node : DeadBy(w)) dead.emplace(node, now_);
      }
    }
  }
  std::vector<std::string> DeadBy(size_t watcher) const {
    std::vector<Testimony> others;
    for (size_t w = 0; w < watchers_.size(); ++w) {
      if (w != watcher && awake(w)) others.push_back({"", watchers_[w].Silent(now_)});
    }
    return watchers_[watcher].Dead(others, watchers_.size(), now_);
  }
  std::vector<std::string> DeadNames() const {
    std::vector<std::string> names;
    for (const auto& [node, at] : dead) names.push_back(node);
    return names;
  }
  Health& watcher(size_t index) { return watchers_[index]; }
  MonoTime now() const { return now_; }

  std::map<std::string, MonoTime> dead;  // when it was first declared, by any of them

 private:
  std::vector<std::string> nodes_;
  std::vector<Health> watchers_;
  MonoTime now_{std::chrono::seconds(1000)};
};

TEST(Health, DeadNode_IsSuspectThenDeclaredWithinTenSeconds) {
  Cluster cluster(6, 2);
  cluster.Run(milliseconds(5'000));
  const MonoTime died = cluster.now();
  cluster.answers = [](size_t, size_t node) { return node != 3; };
  cluster.Run(milliseconds(4'000));
  EXPECT_EQ(cluster.watcher(0).StateOf("n3", cluster.now()), Health::State::kSuspect);
  EXPECT_EQ(cluster.watcher(0).StateOf("n2", cluster.now()), Health::State::kAlive);
  EXPECT_THAT(cluster.DeadNames(), IsEmpty());
  cluster.Run(milliseconds(16'000));
  EXPECT_THAT(cluster.DeadNames(), ElementsAre("n3"));
  EXPECT_LE(cluster.dead.at("n3") - died, milliseconds(10'000));
}

TEST(Health, PausedOrSlowNode_IsNotDead) {
  Cluster cluster(6, 2);
  const MonoTime start = cluster.now();
  // One that stops for 7.5 s of every 8.5, one that answers one probe of fifteen.
  cluster.answers = [&](size_t, size_t node) {
    const auto ms = std::chrono::duration_cast<milliseconds>(cluster.now() - start).count();
    if (node == 1) return ms % 8'500 >= 7'500;
    if (node == 2) return ms / 500 % 15 == 0;
    return true;
  };
  cluster.Run(milliseconds(600'000));
  EXPECT_THAT(cluster.DeadNames(), IsEmpty());
}

TEST(Health, WatcherThatIsCutOff_KillsNobody) {
  Cluster all(6, 3);
  all.answers = [](size_t watcher, size_t) { return watcher != 0; };
  all.Run(milliseconds(60'000));
  EXPECT_THAT(all.DeadNames(), IsEmpty());
  // From some nodes only: the others do not agree.
  Cluster some(6, 3);
  some.answers = [](size_t watcher, size_t node) { return watcher != 0 || node > 1; };
  some.Run(milliseconds(60'000));
  EXPECT_THAT(some.DeadNames(), IsEmpty());
  // The only one there is, from half of them: the dead cannot be told from the distant.
  Cluster half(6, 1);
  half.answers = [](size_t, size_t node) { return node > 2; };
  half.Run(milliseconds(60'000));
  EXPECT_THAT(half.DeadNames(), IsEmpty());
}

TEST(Health, WatcherThatSlept_BeginsAnew) {
  Cluster cluster(3, 1);
  cluster.Run(milliseconds(3'000));
  cluster.awake = [](size_t) { return false; };
  cluster.Run(milliseconds(60'000));
  cluster.awake = [](size_t) { return true; };
  cluster.answers = [](size_t, size_t node) { return node != 0; };
  cluster.Run(milliseconds(7'000));
  EXPECT_THAT(cluster.DeadNames(), IsEmpty());
  cluster.Run(milliseconds(3'000));
  EXPECT_THAT(cluster.DeadNames(), ElementsAre("n0"));
}

TEST(Health, WatchersThatAreAway_DoNotAgree) {
  Cluster cluster(6, 4);
  cluster.awake = [](size_t watcher) { return watcher < 2; };
  cluster.answers = [](size_t, size_t node) { return node != 5; };
  cluster.Run(milliseconds(60'000));
  EXPECT_THAT(cluster.DeadNames(), IsEmpty());  // two of four are no majority
  cluster.awake = [](size_t watcher) { return watcher < 3; };
  cluster.Run(milliseconds(10'000));
  EXPECT_THAT(cluster.DeadNames(), ElementsAre("n5"));
}

TEST(Health, NodesThatComeAndGo_AreNotDead) {
  Health health{HealthOptions()};
  const MonoTime start(std::chrono::seconds(1000));
  const std::vector<std::string> before = {"a", "b", "c"};
  health.SetNodes(before, start);
  health.Heard("stranger", start);
  const std::vector<std::string> after = {"b", "c", "d"};
  MonoTime now = start;
  for (int i = 0; i < 30; ++i) {
    now += kStep;
    health.Tick(now);
    if (i == 10) health.SetNodes(after, now);
    health.Heard("b", now);
    health.Heard("c", now);
    if (i < 26) EXPECT_THAT(health.Dead({}, 1, now), IsEmpty()) << i;
  }
  EXPECT_THAT(health.Dead({}, 1, now), ElementsAre("d"));  // listed 9.5 s ago, never heard
}

// Whatever is cut, slow or asleep: who answers a majority of the watchers is not declared dead.
TEST(Health, RandomFaults_NobodyWhoAnswersAMajorityDies) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Rng rng(seed);
    const size_t nodes = 2 + rng.Below(12);
    const size_t watchers = 1 + rng.Below(4);
    Cluster cluster(nodes, watchers);
    std::set<std::pair<size_t, size_t>> cut;
    std::set<size_t> asleep;
    cluster.answers = [&](size_t w, size_t n) { return cut.count({w, n}) == 0; };
    cluster.awake = [&](size_t w) { return asleep.count(w) == 0; };
    for (int phase = 0; phase < 20; ++phase) {
      cut.clear();
      asleep.clear();
      // Each node loses fewer than half of the watchers, whichever these are.
      for (size_t n = 0; n < nodes; ++n) {
        const size_t most = (watchers - 1) / 2;
        for (size_t i = 0; i < most; ++i) cut.insert({rng.Below(watchers), n});
      }
      if (rng.Below(3) == 0) asleep.insert(rng.Below(watchers));
      cluster.Run(kStep * static_cast<int>(1 + rng.Below(40)));
    }
    EXPECT_THAT(cluster.DeadNames(), IsEmpty()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace dsec::watcher

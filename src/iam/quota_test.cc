// SPDX-License-Identifier: Apache-2.0
// The arithmetic of quotas by itself, and keepers of several nodes on one real store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <future>
#include <thread>

#include "base/rng.h"
#include "iam/layout.h"
#include "iam/quota_keeper.h"
#include "iam/testing/away_store.h"
#include "runtime/shards.h"
#include "store/sqlite_store.h"

namespace dsec::iam {
namespace {

using runtime::BlockOn;
using runtime::Deadline;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kMiB = 1 << 20;

ProjectPath Path(const std::string& text) { return ProjectPath::Parse(text, "project").value(); }
Amounts Box(uint64_t memory = 64 * kMiB) { return {{1, 1, 1000, memory, 0}}; }

LedgerState Ledger(std::optional<uint64_t> limit, uint64_t granted) {
  LedgerState state;
  state.limits[Resource::kLive] = limit;
  state.granted[Resource::kLive] = granted;
  return state;
}

TEST(Grantable, TightestLimit_Holds) {
  RefillWish wish;
  wish.missing[Resource::kLive] = 10;
  wish.ahead[Resource::kLive] = 1000;
  const LedgerState open[] = {Ledger(std::nullopt, 5), Ledger(std::nullopt, 7)};
  EXPECT_EQ(Grantable(open, wish).amounts[Resource::kLive], 1010u);
  const LedgerState wide[] = {Ledger(std::nullopt, 5), Ledger(330, 0)};
  EXPECT_EQ(Grantable(wide, wish).amounts[Resource::kLive], 10u + 320u / 16);
  const LedgerState tight[] = {Ledger(100, 5), Ledger(12, 5)};
  const RefillGrant some = Grantable(tight, wish);
  EXPECT_EQ(some.amounts[Resource::kLive], 7u);
  ASSERT_TRUE(some.short_of.has_value());
  EXPECT_EQ(some.short_of->ledger, 1u);
  EXPECT_EQ(some.short_of->limit, 12u);
  const LedgerState over[] = {Ledger(4, 9)};
  EXPECT_EQ(Grantable(over, wish).amounts[Resource::kLive], 0u);
}

// Nodes take and give back at random, limits change: after each step every ledger is the sum of the
// slices below it, and a refill never brings one above its limit.
TEST(GrantableProperty, RandomOrder_NeverExceedsAndNeverDrifts) {
  const std::vector<std::string> paths = {"root", "root/a", "root/a/b", "root/a/c", "root/d"};
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    std::map<ProjectPath, LedgerState> ledgers;
    std::map<std::pair<int, ProjectPath>, Amounts> slices;
    for (const std::string& path : paths) ledgers[Path(path)] = {};
    for (int step = 0; step < 60; ++step) {
      const ProjectPath path = Path(paths[rng.Below(paths.size())]);
      Amounts& slice = slices[{static_cast<int>(rng.Below(3)), path}];
      const auto resource = static_cast<Resource>(rng.Below(kResourceCount));
      if (rng.Below(5) == 0) {
        ledgers[path].limits[resource] =
            rng.Below(4) == 0 ? std::nullopt : std::optional(rng.Below(200));
        continue;
      }
      if (rng.Below(3) == 0) {
        const Amounts back = slice.Min({{rng.Below(50), rng.Below(50), 1, 2, 3}});
        slice = slice - back;
        for (const ProjectPath& above : path.Chain())
          ledgers[above].granted = ledgers[above].granted - back;
        continue;
      }
      std::vector<LedgerState> chain;
      for (const ProjectPath& above : path.Chain()) chain.push_back(ledgers[above]);
      RefillWish wish;
      for (size_t i = 0; i < kResourceCount; ++i) {
        wish.missing.of[i] = rng.Below(40);
        wish.ahead.of[i] = rng.Below(300);
      }
      const RefillGrant grant = Grantable(chain, wish);
      slice = slice + grant.amounts;
      for (const ProjectPath& above : path.Chain()) {
        LedgerState& ledger = ledgers[above];
        ledger.granted = ledger.granted + grant.amounts;
        for (size_t i = 0; i < kResourceCount; ++i) {
          if (grant.amounts.of[i] > 0 && ledger.limits.of[i].has_value()) {
            EXPECT_LE(ledger.granted.of[i], *ledger.limits.of[i]) << above.str();
          }
        }
      }
    }
    for (const auto& [path, ledger] : ledgers) {
      Amounts sum;
      for (const auto& [key, slice] : slices) {
        if (key.second.Within(path)) sum = sum + slice;
      }
      EXPECT_EQ(sum, ledger.granted) << path.str();
    }
  }
}

TEST(CheckNarrower, ChildAboveParent_NamesFieldValuesAndRule) {
  Limits child, parent;
  child[Resource::kMemory] = 11;
  EXPECT_TRUE(CheckNarrower(child, parent, "limits.").ok());
  parent[Resource::kMemory] = 10;
  const auto checked = CheckNarrower(child, parent, "limits.");
  ASSERT_FALSE(checked.ok());
  EXPECT_EQ(checked.error().reason(), "iam.quota_exceeds_parent");
  EXPECT_EQ(checked.error().field(), "limits.memory_bytes");
  EXPECT_THAT(checked.error().message(), ::testing::HasSubstr("11 is above 10"));
}

// --- keepers ---

class QuotaKeeperTest : public ::testing::Test {
 protected:
  QuotaKeeperTest() {
    std::string folder = (std::filesystem::temp_directory_path() / "dsec-quota-XXXXXX").string();
    dir_ = ::mkdtemp(folder.data());
    store_ =
        store::SqliteStore::Open(dir_ + "/control.db", shards_->at(0), Clock::System()).value();
    away_ = std::make_unique<testing::AwayStore>(*store_);
  }
  ~QuotaKeeperTest() override {
    for (auto& [node, keeper] : keepers_) (void)BlockOn(shards_->at(0), keeper->Stop());
    shards_->Stop();
    keepers_.clear();
    away_.reset();
    store_.reset();
    shards_.reset();
    std::filesystem::remove_all(dir_);
  }

  void Project(const std::string& path, const Limits& limits = {}) {
    v1::IamLedger ledger;
    limits.Into(*ledger.mutable_limits());
    const std::string key = layout::Ledger(Path(path));
    auto before = BlockOn(shards_->at(1), store_->Get(key, Soon())).value();
    if (before.has_value()) {
      ASSERT_TRUE(ledger.ParseFromString(before->value));
      limits.Into(*ledger.mutable_limits());
    }
    ASSERT_TRUE(BlockOn(shards_->at(1),
                        store_->Put(key, ledger.SerializeAsString(), std::nullopt, 0, Soon()))
                    .ok());
    std::lock_guard lock(mutex_);
    limits_[Path(path)] = limits;
  }
  static Limits Live(uint64_t live) {
    Limits limits;
    limits[Resource::kLive] = live;
    return limits;
  }
  QuotaKeeper& Node(const std::string& node) {
    auto& keeper = keepers_[node];
    if (keeper != nullptr) return *keeper;
    QuotaOptions options;
    options.node_id = node;
    options.limits = [this](const ProjectPath& project) { return Tightest(project); };
    options.period = milliseconds(20);
    options.idle_after = milliseconds(40);
    keeper = std::make_unique<QuotaKeeper>(*away_, shards_->at(0), std::move(options));
    return *keeper;
  }
  // As kill -9: nothing is given back, and what is in memory is gone.
  void Kill(const std::string& node) {
    (void)BlockOn(shards_->at(0), keepers_[node]->Stop());
    keepers_.erase(node);
  }
  std::optional<Limits> Tightest(const ProjectPath& project) {
    std::lock_guard lock(mutex_);
    Limits out;
    for (const ProjectPath& above : project.Chain()) out = out.Tightest(limits_[above]);
    return out;
  }
  Result<QuotaKeeper::Charge> Reserve(const std::string& node, const std::string& project,
                                      const Amounts& amounts = Box()) {
    return BlockOn(shards_->at(1), Node(node).Reserve(Path(project), amounts, Soon()));
  }
  v1::IamLedger LedgerOf(const std::string& path) {
    v1::IamLedger ledger;
    auto entry = BlockOn(shards_->at(1), store_->Get(layout::Ledger(Path(path)), Soon())).value();
    EXPECT_TRUE(entry.has_value() && ledger.ParseFromString(entry->value));
    return ledger;
  }
  // Waits until the ledger says so: what is idle goes back by itself.
  void AwaitGranted(const std::string& path, uint64_t live) {
    const auto until = std::chrono::steady_clock::now() + seconds(20);
    while (LedgerOf(path).granted().live() != live) {
      ASSERT_LT(std::chrono::steady_clock::now(), until) << LedgerOf(path).granted().live();
      std::this_thread::yield();
    }
  }
  static Deadline Soon() { return Deadline::After(seconds(20)); }

  std::string dir_;
  std::unique_ptr<runtime::Shards> shards_ = std::make_unique<runtime::Shards>(3);
  std::unique_ptr<store::SqliteStore> store_;
  std::unique_ptr<testing::AwayStore> away_;
  std::mutex mutex_;
  std::map<ProjectPath, Limits> limits_;
  std::map<std::string, std::unique_ptr<QuotaKeeper>> keepers_;
};

TEST_F(QuotaKeeperTest, Limit_IsReachedExactlyAndNamed) {
  Project("root");
  Project("root/a", Live(3));
  Project("root/a/b");
  std::vector<QuotaKeeper::Charge> charges;
  for (int i = 0; i < 3; ++i) {
    auto charge = Reserve("n1", "root/a/b");
    ASSERT_TRUE(charge.ok()) << charge.error().ToString();
    charges.push_back(*std::move(charge));
  }
  auto refused = Reserve("n1", "root/a");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kResourceExhausted);
  EXPECT_EQ(refused.error().reason(), "quota.live");
  EXPECT_THAT(refused.error().message(), ::testing::HasSubstr("live of root/a: 3 of 3"));
  EXPECT_EQ(Node("n1").Used(Path("root/a"))[Resource::kLive], 3u);
  charges.pop_back();
  EXPECT_TRUE(Reserve("n1", "root/a/b").ok());
  EXPECT_EQ(Reserve("n1", "root/a/no").error().reason(), "iam.project_not_found");
}

TEST_F(QuotaKeeperTest, Creating_ComesBackWhenTheCreateIsOver) {
  Project("root");
  Limits limits;
  limits[Resource::kCreating] = 1;
  Project("root/a", limits);
  auto first = Reserve("n1", "root/a").value();
  EXPECT_EQ(Reserve("n1", "root/a").error().reason(), "quota.creating");
  first.Settle();
  auto second = Reserve("n1", "root/a");
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(Node("n1").Used(Path("root"))[Resource::kLive], 2u);
  EXPECT_EQ(Node("n1").Used(Path("root"))[Resource::kCreating], 1u);
}

// Several nodes, every one of them asked by several threads, and a limit above a limit.
TEST_F(QuotaKeeperTest, BurstOverNodes_NeverExceedsAnyProjectOfThePath) {
  Project("root");
  Project("root/a", Live(50));
  Project("root/a/b", Live(30));
  Project("root/a/c");
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::map<std::string, std::vector<QuotaKeeper::Charge>> got;
  for (const char* node : {"n1", "n2", "n3"}) (void)Node(node);
  for (const char* node : {"n1", "n2", "n3"}) {
    for (const char* project : {"root/a/b", "root/a/c"}) {
      threads.emplace_back([&, node, project] {
        for (int i = 0; i < 40; ++i) {
          auto charge = Reserve(node, project);
          if (!charge.ok()) {
            EXPECT_EQ(charge.error().reason(), "quota.live") << charge.error().ToString();
            continue;
          }
          std::lock_guard lock(mutex);
          got[project].push_back(*std::move(charge));
          EXPECT_LE(got["root/a/b"].size(), 30u);
          EXPECT_LE(got["root/a/b"].size() + got["root/a/c"].size(), 50u);
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  // A piece ahead is at most a sixteenth of what remains: near the limit none lies idle.
  EXPECT_GE(got["root/a/b"].size() + got["root/a/c"].size(), 48u);
  EXPECT_LE(LedgerOf("root/a").granted().live(), 50u);
  EXPECT_LE(LedgerOf("root/a/b").granted().live(), 30u);
  got.clear();
  AwaitGranted("root", 0);
  EXPECT_EQ(LedgerOf("root").granted().memory_bytes(), 0u);
  EXPECT_EQ(LedgerOf("root/a/b").granted().creating(), 0u);
}

TEST_F(QuotaKeeperTest, KilledNode_CountsWhatLivesAndNothingElse) {
  Project("root");
  Project("root/a", Live(20));
  std::vector<QuotaKeeper::Charge> charges;
  for (int i = 0; i < 10; ++i) charges.push_back(Reserve("n1", "root/a").value());
  Kill("n1");
  EXPECT_GE(LedgerOf("root/a").granted().live(), 10u);
  // Three of them are alive after the restart.
  charges.clear();
  for (int i = 0; i < 3; ++i)
    charges.push_back(Node("n1").Readmit(Path("root/a"), {{1, 0, 1000, 64 * kMiB, 0}}));
  ASSERT_TRUE(BlockOn(shards_->at(1), Node("n1").Restore()).ok());
  EXPECT_EQ(LedgerOf("root/a").granted().live(), 3u);
  EXPECT_EQ(LedgerOf("root").granted().cpu_millis(), 3000u);
  charges.clear();
  AwaitGranted("root", 0);
}

TEST_F(QuotaKeeperTest, DeadNode_ItsSlicesComeBack) {
  Project("root");
  Project("root/a", Live(5));
  std::vector<QuotaKeeper::Charge> charges;
  for (int i = 0; i < 5; ++i) charges.push_back(Reserve("n1", "root/a").value());
  Kill("n1");
  EXPECT_FALSE(Reserve("n2", "root/a").ok());
  for (int i = 0; i < 2; ++i)
    ASSERT_TRUE(BlockOn(shards_->at(1), ReturnSlices(*store_, "n1")).ok());
  EXPECT_EQ(LedgerOf("root").granted().live(), 0u);
  EXPECT_TRUE(Reserve("n2", "root/a").ok());
}

TEST_F(QuotaKeeperTest, DeadNodeThatHasComeBack_KeepsItsSlices) {
  Project("root");
  Project("root/a", Live(5));
  auto charge = Reserve("n1", "root/a");
  ASSERT_TRUE(charge.ok());
  ASSERT_TRUE(
      BlockOn(shards_->at(1), store_->Put("node/n1", "dead", 0, 0, Deadline::Never())).ok());
  const auto dead = BlockOn(shards_->at(1), store_->Get("node/n1", Deadline::Never()));
  ASSERT_TRUE(
      BlockOn(shards_->at(1), store_->Put("node/n1", "joined", std::nullopt, 0, Deadline::Never()))
          .ok());
  const auto returned =
      BlockOn(shards_->at(1), ReturnSlices(*store_, "n1", {{"node/n1", (*dead)->version}}));
  ASSERT_FALSE(returned.ok());
  EXPECT_EQ(returned.error().reason(), "store.version");
  EXPECT_EQ(LedgerOf("root/a").granted().live(), LedgerOf("root").granted().live());
  EXPECT_GE(LedgerOf("root/a").granted().live(), 1u);
}

// Whether or not a transaction was made whose answer was lost, the sums stay true.
TEST_F(QuotaKeeperTest, LostAnswers_LeaveNoDrift) {
  Project("root");
  Project("root/a", Live(1000));
  Rng rng(7);
  std::vector<QuotaKeeper::Charge> charges;
  for (int i = 0; i < 200; ++i) {
    if (rng.Below(3) == 0) away_->LoseAnswers(1);
    if (rng.Below(4) == 0 && !charges.empty()) {
      charges.pop_back();
      (void)BlockOn(shards_->at(1), Node("n1").Trim(Path("root")));
      continue;
    }
    auto charge = Reserve("n1", "root/a");
    if (charge.ok())
      charges.push_back(*std::move(charge));
    else
      EXPECT_EQ(charge.error().reason(), "quota.store");
    EXPECT_GE(LedgerOf("root/a").granted().live(), charges.size());
    EXPECT_EQ(LedgerOf("root").granted().live(), LedgerOf("root/a").granted().live());
  }
  EXPECT_GT(charges.size(), 50u);
  away_->LoseAnswers(0);
  ASSERT_TRUE(BlockOn(shards_->at(1), Node("n1").Trim(Path("root"))).ok());
  EXPECT_EQ(LedgerOf("root").granted().live(), charges.size());
  charges.clear();
  AwaitGranted("root", 0);
}

TEST_F(QuotaKeeperTest, StoreAway_SliceGoesOnAndWithoutLimitsAllDoes) {
  Project("root");
  Project("root/a", Live(1000));
  Project("root/b");
  auto first = Reserve("n1", "root/a");
  ASSERT_TRUE(first.ok());
  away_->SetAway(true);
  std::vector<QuotaKeeper::Charge> charges;
  Result<QuotaKeeper::Charge> last = Reserve("n1", "root/a");
  while (last.ok() && charges.size() < 1000) {
    charges.push_back(*std::move(last));
    last = Reserve("n1", "root/a");
  }
  EXPECT_GT(charges.size(), 20u);
  ASSERT_FALSE(last.ok());
  EXPECT_EQ(last.error().reason(), "quota.store");
  EXPECT_EQ(last.error().code(), Code::kUnavailable);
  for (int i = 0; i < 200; ++i) charges.push_back(Reserve("n1", "root/b").value());
  away_->SetAway(false);
  EXPECT_TRUE(Reserve("n1", "root/a").ok());
  AwaitGranted("root/b", 200);
}

TEST_F(QuotaKeeperTest, LoweredLimit_IdleGoesBackAtOnce) {
  Project("root");
  Project("root/a", Live(1000));
  auto one = Reserve("n1", "root/a").value();
  EXPECT_GT(LedgerOf("root/a").granted().live(), 1u);
  Project("root/a", Live(2));
  Node("n1").LimitsChanged();
  AwaitGranted("root/a", 1);
  auto two = Reserve("n1", "root/a");
  ASSERT_TRUE(two.ok());
  EXPECT_EQ(Reserve("n1", "root/a").error().reason(), "quota.live");
  // Below what is in use: nothing ends, nothing begins.
  Project("root/a", Live(0));
  Node("n1").LimitsChanged();
  EXPECT_EQ(Reserve("n1", "root/a").error().reason(), "quota.live");
}

TEST_F(QuotaKeeperTest, StartsPerSecond_AtMostThatManyInEachSecond) {
  Project("root");
  Limits limits;
  limits.starts_per_second = 7;
  Project("root/a", limits);
  std::map<int64_t, int> starts;
  const auto until = std::chrono::steady_clock::now() + milliseconds(2500);
  int round = 0;
  while (std::chrono::steady_clock::now() < until) {
    const int64_t before = UnixMillis(Clock::System().Wall()) / 1000;
    auto charge = Reserve(++round % 2 == 0 ? "n1" : "n2", "root/a");
    const int64_t after = UnixMillis(Clock::System().Wall()) / 1000;
    if (charge.ok() && before == after) ++starts[before];
    if (!charge.ok()) {
      EXPECT_EQ(charge.error().reason(), "quota.starts_per_second");
    }
  }
  ASSERT_GE(starts.size(), 2u);
  for (const auto& [second, count] : starts) EXPECT_LE(count, 7) << second;
}

TEST_F(QuotaKeeperTest, CreatePath_AsksTheStoreOncePerSlice) {
  Project("root");
  Project("root/a", Live(100'000));
  std::vector<QuotaKeeper::Charge> charges;
  const uint64_t before = away_->commits();
  for (int i = 0; i < 640; ++i) charges.push_back(Reserve("n1", "root/a").value());
  EXPECT_LE(away_->commits() - before, 20u);
}

}  // namespace
}  // namespace dsec::iam

// SPDX-License-Identifier: Apache-2.0
#include "store/testing/conformance.h"

#include <thread>

namespace dsec::store::testing {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

Revision StoreConformance::Put(const std::string& key, const std::string& value, LeaseId lease) {
  const auto revision = Run(store().Put(key, value, std::nullopt, lease, Soon()));
  if (!revision.ok()) {
    ADD_FAILURE() << revision.error().ToString();
    return 0;
  }
  return *revision;
}

std::optional<std::string> StoreConformance::Value(const std::string& key) {
  const auto entry = Run(store().Get(key, Soon()));
  if (!entry.ok() || !entry->has_value()) return std::nullopt;
  return (*entry)->value;
}

TEST_P(StoreConformance, Put_IsReadBackWithItsVersion) {
  EXPECT_EQ(Value("a"), std::nullopt);
  const Revision first = Put("a", "1");
  const Revision second = Put("b", std::string("\0\xff", 2));
  EXPECT_GT(second, first);
  const auto entry = Run(store().Get("b", Soon()));
  EXPECT_EQ((*entry)->value, std::string("\0\xff", 2));
  EXPECT_EQ((*entry)->version, second);
  harness_->Reopen();
  EXPECT_EQ(Value("a"), "1");
  EXPECT_GT(Put("a", "2"), second);
}

TEST_P(StoreConformance, PutIfVersion_RefusesAnotherVersion) {
  const auto made = Run(store().Put("a", "1", 0, 0, Soon()));
  ASSERT_TRUE(made.ok());
  const auto again = Run(store().Put("a", "2", 0, 0, Soon()));
  EXPECT_EQ(again.error().code(), Code::kConflict);
  EXPECT_EQ(again.error().reason(), "store.version");
  const auto changed = Run(store().Put("a", "2", *made, 0, Soon()));
  ASSERT_TRUE(changed.ok());
  EXPECT_FALSE(Run(store().Put("a", "3", *made, 0, Soon())).ok());
  EXPECT_EQ(Value("a"), "2");
}

TEST_P(StoreConformance, Transaction_IsAllOrNothing) {
  const Revision a = Put("a", "1");
  const auto refused =
      Run(store().Commit({{"a", a}, {"b", 7}}, {{"a", "2", 0}, {"c", "3", 0}}, Soon()));
  EXPECT_EQ(refused.error().reason(), "store.version");
  EXPECT_EQ(Value("a"), "1");
  EXPECT_EQ(Value("c"), std::nullopt);
  const auto done = Run(store().Commit(
      {{"a", a}, {"b", 0}}, {{"a", std::nullopt, 0}, {"b", "2", 0}, {"c", "3", 0}}, Soon()));
  ASSERT_TRUE(done.ok()) << done.error().ToString();
  EXPECT_EQ(Value("a"), std::nullopt);
  EXPECT_EQ((*Run(store().Get("b", Soon())))->version, *done);
  EXPECT_EQ((*Run(store().Get("c", Soon())))->version, *done);
}

TEST_P(StoreConformance, DeletionOfNothing_ChangesNothing) {
  const Revision a = Put("a", "1");
  EXPECT_EQ(*Run(store().Commit({}, {{"nothing", std::nullopt, 0}}, Soon())), a);
}

TEST_P(StoreConformance, Racers_OneWins) {
  std::vector<std::thread> racers;
  std::atomic<int> wins = 0;
  for (int i = 0; i < 8; ++i) {
    racers.emplace_back([&, i] {
      const auto put =
          runtime::BlockOn(shards_.at(1), store().Put("lock", std::to_string(i), 0, 0, Soon()));
      wins += put.ok() ? 1 : 0;
    });
  }
  for (auto& racer : racers) racer.join();
  EXPECT_EQ(wins, 1);
}

TEST_P(StoreConformance, Range_PagesInOrderOfBytes) {
  for (const char* key : {"n/b", "n/a", "n/c", "m", "n0", "n/\xff"}) Put(key, key);
  KeyRange range = KeyRange::Prefix("n/");
  std::vector<std::string> keys;
  while (true) {
    const auto page = Run(store().Range(range, 2, Soon()));
    ASSERT_TRUE(page.ok());
    for (const Entry& entry : page->entries) keys.push_back(entry.key);
    if (!page->more) break;
    range.begin = page->entries.back().key + std::string(1, '\0');
  }
  EXPECT_THAT(keys, ElementsAre("n/a", "n/b", "n/c", "n/\xff"));
  EXPECT_EQ(Run(store().Range(KeyRange::Prefix(""), 100, Soon()))->entries.size(), 6u);
}

TEST_P(StoreConformance, Bounds_AreRefusedByName) {
  EXPECT_EQ(Run(store().Get("", Soon())).error().reason(), "store.too_large");
  EXPECT_EQ(Run(store().Put("a", std::string((1 << 20) + 1, 'x'), std::nullopt, 0, Soon()))
                .error()
                .reason(),
            "store.too_large");
  EXPECT_TRUE(Run(store().Put("a", std::string(1 << 20, 'x'), std::nullopt, 0, Soon())).ok());
  EXPECT_FALSE(Run(store().Range(KeyRange::Prefix(""), 0, Soon())).ok());
  EXPECT_EQ(
      Run(store().Commit({}, std::vector<Write>(129, Write{"a", "1", 0}), Soon())).error().code(),
      Code::kInvalidArgument);
  EXPECT_EQ(Run(store().Commit({}, {{"a", "1", 0}, {"a", "2", 0}}, Soon())).error().code(),
            Code::kInvalidArgument);
  EXPECT_FALSE(Run(store().Grant(milliseconds(1), Soon())).ok());
}

TEST_P(StoreConformance, Lease_TakesItsKeysWithItUnlessKeptAlive) {
  const auto lease = Run(store().Grant(milliseconds(2'000), Soon()));
  ASSERT_TRUE(lease.ok());
  Put("leased", "1", *lease);
  Put("free", "2");
  harness_->Pass(milliseconds(1'200));
  ASSERT_TRUE(Run(store().KeepAlive(*lease, Soon())).ok());
  harness_->Pass(milliseconds(1'200));
  EXPECT_EQ(Value("leased"), "1");
  const Revision before = Run(store().Range(KeyRange::Prefix(""), 10, Soon()))->revision;
  harness_->Pass(milliseconds(2'100));
  const auto gone = Run(store().Watch(KeyRange::Prefix("leased"), before, Soon()));
  ASSERT_TRUE(gone.ok()) << gone.error().ToString();
  ASSERT_EQ(gone->changes.size(), 1u);
  EXPECT_EQ(gone->changes[0].value, std::nullopt);
  EXPECT_EQ(Value("leased"), std::nullopt);
  EXPECT_EQ(Value("free"), "2");
  EXPECT_EQ(Run(store().KeepAlive(*lease, Soon())).error().reason(), "store.lease");
  EXPECT_EQ(Run(store().Put("leased", "3", std::nullopt, *lease, Soon())).error().reason(),
            "store.lease");
}

TEST_P(StoreConformance, RevokedLease_EndsAtOnceAndOnlyOnce) {
  const auto lease = Run(store().Grant(milliseconds(60'000), Soon()));
  Put("a", "1", *lease);
  Put("b", "2", *lease);
  Put("b", "3");  // no longer under it
  ASSERT_TRUE(Run(store().Revoke(*lease, Soon())).ok());
  EXPECT_EQ(Value("a"), std::nullopt);
  EXPECT_EQ(Value("b"), "3");
  EXPECT_EQ(Run(store().Revoke(*lease, Soon())).error().reason(), "store.lease");
}

TEST_P(StoreConformance, Lease_OutlivesTheConnection) {
  const auto lease = Run(store().Grant(milliseconds(5'000), Soon()));
  Put("a", "1", *lease);
  harness_->Reopen();
  EXPECT_TRUE(Run(store().KeepAlive(*lease, Soon())).ok());
  EXPECT_EQ(Value("a"), "1");
}

TEST_P(StoreConformance, Watch_TellsEveryChangeInOrder) {
  const Revision start = Put("w/a", "1");
  Put("other", "x");
  Put("w/b", "2");
  ASSERT_TRUE(Run(store().Commit({}, {{"w/a", std::nullopt, 0}, {"w/c", "3", 0}}, Soon())).ok());
  const auto changes = Run(store().Watch(KeyRange::Prefix("w/"), start, Soon()));
  ASSERT_TRUE(changes.ok()) << changes.error().ToString();
  std::vector<std::string> seen;
  for (const Change& change : changes->changes)
    seen.push_back(change.key + "=" + change.value.value_or("-"));
  EXPECT_THAT(seen, ElementsAre("w/b=2", "w/a=-", "w/c=3"));
  EXPECT_EQ(changes->changes[1].revision, changes->changes[2].revision);
  const auto nothing = Run(store().Watch(KeyRange::Prefix("w/"), changes->next, Now()));
  ASSERT_TRUE(nothing.ok());
  EXPECT_THAT(nothing->changes, IsEmpty());
  EXPECT_EQ(nothing->next, changes->next);
}

TEST_P(StoreConformance, Watch_WakesForAChange) {
  const Revision start = Put("a", "1");
  std::thread writer([&] {
    Put("unrelated", "x");
    Put("w", "1");
  });
  const auto changes = Run(store().Watch(KeyRange::Prefix("w"), start, Soon()));
  writer.join();
  ASSERT_TRUE(changes.ok());
  ASSERT_EQ(changes->changes.size(), 1u);
  EXPECT_EQ(changes->changes[0].key, "w");
}

}  // namespace dsec::store::testing

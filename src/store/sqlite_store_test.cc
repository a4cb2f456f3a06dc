// SPDX-License-Identifier: Apache-2.0
#include "store/sqlite_store.h"

#include <stdlib.h>

#include <atomic>
#include <filesystem>

#include "store/testing/conformance.h"

namespace dsec::store {
namespace testing {
namespace {

using std::chrono::milliseconds;

// Moved by the test while the store reads it.
class MovedClock final : public Clock {
 public:
  MonoTime Mono() const override { return MonoTime(milliseconds(ms_.load())); }
  WallTime Wall() const override { return WallTime(milliseconds(ms_.load())); }
  void Advance(milliseconds by) { ms_ += by.count(); }

 private:
  std::atomic<int64_t> ms_ = 3'600'000;
};

class SqliteHarness final : public Harness {
 public:
  explicit SqliteHarness(runtime::Executor executor) : executor_(std::move(executor)) {
    std::string pattern = (std::filesystem::temp_directory_path() / "dsec-store-XXXXXX").string();
    dir_ = mkdtemp(pattern.data());
    Reopen();
  }
  ~SqliteHarness() override {
    store_.reset();
    std::filesystem::remove_all(dir_);
  }
  Store& store() override { return *store_; }
  void Pass(milliseconds time) override { clock_.Advance(time); }
  void Reopen() override {
    store_.reset();
    auto store = SqliteStore::Open(dir_ + "/store.db", executor_, clock_);
    ASSERT_TRUE(store.ok()) << store.error().ToString();
    store_ = *std::move(store);
  }

 private:
  const runtime::Executor executor_;
  MovedClock clock_;
  std::string dir_;
  std::unique_ptr<SqliteStore> store_;
};

std::unique_ptr<Harness> MakeSqliteHarness(runtime::Executor executor) {
  return std::make_unique<SqliteHarness>(std::move(executor));
}

INSTANTIATE_TEST_SUITE_P(Sqlite, StoreConformance, ::testing::Values(MakeSqliteHarness));

class SqliteStoreHistory : public StoreConformance {};

TEST_P(SqliteStoreHistory, WatcherTooFarBehind_IsToldSo) {
  const Revision start = Put("a", "0");
  for (uint64_t i = 0; i < SqliteStore::kHistory + 10; i += 100) {
    std::vector<Write> writes;
    for (uint64_t k = 0; k < 100; ++k) writes.push_back({fmt::format("k{}", k), "x", 0});
    ASSERT_TRUE(Run(store().Commit({}, std::move(writes), Soon())).ok());
  }
  Put("b", "1");
  const auto behind = Run(store().Watch(KeyRange::Prefix("a"), start - 1, Soon()));
  EXPECT_EQ(behind.error().code(), Code::kGone);
  EXPECT_EQ(behind.error().reason(), "store.compacted");
  harness_->Reopen();
  EXPECT_EQ(Run(store().Watch(KeyRange::Prefix("a"), start - 1, Soon())).error().reason(),
            "store.compacted");
  const Revision now = Run(store().Range(KeyRange::Prefix(""), 1, Soon()))->revision;
  EXPECT_TRUE(Run(store().Watch(KeyRange::Prefix("a"), now, Now())).ok());
}

INSTANTIATE_TEST_SUITE_P(Sqlite, SqliteStoreHistory, ::testing::Values(MakeSqliteHarness));

}  // namespace
}  // namespace testing
}  // namespace dsec::store

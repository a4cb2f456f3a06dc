// SPDX-License-Identifier: Apache-2.0
#include "store/etcd_store.h"

#include <signal.h>

#include <atomic>
#include <thread>

#include "http/client.h"
#include "store/etcd_json.h"
#include "store/testing/conformance.h"
#include "store/testing/etcd_cluster.h"

namespace dsec::store {
namespace testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;

// One member for all tests of the interface: each has keys of its own.
EtcdCluster& OneMember() {
  static EtcdCluster cluster(1);
  return cluster;
}

std::unique_ptr<EtcdStore> OpenStore(runtime::Executor executor, EtcdOptions options) {
  auto store = EtcdStore::Open(std::move(executor), std::move(options));
  EXPECT_TRUE(store.ok()) << store.error().ToString();
  return *std::move(store);
}

class EtcdHarness final : public Harness {
 public:
  explicit EtcdHarness(runtime::Executor executor) : executor_(std::move(executor)) {
    static std::atomic<int> number = 0;
    options_.endpoints = OneMember().Endpoints();
    options_.prefix = fmt::format("test{}/", ++number);
    store_ = OpenStore(executor_, options_);
  }
  Store& store() override { return *store_; }
  void Pass(milliseconds time) override { std::this_thread::sleep_for(time); }
  void Reopen() override { store_ = OpenStore(executor_, options_); }

 private:
  const runtime::Executor executor_;
  EtcdOptions options_;
  std::unique_ptr<EtcdStore> store_;
};

std::unique_ptr<Harness> MakeEtcdHarness(runtime::Executor executor) {
  return std::make_unique<EtcdHarness>(std::move(executor));
}

INSTANTIATE_TEST_SUITE_P(Etcd, StoreConformance, ::testing::Values(MakeEtcdHarness));

class EtcdTest : public ::testing::Test {
 protected:
  template <typename T>
  Result<T> Run(runtime::Task<T> task) {
    return runtime::BlockOn(shards_.at(1), std::move(task));
  }
  static runtime::Deadline Soon() { return runtime::Deadline::After(seconds(30)); }
  std::unique_ptr<EtcdStore> Open(const EtcdCluster& cluster, std::string prefix,
                                  milliseconds patience = milliseconds(3'000)) {
    return OpenStore(shards_.at(0), {cluster.Endpoints(), std::move(prefix), patience});
  }

  runtime::Shards shards_{2};
};

TEST_F(EtcdTest, Stores_WithDifferentPrefixes_DoNotMeet) {
  const auto one = Open(OneMember(), "one/");
  const auto two = Open(OneMember(), "two/");
  ASSERT_TRUE(Run(one->Put("k", "1", 0, 0, Soon())).ok());
  ASSERT_TRUE(Run(two->Put("k", "2", 0, 0, Soon())).ok());
  const auto page = Run(one->Range(KeyRange::Prefix(""), 10, Soon()));
  ASSERT_EQ(page->entries.size(), 1u);
  EXPECT_EQ(page->entries[0].key, "k");
  EXPECT_EQ(page->entries[0].value, "1");
}

TEST_F(EtcdTest, LargePage_ComesInPieces) {
  const auto store = Open(OneMember(), "large/");
  const std::string value(1 << 20, '\xee');
  for (int i = 0; i < 12; ++i)
    ASSERT_TRUE(Run(store->Put(fmt::format("k{:02}", i), value, 0, 0, Soon())).ok());
  KeyRange range = KeyRange::Prefix("k");
  size_t seen = 0;
  for (bool more = true; more;) {
    const auto page = Run(store->Range(range, 1000, Soon()));
    ASSERT_TRUE(page.ok()) << page.error().ToString();
    ASSERT_FALSE(page->entries.empty());
    for (const Entry& entry : page->entries) seen += entry.value == value ? 1 : 0;
    range.begin = page->entries.back().key + std::string(1, '\0');
    more = page->more;
  }
  EXPECT_EQ(seen, 12u);
}

TEST_F(EtcdTest, Watch_OfLargeTransactions_GivesThemWhole) {
  const auto store = Open(OneMember(), "fragments/");
  const auto start = Run(store->Range(KeyRange::Prefix(""), 1, Soon()))->revision;
  std::vector<Write> writes;
  for (int i = 0; i < 8; ++i) writes.push_back({fmt::format("k{}", i), std::string(140'000, 'v')});
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(Run(store->Commit({}, writes, Soon())).ok());
  Revision after = start;
  std::map<Revision, size_t> changes;
  while (changes.size() < 20) {
    const auto some = Run(store->Watch(KeyRange::Prefix("k"), after, Soon()));
    ASSERT_TRUE(some.ok()) << some.error().ToString();
    ASSERT_FALSE(some->changes.empty());
    for (const Change& change : some->changes) {
      EXPECT_GT(change.revision, after);
      ++changes[change.revision];
    }
    after = some->next;
  }
  for (const auto& [revision, count] : changes) EXPECT_EQ(count, 8u) << revision;
}

TEST_F(EtcdTest, Compaction_IsToldToWatchers) {
  const auto store = Open(OneMember(), "compacted/");
  const auto first = Run(store->Put("k", "1", 0, 0, Soon()));
  const auto last = Run(store->Put("k", "2", std::nullopt, 0, Soon()));
  const auto client = http::Client::Create(shards_.at(0), {OneMember().Endpoint(0)});
  http::ClientRequest request{"POST", "/v3/kv/compaction"};
  request.body = fmt::format(R"({{"revision":"{}","physical":true}})", *last);
  const auto compacted = runtime::BlockOn(shards_.at(0), (*client)->Call(request, Soon()));
  ASSERT_EQ(compacted->status, 200) << compacted->body;
  EXPECT_EQ(Run(store->Watch(KeyRange::Prefix(""), *first - 1, Soon())).error().reason(),
            "store.compacted");
  EXPECT_TRUE(Run(store->Watch(KeyRange::Prefix(""), *last - 1, Soon())).ok());
}

TEST_F(EtcdTest, NobodyThere_IsUnavailable) {
  const auto store = OpenStore(shards_.at(0), {{"unix:/nonexistent/a", "unix:/nonexistent/b"}});
  for (const auto& error :
       {Run(store->Get("k", Soon())).error(), Run(store->Put("k", "1", 0, 0, Soon())).error(),
        Run(store->Watch(KeyRange::Prefix(""), 0, Soon())).error()}) {
    EXPECT_EQ(error.code(), Code::kUnavailable);
    EXPECT_EQ(error.reason(), "store.unavailable");
  }
  EXPECT_EQ(EtcdStore::Open(shards_.at(0), {}).error().reason(), "store.endpoints");
  EXPECT_EQ(EtcdStore::Open(shards_.at(0), {{"ftp://x"}}).error().reason(), "client.endpoint");
}

// Counts a key up, each step if the last is still there. A step whose outcome is not known is
// looked up. Returns how many were made.
class Counter {
 public:
  explicit Counter(Store& store, runtime::Executor executor)
      : store_(store), executor_(std::move(executor)) {}

  // False: the store could not be asked.
  bool Step() {
    const auto deadline = runtime::Deadline::After(seconds(5));
    const auto entry = runtime::BlockOn(executor_, store_.Get("counter", deadline));
    if (!entry.ok()) return Note(entry.error());
    const Revision version = entry->has_value() ? (*entry)->version : 0;
    const int value = entry->has_value() ? std::stoi((*entry)->value) : 0;
    EXPECT_GE(value, answered_);  // what was answered is never lost
    EXPECT_LE(value, answered_ + unknown_);
    answered_ = value;
    unknown_ = 0;
    const auto put = runtime::BlockOn(
        executor_, store_.Put("counter", std::to_string(value + 1), version, 0, deadline));
    if (put.ok()) {
      ++answered_;
      return true;
    }
    EXPECT_NE(put.error().code(), Code::kConflict) << "nobody else writes";
    unknown_ = 1;
    return Note(put.error());
  }
  int answered() const { return answered_; }

 private:
  static bool Note(const Error& error) {
    EXPECT_TRUE(error.code() == Code::kUnavailable || error.code() == Code::kDeadlineExceeded)
        << error.ToString();
    return false;
  }
  Store& store_;
  const runtime::Executor executor_;
  int answered_ = 0;
  int unknown_ = 0;
};

TEST_F(EtcdTest, ThreeMembers_AnyOneMayDieOrHang) {
  EtcdCluster cluster(3);
  const auto store = Open(cluster, "", milliseconds(1'000));
  Counter counter(*store, shards_.at(1));
  const auto count_to = [&](int value) {
    const auto until = runtime::Deadline::After(seconds(60));
    while (counter.answered() < value && !until.Expired()) counter.Step();
    EXPECT_GE(counter.answered(), value);
  };
  count_to(10);
  for (size_t member = 0; member < cluster.size(); ++member) {
    const int before = counter.answered();
    cluster.Kill(member);  // the leader is one of them
    count_to(before + 10);
    cluster.Start(member);
    cluster.Signal(member, SIGSTOP);
    count_to(before + 20);
    cluster.Signal(member, SIGCONT);
  }
}

TEST_F(EtcdTest, WithoutMajority_FailsAndComesBack) {
  EtcdCluster cluster(3);
  const auto store = Open(cluster, "", milliseconds(1'000));
  const auto made = Run(store->Put("k", "1", 0, 0, Soon()));
  ASSERT_TRUE(made.ok()) << made.error().ToString();
  cluster.Kill(0);
  cluster.Kill(1);
  const auto lost = Run(store->Put("k", "2", *made, 0, runtime::Deadline::After(seconds(8))));
  ASSERT_FALSE(lost.ok());
  EXPECT_TRUE(lost.error().code() == Code::kUnavailable ||
              lost.error().code() == Code::kDeadlineExceeded)
      << lost.error().ToString();
  cluster.Start(0);
  const auto entry = Run(store->Get("k", Soon()));
  ASSERT_TRUE(entry.ok()) << entry.error().ToString();
  EXPECT_TRUE((*entry)->value == "1" || (*entry)->value == "2");
}

}  // namespace
}  // namespace testing

namespace etcd {
namespace {

using std::chrono::seconds;

TEST(EtcdJson, Commit_ComparesVersionsAndAsksForThemOnFailure) {
  EXPECT_EQ(CommitBody({{"a", 7}}, {{"a", "1", 5}, {"b", std::nullopt, 0}}),
            R"({"compare":[{"key":"YQ==","mod_revision":"7","result":"EQUAL","target":"MOD"}],)"
            R"("failure":[{"request_range":{"key":"YQ==","keys_only":true}}],)"
            R"("success":[{"request_put":{"key":"YQ==","lease":"5","value":"MQ=="}},)"
            R"({"request_delete_range":{"key":"Yg=="}}]})");
  const auto refused = ParseCommit(
      R"({"header":{"revision":"9"},"responses":[{"response_range":{"kvs":[{"key":"YQ==",)"
      R"("mod_revision":"8"}]}},{"response_range":{}}]})",
      2);
  ASSERT_TRUE(refused.ok());
  EXPECT_FALSE(refused->done);
  EXPECT_EQ(refused->found, (std::vector<Revision>{8, 0}));
}

TEST(EtcdJson, WhatIsNotAnAnswer_IsRefusedByName) {
  for (const char* text :
       {"", "[]", "{\"header\":5}", "{\"header\":{\"revision\":\"x\"}}", "{\"kvs\":{}}",
        "{\"kvs\":[{\"key\":\"%%\"}]}", "{\"kvs\":[1]}", "{\"header\":{\"revision\":\"-3\"}}"}) {
    EXPECT_EQ(ParsePage(text).error().reason(), "store.protocol") << text;
  }
  EXPECT_EQ(ParseCommit(R"({"responses":[{}]})", 2).error().reason(), "store.protocol");
  EXPECT_EQ(ParseKeepAlive("{\"result\":[]}").error().reason(), "store.protocol");
  EXPECT_EQ(ParseWatchLine(R"({"result":{"events":[{"kv":{}}]}})").error().reason(),
            "store.protocol");
}

TEST(EtcdJson, Errors_KeepTheirMeaning) {
  EXPECT_EQ(ErrorOf(404, R"({"error":"x","message":"no lease","code":5})").reason(), "store.lease");
  EXPECT_EQ(ErrorOf(503, R"({"message":"no leader","code":14})").code(), Code::kUnavailable);
  EXPECT_EQ(ErrorOf(429, R"({"message":"full","code":8})").reason(), "store.full");
  EXPECT_EQ(ErrorOf(502, "<html>").code(), Code::kUnavailable);
  const auto line = ParseWatchLine(R"({"error":{"grpc_code":14,"message":"no leader"}})");
  EXPECT_EQ(line->error->code(), Code::kUnavailable);
}

}  // namespace
}  // namespace etcd
}  // namespace dsec::store

// SPDX-License-Identifier: Apache-2.0
#include "edge/record_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

namespace dsec::edge {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

class RecordStoreTest : public testing::Test {
 protected:
  RecordStoreTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "dsec-records-XXXXXX").string();
    dir_ = mkdtemp(pattern.data());
    Reopen();
  }
  ~RecordStoreTest() override {
    store_.reset();
    std::filesystem::remove_all(dir_);
  }
  void Reopen() {
    store_.reset();
    auto store = RecordStore::Open(path());
    ASSERT_TRUE(store.ok()) << store.error().ToString();
    store_ = *std::move(store);
  }
  std::string path() const { return dir_ + "/edge.db"; }

  static v1::SandboxRecord Record(int n, int64_t ended_ms = 0) {
    v1::SandboxRecord record;
    record.set_id(fmt::format("sb-n1-{:026}", n));
    record.set_request_id(fmt::format("request-{}", n));
    record.set_state(ended_ms == 0 ? v1::STATE_RUNNING : v1::STATE_STOPPED);
    record.set_ended_unix_ms(ended_ms);
    return record;
  }
  static v1::Event Event(const v1::SandboxRecord& record, uint64_t seq) {
    v1::Event event;
    event.set_sandbox_id(record.id());
    event.set_seq(seq);
    event.set_type("state");
    return event;
  }
  std::vector<uint64_t> Seqs(std::string_view id, uint64_t after) {
    auto events = store_->Events(id, after, 100);
    std::vector<uint64_t> seqs;
    for (const auto& event : *events) seqs.push_back(event.seq());
    return seqs;
  }

  std::string dir_;
  std::unique_ptr<RecordStore> store_;
};

TEST_F(RecordStoreTest, File_IsForOurEyesOnly) {
  struct stat status = {};
  ASSERT_EQ(stat(path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(RecordStoreTest, SavedRecord_IsFoundAfterReopening) {
  auto record = Record(1);
  ASSERT_TRUE(store_->Insert(record, {{Event(record, 1)}}).ok());
  record.set_scratch("scratch-1");
  ASSERT_TRUE(store_->Save(record, {}).ok());
  Reopen();
  EXPECT_EQ((*store_->Find(record.id()))->scratch(), "scratch-1");
  EXPECT_EQ((*store_->FindByRequest("request-1"))->id(), record.id());
  EXPECT_FALSE(store_->Find("sb-n1-unknown")->has_value());
  EXPECT_EQ(store_->Live()->size(), 1u);
}

TEST_F(RecordStoreTest, SecondInsertOfARequest_IsRefusedAndLeavesNothing) {
  auto first = Record(1);
  ASSERT_TRUE(store_->Insert(first, {}).ok());
  auto second = Record(2);
  second.set_request_id("request-1");
  const auto refused = store_->Insert(second, {{Event(second, 1)}});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kAlreadyExists);
  EXPECT_EQ(refused.error().reason(), "store.constraint");
  EXPECT_THAT(Seqs("", 0), IsEmpty());
}

TEST_F(RecordStoreTest, FailedCreate_FreesItsRequestId) {
  auto failed = Record(1);
  ASSERT_TRUE(store_->Insert(failed, {}).ok());
  failed.mutable_termination()->set_cause("create_failed");
  failed.set_ended_unix_ms(5);
  ASSERT_TRUE(store_->Save(failed, {}).ok());
  EXPECT_FALSE(store_->FindByRequest("request-1")->has_value());
  EXPECT_EQ((*store_->Find(failed.id()))->request_id(), "request-1");
  auto again = Record(2);
  again.set_request_id("request-1");
  EXPECT_TRUE(store_->Insert(again, {}).ok());
}

TEST_F(RecordStoreTest, SaveOfUnknownRecord_Fails) {
  EXPECT_EQ(store_->Save(Record(1), {}).error().reason(), "store.failed");
}

TEST_F(RecordStoreTest, SecondEventOfTheSameSeq_IsRefusedWithItsRecord) {
  auto record = Record(1);
  ASSERT_TRUE(store_->Insert(record, {{Event(record, 1)}}).ok());
  record.set_ended_unix_ms(5);
  EXPECT_FALSE(store_->Save(record, {{Event(record, 2), Event(record, 1)}}).ok());
  EXPECT_EQ((*store_->Find(record.id()))->ended_unix_ms(), 0);
  EXPECT_THAT(Seqs(record.id(), 0), ElementsAre(1));
}

TEST_F(RecordStoreTest, NodeSeq_GoesOnAfterReopeningAndAfterAFailedWrite) {
  auto a = Record(1);
  auto b = Record(2);
  ASSERT_TRUE(store_->Insert(a, {{Event(a, 1), Event(a, 2)}}).ok());
  ASSERT_FALSE(store_->Insert(a, {{Event(a, 3)}}).ok());
  Reopen();
  ASSERT_TRUE(store_->Insert(b, {{Event(b, 1)}}).ok());
  v1::Event node;
  node.set_type("repaired");
  ASSERT_TRUE(store_->AppendNodeEvent(node).ok());
  const auto events = store_->Events("", 1, 100);
  std::vector<uint64_t> node_seqs;
  for (const auto& event : *events) node_seqs.push_back(event.node_seq());
  EXPECT_THAT(node_seqs, ElementsAre(2, 3, 4));
  EXPECT_EQ(events->back().seq(), 4u);
  EXPECT_THAT(Seqs(a.id(), 1), ElementsAre(2));
}

TEST_F(RecordStoreTest, EndedAfter_PagesInOrderOfIdWithoutTheLiving) {
  for (int n : {3, 1, 2}) ASSERT_TRUE(store_->Insert(Record(n, n * 10), {}).ok());
  ASSERT_TRUE(store_->Insert(Record(4), {}).ok());
  const auto page = store_->EndedAfter("", 2);
  ASSERT_EQ(page->size(), 2u);
  EXPECT_EQ((*page)[0].id(), Record(1).id());
  const auto rest = store_->EndedAfter((*page)[1].id(), 2);
  ASSERT_EQ(rest->size(), 1u);
  EXPECT_EQ((*rest)[0].id(), Record(3).id());
}

TEST_F(RecordStoreTest, Expire_DropsByAgeAndByCountNeverTheLiving) {
  for (int n = 1; n <= 10; ++n) ASSERT_TRUE(store_->Insert(Record(n, n * 1000), {}).ok());
  auto living = Record(99);
  ASSERT_TRUE(
      store_->Insert(living, {{Event(living, 1), Event(living, 2), Event(living, 3)}}).ok());
  const Retention retention{.ended_records = 5, .ended_age_ms = 3'000, .events = 2};
  // At 10 s: age drops ids 1..7, and of the rest the count keeps all.
  EXPECT_TRUE(*store_->Expire(retention, 10'000, 4));
  while (*store_->Expire(retention, 10'000, 4)) {
  }
  EXPECT_EQ(store_->EndedAfter("", 100)->size(), 3u);
  EXPECT_THAT(Seqs(living.id(), 0), ElementsAre(2, 3));
  while (*store_->Expire({.ended_records = 1, .ended_age_ms = 1'000'000, .events = 2}, 10'000, 4)) {
  }
  EXPECT_EQ(store_->EndedAfter("", 100)->size(), 1u);
  EXPECT_EQ(store_->Live()->size(), 1u);
}

TEST_F(RecordStoreTest, SecondOpener_IsRefused) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto other = RecordStore::Open(path());
    _exit(!other.ok() && other.error().reason() == "store.busy" ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST_F(RecordStoreTest, KilledWriter_LosesNothingThatWasAnswered) {
  store_.reset();
  for (int round = 0; round < 5; ++round) {
    int pipe_ends[2];
    ASSERT_EQ(pipe(pipe_ends), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      auto store = RecordStore::Open(path());
      if (!store.ok()) _exit(1);
      for (int n = round * 100'000;; ++n) {
        if (!(*store)->Insert(Record(n), {}).ok()) _exit(2);
        if (write(pipe_ends[1], &n, sizeof(n)) != sizeof(n)) _exit(3);
      }
    }
    close(pipe_ends[1]);
    int answered = -1;
    for (int count = 0; count < 200 * (round + 1); ++count) {
      ASSERT_EQ(read(pipe_ends[0], &answered, sizeof(answered)),
                static_cast<ssize_t>(sizeof(answered)));
    }
    kill(child, SIGKILL);
    while (read(pipe_ends[0], &answered, sizeof(answered)) ==
           static_cast<ssize_t>(sizeof(answered))) {
    }
    close(pipe_ends[0]);
    waitpid(child, nullptr, 0);
    Reopen();
    ASSERT_TRUE(store_->Verify().ok());
    EXPECT_TRUE(store_->Find(Record(answered).id())->has_value());
    store_.reset();
  }
}

TEST_F(RecordStoreTest, DamagedFile_IsNamedCorrupt) {
  for (int n = 1; n < 200; ++n) ASSERT_TRUE(store_->Insert(Record(n), {}).ok());
  store_.reset();
  std::ofstream(path(), std::ios::binary | std::ios::in).write(std::string(100, 'x').data(), 100);
  const auto opened = RecordStore::Open(path());
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().reason(), "store.corrupt");
}

}  // namespace
}  // namespace dsec::edge

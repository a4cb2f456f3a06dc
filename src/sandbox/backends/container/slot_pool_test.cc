// SPDX-License-Identifier: Apache-2.0
// The pool with slots that are single sleeping processes: who gets which index, and when it comes
// back.

#include "sandbox/backends/container/slot_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <map>
#include <mutex>

#include "runtime/shards.h"

namespace dsec::sandbox {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Makes slots, each with a process in the agent's place, and remembers what exists.
class FakeSlots {
 public:
  ~FakeSlots() {
    for (const auto& [name, pid] : live_) End(pid);
  }
  SlotPool::Hooks Hooks() {
    return {[this](const SlotName& name) { return Make(name); },
            [this](const SlotName& name) { return Remove(name); }};
  }
  Result<ReadySlot> Make(const SlotName& name) {
    std::unique_lock lock(mutex_);
    ++made_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !hold_; });
    if (failures_ > 0) {
      --failures_;
      half_made_.insert(name);
      return Error(fail_with_, "test.make", "as asked");
    }
    for (const auto& [other, pid] : live_) EXPECT_NE(other.index, name.index) << "two owners";
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::pause();
      ::_exit(0);
    }
    live_[name] = pid;
    ReadySlot slot;
    slot.name = name;
    slot.process.agent = os::PidFd::Open(pid).value();
    slot.process.agent_pid = pid;
    return slot;
  }
  Result<void> Remove(const SlotName& name) {
    const std::lock_guard lock(mutex_);
    if (refuse_remove_) return Error(Code::kDeadlineExceeded, "test.remove", "as asked");
    half_made_.erase(name);
    const auto it = live_.find(name);
    if (it != live_.end()) {
      End(it->second);
      live_.erase(it);
    }
    removed_.push_back(name);
    changed_.notify_all();
    return Ok();
  }
  void Fail(int count, Code code) {
    const std::lock_guard lock(mutex_);
    failures_ = count;
    fail_with_ = code;
  }
  void Hold(bool hold) {
    const std::lock_guard lock(mutex_);
    hold_ = hold;
    changed_.notify_all();
  }
  void AwaitMade(size_t count) {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(10), [&] { return made_ >= count; }));
  }
  void AwaitRemoved(size_t count) {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(10),
                                  [&] { return removed_.size() >= count; }));
  }
  void Kill(pid_t pid) { ::kill(pid, SIGKILL); }
  size_t live() {
    const std::lock_guard lock(mutex_);
    return live_.size();
  }
  bool refuse_remove_ = false;

 private:
  static void End(pid_t pid) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<SlotName, pid_t> live_;
  std::set<SlotName> half_made_;
  std::vector<SlotName> removed_;
  size_t made_ = 0;
  int failures_ = 0;
  bool hold_ = false;
  Code fail_with_ = Code::kInternal;
};

class SlotPoolTest : public ::testing::Test {
 protected:
  std::unique_ptr<SlotPool> Pool(uint32_t indices, uint32_t ready,
                                 std::vector<SlotName> found = {}) {
    SlotPoolOptions options;
    options.indices = indices;
    options.ready = ready;
    return std::make_unique<SlotPool>(options, slots_.Hooks(), found);
  }
  Result<ReadySlot> Take(SlotPool& pool, int seconds = 10) {
    return runtime::BlockOn(shards_.at(0),
                            pool.Take(runtime::Deadline::After(std::chrono::seconds(seconds))));
  }
  FakeSlots slots_;
  runtime::Shards shards_{2};
};

TEST_F(SlotPoolTest, Take_EmptyPool_MakesOne) {
  auto pool = Pool(4, 0);
  auto slot = Take(*pool);
  ASSERT_TRUE(slot.ok()) << slot.error().ToString();
  EXPECT_THAT(pool->Owned(), ElementsAre(slot->name));
  EXPECT_EQ(pool->ready(), 0u);
}

TEST_F(SlotPoolTest, Ready_IsFilledUpOnceHalfEmptyAndNotAbove) {
  auto pool = Pool(16, 3);
  slots_.AwaitMade(3);
  while (pool->ready() < 3) std::this_thread::yield();
  auto slot = Take(*pool);
  ASSERT_TRUE(slot.ok());
  slot = Take(*pool);
  ASSERT_TRUE(slot.ok());
  slots_.AwaitMade(5);
  pool.reset();
  EXPECT_EQ(slots_.live(), 2u) << "what was taken lives on, what waited is gone";
}

// Acceptance case 91.
TEST_F(SlotPoolTest, AllTaken_NextIsRefusedAtOnceUntilARelease) {
  auto pool = Pool(4, 0);
  std::vector<SlotName> names;
  for (int i = 0; i < 4; ++i) names.push_back(Take(*pool)->name);
  auto fifth = Take(*pool);
  ASSERT_FALSE(fifth.ok());
  EXPECT_EQ(fifth.error().reason(), "capacity.slots");
  EXPECT_EQ(fifth.error().code(), Code::kResourceExhausted);
  ASSERT_TRUE(slots_.Remove(names[2]).ok());
  pool->Release(names[2]);
  auto again = Take(*pool);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->name.index, names[2].index);
  EXPECT_GT(again->name.generation, names[2].generation);
  // A late second release of the old name does not free what the new owner has.
  pool->Release(names[2]);
  EXPECT_FALSE(Take(*pool).ok());
}

TEST_F(SlotPoolTest, ThousandRounds_NeverTwoOwners) {
  auto pool = Pool(8, 2);
  std::vector<SlotName> mine;
  for (int i = 0; i < 300; ++i) {
    auto slot = Take(*pool);
    if (slot.ok()) mine.push_back(slot->name);
    if (mine.size() == 8 || !slot.ok() || i % 3 == 0) {
      ASSERT_FALSE(mine.empty());
      ASSERT_TRUE(slots_.Remove(mine.front()).ok());
      pool->Release(mine.front());
      mine.erase(mine.begin());
    }
  }
}

TEST_F(SlotPoolTest, Reserved_IsOneOfTheSameIndices) {
  auto pool = Pool(3, 0, {{2, 9, SlotKind::kWorker}});
  const SlotName worker = pool->Reserve(SlotKind::kWorker).value();
  auto slot = Take(*pool);
  ASSERT_TRUE(slot.ok());
  EXPECT_NE(slot->name.index, worker.index);
  EXPECT_EQ(pool->Reserve(SlotKind::kWorker).error().reason(), "capacity.slots");
  EXPECT_EQ(Take(*pool).error().reason(), "capacity.slots");
  // Another kind of that index is another name.
  pool->Release({worker.index, worker.generation, SlotKind::kSandbox});
  EXPECT_FALSE(Take(*pool).ok());
  pool->Release(worker);
  EXPECT_EQ(Take(*pool)->name.index, worker.index);
  pool->Release({2, 9, SlotKind::kWorker});
  EXPECT_EQ(pool->Reserve(SlotKind::kWorker)->index, 2u);
}

TEST_F(SlotPoolTest, Foreign_IsNotUsedBeforeItIsReleased) {
  const SlotName old{0, 5}, other{1, 6};
  auto pool = Pool(2, 0, {old, other, {99, 1}});
  EXPECT_EQ(Take(*pool).error().reason(), "capacity.slots");
  EXPECT_TRUE(pool->Adopt(old));
  EXPECT_TRUE(pool->Adopt(old)) << "again";
  EXPECT_FALSE(pool->Adopt({1, 7})) << "another generation";
  EXPECT_THAT(pool->Owned(), ElementsAre(old));
  pool->Release(other);
  auto slot = Take(*pool);
  ASSERT_TRUE(slot.ok());
  EXPECT_EQ(slot->name.index, 1u);
  EXPECT_GT(slot->name.generation, 6u);
}

TEST_F(SlotPoolTest, TwoGenerationsOfOneIndex_BothMustGo) {
  auto pool = Pool(1, 0, {{0, 5}, {0, 6}});
  pool->Release({0, 5});
  EXPECT_FALSE(Take(*pool).ok());
  pool->Release({0, 6});
  EXPECT_TRUE(Take(*pool).ok());
}

TEST_F(SlotPoolTest, DeadInThePool_IsNotHandedOut) {
  auto pool = Pool(8, 1);
  slots_.AwaitMade(1);
  auto first = Take(*pool);
  ASSERT_TRUE(first.ok());
  slots_.AwaitMade(2);
  auto waiting = Take(*pool);
  ASSERT_TRUE(waiting.ok());
  slots_.AwaitMade(3);
  // The third stands in the pool; end it there.
  SlotName third;
  for (const SlotName& name : pool->Owned()) {
    if (name != first->name && name != waiting->name) third = name;
  }
  auto taken = Take(*pool);
  ASSERT_TRUE(taken.ok());
  EXPECT_EQ(taken->name, third);
  slots_.AwaitMade(4);
  while (pool->ready() == 0) std::this_thread::yield();
  for (const SlotName& name : pool->Owned()) {
    if (name == first->name || name == waiting->name || name == third) continue;
    // Ended from outside, as by the host's OOM killer.
    ASSERT_TRUE(slots_.Remove(name).ok());
  }
  auto after = Take(*pool);
  ASSERT_TRUE(after.ok());
  EXPECT_TRUE(*after->process.agent.WaitExit(Clock::System().Mono()) == false) << "alive";
}

TEST_F(SlotPoolTest, MakeFails_WaiterLearnsAndTheIndexIsFreeAgain) {
  slots_.Fail(1, Code::kInternal);
  auto pool = Pool(1, 0);
  EXPECT_EQ(Take(*pool).error().reason(), "test.make");
  EXPECT_TRUE(Take(*pool).ok());
}

TEST_F(SlotPoolTest, SpawnerDied_IsTriedAgain) {
  slots_.Fail(1, Code::kUnavailable);
  auto pool = Pool(1, 0);
  EXPECT_TRUE(Take(*pool).ok());
}

TEST_F(SlotPoolTest, RemainsThatStay_KeepTheIndex) {
  slots_.Fail(1, Code::kInternal);
  slots_.refuse_remove_ = true;
  auto pool = Pool(1, 0);
  EXPECT_FALSE(Take(*pool).ok());
  EXPECT_EQ(Take(*pool).error().reason(), "capacity.slots");
  EXPECT_EQ(pool->Foreign().size(), 1u) << "left to a sweep";
}

TEST_F(SlotPoolTest, WaiterGivesUp_SlotGoesToThePool) {
  slots_.Hold(true);
  auto pool = Pool(2, 0);
  auto late = runtime::BlockOn(shards_.at(0),
                               pool->Take(runtime::Deadline::After(std::chrono::milliseconds(50))));
  EXPECT_EQ(late.error().code(), Code::kDeadlineExceeded);
  slots_.Hold(false);
  auto next = Take(*pool);
  ASSERT_TRUE(next.ok());
  EXPECT_LE(pool->Owned().size(), 2u);
}

}  // namespace
}  // namespace dsec::sandbox

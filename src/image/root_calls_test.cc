// SPDX-License-Identifier: Apache-2.0
#include "image/root_calls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <latch>
#include <thread>

namespace dsec::image {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kAtOnce{0};
constexpr seconds kLong{30};

TEST(RootCalls, Error_OfAFileSystemInTroubleIsUnreachable) {
  const Error trouble = RootError(Error::FromErrno(ENOTCONN, "os.open", "open x"));
  EXPECT_EQ(trouble.reason(), "layer.unreachable");
  EXPECT_EQ(trouble.code(), Code::kUnavailable);
  EXPECT_EQ(trouble.sys_errno(), ENOTCONN);
  EXPECT_EQ(RootError(Error::FromErrno(ENOENT, "os.open", "open x")).reason(), "os.open");
}

TEST(RootLane, HangingCall_CostsOthersNoMoreThanTheirPatience) {
  std::latch release(1);
  std::latch begun(1);
  std::atomic<int> made = 0;
  RootLane lane;
  std::jthread first([&] {
    const auto answer = lane.Run<int>(
        [&]() -> Result<int> {
          begun.count_down();
          release.wait();
          return 1;
        },
        kLong);
    EXPECT_EQ(*answer, 1);
  });
  begun.wait();
  const auto count = [&]() -> Result<int> { return ++made; };
  EXPECT_EQ(lane.Run<int>(count, milliseconds(20)).error().reason(), "layer.unreachable");
  // By now the first has been at work for longer than this one would wait.
  EXPECT_EQ(lane.Run<int>(count, milliseconds(10)).error().reason(), "layer.unreachable");
  EXPECT_EQ(made, 0);
  release.count_down();
  first.join();
  // Calls that nobody waited for any more have not been made.
  EXPECT_EQ(*lane.Run<int>(count, kLong), 1);
}

TEST(RootLane, End_LeavesAHangingCallBehind) {
  auto release = std::make_shared<std::latch>(1);
  auto done = std::make_shared<std::latch>(1);
  {
    RootLane lane;
    const auto answer = lane.Run<int>(
        [release, done]() -> Result<int> {
          release->wait();
          done->count_down();
          return 1;
        },
        milliseconds(20));
    EXPECT_EQ(answer.error().reason(), "layer.unreachable");
  }
  release->count_down();
  done->wait();
}

TEST(RootThreads, Limit_RefusesAndWaitSaysWhenNoneIsLeft) {
  std::latch release(1);
  RootThreads threads(2);
  EXPECT_TRUE(threads.Start([&] { release.wait(); }));
  EXPECT_TRUE(threads.Start([&] { release.wait(); }));
  EXPECT_FALSE(threads.Start([] {}));
  EXPECT_FALSE(threads.Wait(milliseconds(1)));
  release.count_down();
  EXPECT_TRUE(threads.Wait(kLong));
  EXPECT_TRUE(threads.Start([] {}));
  EXPECT_TRUE(threads.Wait(kLong));
}

TEST(RootThreads, ThreadWithoutACall_TakesTheNextOneAndNoneWaitsForABusyOne) {
  RootThreads threads(4);
  std::thread::id first, second, beside;
  EXPECT_TRUE(threads.Start([&] { first = std::this_thread::get_id(); }));
  EXPECT_TRUE(threads.Wait(kLong));
  std::latch begun(1), release(1);
  EXPECT_TRUE(threads.Start([&] {
    second = std::this_thread::get_id();
    begun.count_down();
    release.wait();
  }));
  begun.wait();
  std::latch done(1);
  EXPECT_TRUE(threads.Start([&] {
    beside = std::this_thread::get_id();
    done.count_down();
  }));
  done.wait();
  release.count_down();
  EXPECT_TRUE(threads.Wait(kLong));
  EXPECT_EQ(first, second);
  EXPECT_NE(beside, second);
}

TEST(Pending, Result_IsGoneWithTheLastWhoJoined) {
  Pending<std::shared_ptr<int>> pending;
  pending.Join();
  pending.Join();
  auto value = std::make_shared<int>(7);
  const std::weak_ptr<int> watch = value;
  pending.Set(std::move(value));
  EXPECT_EQ(***pending.Wait(kLong), 7);
  EXPECT_FALSE(watch.expired());
  EXPECT_EQ(***pending.Wait(kLong), 7);
  EXPECT_TRUE(watch.expired());
}

TEST(Pending, NoResult_IsNoAnswer) {
  Pending<int> pending;
  pending.Join();
  EXPECT_FALSE(pending.Wait(kAtOnce).has_value());
  pending.Set(1);  // nobody waits: it is not kept
  pending.Join();
  EXPECT_FALSE(pending.Wait(kAtOnce).has_value());
}

}  // namespace
}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#include "runtime/testing/virtual_time.h"

#include <gtest/gtest.h>

#include "runtime/periodic.h"

namespace dsec::runtime::testing {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

Task<MonoTime> SleepThenTell(std::chrono::nanoseconds time) {
  auto slept = co_await SleepUntil(Deadline::After(time));
  if (!slept.ok()) co_return std::move(slept).error();
  co_return std::chrono::steady_clock::now();
}

TEST(VirtualTime, StandsStillUntilTheWorldRuns) {
  const MonoTime before = VirtualNow();
  const auto wall = std::chrono::system_clock::now();
  EXPECT_EQ(Clock::System().Mono(), before);
  World world;
  world.Add();
  world.RunFor(hours(2));
  EXPECT_EQ(VirtualNow() - before, hours(2));
  EXPECT_EQ(std::chrono::system_clock::now() - wall, hours(2));
}

TEST(VirtualTime, TimersFireInTheirOrderAtTheirTime) {
  World world;
  const auto process = world.Add();
  const MonoTime begin = VirtualNow();
  const auto woken = world.Await(process, SleepThenTell(milliseconds(12'345)));
  ASSERT_TRUE(woken.ok()) << woken.error().ToString();
  EXPECT_EQ(*woken - begin, milliseconds(12'345));
}

TEST(VirtualTime, PausedProcess_IsLateButLosesNothing) {
  World world;
  const auto process = world.Add();
  int runs = 0;
  Periodic periodic(world.at(process), "test", seconds(1), [&]() -> boost::asio::awaitable<void> {
    ++runs;
    co_return;
  });
  world.RunFor(milliseconds(3'500));
  EXPECT_EQ(runs, 3);
  world.Pause(process);
  world.RunFor(seconds(60));
  EXPECT_EQ(runs, 3);
  world.Continue(process);
  world.RunFor(milliseconds(1));
  EXPECT_EQ(runs, 4);
}

TEST(VirtualTime, KilledProcess_RunsNothingMore) {
  World world;
  const auto process = world.Add();
  bool ended = false;
  auto work = [&]() -> boost::asio::awaitable<void> {
    (void)co_await SleepUntil(Deadline::After(seconds(1)));
    ended = true;
  };
  internal::StartDetached(world.at(process), work());
  world.RunFor(milliseconds(500));
  world.Kill(process);
  world.RunFor(seconds(5));
  EXPECT_FALSE(ended);
}

}  // namespace
}  // namespace dsec::runtime::testing

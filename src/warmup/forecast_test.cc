// SPDX-License-Identifier: Apache-2.0
#include "warmup/forecast.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dsec::warmup {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class ForecastTest : public ::testing::Test {
 protected:
  static MonoTime At(int64_t second) { return MonoTime(seconds(10'000 + second)); }
  // `count` creations within two seconds.
  void Burst(int64_t second, int count, const std::vector<std::string>& layers,
             const std::string& project = "p") {
    for (int i = 0; i < count; ++i)
      forecast_.Note(project, layers, At(second) + milliseconds(2000 * i / count));
  }
  std::vector<Hint> Due(int64_t second) { return forecast_.Due(At(second)); }

  Forecast forecast_{ForecastOptions()};
};

TEST_F(ForecastTest, ThirdRegularBurst_ForeseesTheFourth) {
  Burst(0, 100, {"base", "w1"});
  Burst(300, 120, {"base", "w2"});
  EXPECT_THAT(Due(590), IsEmpty());  // two tell nothing
  Burst(600, 110, {"base", "w3"});
  EXPECT_THAT(Due(800), IsEmpty());
  EXPECT_THAT(Due(889), IsEmpty());
  const std::vector<Hint> hints = Due(891);
  ASSERT_THAT(hints, SizeIs(1));
  EXPECT_EQ(hints[0].project, "p");
  EXPECT_EQ(hints[0].expected, At(900));
  EXPECT_EQ(hints[0].sandboxes, 110u);
  EXPECT_THAT(hints[0].layers, ElementsAre("base"));  // workspaces are new each time
  EXPECT_THAT(Due(892), IsEmpty());                   // told once
}

TEST_F(ForecastTest, Layers_AreOrderedByUseAndFromHalfOfTheBursts) {
  for (int step = 0; step < 4; ++step) {
    Burst(300 * step, 10, {"rare", "base"});
    Burst(300 * step + 3, 30, {"base", "tool"});
    if (step < 1) Burst(300 * step + 5, 5, {"once"});
  }
  const std::vector<Hint> hints = Due(1195);
  ASSERT_THAT(hints, SizeIs(1));
  EXPECT_THAT(hints[0].layers, ElementsAre("base", "tool", "rare"));
  EXPECT_EQ(hints[0].sandboxes, 40u);
}

TEST_F(ForecastTest, IrregularBursts_ForeseeNothing) {
  for (const int64_t start : {0, 40, 900, 1000, 3000}) Burst(start, 50, {"base"});
  for (int64_t second = 3010; second < 6000; second += 5) EXPECT_THAT(Due(second), IsEmpty());
}

TEST_F(ForecastTest, SingleCreationsBetween_DoNotSpoilTheRhythm) {
  for (int step = 0; step < 3; ++step) {
    Burst(300 * step, 50, {"base"});
    Burst(300 * step + 130, 1, {"debug"});
  }
  const std::vector<Hint> hints = Due(895);
  ASSERT_THAT(hints, SizeIs(1));
  EXPECT_EQ(hints[0].expected, At(900));
  EXPECT_THAT(hints[0].layers, Not(Contains("debug")));
}

TEST_F(ForecastTest, HintThatComesTrue_CountsWhatItCovers) {
  for (int step = 0; step < 3; ++step) Burst(300 * step, 50, {"base"});
  ASSERT_THAT(Due(895), SizeIs(1));
  Burst(903, 40, {"base"});
  Burst(904, 10, {"base", "new"});
  EXPECT_EQ(forecast_.figures().hints, 1u);
  EXPECT_EQ(forecast_.figures().came, 1u);
  EXPECT_EQ(forecast_.figures().creations, 50u);
  EXPECT_EQ(forecast_.figures().covered, 40u);
  // The burst that came has moved the rhythm by its three seconds.
  const std::vector<Hint> next = Due(1200);
  ASSERT_THAT(next, SizeIs(1));
  EXPECT_EQ(next[0].expected, At(1203));
  EXPECT_EQ(forecast_.figures().missed, 0u);
}

TEST_F(ForecastTest, JobThatHasEnded_IsHintedOnceMoreAndNeverAgain) {
  for (int step = 0; step < 3; ++step) Burst(300 * step, 50, {"base"});
  size_t hints = 0;
  for (int64_t second = 700; second < 9000; second += 5) hints += Due(second).size();
  EXPECT_EQ(hints, 1u);
  EXPECT_EQ(forecast_.figures().missed, 1u);
}

TEST_F(ForecastTest, LookedAtTooLate_TellsNothing) {
  for (int step = 0; step < 3; ++step) Burst(300 * step, 50, {"base"});
  EXPECT_THAT(Due(5000), IsEmpty());
  EXPECT_EQ(forecast_.figures().hints, 0u);
}

TEST_F(ForecastTest, ProjectsAndLayers_AreBounded) {
  ForecastOptions options;
  options.max_projects = 3;
  options.max_layers = 2;
  Forecast forecast(options);
  for (int i = 0; i < 10; ++i) forecast.Note(fmt::format("p{}", i), {}, At(i));
  EXPECT_EQ(forecast.projects(), 3u);
  const std::vector<std::string> layers = {"a", "b", "c", "d"};
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < 8; ++i) forecast.Note("p9", layers, At(100 + 300 * step));
  }
  const std::vector<Hint> hints = forecast.Due(At(995));
  ASSERT_THAT(hints, SizeIs(1));
  EXPECT_THAT(hints[0].layers, ElementsAre("a", "b"));
}

}  // namespace
}  // namespace dsec::warmup

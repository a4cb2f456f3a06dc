// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <limits>
#include <thread>

#include "base/fault.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/utf8.h"

namespace dsec {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

class LogTest : public ::testing::Test {
 protected:
  void SetUp() override { Use(log::Format::kText); }
  void TearDown() override { log::Configure({}); }
  void Use(log::Format format) {
    log::Configure({.format = format,
                    .level = log::Level::kInfo,
                    .burst = 2,
                    .per_second = 1,
                    .sink = [this](std::string_view line) { lines_.emplace_back(line); },
                    .clock = &clock_});
  }

  FakeClock clock_;
  std::vector<std::string> lines_;
};

TEST_F(LogTest, Text_QuotesWhatNeedsIt) {
  log::Info("a.b", {{"id", SandboxId("sb-1")},
                    {"n", -3},
                    {"big", UINT64_MAX},
                    {"ok", true},
                    {"s", "two words"},
                    {"ratio", 0.5}});
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_THAT(lines_[0], EndsWith("Z info  a.b id=sb-1 n=-3 big=18446744073709551615 ok=true "
                                  "s=\"two words\" ratio=0.5"));
}

TEST_F(LogTest, HostileValue_CannotForgeALineOrReachTheTerminal) {
  const std::string hostile = "x\n2020 info forged\x1b[2J\xff\xc2\x9b\"";
  log::Info("text", {{"v", hostile}});
  Use(log::Format::kJson);
  log::Info("json", {{"v", hostile}});
  ASSERT_EQ(lines_.size(), 2u);
  EXPECT_THAT(lines_[0], EndsWith(R"(v="x\n2020 info forged\u001b[2J\xff\u009b\"")"));
  EXPECT_THAT(lines_[1], EndsWith(R"("v":"x\n2020 info forged\u001b[2J\ufffd\u009b\""})"));
}

TEST_F(LogTest, Json_IsOneObject) {
  Use(log::Format::kJson);
  log::Error("e", {{"error", Error(Code::kNotFound, "x.y", "gone").WithErrno(2)},
                   {"nan", std::numeric_limits<double>::quiet_NaN()}});
  EXPECT_EQ(lines_.at(0), R"({"ts":"2019-12-20T00:00:00.000Z","level":"error","event":"e",)"
                          R"("error":"NOT_FOUND x.y: gone errno=2","nan":null})");
}

TEST_F(LogTest, LongValue_IsCutWithItsLength) {
  log::Info("long", {{"v", std::string(5000, 'a')}});
  EXPECT_THAT(lines_.at(0), EndsWith("a...[904 bytes more]\""));
  EXPECT_LT(lines_.at(0).size(), 4300u);
}

TEST_F(LogTest, Flood_IsLimitedPerEventAndCounted) {
  metrics::Counter& counter =
      metrics::Registry::Global().GetCounter("dsec_log_suppressed_total", "", {{"event", "flood"}});
  const uint64_t before = counter.value();
  for (int i = 0; i < 10; ++i) log::Warn("flood");
  log::Warn("other");
  EXPECT_EQ(lines_.size(), 3u);
  EXPECT_EQ(counter.value() - before, 8u);
  clock_.Advance(std::chrono::seconds(1));
  log::Warn("flood");
  EXPECT_THAT(lines_.back(), EndsWith("flood suppressed=8"));
}

TEST_F(LogTest, BelowLevel_IsDropped) {
  log::Debug("quiet");
  EXPECT_TRUE(lines_.empty());
}

TEST_F(LogTest, ThrowingSink_DoesNotThrow) {
  log::Configure({.sink = [](std::string_view) { throw std::runtime_error("full"); }});
  log::Info("x");
}

TEST(LogWords, Unknown_NamesTheValueAndTheRule) {
  EXPECT_TRUE(log::ParseLevel("warn").ok());
  auto level = log::ParseLevel("loud");
  ASSERT_FALSE(level.ok());
  EXPECT_THAT(level.error().message(), HasSubstr("loud"));
  EXPECT_FALSE(log::ParseFormat("xml").ok());
}

TEST(Metrics, Render_FollowsTheTextFormat) {
  metrics::Registry registry;
  registry.GetCounter("b_total", "Two\nlines \\.", {{"z", "1"}, {"a", "q\"\\\n\xff"}}).Add(3);
  registry.GetGauge("a_bytes", "Size.").Set(1.5);
  metrics::Histogram& histogram =
      registry.GetHistogram("c_seconds", "Time.", {0.1, 1}, {{"k", "v"}});
  histogram.Observe(0.1);
  histogram.Observe(0.5);
  histogram.Observe(7);
  EXPECT_EQ(registry.RenderPrometheus(),
            "# HELP a_bytes Size.\n"
            "# TYPE a_bytes gauge\n"
            "a_bytes 1.5\n"
            "# HELP b_total Two\\nlines \\\\.\n"
            "# TYPE b_total counter\n"
            "b_total{a=\"q\\\"\\\\\\n\xef\xbf\xbd\",z=\"1\"} 3\n"
            "# HELP c_seconds Time.\n"
            "# TYPE c_seconds histogram\n"
            "c_seconds_bucket{k=\"v\",le=\"0.1\"} 1\n"
            "c_seconds_bucket{k=\"v\",le=\"1\"} 2\n"
            "c_seconds_bucket{k=\"v\",le=\"+Inf\"} 3\n"
            "c_seconds_sum{k=\"v\"} 7.6\n"
            "c_seconds_count{k=\"v\"} 3\n");
}

TEST(Metrics, SameLabelsInAnyOrder_AreOneSeries) {
  metrics::Registry registry;
  metrics::Counter& one = registry.GetCounter("x_total", "X.", {{"a", "1"}, {"b", "2"}});
  metrics::Counter& two = registry.GetCounter("x_total", "X.", {{"b", "2"}, {"a", "1"}});
  EXPECT_EQ(&one, &two);
}

TEST(Metrics, TooManySeries_ShareOne) {
  metrics::Registry registry;
  for (size_t i = 0; i < metrics::Registry::kMaxSeries + 10; ++i) {
    registry.GetCounter("x_total", "X.", {{"id", std::to_string(i)}}).Add();
  }
  EXPECT_EQ(registry.GetCounter("x_total", "X.", {{"id", "another"}}).value(), 10u);
  EXPECT_THAT(registry.RenderPrometheus(), HasSubstr("x_total{id=\"overflow\"} 10\n"));
}

TEST(Metrics, ParallelIncrements_AreAllCounted) {
  metrics::Registry registry;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 1000; ++n) {
        registry.GetCounter("x_total", "X.").Add();
        registry.GetGauge("g", "G.").Add(1);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(registry.GetCounter("x_total", "X.").value(), 4000u);
  EXPECT_EQ(registry.GetGauge("g", "G.").value(), 4000);
}

class FaultTest : public ::testing::Test {
 protected:
  void TearDown() override { fault::DisarmAll(); }
};

Result<int> Work() {
  DSEC_FAULT_POINT("test.work");
  return 7;
}

TEST_F(FaultTest, NotArmed_DoesNothing) {
  EXPECT_EQ(*Work(), 7);
  ASSERT_TRUE(fault::Arm("test.other=error:EIO").ok());
  EXPECT_EQ(*Work(), 7);
}

TEST_F(FaultTest, ErrorWithCount_FiresThatOften) {
  const uint64_t before = fault::Fired("test.work");
  ASSERT_TRUE(fault::Arm("test.work=error:ENOSPC*2").ok());
  for (int i = 0; i < 2; ++i) {
    auto result = Work();
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.error().sys_errno(), ENOSPC);
    EXPECT_EQ(result.error().reason(), "fault.injected");
  }
  EXPECT_TRUE(Work().ok());
  EXPECT_EQ(fault::Fired("test.work") - before, 2u);
}

TEST_F(FaultTest, Probability_ZeroNeverOneAlways) {
  ASSERT_TRUE(fault::Arm("test.work=error:EIO%0").ok());
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(Work().ok());
  ASSERT_TRUE(fault::Arm("test.work=error:EIO*100%1").ok());
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(Work().ok());
  EXPECT_TRUE(Work().ok());
}

TEST_F(FaultTest, Block_LastsUntilDisarmed) {
  const uint64_t before = fault::Fired("test.work");
  ASSERT_TRUE(fault::Arm("test.work=block").ok());
  std::jthread thread([] { EXPECT_TRUE(Work().ok()); });
  ASSERT_TRUE(fault::WaitFired("test.work", before + 1, std::chrono::seconds(10)));
  fault::Disarm("test.work");
}

TEST_F(FaultTest, Kill_EndsTheProcess) {
  EXPECT_EXIT(
      {
        (void)fault::Arm("test.work=kill");
        (void)Work();
      },
      ::testing::KilledBySignal(SIGKILL), "");
}

TEST_F(FaultTest, BadSpec_IsRefusedWhole) {
  for (const char* spec : {"x", "=kill", "x=", "x=die", "x=error:EWHAT", "x=delay:5", "x=delay:5h",
                           "x=kill*0", "x=kill*-1", "x=kill%2", "x=kill%nan", "x=error:"}) {
    auto armed = fault::Arm(std::string("test.work=error:EIO;") + spec);
    ASSERT_FALSE(armed.ok()) << spec;
    EXPECT_EQ(armed.error().reason(), "fault.invalid");
    EXPECT_TRUE(Work().ok()) << spec;
  }
}

TEST(Utf8, OnlyShortestFormsOfScalarValues_Pass) {
  EXPECT_TRUE(IsUtf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"));
  for (const char* bad : {"\x80", "\xc0\xaf", "\xc3", "\xe0\x80\xaf", "\xed\xa0\x80",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xf0\x80\x80\x80"}) {
    EXPECT_FALSE(IsUtf8(bad));
  }
}

}  // namespace
}  // namespace dsec

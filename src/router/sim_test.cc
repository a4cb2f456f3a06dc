// SPDX-License-Identifier: Apache-2.0
// Whole clusters under load and faults, on virtual time: what a cluster promises holds for every
// seed, and the checks find it when it does not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "router/testing/sim_run.h"

namespace dsec::router::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

SimRunOptions Faulty(uint64_t seed) {
  SimRunOptions options;
  options.nodes = 20;
  options.apiservers = 3;
  options.watchers = 3;
  options.rate = 60;
  options.time = seconds(60);
  options.faults = true;
  options.seed = seed;
  return options;
}

std::string Told(const SimRunResult& result) {
  std::string text;
  for (const std::string& violation : result.violations) text += violation + "\n";
  return text;
}

class SimTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(SimTest, Faults_BreakNoPromise) {
  const auto result = RunSim(Faulty(GetParam()));
  EXPECT_EQ(Told(result), "");
  EXPECT_EQ(result.false_deaths, 0u);
  EXPECT_GT(result.made, result.asked * 95 / 100);
  EXPECT_GT(result.injected.size(), 8u);
  // The leader may be killed in the middle (a lease of 5 s), and who follows may have slept.
  EXPECT_GT(result.detection_s.size(), 2u);
  for (const double detection : result.detection_s) EXPECT_LE(detection, 40.0);
  EXPECT_GT(result.told_and_lost, 20u);
}

// Twenty times slower with sanitizers, which look at the same code with each seed.
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
INSTANTIATE_TEST_SUITE_P(Seeds, SimTest, ::testing::Values(1));
#else
INSTANTIATE_TEST_SUITE_P(Seeds, SimTest, ::testing::Values(1, 2, 3));
#endif

TEST(Sim, DeadNodes_AreFoundWithinTenSecondsAndNobodyElse) {
  SimRunOptions options = Faulty(4);
  options.only_nodes = true;
  const auto result = RunSim(options);
  EXPECT_EQ(Told(result), "");
  EXPECT_EQ(result.false_deaths, 0u);
  EXPECT_GT(result.detection_s.size(), 5u);
  for (const double detection : result.detection_s) EXPECT_LE(detection, 10.0);
}

TEST(Sim, NodesThatForgetRequests_AreFoundOut) {
  SimRunOptions options = Faulty(1);
  options.forgetful_nodes = true;
  EXPECT_GT(RunSim(options).violations.size(), 0u);
}

TEST(Sim, QuotaOfAProject_IsNeverExceeded) {
  SimRunOptions options;
  options.nodes = 10;
  options.rate = 100;
  options.time = seconds(15);
  options.quota = 500;
  options.settle = seconds(30);
  const auto result = RunSim(options);
  EXPECT_EQ(Told(result), "");
  EXPECT_LE(result.most_live_of_quota, 500u);
  EXPECT_GE(result.made, 490u);
  EXPECT_LE(result.made, 500u);
}

TEST(Sim, BurstOverFourApiservers_SpreadsEvenly) {
  SimRunOptions options;
  options.nodes = 40;
  options.apiservers = 4;
  options.rate = 0;
  options.preload = 200;
  options.burst = 8'000;
  options.burst_over = milliseconds(1'500);
  options.time = seconds(3);
  options.looked_at = 200;
  const auto result = RunSim(options);
  EXPECT_EQ(Told(result), "");
  EXPECT_EQ(result.made, 8'000u);
  EXPECT_LE(result.imbalance, 1.05);
}

}  // namespace
}  // namespace dsec::router::testing

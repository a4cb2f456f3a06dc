// SPDX-License-Identifier: Apache-2.0
// cluster_sim [faults [SEED [SECONDS]] | nodes [SEED [SECONDS]] | unit | burst | wide]: whole
// clusters on virtual time (bench/README.md says what the figures are), as JSON lines. Without
// arguments: all but faults are run once each. Exits with 1 when a promise was broken.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "router/testing/sim_run.h"

namespace dsec::router {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::RunSim;
using testing::SimRunOptions;
using testing::SimRunResult;

template <typename Map>
std::string Object(const Map& map) {
  std::string text = "{";
  for (const auto& [key, value] : map)
    text += fmt::format("{}\"{}\":{}", text.size() > 1 ? "," : "", key, value);
  return text + "}";
}

// A figure as the other benches print it; false when something is wrong.
bool Print(std::string_view name, std::string_view unit, double value, std::string_view run,
           const SimRunResult& result) {
  std::string violations = "[";
  for (const std::string& one : result.violations)
    violations += fmt::format("{}\"{}\"", violations.size() > 1 ? "," : "", one);
  violations += "]";
  double worst = 0;
  for (const double one : result.detection_s) worst = std::max(worst, one);
  fmt::print(
      "{{\"name\":\"{}\",\"value\":{:.4f},\"unit\":\"{}\",\"baseline\":null,\"ratio\":null,"
      "\"detail\":{{\"run\":\"{}\",\"asked\":{},\"made\":{},\"sent_again\":{},\"repeated\":{},"
      "\"deleted\":{},\"failed\":{},\"faults\":{},\"deaths\":{},\"false_deaths\":{},"
      "\"worst_detection_s\":{:.2f},\"told_and_lost\":{},\"live\":{},\"imbalance\":{:.4f},"
      "\"p50_ms\":{:.1f},\"p99_ms\":{:.1f},\"worst_ms\":{:.1f},\"cpu_s\":{:.1f},"
      "\"virtual_s\":{:.1f},\"store_commits\":{},\"violations\":{}}}}}\n",
      name, value, unit, run, result.asked, result.made, result.sent_again, result.repeated,
      result.deleted, Object(result.failed), Object(result.injected), result.deaths,
      result.false_deaths, worst, result.told_and_lost, result.live, result.imbalance,
      result.p50_ms, result.p99_ms, result.worst_ms, result.cpu_s, result.virtual_s,
      result.store_commits, violations);
  std::fflush(stdout);
  return result.violations.empty();
}

// A unit: 160 nodes, 380,000 live, 5,000 creates a second.
bool Unit() {
  SimRunOptions options;
  options.nodes = 160;
  options.apiservers = 4;
  options.preload = 2'375;
  options.rate = 5'000;
  options.time = seconds(10);
  options.steady = true;
  options.looked_at = 2'000;
  const auto result = RunSim(options);
  return Print("cluster_sim_unit", "creates/s", static_cast<double>(result.made) / 10, "unit",
               result);
}

// One job asks for 32,000 within a second and a half.
bool Burst() {
  SimRunOptions options;
  options.nodes = 160;
  options.apiservers = 4;
  options.preload = 200;
  options.rate = 0;
  options.burst = 32'000;
  options.burst_over = milliseconds(1'500);
  options.time = seconds(6);
  options.looked_at = 2'000;
  const auto result = RunSim(options);
  return Print("placement_imbalance_whole", "ratio", result.imbalance, "burst", result);
}

bool Wide() {
  SimRunOptions options;
  options.nodes = 10'000;
  options.apiservers = 4;
  options.preload = 20;
  options.rate = 5'000;
  options.time = seconds(6);
  options.steady = true;
  options.looked_at = 2'000;
  const auto result = RunSim(options);
  return Print("cluster_sim_wide", "creates/s", static_cast<double>(result.made) / 6, "wide",
               result);
}

bool Faults(uint64_t seed, int64_t time, bool only_nodes) {
  SimRunOptions options;
  options.nodes = 40;
  options.apiservers = 4;
  options.watchers = 3;
  options.rate = 100;
  options.time = seconds(time);
  options.faults = true;
  options.only_nodes = only_nodes;
  options.seed = seed;
  const auto result = RunSim(options);
  double worst = 0;
  for (const double one : result.detection_s) worst = std::max(worst, one);
  return Print(only_nodes ? "node_death_detection" : "cluster_sim_faults", "s", worst,
               fmt::format("simulated, {}, seed {}",
                           only_nodes ? "faults of nodes" : "faults of everything", seed),
               result);
}

int Main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  bool good = true;
  if (what.empty() || what == "unit") good &= Unit();
  if (what.empty() || what == "burst") good &= Burst();
  if (what.empty() || what == "wide") good &= Wide();
  if (what.empty() || what == "faults") {
    good &= Faults(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1,
                   argc > 3 ? std::strtoll(argv[3], nullptr, 10) : 120, false);
  }
  if (what.empty() || what == "nodes") {
    good &= Faults(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1,
                   argc > 3 ? std::strtoll(argv[3], nullptr, 10) : 120, true);
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace dsec::router

int main(int argc, char** argv) { return dsec::router::Main(argc, argv); }

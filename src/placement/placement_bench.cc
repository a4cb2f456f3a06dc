// SPDX-License-Identifier: Apache-2.0
// placement_bench: the figures `placement_rate` and `placement_imbalance` as JSON lines
// (bench/README.md says what they are). No arguments.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "placement/choose.h"
#include "placement/testing/herd.h"

namespace dsec::placement {
namespace {

using std::chrono::milliseconds;

constexpr uint32_t kDecisions = 200'000;
constexpr int kRounds = 5;
constexpr uint32_t kSnapshotEvery =
    5'000;  // decisions: 5,000 creations a second, one snapshot each

std::shared_ptr<const Snapshot> Cluster(size_t size, MonoTime taken) {
  Rng rng(5);
  std::vector<NodeView> nodes;
  for (size_t i = 0; i < size; ++i) {
    NodeView node;
    node.id = fmt::format("node-{:05}", i);
    node.backends = kContainer | kFnCall;
    node.capacity = {3'200, uint64_t{512} << 30, uint64_t{4} << 40};
    node.used = {static_cast<uint32_t>(1'500 + rng.Below(600)), uint64_t{200} << 30, 0};
    nodes.push_back(std::move(node));
  }
  return std::make_shared<Snapshot>(std::move(nodes), taken, 1);
}

// Decisions of one sandbox each in a second of this process's time, the taking over of a new
// snapshot after every 5,000 included (its making is the watcher's).
double Rate(size_t nodes) {
  MonoTime now(std::chrono::seconds(1000));
  std::vector<std::shared_ptr<const Snapshot>> snapshots;
  for (uint32_t i = 0; i <= kDecisions / kSnapshotEvery; ++i)
    snapshots.push_back(Cluster(nodes, now + std::chrono::seconds(i)));
  Overlay overlay({}, snapshots[0]);
  Rng rng(9);
  Request request;
  request.each = {1, uint64_t{64} << 20, uint64_t{50} << 20};
  const auto begun = std::chrono::steady_clock::now();
  for (uint32_t i = 0; i < kDecisions; ++i) {
    if (i % kSnapshotEvery == 0) {
      now = now + std::chrono::seconds(i == 0 ? 0 : 1);
      overlay.Use(snapshots[i / kSnapshotEvery], now);
    }
    const Decision decision = Choose(overlay, request, {}, rng);
    overlay.Add(decision.placed.at(0).node, request.each, now);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  return kDecisions / took.count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int Main() {
  std::vector<double> small;
  std::vector<double> large;
  for (int i = 0; i < kRounds; ++i) {
    small.push_back(Rate(160));
    large.push_back(Rate(10'000));
  }
  const double rate = Median(small);
  const double rate_large = Median(large);
  fmt::print(
      "{{\"name\":\"placement_rate\",\"value\":{:.0f},\"unit\":\"1/s\",\"baseline\":{:.0f},"
      "\"ratio\":{:.3f},\"detail\":{{\"nodes\":160,\"baseline\":\"10,000 "
      "nodes\",\"rounds\":{}}}}}\n",
      rate, rate_large, rate / rate_large, kRounds);
  testing::HerdOptions options;
  double worst = 0;
  std::string detail;
  for (const bool batches : {true, false}) {
    for (const bool skewed : {false, true}) {
      options.batches = batches;
      options.skewed = skewed;
      const double imbalance = testing::RunHerd(options).imbalance;
      worst = std::max(worst, imbalance);
      detail += fmt::format("{}\"{}_{}\":{:.4f}", detail.empty() ? "" : ",",
                            batches ? "batch" : "single", skewed ? "skewed" : "even", imbalance);
    }
  }
  fmt::print(
      "{{\"name\":\"placement_imbalance\",\"value\":{:.4f},\"unit\":\"max/mean\",\"baseline\":null,"
      "\"ratio\":null,\"detail\":{{{}}}}}\n",
      worst, detail);
  return 0;
}

}  // namespace
}  // namespace dsec::placement

int main() { return dsec::placement::Main(); }

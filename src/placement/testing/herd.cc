// SPDX-License-Identifier: Apache-2.0
#include "placement/testing/herd.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "placement/choose.h"

namespace dsec::placement::testing {
namespace {

using std::chrono::milliseconds;

class Herd {
 public:
  explicit Herd(const HerdOptions& options)
      : options_(options), live_(options.nodes, options.live) {
    for (uint32_t i = 0; options.skewed && i < options.nodes; i += 10) live_[i] -= 60;
    for (uint32_t i = 0; i < options.instances; ++i) {
      instances_.push_back(
          {Overlay(Overlay::Options(), Look(Start())), Rng(options.seed * 100 + i)});
    }
  }

  HerdResult Run() {
    HerdResult result;
    const auto steps = static_cast<uint32_t>(options_.seconds * 10);
    for (uint32_t step = 0; step < steps; ++step) {
      const MonoTime now = Start() + milliseconds(100) * step;
      if (step % 10 == 0) {
        const auto snapshot = Look(now);
        for (Instance& instance : instances_) instance.overlay.Use(snapshot, now);
      }
      const uint64_t until = uint64_t{options_.burst} * (step + 1) / steps;
      const auto share = static_cast<uint32_t>(until - uint64_t{options_.burst} * step / steps);
      for (uint32_t i = 0; i < options_.instances; ++i) {
        const uint32_t count =
            share * (i + 1) / options_.instances - share * i / options_.instances;
        result.placed += Place(instances_[i], count, now);
      }
    }
    const double sum = std::accumulate(live_.begin(), live_.end(), 0.0);
    result.imbalance = *std::max_element(live_.begin(), live_.end()) / (sum / options_.nodes);
    return result;
  }

 private:
  struct Instance {
    Overlay overlay;
    Rng rng;
  };
  static MonoTime Start() { return MonoTime(std::chrono::seconds(1000)); }

  std::shared_ptr<const Snapshot> Look(MonoTime now) const {
    std::vector<NodeView> nodes;
    for (uint32_t i = 0; i < options_.nodes; ++i) {
      NodeView node;
      node.id = fmt::format("node-{}", i);
      node.backends = kContainer;
      node.capacity.sandboxes = 3'200;
      node.used.sandboxes = live_[i];
      nodes.push_back(std::move(node));
    }
    return std::make_shared<Snapshot>(std::move(nodes), now, options_.instances);
  }

  uint32_t Place(Instance& instance, uint32_t count, MonoTime now) {
    Request request;
    const uint32_t size = options_.batches ? count : 1;
    uint32_t placed = 0;
    for (uint32_t done = 0; done < count; done += size) {
      request.count = size;
      const Decision decision = Choose(instance.overlay, request, {}, instance.rng);
      for (const Placed& here : decision.placed) {
        live_[here.node] += here.count;
        placed += here.count;
        for (uint32_t i = 0; i < here.count; ++i)
          instance.overlay.Add(here.node, request.each, now);
      }
    }
    return placed;
  }

  const HerdOptions options_;
  std::vector<uint32_t> live_;
  std::vector<Instance> instances_;
};

}  // namespace

HerdResult RunHerd(const HerdOptions& options) { return Herd(options).Run(); }

}  // namespace dsec::placement::testing

// SPDX-License-Identifier: Apache-2.0
#include "placement/cloud_set.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <queue>
#include <utility>

namespace dsec::placement {
namespace {

struct Layer {
  const std::string* id = nullptr;
  uint64_t bytes = 0;
  std::vector<size_t> users;  // environments
  bool taken = false;
};

struct Environment {
  std::vector<size_t> layers;
  uint64_t creations = 0;
  bool taken = false;
};

// Equal compositions are one environment.
struct Herd {
  std::vector<Layer> layers;
  std::vector<Environment> environments;

  Herd(std::span<const EnvironmentUse> uses, const std::map<std::string, uint64_t>& bytes) {
    std::map<std::string_view, size_t> layer_index;
    std::map<std::vector<size_t>, size_t> environment_index;
    for (const EnvironmentUse& use : uses) {
      std::vector<size_t> members;
      bool known = use.creations > 0;
      for (const std::string& id : use.layers) {
        const auto size = bytes.find(id);
        known = known && size != bytes.end();
        if (!known) break;
        const auto [at, fresh] = layer_index.emplace(size->first, layers.size());
        if (fresh) layers.push_back({&size->first, size->second, {}, false});
        members.push_back(at->second);
      }
      if (!known || members.empty()) continue;
      std::ranges::sort(members);
      members.erase(std::unique(members.begin(), members.end()), members.end());
      const auto [at, fresh] = environment_index.emplace(members, environments.size());
      if (fresh) environments.push_back({std::move(members), 0, false});
      environments[at->second].creations += use.creations;
    }
    for (size_t i = 0; i < environments.size(); ++i) {
      for (const size_t layer : environments[i].layers) layers[layer].users.push_back(i);
    }
  }

  // Creations a byte, the bytes of each layer shared among its users.
  double Worth(const Environment& environment) const {
    double cost = 0;
    for (const size_t at : environment.layers) {
      const Layer& layer = layers[at];
      if (!layer.taken)
        cost += static_cast<double>(layer.bytes) / static_cast<double>(layer.users.size());
    }
    return cost == 0 ? std::numeric_limits<double>::infinity()
                     : static_cast<double>(environment.creations) / cost;
  }
  // Creations of all environments whose layers are all among `chosen`.
  uint64_t Covered(const std::set<std::string>& chosen) const {
    uint64_t sum = 0;
    for (const Environment& environment : environments) {
      const bool inside = std::ranges::all_of(
          environment.layers, [&](size_t at) { return chosen.contains(*layers[at].id); });
      if (inside) sum += environment.creations;
    }
    return sum;
  }
  // What it would add to the set.
  uint64_t Added(const Environment& environment) const {
    uint64_t sum = 0;
    for (const size_t at : environment.layers) {
      const Layer& layer = layers[at];
      if (layer.taken) continue;
      if (layer.bytes > std::numeric_limits<uint64_t>::max() - sum)
        return std::numeric_limits<uint64_t>::max();
      sum += layer.bytes;
    }
    return sum;
  }
};

}  // namespace

CloudSet ComputeCloudSet(std::span<const EnvironmentUse> uses,
                         const std::map<std::string, uint64_t>& bytes, uint64_t budget) {
  Herd herd(uses, bytes);
  uint64_t all = 0;
  for (const EnvironmentUse& use : uses) all += use.creations;
  if (all == 0) return {};

  // The best alone, before anything is taken.
  CloudSet single;
  std::optional<size_t> best;
  for (size_t i = 0; i < herd.environments.size(); ++i) {
    const Environment& environment = herd.environments[i];
    if (herd.Added(environment) <= budget &&
        (!best || environment.creations > herd.environments[*best].creations))
      best = i;
  }
  if (best) {
    single.bytes = herd.Added(herd.environments[*best]);
    for (const size_t at : herd.environments[*best].layers)
      single.layers.insert(*herd.layers[at].id);
  }

  // What is worth most first. A worth only grows, by layers that others bring; an entry that was
  // overtaken by a newer one of the same environment finds it taken or passed over.
  using Entry = std::pair<double, size_t>;
  const auto lower = [](const Entry& a, const Entry& b) {
    return a.first != b.first ? a.first < b.first : a.second > b.second;
  };
  std::priority_queue<Entry, std::vector<Entry>, decltype(lower)> queue(lower);
  for (size_t i = 0; i < herd.environments.size(); ++i)
    queue.emplace(herd.Worth(herd.environments[i]), i);
  CloudSet set;
  while (!queue.empty()) {
    const auto [worth, index] = queue.top();
    queue.pop();
    Environment& environment = herd.environments[index];
    if (environment.taken || worth < herd.Worth(environment)) continue;
    const uint64_t added = herd.Added(environment);
    // It comes again should other environments bring its layers.
    if (added > budget - set.bytes) continue;
    environment.taken = true;
    set.bytes += added;
    std::vector<size_t> changed;
    for (const size_t at : environment.layers) {
      Layer& layer = herd.layers[at];
      if (std::exchange(layer.taken, true)) continue;
      set.layers.insert(*layer.id);
      changed.insert(changed.end(), layer.users.begin(), layer.users.end());
    }
    std::ranges::sort(changed);
    changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
    for (const size_t other : changed) {
      if (!herd.environments[other].taken)
        queue.emplace(herd.Worth(herd.environments[other]), other);
    }
  }
  if (herd.Covered(single.layers) > herd.Covered(set.layers)) set = std::move(single);
  set.covered = static_cast<double>(herd.Covered(set.layers)) / static_cast<double>(all);
  return set;
}

}  // namespace dsec::placement

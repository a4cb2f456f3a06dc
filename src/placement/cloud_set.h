// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace dsec::placement {

// How often creations asked for one composition of layers.
struct EnvironmentUse {
  std::vector<std::string> layers;  // ids; the order does not matter
  uint64_t creations = 0;
};

struct CloudSet {
  std::set<std::string> layers;
  uint64_t bytes = 0;
  double covered = 0;  // of all creations: the part whose layers all lie in the set
};

// Which layers the cloud pool is to have so that as many creations as possible need nothing else,
// with at most `budget` bytes. `bytes`: what runs read of a layer, as its first-touch traces say,
// or all of it where there is no trace; an environment with a layer that is not named there is left
// out. The same arguments give the same set.
//
// This is the set-union knapsack problem. The greedy rule shares the bytes of a layer among the
// environments that use it and takes the one with the most creations a byte (Arulselvan, "A note on
// the set union knapsack problem", Discrete Applied Mathematics 169, 2014), what is in the set
// already being free; the best single environment is taken instead where that covers more.
CloudSet ComputeCloudSet(std::span<const EnvironmentUse> uses,
                         const std::map<std::string, uint64_t>& bytes, uint64_t budget);

}  // namespace dsec::placement

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dsec::placement::testing {

// A burst over several placement instances, on virtual time: each sees the snapshot of the last
// full second and its own placements, and no other's.
struct HerdOptions {
  uint32_t nodes = 160;
  uint32_t live = 200;  // on each node before the burst
  bool skewed = false;  // a tenth of the nodes has 60 less
  uint32_t burst = 32'000;
  uint32_t instances = 4;
  bool batches = true;   // one request an instance and second; else one for each sandbox
  double seconds = 1.5;  // over which the burst arrives
  uint64_t seed = 1;
};
struct HerdResult {
  uint32_t placed = 0;
  double imbalance = 0;  // fullest node over the mean, after the burst
};
HerdResult RunHerd(const HerdOptions& options);

}  // namespace dsec::placement::testing

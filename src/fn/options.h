// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "fn/artifact_store.h"
#include "fn/op_table.h"
#include "fn/pools.h"

namespace dsec::fn {

struct FnOptions {
  std::string state_dir;                // types that were put and artefacts live below it
  std::vector<std::string> types_dirs;  // of the node
  PoolsOptions pools;
  uint64_t queue_bytes = 1ull << 30;  // of the calls under way, those that wait included
  OpBounds ops;
  ArtifactBounds artifacts;
  size_t compile_cache_entries = 10'000;
  uint64_t compile_cache_bytes = 256ull << 20;  // of reports; the files are artefacts
  uint32_t attempts = 3;                        // workers that a step is tried on
  uint64_t fetch_bytes = 64ull << 20;           // of all files that one step brings back
  // What a step may take beside its wall limit: to prepare, to end, to read files back.
  std::chrono::milliseconds step_slack{60'000};
  std::chrono::milliseconds resolve_timeout{10'000};
  std::chrono::milliseconds environment_age{1000};
  std::chrono::milliseconds tick{1000};
  size_t disk_threads = 2;
  std::string gpu_root;  // where dev/ and proc/ are; empty: the host's
  std::map<std::string, std::string> mig_profiles;
  uint32_t gpu_shared_max = 4;  // holders of one shared device
  const Clock* clock = &Clock::System();
  metrics::Registry* metrics = &metrics::Registry::Global();
};

}  // namespace dsec::fn

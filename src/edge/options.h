// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/id.h"
#include "base/metrics.h"
#include "edge/record_store.h"
#include "iam/quota_keeper.h"

namespace dsec::edge {

// What is never given away. 0 turns a check off, except for max_sandboxes.
struct AdmissionOptions {
  uint64_t max_sandboxes = 4000;
  // A create is refused when less than this would be left of the host's MemAvailable, counting
  // memory_per_create for each create whose memory is not visible there yet.
  uint64_t memory_reserve_bytes = 512ull << 20;
  uint64_t memory_per_create_bytes = 4ull << 20;
  // Of the file systems that hold writable layers and state.
  uint64_t disk_reserve_bytes = 1ull << 30;
  // Percent of time in /proc/pressure, "some", average of 10 s.
  double psi_memory_max = 60;
  double psi_cpu_max = 0;
  // Creates that work at the same time, and that may stand in line for it and for room.
  uint32_t creates_at_once = 16;
  uint32_t max_waiting = 4096;
};

struct EdgeOptions {
  NodeId node_id;
  std::string version;
  std::string state_dir;
  std::string proc_root = "/proc";
  std::vector<std::string> disk_paths;  // on the file systems whose free space admission watches
  AdmissionOptions admission;
  Retention retention;
  std::chrono::milliseconds create_timeout{30'000};  // of the work, waiting in line not counted
  std::chrono::milliseconds create_queue_timeout{60'000};  // in line for creates_at_once
  std::chrono::milliseconds destroy_timeout{10'000};       // one attempt
  std::chrono::milliseconds adopt_timeout{5'000};          // one attempt
  std::chrono::milliseconds adopt_patience{
      60'000};  // then a live agent that does not answer is given up
  std::chrono::milliseconds claim_grace{60'000};
  std::chrono::milliseconds disconnect_grace{5'000};
  std::chrono::milliseconds reattach_grace{60'000};  // of execs found running at adoption
  std::chrono::milliseconds stop_drain{
      250};  // for followers to read the end of their exec when it is stopped
  std::chrono::milliseconds max_stop_grace{300'000};
  std::chrono::milliseconds reconcile_period{60'000};
  iam::QuotaKeeper* quota = nullptr;  // outlives the Edge; null: nothing is limited by project
  const Clock* clock = &Clock::System();
  metrics::Registry* metrics = &metrics::Registry::Global();
};

}  // namespace dsec::edge

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace dsec::router::testing {

// A run of a whole cluster on virtual time under load, with faults, all from one seed.
struct SimRunOptions {
  size_t nodes = 20;
  size_t apiservers = 2;
  size_t watchers = 2;
  uint64_t capacity = 3'200;  // of a node
  uint64_t preload = 0;       // sandboxes that live on each node before
  double rate = 100;          // creates a second, evenly
  uint64_t burst = 0;         // creates more, over the first `burst_over`
  std::chrono::milliseconds burst_over{1'000};
  std::chrono::milliseconds time{20'000};
  bool steady = false;  // for each create a sandbox of before is ended
  bool faults = false;
  bool only_nodes = false;  // of the faults: those of nodes
  std::chrono::milliseconds fault_every{400};
  uint64_t quota = 0;     // live sandboxes of the project; 0: no quotas
  double repeats = 0.01;  // of the creates are asked for again after their answer
  std::chrono::milliseconds create_time{40};
  std::chrono::milliseconds settle{100'000};  // after the load, until all is looked at
  size_t looked_at = 20'000;  // creates of which the answers are compared with the nodes, at most
  uint64_t seed = 1;
  // A fault of the simulated nodes that the checks must find: they forget requests at once.
  bool forgetful_nodes = false;
};

struct SimRunResult {
  uint64_t asked = 0;
  uint64_t made = 0;
  uint64_t repeated = 0;
  uint64_t deleted = 0;
  uint64_t sent_again = 0;                   // by clients, after no answer or a refusal
  std::map<std::string, uint64_t> failed;    // by reason
  std::map<std::string, uint64_t> injected;  // faults, by kind
  uint64_t deaths = 0;
  uint64_t false_deaths = 0;   // of nodes that were only slow, paused or restarted
  uint64_t told_and_lost = 0;  // sandboxes that clients knew, on nodes that died
  uint64_t live = 0;           // at the end of the load
  uint64_t most_live_of_quota = 0;
  double imbalance = 0;             // fullest node over the mean at the end of the load
  std::vector<double> detection_s;  // from a node's silence to its death
  double p50_ms = 0;                // from the first try to the answer
  double p99_ms = 0;
  double worst_ms = 0;
  double cpu_s = 0;  // of this process
  double virtual_s = 0;
  uint64_t store_commits = 0;
  std::vector<std::string> violations;  // of what a cluster promises; at most 50
  // What happened, in one number: the same seed gives the same.
  uint64_t digest = 0;
};

SimRunResult RunSim(const SimRunOptions& options);

}  // namespace dsec::router::testing

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/rng.h"
#include "placement/overlay.h"
#include "placement/snapshot.h"

namespace dsec::placement {

struct Request {
  Backend backend = kContainer;
  uint32_t count = 1;
  Demand each;                                // of one sandbox
  std::map<std::string, std::string> labels;  // that the node must have, each with this value
  std::string project;
  bool isolate = false;          // only on nodes that are the project's own, or become so
  bool in_cloud_set = false;     // all its layers are there: it may go to the cloud pool
  std::vector<size_t> excluded;  // nodes that have refused this request, by index
};

struct Options {
  // Nodes that a decision looks at, for each sandbox of the request (sample k, take the least
  // loaded): few, since snapshots are old (Mitzenmacher, TPDS 2000; Sparrow, SOSP 2013).
  uint32_t sample = 3;
  // Above this use of the other nodes a share of what lies in the cloud set goes to the cloud pool.
  double cloud_threshold = 0.8;
  double cloud_share = 0.5;
};

// Why a node was not taken; the first reason that holds.
enum class Refusal : uint8_t {
  kState,  // not ready, or has not the backend
  kPool,   // cloud pool, and the request is not for it, or the other way round
  kOwner,  // user isolation
  kLabels,
  kExcluded,
  kFull,
  kCount,
};

struct Placed {
  size_t node = 0;  // index in the snapshot
  uint32_t count = 0;
};

struct Decision {
  std::vector<Placed> placed;  // each node once, by index
  uint32_t missing = 0;        // of the request's count
  // When some are missing: how many nodes each reason refuses.
  uint32_t refused[static_cast<size_t>(Refusal::kCount)] = {};
};

// Chooses nodes for all sandboxes of a request: filter, sample, least loaded. A function of its
// arguments alone. The edges have the last word, so what is chosen may be refused there.
//
// Load is the fullest of a node's resources, as the snapshot shows it, and on top of it the own
// placements that it does not show yet, counted once for each instance of the snapshot: the others
// are taken to place as this one does. Without that a node that looks empty gets a burst from each.
//
// With `isolate` a node without an owner that is chosen becomes the project's (the watcher learns
// it from the edge); nodes that the project has go first.
Decision Choose(const Overlay& overlay, const Request& request, const Options& options, Rng& rng);

}  // namespace dsec::placement

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "placement/snapshot.h"

namespace dsec::placement {

// The own placements of one placement instance that its snapshot does not show yet. Not
// thread-safe.
//
// A placement counts until there is a snapshot that was taken `settle` after it (an edge counts a
// create as soon as it has admitted it, so that one shows it), until it has failed, or for `forget`
// at most: a watcher that is down must not make a node look full for ever. What is pending on a
// node that a snapshot lacks is not remembered should the node come back.
class Overlay {
 public:
  using Ticket = uint64_t;
  struct Options {
    std::chrono::milliseconds settle{500};
    std::chrono::milliseconds forget{30'000};
  };
  Overlay(Options options, std::shared_ptr<const Snapshot> snapshot);

  // A newer snapshot; drops what it shows and what is too old.
  void Use(std::shared_ptr<const Snapshot> snapshot, MonoTime now);
  const Snapshot& snapshot() const { return *snapshot_; }
  std::shared_ptr<const Snapshot> shared() const { return snapshot_; }

  // `node`: index in the snapshot. The ticket is for Fail.
  Ticket Add(size_t node, const Demand& demand, MonoTime now);
  // The create has failed or was refused. A ticket that no longer counts changes nothing.
  void Fail(Ticket ticket);

  // Pending on a node.
  const Demand& on(size_t node) const { return on_[node]; }
  size_t pending() const { return pending_; }

 private:
  struct Placement {
    size_t node = kNone;  // index in snapshot_
    Demand demand;
    MonoTime at;
    bool counts = true;
  };
  static constexpr size_t kNone = SIZE_MAX;  // the node is not in the snapshot
  void Renumber(const Snapshot& next);

  const Options options_;
  std::shared_ptr<const Snapshot> snapshot_;
  std::vector<Demand> on_;
  std::deque<Placement> placements_;  // in order of time; the first has ticket first_
  Ticket first_ = 1;
  size_t pending_ = 0;
};

}  // namespace dsec::placement

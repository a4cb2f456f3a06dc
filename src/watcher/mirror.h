// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "dsec/v1/watcher.pb.h"
#include "watcher/probe.h"

namespace dsec::watcher {

// What a watcher knows of the live sandboxes of one node: what will be said of them should it die.
// What the node says is bounded: sandboxes of other nodes, and those beyond the limits, are not
// taken. Not thread-safe.
class Mirror {
 public:
  static constexpr size_t kMaxSandboxes = 100'000;
  static constexpr size_t kMaxLabels = 64;
  static constexpr size_t kMaxText = 256;

  explicit Mirror(std::string node) : node_(std::move(node)) {}

  // `asked`: the `after` that this answers. False: something that the node said was not taken, or
  // its events have begun anew (all is asked for then). What has changed since `asked` is not taken
  // either while it is everything that is wanted, or when it lies beyond what is known.
  bool Apply(Seen seen, uint64_t asked);
  uint64_t place() const { return place_; }
  // Whether it has everything up to place().
  bool known() const { return known_; }
  size_t size() const { return sandboxes_.size(); }

  // In order of id, in parts as the store holds them: at most 1,000 sandboxes and 512 KiB each, at
  // least one part.
  std::vector<v1::LostPart> Parts() const;

 private:
  bool Take(v1::LostSandbox sandbox);

  const std::string node_;
  uint64_t place_ = 0;
  bool known_ = false;
  std::unordered_map<std::string, v1::LostSandbox> sandboxes_;
};

}  // namespace dsec::watcher

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "placement/node.h"

namespace dsec::placement {

// The nodes as a watcher has last seen them; immutable, so any number of threads may read it.
class Snapshot {
 public:
  // `instances`: placement instances that decide by this snapshot without a word between them, this
  // one included; at least 1. Of nodes with the same id the last counts.
  Snapshot(std::vector<NodeView> nodes, MonoTime taken, uint32_t instances);

  size_t size() const { return nodes_.size(); }
  const NodeView& node(size_t index) const { return nodes_[index]; }
  std::optional<size_t> Find(std::string_view id) const;
  // Whether `other` has the same nodes at the same indexes, by a hash of 64 bits.
  bool SameNodes(const Snapshot& other) const {
    return size() == other.size() && ids_ == other.ids_;
  }
  MonoTime taken() const { return taken_; }
  uint32_t instances() const { return instances_; }

  // What every decision looks at, close together in memory.
  struct Hot {
    uint32_t backends = 0;  // 0: takes nothing new
    bool cloud = false;
    bool owned = false;
    Demand used{0, 0, 0};
    Demand capacity{0, 0, 0};
  };
  const Hot& hot(size_t index) const { return hot_[index]; }
  // Sandboxes on nodes outside the cloud pool over what these can take; 1 when they can take none.
  double use() const { return use_; }
  bool has_cloud() const { return has_cloud_; }

 private:
  std::vector<NodeView> nodes_;
  std::vector<Hot> hot_;
  std::unordered_map<std::string_view, size_t> by_id_;
  uint64_t ids_ = 0;
  MonoTime taken_;
  uint32_t instances_;
  double use_ = 1;
  bool has_cloud_ = false;
};

}  // namespace dsec::placement

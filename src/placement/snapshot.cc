// SPDX-License-Identifier: Apache-2.0
#include "placement/snapshot.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace dsec::placement {

Snapshot::Snapshot(std::vector<NodeView> nodes, MonoTime taken, uint32_t instances)
    : taken_(taken), instances_(std::max<uint32_t>(instances, 1)) {
  std::unordered_map<std::string_view, size_t> last;
  for (size_t i = 0; i < nodes.size(); ++i) last[nodes[i].id] = i;
  nodes_.reserve(last.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (last[nodes[i].id] == i) nodes_.push_back(nodes[i]);
  }
  uint64_t used = 0;
  uint64_t limit = 0;
  hot_.reserve(nodes_.size());
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const NodeView& node = nodes_[i];
    by_id_[node.id] = i;
    ids_ = ids_ * 0x9e3779b97f4a7c15 + std::hash<std::string_view>()(node.id);
    const bool ready = node.state == NodeState::kReady;
    hot_.push_back(
        {ready ? node.backends : 0, node.cloud, !node.owner.empty(), node.used, node.capacity});
    has_cloud_ = has_cloud_ || node.cloud;
    if (node.cloud || !ready) continue;
    used += node.used.sandboxes;
    limit += node.capacity.sandboxes;
  }
  if (limit > 0) use_ = static_cast<double>(used) / static_cast<double>(limit);
}

std::optional<size_t> Snapshot::Find(std::string_view id) const {
  const auto it = by_id_.find(id);
  if (it == by_id_.end()) return std::nullopt;
  return it->second;
}

}  // namespace dsec::placement

// SPDX-License-Identifier: Apache-2.0
#include "router/nodes.h"

#include <set>
#include <utility>

#include "base/log.h"
#include "cluster/node_record.h"

namespace dsec::router {
namespace {

std::string IdOf(const std::string& key) { return key.substr(cluster::kNodePrefix.size()); }

}  // namespace

bool NodeTable::Apply(const store::Update& update) {
  bool changed = false;
  if (update.whole) {
    std::set<std::string> there;
    for (const store::Entry& entry : update.set) there.insert(IdOf(entry.key));
    for (const NodePtr& node : All()) {
      if (!there.contains(node->id())) changed |= Remove(node->id());
    }
  }
  for (const store::Entry& entry : update.set) changed |= Set(entry);
  for (const std::string& key : update.removed) changed |= Remove(IdOf(key));
  std::lock_guard lock(mutex_);
  known_ = true;
  return changed;
}

bool NodeTable::Set(const store::Entry& entry) {
  auto record = cluster::ParseNodeRecord(entry.value);
  if (!record.ok() || record->node_id() != IdOf(entry.key)) {
    log::Error("router.node_record", {{"key", entry.key}, {"bytes", entry.value.size()}});
    return false;
  }
  const NodePtr before = Find(record->node_id());
  if (before != nullptr && before->version >= entry.version) return false;
  auto node = std::make_shared<Node>();
  node->record = *std::move(record);
  node->version = entry.version;
  const bool same_life = before != nullptr && before->api != nullptr &&
                         before->record.epoch() == node->record.epoch() &&
                         before->record.address() == node->record.address();
  if (before != nullptr && before->api != nullptr && (!same_life || node->dead()) && dead_)
    dead_(before->record);
  if (!node->dead()) node->api = same_life ? before->api : edge_of_(node->record);
  std::lock_guard lock(mutex_);
  nodes_.insert_or_assign(node->id(), node);
  return true;
}

bool NodeTable::Remove(const std::string& id) {
  const NodePtr before = Find(id);
  if (before == nullptr) return false;
  if (before->api != nullptr && dead_) dead_(before->record);
  std::lock_guard lock(mutex_);
  nodes_.erase(id);
  return true;
}

NodePtr NodeTable::Find(std::string_view id) const {
  std::lock_guard lock(mutex_);
  const auto it = nodes_.find(id);
  return it == nodes_.end() ? nullptr : it->second;
}

std::vector<NodePtr> NodeTable::All() const {
  std::lock_guard lock(mutex_);
  std::vector<NodePtr> all;
  all.reserve(nodes_.size());
  for (const auto& [id, node] : nodes_) all.push_back(node);
  return all;
}

bool NodeTable::known() const {
  std::lock_guard lock(mutex_);
  return known_;
}

}  // namespace dsec::router

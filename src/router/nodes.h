// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "dsec/v1/cluster.pb.h"
#include "edge/api.h"
#include "store/follow.h"

namespace dsec::router {

// The way to a node; the one of an epoch is asked for once.
using EdgeOf = std::function<std::shared_ptr<edge::EdgeApi>(const v1::NodeRecord&)>;

// A node as its record says, and the way to it.
struct Node {
  v1::NodeRecord record;
  store::Revision version = 0;
  std::shared_ptr<edge::EdgeApi> api;  // null when it is dead

  const std::string& id() const { return record.node_id(); }
  bool dead() const { return record.state() == v1::NODE_DEAD; }
  // It may have had another life before.
  bool died_before() const { return record.epoch() > 1; }
};
using NodePtr = std::shared_ptr<const Node>;

// The nodes of node/ as the store has them. Thread-safe.
class NodeTable {
 public:
  // `dead` is told, on the executor that Apply is called on, when a node's life is over, before
  // anybody finds so here: whatever is open to it is to be closed.
  NodeTable(EdgeOf edge_of, std::function<void(const v1::NodeRecord&)> dead)
      : edge_of_(std::move(edge_of)), dead_(std::move(dead)) {}

  // On one executor. Whether anything has changed.
  bool Apply(const store::Update& update);

  NodePtr Find(std::string_view id) const;
  // In order of id, which is the order of the ids of their sandboxes.
  std::vector<NodePtr> All() const;
  // The store has been read.
  bool known() const;

 private:
  bool Set(const store::Entry& entry);
  bool Remove(const std::string& id);

  const EdgeOf edge_of_;
  const std::function<void(const v1::NodeRecord&)> dead_;
  mutable std::mutex mutex_;
  std::map<std::string, NodePtr, std::less<>> nodes_;
  bool known_ = false;
};

}  // namespace dsec::router

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "router/nodes.h"
#include "watcher/probe.h"

namespace dsec::router {

// A watcher's probe over the same calls that apiservers make. Everything: a list of what lives,
// then the node's events from where they begin, some thousands a probe; of what those name only
// what is younger than the list is asked for. Thread-safe.
class EdgeProbe final : public watcher::NodeProbe {
 public:
  explicit EdgeProbe(EdgeOf edge_of) : edge_of_(std::move(edge_of)) {}

  runtime::Task<watcher::Seen> Probe(v1::NodeRecord node, uint64_t place,
                                     runtime::Deadline deadline) override;

 private:
  struct Way {
    uint64_t epoch = 0;
    std::string address;
    std::shared_ptr<edge::EdgeApi> api;
    int64_t listed_ms = 0;  // when its list was begun, by the ids of this clock
  };
  std::shared_ptr<edge::EdgeApi> WayTo(const v1::NodeRecord& node);
  int64_t ListedAt(const std::string& node) const;
  void SetListed(const std::string& node, int64_t at_ms);

  const EdgeOf edge_of_;
  mutable std::mutex mutex_;
  std::map<std::string, Way> ways_;
};

}  // namespace dsec::router

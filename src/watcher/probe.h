// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dsec/v1/cluster.pb.h"
#include "dsec/v1/edge.pb.h"
#include "dsec/v1/watcher.pb.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::watcher {

// What one probe has found of a node.
struct Seen {
  v1::NodeInfo info;
  // All that lives there, in place of what was known; else what has changed since.
  bool whole = false;
  std::vector<v1::LostSandbox> changed;  // live ones, made or with another state
  std::vector<std::string> ended;        // ids
  uint64_t next_seq = 0;                 // of the node's events; to ask after
};

// The way to a node. A probe answers with what a node that lives says; kUnavailable,
// kDeadlineExceeded and kCancelled mean that it did not answer, any other error that it did but
// could not say. `after_seq` 0 asks for everything.
class NodeProbe {
 public:
  virtual ~NodeProbe() = default;
  virtual runtime::Task<Seen> Probe(v1::NodeRecord node, uint64_t after_seq,
                                    runtime::Deadline deadline) = 0;
};

}  // namespace dsec::watcher

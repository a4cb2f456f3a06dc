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
  // Live ones, made or with another state. Without created_unix_ms: only id, state and event of one
  // that was told before.
  std::vector<v1::LostSandbox> changed;
  std::vector<std::string> ended;  // ids
  uint64_t next = 0;               // place to go on from, never 0
};

// The way to a node. A probe answers with what a node that lives says; kUnavailable,
// kDeadlineExceeded and kCancelled mean that it did not answer, any other error that it did but
// could not say. `place` 0 asks for everything.
class NodeProbe {
 public:
  virtual ~NodeProbe() = default;
  virtual runtime::Task<Seen> Probe(v1::NodeRecord node, uint64_t place,
                                    runtime::Deadline deadline) = 0;
};

}  // namespace dsec::watcher

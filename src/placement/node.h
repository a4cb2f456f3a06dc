// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace dsec::placement {

// Bits of NodeView::backends.
enum Backend : uint32_t {
  kFnCall = 1,
  kContainer = 2,
  kMicroVm = 4,
  kFullVm = 8,
};

enum class NodeState : uint8_t {
  kReady,
  kCordoned,  // takes nothing new
  kDraining,  // and gets rid of what it has
  kSuspect,   // did not answer the last probe
};

// What nodes are filled with. Of a sandbox: what it is expected to use, which is far less than its
// limits (most use less than 5% of them), not what it may use.
struct Demand {
  uint32_t sandboxes = 1;
  uint64_t memory_bytes = 0;
  uint64_t disk_bytes = 0;

  Demand& operator+=(const Demand& other) {
    sandboxes += other.sandboxes;
    memory_bytes += other.memory_bytes;
    disk_bytes += other.disk_bytes;
    return *this;
  }
  // Of what was added before.
  Demand& operator-=(const Demand& other) {
    sandboxes -= other.sandboxes;
    memory_bytes -= other.memory_bytes;
    disk_bytes -= other.disk_bytes;
    return *this;
  }
};

// One node as the watcher saw it.
struct NodeView {
  std::string id;
  NodeState state = NodeState::kReady;
  uint32_t backends = 0;
  bool cloud = false;  // of the cloud pool
  std::map<std::string, std::string> labels;
  // With user isolation: the project that has the node for itself. Empty: anyone's.
  std::string owner;
  Demand capacity{0, 0, 0};  // memory or disk of 0: not bounded here, the edge decides
  Demand used{0, 0, 0};      // sandboxes that live or are being made; memory and disk as measured
};

}  // namespace dsec::placement

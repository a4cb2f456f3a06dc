// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/id.h"
#include "base/result.h"

// What tells a store of many nodes that a layer may be mounted somewhere, where neither locks nor
// open files reach from one node to the next: a file a node, <root>/nodes/<node>.json, that lists
// the layers it may have mounted. A layer is listed, durably, before the node opens its files, and
// until a while after its last mount has ended. Nothing of a listed layer is ever deleted.
//
// A lease does not end by itself: a node whose daemon is dead may have sandboxes that read. Whoever
// knows that the node is gone for good forgets it (ForgetNode); were it wrong, that node mounts
// nothing more until it has let go of all it had and taken a new epoch.
namespace dsec::image {

struct Lease {
  std::string node;
  std::string epoch;    // ULID, new at each start of the daemon
  std::string boot_id;  // of the node's kernel: no mount outlives it
  std::string machine_id;
  int64_t renewed_unix_ms = 0;
  std::set<LayerId> layers;
  // Equal for equal content. Accepted is what Encode writes: kInternal "layer.bad_lease".
  std::string Encode() const;
  static Result<Lease> Parse(std::string_view text);
};

// The leases of a store that are not forgotten. All or an error: an unreadable lease may list
// anything. Blocking, on the file system of the store.
Result<std::vector<Lease>> ReadLeases(const std::string& root);
// The word of an operator that a node is gone with all its mounts; a lease that cannot be read is
// moved aside. kNotFound "layer.no_lease".
Result<void> ForgetNode(const std::string& root, const std::string& node);
// Of a node that has nothing mounted any more; one without a lease is no error.
Result<void> DropLease(const std::string& root, const std::string& node);

// The lease of this node. Thread-safe; blocking, on the file system of the store.
class NodeLease {
 public:
  // Ends the listing of a layer, after a while, with its last copy.
  using Pin = std::shared_ptr<const void>;

  // `node`: see ParseNodeId.
  NodeLease(std::string root, std::string node, const Clock& clock = Clock::System());

  // The layer is listed when this returns; touches the store only if it was not before.
  // kUnavailable "layer.lease_lost": this node was forgotten and has layers in use still;
  // kFailedPrecondition "layer.node_id_taken": another machine has the same node_id.
  Result<Pin> Hold(const LayerId& id);
  // Somebody wanted the layer and did not get it, perhaps for a sandbox that runs: if an earlier
  // daemon of this node has listed it, it stays so until somebody gets it. Neither blocks.
  void Missed(const LayerId& id);
  void Got(const LayerId& id);
  // Once a minute: says that the node lives, and lists no more what two calls in a row have found
  // without a pin.
  Result<void> Renew();
  // The node was forgotten: what is mounted without a use should go.
  bool lost() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // pins outlive this
};

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/id.h"
#include "dsec/v1/model.pb.h"
#include "dsec/v1/watcher.pb.h"
#include "router/nodes.h"
#include "runtime/async_event.h"
#include "runtime/gate.h"
#include "runtime/task.h"
#include "store/store.h"

namespace dsec::router {

// When a sandbox id was made, ms since the epoch; 0 for what is none.
int64_t MadeAt(const SandboxId& id);

// The sandboxes that died with earlier lives of one node.
struct LostOfNode {
  struct One {
    v1::LostSandbox sandbox;
    int64_t died_unix_ms = 0;
  };
  uint64_t before_epoch = 0;  // of lives below this one
  int64_t last_death_unix_ms = 0;
  std::map<std::string, One> sandboxes;  // by id
};

// A record in STATE_LOST with the one termination that a sandbox of a dead node has.
v1::SandboxRecord RecordOf(const LostOfNode::One& lost);
// Its events as far as they are known: the terminal one.
v1::Event TerminalEventOf(const LostOfNode::One& lost);
// Of one that no mirror had yet: made before the death, by its id.
LostOfNode::One Unmirrored(const SandboxId& id, int64_t died_unix_ms);

// What lost/ says, read when it is asked for and kept for some nodes. Thread-safe.
class LostBook {
 public:
  static constexpr size_t kNodesKept = 64;
  // `executor` runs what talks to the store, which must outlive this.
  LostBook(store::Store& store, runtime::Executor executor);
  ~LostBook();
  runtime::Task<void> Stop();

  // Errors of the store. Of a node that has never died: nothing, without a question.
  runtime::Task<std::shared_ptr<const LostOfNode>> Of(NodePtr node, runtime::Deadline deadline);

 private:
  struct Kept {
    std::shared_ptr<const LostOfNode> book;
    uint64_t used = 0;
    bool reading = false;
    runtime::AsyncEvent read;
  };
  runtime::Task<std::shared_ptr<const LostOfNode>> OfHere(NodePtr node, runtime::Deadline deadline);
  runtime::Task<std::shared_ptr<const LostOfNode>> Read(NodePtr node, runtime::Deadline deadline);

  store::Store& store_;
  const runtime::Executor executor_;
  std::map<std::string, std::shared_ptr<Kept>> kept_;  // on executor_ alone
  uint64_t uses_ = 0;
  runtime::Gate gate_;
};

}  // namespace dsec::router

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "base/clock.h"
#include "base/result.h"
#include "dsec/v1/fncall.pb.h"
#include "runtime/async_event.h"
#include "runtime/gate.h"

namespace dsec::fn {

// One call on its way. It ends exactly once: `end` is set, then `done`.
struct Op {
  v1::FnCall call;
  std::string key;  // OpKey, of one whose client knows the op_id
  std::shared_ptr<const v1::FnTaskType> type;
  std::string digest;   // of the call without its op_id
  uint64_t bytes = 0;   // of the call
  bool chosen = false;  // the client knows the op_id: it may join, and the call outlives it
  std::optional<Result<v1::FnResult>> end;
  runtime::AsyncEvent done;
  runtime::Running running;
  bool given_up = false;  // cancelled by its client
};

// What stands for an op_id of a project among those of all.
std::string OpKey(const std::string& project, const std::string& op_id);

struct OpBounds {
  size_t count = 10'000;
  uint64_t bytes = 256ull << 20;
  std::chrono::milliseconds age{600'000};
};

// The calls whose op_id a client chose: those under way and, within the bounds, results of those
// that have ended, oldest first out. One shard.
class OpTable {
 public:
  OpTable(OpBounds bounds, const Clock& clock) : bounds_(bounds), clock_(clock) {}

  // Null when it is not known.
  std::shared_ptr<Op> Find(const std::string& key);
  void Add(std::shared_ptr<Op> op);
  // It has ended: keeps its result; an error is not kept, as the call has not run.
  void Ended(const std::shared_ptr<Op>& op);
  void Forget(const std::string& key);
  void DropOld();

 private:
  struct Kept {
    std::string key;
    uint64_t bytes;
    MonoTime at;
  };
  struct Entry {
    std::shared_ptr<Op> op;
    std::optional<std::list<Kept>::iterator> kept;
  };

  const OpBounds bounds_;
  const Clock& clock_;
  std::unordered_map<std::string, Entry> ops_;
  std::list<Kept> kept_;  // in order of their end
  uint64_t bytes_ = 0;
};

}  // namespace dsec::fn

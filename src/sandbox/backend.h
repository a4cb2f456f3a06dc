// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "dsec/v1/edge.pb.h"
#include "dsec/v1/model.pb.h"
#include "dsec/v1/pack.pb.h"
#include "rpc/channel.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::sandbox {

// Saves a changed record. The backend calls it before it makes each thing on the host, so that
// after kill -9 the record names everything that may exist. Returns once the record would survive
// the death of this process.
using Journal = std::function<Result<void>(const v1::SandboxRecord&)>;

// How an agent was found to have ended.
struct AgentEnd {
  // The memory limit killed a process of the sandbox since its figures were last read. The kernel
  // does not say which one; init and the agent die of nothing else that code inside can bring
  // about.
  bool oom = false;
  std::string message;  // for the termination record
};

// Of the error with which work on a sandbox ends when it is removed: kCancelled.
inline constexpr std::string_view kRemovedReason = "create.destroyed";

// Told how far a pack has come, on a thread of the backend, at most ten times a second; false ends
// it (kCancelled "layer.cancelled"). May be empty.
using PackProgressFn = std::function<bool(const v1::PackProgress&)>;

// One running sandbox. Lives on the shard that created it; all calls from that shard.
class Instance {
 public:
  virtual ~Instance() = default;
  // The channel to aether; null once it has closed.
  virtual std::shared_ptr<rpc::Channel> agent() = 0;
  // Completes when the agent's process has ended or its channel is closed for good. At most one
  // waiter.
  virtual runtime::Task<AgentEnd> WaitEnd() = 0;
  // Figures from cgroups and scratch; at most some milliseconds, never blocks the shard.
  virtual runtime::Task<v1::Usage> ReadUsage() = 0;
  // What edge::EdgeApi::Pack says. A removal of the sandbox ends it with
  // kRemovedReason.
  virtual runtime::Task<v1::PackReply> Pack(v1::PackRequest request, PackProgressFn progress,
                                            runtime::Deadline deadline) = 0;
  // What edge::EdgeApi::FirstTouch says.
  virtual runtime::Task<v1::FirstTouchReply> FirstTouch(v1::FirstTouchRequest request,
                                                        runtime::Deadline deadline) = 0;
};

// What keeps things on the host in which the code of users runs. Two kinds: sandboxes, each with an
// agent and a record of its own, and calls (fn_backend.h), which have neither. Thread-safe; nothing
// blocks the calling shard.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  // What was probed on this host, for doctor and placement.
  virtual std::vector<v1::Capability> Capabilities() const = 0;
  // Finds host things of this backend that nobody owns, removes them and returns one line for each.
  // Owners are this process and, where there are records, those in `live`.
  virtual runtime::Task<std::vector<std::string>> Sweep(const std::vector<v1::SandboxRecord>& live,
                                                        runtime::Deadline deadline) = 0;
};

// One kind of sandbox.
class SandboxBackend : public Backend {
 public:
  // Fills defaults into `spec` and refuses what is malformed (kInvalidArgument with the field) or
  // cannot be enforced here (kFailedPrecondition, "limit.unenforceable"). Pure.
  virtual Result<void> Normalize(v1::SandboxSpec& spec) const = 0;
  // How long a create of a node may take whose setting is `usual`.
  virtual std::chrono::milliseconds CreateTime(std::chrono::milliseconds usual) const {
    return usual;
  }
  // Makes the sandbox that `record` describes and returns when its agent has answered Hello. Fills
  // the host fields and phases of `record` and journals before each host change. On failure
  // everything made is gone or left to Destroy.
  virtual runtime::Task<std::shared_ptr<Instance>> Create(v1::SandboxRecord& record,
                                                          Journal journal,
                                                          runtime::Deadline deadline) = 0;
  // Takes over a sandbox of an earlier process: verifies pid, start time and boot id, connects,
  // says Hello. kGone when it is not alive any more.
  virtual runtime::Task<std::shared_ptr<Instance>> Adopt(const v1::SandboxRecord& record,
                                                         runtime::Deadline deadline) = 0;
  // Removes everything on the host that `record` names: processes, cgroups, mounts, scratch,
  // socket, slot. Idempotent, works without an Instance, bounded by the deadline: kDeadlineExceeded
  // "sandbox.stuck" when something would not die (the caller keeps the record and tries again).
  virtual runtime::Task<void> Destroy(const v1::SandboxRecord& record,
                                      runtime::Deadline deadline) = 0;
};

}  // namespace dsec::sandbox

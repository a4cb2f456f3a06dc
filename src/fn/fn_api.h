// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "dsec/v1/edge.pb.h"
#include "dsec/v1/fncall.pb.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::fn {

// Short stateless calls, as the apiserver sees them. Any shard; resumes on the caller's.
class FnApi {
 public:
  virtual ~FnApi() = default;

  // Runs a call to its verdict. What is wrong with the request is an error: kInvalidArgument with
  // the field, kNotFound fn.type_not_found / artifact.not_found / layer.not_found, kAlreadyExists
  // fn.op_id_reused (same op_id, another call), kResourceExhausted fn.queue_full (see
  // edge::RetryAfter), kUnavailable edge.stopping. What goes wrong while it runs is a result:
  // FN_INFRASTRUCTURE with reason and retriable. A repeat of op_id joins the call that runs or
  // answers the kept result. When the coroutine is cancelled or its deadline passes, a call whose
  // op_id the client chose goes on to its end; any other is ended.
  virtual runtime::Task<v1::FnResult> Call(v1::FnCall call, runtime::Deadline deadline) = 0;
  // The result of an earlier call of the project (op_ids are the project's own): kNotFound
  // fn.op_not_found; kUnavailable fn.still_running when the deadline passes first.
  virtual runtime::Task<v1::FnResult> Result(std::string project, std::string op_id,
                                             runtime::Deadline deadline) = 0;

  // Task types: of the node's folder and what was put. kInvalidArgument with the field.
  virtual std::vector<v1::FnTaskType> Types() const = 0;
  virtual runtime::Task<v1::FnTaskType> PutType(v1::FnTaskType type,
                                                runtime::Deadline deadline) = 0;
  virtual runtime::Task<void> RemoveType(std::string name, runtime::Deadline deadline) = 0;

  // Artefacts: bytes by digest ("sha256:<hex>"), kept until the bound of the store asks for room
  // (least recently used first). kNotFound artifact.not_found, kResourceExhausted
  // artifact.too_large.
  virtual runtime::Task<std::string> PutArtifact(std::string bytes, runtime::Deadline deadline) = 0;
  virtual runtime::Task<std::string> GetArtifact(std::string digest,
                                                 runtime::Deadline deadline) = 0;

  virtual std::vector<v1::FnPoolInfo> Pools() const = 0;
  // What the node has for calls, lacks, and what could not be loaded.
  virtual std::vector<v1::Capability> Capabilities() const { return {}; }
};

}  // namespace dsec::fn

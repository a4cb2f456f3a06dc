// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::apiserver {

// One layer as the public API shows it.
struct LayerView {
  std::string id;    // sha256:<hex>
  std::string kind;  // base, workspace, toolkit
  std::vector<std::string> names;
  uint64_t meta_bytes = 0;
  uint64_t blob_bytes = 0;
  uint64_t entries = 0;
  uint64_t content_bytes = 0;
  int64_t created_unix_ms = 0;
  std::string source;
  std::map<std::string, std::string> labels;
  std::vector<std::string>
      lower;  // ids of layers that go below it wherever it is used, lowest first
};

struct LayerQuery {
  std::string kind;    // one of the three words, or empty
  std::string prefix;  // some name, or the id, begins so
  std::map<std::string, std::string> labels;
  std::string after;  // only ids greater than this
  uint32_t limit = 0;
};

// A run of garbage collection (image::CollectOptions).
struct CollectOrder {
  uint64_t unnamed_for_ms = uint64_t{7} * 24 * 3600 * 1000;
  uint64_t grace_ms = 600'000;
  bool dry_run = false;
  uint64_t timeout_ms = 600'000;
};

struct CollectView {
  struct InUse {
    std::string id;
    std::string by;
  };
  std::vector<std::string> removed;  // with dry_run: would be
  std::vector<InUse> in_use;
  uint64_t removed_bytes = 0;
  uint64_t young = 0;
  uint64_t waiting = 0;
  uint64_t deleted = 0;
};

// A node that has layers of the store in use.
struct LayerNodeView {
  std::string node;
  std::string epoch;
  uint64_t layers = 0;
  int64_t renewed_unix_ms = 0;
};

// The node's layer store as the apiserver sees it. Every call may be made from any shard, resumes
// on the caller's, never blocks it and is bounded by `deadline`.
class LayerCatalog {
 public:
  virtual ~LayerCatalog() = default;
  // In order of id.
  virtual runtime::Task<std::vector<LayerView>> List(LayerQuery query,
                                                     runtime::Deadline deadline) = 0;
  // `ref` is name:tag or an id. kNotFound "layer.not_found".
  virtual runtime::Task<LayerView> Get(std::string ref, runtime::Deadline deadline) = 0;
  // kNotFound "layer.not_found"; kConflict "layer.in_use".
  virtual runtime::Task<void> Remove(std::string ref, runtime::Deadline deadline) = 0;
  // Takes as long as `order` allows and holds up no other call. What was begun goes on when the
  // time is over or the caller has gone. kInternal "layer.bad_lease".
  virtual runtime::Task<CollectView> Collect(CollectOrder order) = 0;
  virtual runtime::Task<std::vector<LayerNodeView>> Nodes(runtime::Deadline deadline) = 0;
  // kNotFound "layer.no_lease".
  virtual runtime::Task<void> ForgetNode(std::string node, runtime::Deadline deadline) = 0;
};

}  // namespace dsec::apiserver

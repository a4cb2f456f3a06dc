// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace dsec::apiserver {

struct LayerView {
  std::string id;
  std::string kind;  // base, workspace, toolkit
  std::vector<std::string> names;
  uint64_t meta_bytes = 0;
  uint64_t blob_bytes = 0;
  uint64_t entries = 0;
  uint64_t content_bytes = 0;
  int64_t created_unix_ms = 0;
  std::string source;
  std::map<std::string, std::string> labels;
};

// The node's layers as the apiserver shows them. Thread-safe and blocking: the apiserver calls it on a pool of its own.
class LayerCatalog {
 public:
  virtual ~LayerCatalog() = default;
  // `kind` and `prefix` may be empty.
  virtual Result<std::vector<LayerView>> List(const std::string& kind, const std::string& prefix) = 0;
  virtual Result<LayerView> Get(const std::string& ref) = 0;
  // kConflict "layer.in_use".
  virtual Result<void> Remove(const std::string& ref) = 0;
};

}  // namespace dsec::apiserver

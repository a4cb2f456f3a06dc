// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/id.h"
#include "base/result.h"
#include "image/layer.h"

namespace dsec::image {

struct ListFilter {
  std::optional<LayerKind> kind = {};
  std::string prefix = {};                         // of a NAME:TAG or of an id; empty: all
  std::map<std::string, std::string> labels = {};  // all must match
  std::string after = {};                          // only ids greater than this
  uint64_t limit = 0;                              // the first so many; 0: all
};

// What is known of the layers beside their content: names, labels, origin. SQLite with a rollback
// journal, which any file system with POSIX locks can hold; every change is durable when the call
// returns. Several processes may have it open; one that waits longer than 10 s for another gets
// kUnavailable "layer.catalog_busy", other failures as of sql. Thread-safe.
class Catalog {
 public:
  static Result<std::unique_ptr<Catalog>> Open(const std::string& path);
  ~Catalog();
  Catalog(const Catalog&) = delete;
  Catalog& operator=(const Catalog&) = delete;

  // True when this call made the database.
  bool created() const;

  // Adds the layer unless it is there, gives it `name` (which leaves the layer that had it) and
  // merges the labels. A name that belongs to a layer of another kind: kConflict
  // "layer.kind_conflict".
  Result<void> Put(const LayerInfo& layer, const std::optional<LayerName>& name);
  // By id, by at least 12 hex digits of one, or by NAME[:TAG]. kNotFound "layer.not_found".
  Result<LayerInfo> Find(std::string_view ref) const;
  // In order of id. With a limit the time does not grow with the catalogue or with how far the page
  // is from its begin, unless several filters each fit thousands of layers and hardly any fits all.
  Result<std::vector<LayerInfo>> List(const ListFilter& filter) const;
  Result<void> RemoveName(const LayerName& name);
  // A layer that no name leads to, and that lies below no other one.
  struct Unnamed {
    LayerId id;
    uint64_t bytes = 0;
    int64_t since_unix_ms = 0;  // built, lost its last name or was seen in use
  };
  Result<std::vector<Unnamed>> ListUnnamed() const;
  // One that has this layer below it; nullopt: none.
  Result<std::optional<LayerId>> UpperOf(const LayerId& id) const;
  Result<void> SeenInUse(const std::vector<LayerId>& ids, int64_t now_unix_ms);
  // The layer with all its names and labels.
  Result<void> RemoveLayer(const LayerId& id);

 private:
  class Impl;
  explicit Catalog(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dsec::image

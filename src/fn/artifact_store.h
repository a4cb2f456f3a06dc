// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/result.h"
#include "fn/fn_metrics.h"
#include "os/unique_fd.h"

namespace dsec::fn {

struct ArtifactBounds {
  uint64_t bytes = 1ull << 30;      // of all together
  uint64_t item_bytes = 64u << 20;  // of one
  uint64_t count = 65'536;
};

// Bytes by their digest, one file each, least recently used first out. The files survive the
// process; a file whose bytes are not those of its name is removed and is gone. Thread-safe; Put
// and Get block on the disk.
class ArtifactStore {
 public:
  // Reads the folder, which is made when it is missing, and removes what does not belong there.
  static Result<std::unique_ptr<ArtifactStore>> Open(const std::string& dir, ArtifactBounds bounds,
                                                     FnMetrics& metrics);

  // Its digest. kResourceExhausted artifact.too_large, or the error of the disk.
  Result<std::string> Put(std::string_view bytes);
  // kNotFound artifact.not_found.
  Result<std::string> Get(std::string_view digest);
  // From memory, without looking at the bytes.
  bool Has(std::string_view digest) const;
  uint64_t bytes() const;

 private:
  struct Item {
    std::string name;  // hex digits
    uint64_t size = 0;
  };

  ArtifactStore(os::UniqueFd dir, ArtifactBounds bounds, FnMetrics& metrics)
      : dir_(std::move(dir)), bounds_(bounds), metrics_(metrics) {}
  Result<void> Load(const std::string& dir);
  bool Touch(std::string_view name);
  void InsertLocked(std::string name, uint64_t size);
  void Drop(std::string_view name);
  void DropLocked(std::list<Item>::iterator item);

  const os::UniqueFd dir_;
  const ArtifactBounds bounds_;
  FnMetrics& metrics_;
  mutable std::mutex mutex_;
  std::list<Item> items_;  // least recently used first
  std::unordered_map<std::string_view, std::list<Item>::iterator> index_;  // keys lie in items_
  uint64_t bytes_ = 0;
  uint64_t next_partial_ = 0;
};

}  // namespace dsec::fn

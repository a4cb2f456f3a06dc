// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "image/layer_files.h"
#include "image/stored_form.h"

namespace dsec::image {

// The bytes of a layer's data.blob in whatever form the store keeps them. `files` outlives it.
// Thread-safe; blocks, and may hang with the file system of the store. Bytes are not checked.
class CanonicalBlob {
 public:
  explicit CanonicalBlob(const LayerFiles& files)
      : CanonicalBlob(ContentOf(files), files.form ? &*files.form : nullptr,
                      files.manifest.blob.size) {}
  // `form`: null for a data.blob.
  CanonicalBlob(std::vector<int> content, const StoredForm* form, uint64_t size);

  uint64_t size() const { return size_; }
  // Fills `out` or fails: kUnavailable "layer.unreachable", kInternal "layer.corrupt" when there is
  // less.
  Result<void> ReadAt(uint64_t offset, std::span<uint8_t> out) const;
  // Shows each piece of a file that a read of so many bytes takes.
  void ForEachPiece(
      uint64_t offset, uint64_t bytes,
      const std::function<void(int file, uint64_t offset, uint64_t bytes)>& show) const;

 private:
  struct Piece {
    int file = -1;
    uint64_t offset = 0;
    uint64_t bytes = 0;  // 0: behind the end
  };
  Piece Find(uint64_t offset, uint64_t most) const;

  const std::vector<int> content_;
  const std::optional<FormMap> map_;
  const uint64_t size_;
};

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "disk/layer.h"

namespace dsec::disk {

// Writes one sealed layer from its parts in the order of the disk. Not thread-safe. Blocks.
class LayerWriter {
 public:
  // `fd`: an empty file that outlives this; `info`: uuid, parent, size, tag.
  static Result<LayerWriter> Create(int fd, LayerInfo info);
  // Whole sectors, behind what was added before; data that are all zero are the caller's affair.
  Result<void> AddData(uint64_t first, std::span<const uint8_t> data);
  Result<void> AddZeros(uint64_t first, uint64_t count);
  // Index and trailer; synced.
  Result<LayerInfo> Finish();
  uint64_t data_bytes() const { return end_ - kHeaderBytes; }

 private:
  LayerWriter(int fd, LayerInfo info) : fd_(fd), info_(std::move(info)) {}
  int fd_;
  LayerInfo info_;
  uint64_t end_ = kHeaderBytes;
  uint64_t done_ = 0;  // sectors of the disk
  std::vector<Extent> extents_;
};

// The difference between what is below `layers` (oldest first, consecutive in their chain) and
// their newest, as one layer in the empty file `fd`. `bottom`: nothing is below. `proceed` (may be
// empty) is asked with the bytes done; false gives kCancelled "disk.cancelled".
Result<LayerInfo> CollapseTo(int fd, std::span<const std::shared_ptr<const Layer>> layers,
                             bool bottom, const std::function<bool(uint64_t)>& proceed);

}  // namespace dsec::disk

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "disk/extent.h"
#include "disk/lsmt.h"
#include "os/unique_fd.h"

namespace dsec::disk {

// Errors of this folder, from the errno just set: no room -> kResourceExhausted "disk.no_space",
// else kInternal "disk.io".
Error DiskError(std::string_view what);
// The whole of `out`, or an error; the end of the file is one.
Result<void> ReadFully(int fd, uint64_t offset, std::span<uint8_t> out);
Result<void> WriteFully(int fd, uint64_t offset, std::span<const uint8_t> bytes);

// The bytes of one layer, wherever they lie. Thread-safe.
class LayerFile {
 public:
  using Done = std::function<void(Result<void>)>;
  virtual ~LayerFile() = default;
  virtual uint64_t size() const = 0;
  // Fills `out`, which stays until `done` has been called: once, here or on another thread.
  virtual void Read(uint64_t offset, std::span<uint8_t> out, Done done) = 0;
  // The same, waiting as long as it takes.
  Result<void> ReadNow(uint64_t offset, std::span<uint8_t> out);
};

// Starts what calls back once, and waits for that as long as it takes.
Result<void> WaitFor(const std::function<void(LayerFile::Done)>& start);

// A local file; Read blocks. Takes the descriptor.
Result<std::unique_ptr<LayerFile>> OpenLocalFile(os::UniqueFd fd);

// A sealed layer that has been checked but for its content.
struct Layer {
  LayerInfo info;
  std::shared_ptr<LayerFile> file;
  // Its index, read and checked again: kept by whoever merges it.
  Result<std::vector<Extent>> ReadIndex() const;
};
// kInvalidArgument "disk.bad_layer", or the error of the file.
Result<std::shared_ptr<const Layer>> OpenLayer(std::shared_ptr<LayerFile> file);
Result<std::shared_ptr<const Layer>> OpenLayerAt(int dirfd, const std::string& path);

// All layers of a chain, oldest first, as one index; an extent's layer is its number. Nothing
// below. kInvalidArgument "disk.bad_chain": a parent or size that does not fit.
Result<std::vector<Extent>> MergeChain(std::span<const std::shared_ptr<const Layer>> layers);
// The same without leaving out what says zero: of layers that have others below.
Result<std::vector<Extent>> MergeLayers(std::span<const std::shared_ptr<const Layer>> layers);
Result<void> CheckChain(std::span<const std::shared_ptr<const Layer>> layers);

}  // namespace dsec::disk

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/result.h"
#include "disk/layer.h"

// Disk images of others in and out. Blocking; `proceed` (may be empty) is asked with the bytes
// done, false gives kCancelled "disk.cancelled".
namespace dsec::disk {

using Proceed = std::function<bool(uint64_t)>;

// Makes the sealed layer `out`, which must not exist, of a raw image: a regular file or a block
// device; its last sector is filled with zeros. What is zero is left out. `parent`: null, or the
// chain below, oldest first; then only what differs from it is in the layer.
Result<LayerInfo> ImportRaw(const std::string& image, const std::string& out,
                            std::span<const std::shared_ptr<const Layer>> parent,
                            const Proceed& proceed);
// The same of a qcow2 image, which qemu-img converts to a raw file beside `out` first. An image
// that names other files (a backing file, external data) is refused: kInvalidArgument
// "disk.image_refers". No qemu-img: kFailedPrecondition "disk.no_qemu_img".
Result<LayerInfo> ImportQcow2(const std::string& image, const std::string& out,
                              std::span<const std::shared_ptr<const Layer>> parent,
                              const Proceed& proceed);
// Writes the disk of a chain to the raw file `out`, which must not exist, with holes for zeros.
// Bytes of data.
Result<uint64_t> ExportRaw(std::span<const std::shared_ptr<const Layer>> chain,
                           const std::string& out, const Proceed& proceed);

}  // namespace dsec::disk

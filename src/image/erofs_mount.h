// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/error.h"
#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::image {

// A detached EROFS mount (O_PATH) of a layer's metadata with the content in `content`, a file a
// device of the metadata; read-only, nodev, nosuid. Its content is read `read_ahead_kib` at a time;
// a failure to set that is logged. May hang on the file system of the blob. kInternal
// "layer.mount_failed", kUnavailable "layer.unreachable" or, for a compressed layer on a kernel
// that reads none, "layer.compression_unsupported".
Result<std::shared_ptr<const os::UniqueFd>> MountLayer(int meta, std::span<const int> content,
                                                       uint32_t read_ahead_kib);

// The same without any readahead, which no MountLayer of this process gives it later: what is read
// from it is what was asked for. kUnavailable "layer.busy": so many mounts were made at the same
// time that its backing device could not be told from theirs.
Result<std::shared_ptr<const os::UniqueFd>> MountLayerApart(int meta, std::span<const int> content);

// What a refusal of the kernel to mount the metadata is for MountLayer.
Error MountRefused(int meta, const Error& cause);

}  // namespace dsec::image

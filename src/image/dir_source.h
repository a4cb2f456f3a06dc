// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "image/entry.h"

namespace dsec::image {

// A folder as a one-layer image: owners, modes, times, xattrs, hard links, holes and devices as
// they are, members in byte order of their names. Follows no link. Refuses to cross into another
// mount (kInvalidArgument "layer.source_crosses_mount") and notices files that change while they
// are read ("layer.source_changed"). Sockets are left out with a warning. `warnings` must outlive
// the reader.
Result<std::unique_ptr<ImageReader>> OpenDirectory(const std::string& path,
                                                   const ImportLimits& limits, Warnings& warnings);

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "image/entry.h"
#include "image/overlay.h"
#include "image/pack_rules.h"
#include "os/unique_fd.h"

namespace dsec::image {

// A folder as a one-layer image: owners, modes, times, xattrs, hard links, holes and devices as
// they are, members in byte order of their names. Follows no link. Refuses to cross into another
// mount (kInvalidArgument "layer.source_crosses_mount") and notices files that change while they
// are read ("layer.source_changed"). Sockets are left out with a warning. `warnings` must outlive
// the reader.
Result<std::unique_ptr<ImageReader>> OpenDirectory(const std::string& path,
                                                   const ImportLimits& limits, Warnings& warnings);

// Folders that are layers of an overlay, lowest first: whiteouts of either form become character
// devices 0:0 without owner and time, opaque folders are marked so, other xattrs of overlayfs are
// dropped (overlay.h). Everything else as above, but with the ids of `ids`.
struct OverlayFolders {
  std::vector<os::UniqueFd> folders;
  IdRange ids;
  ImageConfig config;
  // What is left out or must not be there; null: nothing. Outlives the reader.
  PackFilter* filter = nullptr;
};
Result<std::unique_ptr<ImageReader>> OpenOverlayFolders(OverlayFolders stack,
                                                        const ImportLimits& limits,
                                                        Warnings& warnings);

}  // namespace dsec::image

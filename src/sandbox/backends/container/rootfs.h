// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "base/result.h"
#include "image/layer_mounts.h"
#include "os/unique_fd.h"
#include "sandbox/isolators/scratch.h"

namespace dsec::sandbox {

// The root of one sandbox: an overlay of its layers, bottom to top, under its writable layer, as a
// detached mount. Each layer takes part as a clone of the node's one mount of it, with ids mapped
// through `user_ns`, so that what the image calls root is the sandbox's root. Needs overlayfs
// layers by descriptor (Linux 6.13). Blocking; on the layer store only as far as the kernel reads
// it. kInternal "rootfs.*".
Result<os::UniqueFd> BuildRoot(
    const std::vector<std::shared_ptr<const image::MountedLayer>>& layers,
    const ScratchLayer& scratch, int user_ns);

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/id.h"
#include "base/result.h"
#include "dsec/v1/model.pb.h"
#include "image/layer_mounts.h"
#include "image/shared_catalog.h"
#include "os/unique_fd.h"
#include "sandbox/isolators/scratch.h"

namespace dsec::sandbox {

using HeldLayers = std::vector<std::shared_ptr<const image::MountedLayer>>;

// The layers that an environment names, bottom to top.
struct LayerRefs {
  std::string base;
  std::string workspace;  // empty: none
  std::vector<std::string> toolkits;
};
// kNotFound "layer.not_found", kInvalidArgument "layer.wrong_kind", kUnavailable
// "layer.unreachable", with the field.
Result<std::vector<image::LayerInfo>> FindLayers(image::SharedCatalog& catalog,
                                                 const LayerRefs& refs);
// The same with those that go below one of them (image::Manifest::lower), as they are mounted.
Result<std::vector<LayerId>> ResolveLayers(image::SharedCatalog& catalog, const LayerRefs& refs);
Result<HeldLayers> AcquireLayers(image::LayerMounts& mounts, const std::vector<LayerId>& ids);

// The layers of a sandbox that runs already, as many of them as can be had: its own root does not
// depend on them.
std::shared_ptr<const HeldLayers> HoldLayers(image::LayerMounts& mounts,
                                             const v1::SandboxRecord& record);

// A clone of each layer's one mount on the node, in the same order, with ids mapped through
// `user_ns`, so that what the image calls root is the root of that namespace.
Result<std::vector<os::UniqueFd>> MapLayers(const HeldLayers& layers, int user_ns);

// A root: an overlay of `lowers`, bottom to top, under a writable layer, as a detached mount. Needs
// overlayfs layers by descriptor (Linux 6.13). Blocking; on the layer store only as far as the
// kernel reads it. kInternal "rootfs.*".
Result<os::UniqueFd> BuildRoot(const std::vector<os::UniqueFd>& lowers,
                               const ScratchLayer& scratch);

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/result.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"

namespace dsec::image {

struct FlattenRequest {
  std::vector<std::string> refs;  // lowest first; one alone is written anew
  LayerKind kind = LayerKind::kWorkspace;
  std::string name;  // NAME[:TAG]; empty: the layer is reached by its id alone
  std::map<std::string, std::string> labels;
  Compression compression;
};

struct CompressRequest {
  std::string ref;
  std::string name;  // NAME[:TAG]; empty: the layer is reached by its id alone
  std::map<std::string, std::string> labels;
  std::vector<FirstTouch> first_touch;  // as in a build
  Compression compression;              // none: the plain form again
};

// One layer that shows over any base what the layers show there one over the other. With a base as
// the lowest the result is a base, with its configuration, and deletions are gone; else it keeps
// them. kInvalidArgument "layer.bad_stack" with the field for no layers, a base that is
// not the lowest, and a kind that does not fit; otherwise as LayerStore::Build. `mounts` is of the
// store.
Result<BuildReport> Flatten(LayerStore& store, LayerMounts& mounts, const FlattenRequest& request,
                            const ProgressFn& progress);

// The same tree of the same kind with its content in another form. The new layer has the labels of
// the old one and "dsec.compress.layer", its id. As LayerStore::Build. `mounts` is of the store.
Result<BuildReport> CompressLayer(LayerStore& store, LayerMounts& mounts,
                                  const CompressRequest& request, const ProgressFn& progress);

}  // namespace dsec::image

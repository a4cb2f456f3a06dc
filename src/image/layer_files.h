// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "base/id.h"
#include "base/result.h"
#include "image/layer.h"
#include "os/unique_fd.h"

namespace dsec::image {

// In the folder of a layer, beside its metadata and content.
inline constexpr char kManifestName[] = "manifest.json";

// The hex digits of an id, which name that folder.
std::string HexOf(const LayerId& id);

// The files of one layer, held so that no process of this node removes them while this lives.
struct LayerFiles {
  LayerInfo info;  // as far as the manifest knows it, when it comes from OpenLayer
  Manifest manifest;
  os::UniqueFd lock;  // manifest.json with a shared flock
  os::UniqueFd meta;
  os::UniqueFd blob;
  os::UniqueFd table;  // with the metadata, of a layer that has one
};

// What a manifest says of its layer.
LayerInfo InfoOf(const LayerId& id, const Manifest& manifest);

// kInternal "layer.corrupt": a file of the layer in the store has not the digest of its manifest.
Error WrongDigest(const LayerId& id, std::string_view file, std::string_view found,
                  std::string_view expected);

// Opens the files of a layer below `blobs` and checks manifest and sizes against its id; the
// metadata only if `with_meta`. Blocking, on the file system of the store. kNotFound
// "layer.not_found", kInternal "layer.corrupt", kUnavailable "layer.unreachable".
Result<LayerFiles> OpenLayer(int blobs, const LayerId& id, bool with_meta);

}  // namespace dsec::image

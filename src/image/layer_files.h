// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/id.h"
#include "base/result.h"
#include "image/layer.h"
#include "image/stored_form.h"
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
  // data.blob, or the files of `form`.
  std::vector<os::UniqueFd> content;
  std::string first_name;          // of the first of them
  std::optional<StoredForm> form;  // of a layer that shares content
  os::UniqueFd shared_meta;        // with the metadata, of such a layer
  os::UniqueFd table;              // with the metadata, of a layer that has one
};

// What MountLayer takes.
std::vector<int> ContentOf(const LayerFiles& files);

// The form of the layer in that folder; nullopt: it has a data.blob. kInternal "layer.corrupt",
// kUnavailable "layer.unreachable".
Result<std::optional<StoredForm>> ReadForm(int folder, uint64_t blob_bytes);

// What a manifest says of its layer.
LayerInfo InfoOf(const LayerId& id, const Manifest& manifest);

// kInternal "layer.corrupt": a file of the layer in the store has not the digest of its manifest.
Error WrongDigest(const LayerId& id, std::string_view file, std::string_view found,
                  std::string_view expected);

// That the metadata for the shared content are those that its form makes of the layer's metadata,
// which have their digest. As ReadForm; may hang.
Result<void> CheckSharedMeta(const LayerId& id, const LayerFiles& files);

// Opens the files of a layer below `blobs` and checks manifest and sizes against its id; the
// metadata only if `with_meta`. Blocking, on the file system of the store. kNotFound
// "layer.not_found", kInternal "layer.corrupt", kUnavailable "layer.unreachable".
Result<LayerFiles> OpenLayer(int blobs, const LayerId& id, bool with_meta);

}  // namespace dsec::image

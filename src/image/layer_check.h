// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "image/layer_files.h"
#include "image/layer_store.h"

namespace dsec::image {

// Reads all bytes of a layer and compares their digests with those that its id stands for.
// Progress comes with the phase kRead. kInternal "layer.corrupt" names the file and both digests;
// kNotFound "layer.not_found"; kCancelled "layer.cancelled" when `progress` (may be empty) says
// so. Blocking; the layer cannot be removed meanwhile.
Result<LayerInfo> VerifyLayer(const LayerStore& store, std::string_view ref,
                              const ProgressFn& progress);

// The same for files that are open, with their metadata. `proceed` (may be empty) is asked with the
// bytes that are done.
Result<void> CheckFiles(const LayerId& id, const LayerFiles& files,
                        const std::function<bool(uint64_t)>& proceed);

// What some layers take in the store. Bytes are those of the files; blocks what the file system
// has allocated for them (st_blocks).
struct LayerUsage {
  LayerInfo layer;
  uint64_t meta_blocks = 0;
  uint64_t blob_blocks = 0;   // of content that it does not have from others
  uint64_t shared_bytes = 0;  // of content that lies in files of other layers
  uint64_t trace_blocks = 0;  // of its trace of first reads
  bool unnamed = false;       // no NAME:TAG leads to it
};
struct StoreUsage {
  std::vector<LayerUsage> layers;  // the largest first
  uint64_t work_blocks = 0;        // builds under way, and what killed ones left
  uint64_t condemned_blocks = 0;   // removed layers whose files are kept for now
  uint64_t kept_blocks = 0;        // files of removed layers that others share
};
// Of the layers that `filter` lets through. A layer that goes meanwhile is left out. Blocking.
Result<StoreUsage> MeasureStore(const LayerStore& store, const ListFilter& filter);

}  // namespace dsec::image

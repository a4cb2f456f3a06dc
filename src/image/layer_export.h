// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/result.h"
#include "image/layer_store.h"

namespace dsec::image {

// Writes the files that a layer's id stands for, whatever form the store keeps them in, to
// <to>/blobs/<hex>/{manifest.json,meta.erofs,data.blob,chunks.sha256}, as an object store has them:
// complete and synced as soon as the folder has that name. Each is checked against its digest on
// the way. False: the folder was there. Progress comes with the phase kRead. kInternal
// "layer.corrupt", kResourceExhausted "layer.no_space", kCancelled "layer.cancelled"; then nothing
// of it stays, and what a death leaves is <hex>.part, removed by the next.
Result<bool> ExportLayer(const LayerStore& store, const LayerId& id, const std::string& to,
                         const ProgressFn& progress);

}  // namespace dsec::image

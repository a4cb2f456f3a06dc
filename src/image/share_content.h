// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "image/chunk_index.h"
#include "image/chunk_store.h"
#include "image/stored_form.h"

namespace dsec::image {

// What is worth to be shared. Reads of shared content stay large, and what a layer keeps alive of
// one that has gone stays in proportion.
struct SharingRules {
  uint32_t least_run = 64;      // blocks in a row, 256 KiB: what a checked read takes at least
  uint32_t least_shared = 256;  // blocks of one file, 1 MiB
  uint32_t least_of_file = 4;   // a fourth of the file that is linked is used
  uint32_t least_of_layer = 8;  // an eighth of the layer's content is shared; the rest is copied
  size_t candidates = 16;       // files that are looked at
};

// What ShareContent has made.
struct SharedContent {
  StoredForm form;
  std::vector<ChunkIndex::Link> links;
  std::vector<ChunkStore::Placed> own;  // as it lies in kOwnName
};

// In place of data.blob, puts into the folder `out` of a layer that is being built what of its
// content no other layer below `blobs` has, links to the files of those that have the rest, the
// form and the metadata for it (StoredForm). Each byte that is not kept was compared with what
// stands for it. nullopt: data.blob stays, for too little is shared or because `index` is wrong.
// With an error, too, all is as it was before. kFailedPrecondition "layer.no_links": the file
// system makes no hard links. `proceed` (may be empty) is asked with the bytes compared and copied;
// false: kCancelled "layer.cancelled".
Result<std::optional<SharedContent>> ShareContent(int blobs, int out, ChunkIndex& index,
                                                  std::span<const ChunkStore::Placed> content,
                                                  const std::function<bool(uint64_t)>& proceed,
                                                  const SharingRules& rules = {});

// Whether hard links can be made below `dir`, by making one. kFailedPrecondition "layer.no_links".
Result<void> CheckLinks(int dir);

}  // namespace dsec::image

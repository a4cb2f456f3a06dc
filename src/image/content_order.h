// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "image/chunk_store.h"
#include "image/entry.h"
#include "image/tree.h"

namespace dsec::image {

// A part of a file that runs of the layer read early.
struct FirstTouch {
  std::string path;
  uint64_t offset = 0;
  uint64_t length = UINT64_MAX;  // to the end
};

// One a line, in the order of the reads: PATH, or PATH, OFFSET and LENGTH with tabs between them.
// kInvalidArgument "layer.bad_first_touch" with the line.
Result<std::vector<FirstTouch>> ParseFirstTouch(std::string_view text);

// Settles all files of the tree (chunk_store.h). Before PlaceContent. Errors: of the store.
Result<void> SettleContent(const Tree& tree, ChunkStore& chunks);

// Places the chunks of all files of the tree: first the parts of `first`, in their order, then the
// rest as a walk meets it, folders in byte order of their names. Chunks that no file of the tree
// has get no place. A part that names no file of the tree is left out with a warning.
void PlaceContent(const Tree& tree, const std::vector<FirstTouch>& first, ChunkStore& chunks,
                  Warnings& warnings);

}  // namespace dsec::image

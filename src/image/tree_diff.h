// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "image/tree.h"

namespace dsec::image {

// What must lie over `below` in an overlay so that `after` shows: files that are new or other ones,
// whiteouts, opaque folders, and the folders on the way with what `after` says of them. `after` is
// `below` changed (Tree::Clone), so equal indices are the same inode; neither holds whiteouts or
// opaque folders. A file that gets one more name comes with all its names. Content is referred to,
// not copied. `out` is empty.
void DiffTrees(const Tree& below, const Tree& after, Tree& out);

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"

namespace dsec::image {

// How ids on disk stand for ids in a layer: first+u is u, for u below count. The default leaves
// them as they are.
struct IdRange {
  uint32_t first = 0;
  uint32_t count = UINT32_MAX;
  bool whole() const { return first == 0 && count == UINT32_MAX; }
};

using XattrList = std::vector<std::pair<std::string, std::string>>;

// What overlayfs says about a file of one of its layers.
struct OverlayMarks {
  bool opaque = false;
  bool whiteout = false;  // meaningful for an empty file
};

// Takes the xattrs that are overlayfs's own (trusted.overlay.*) out of the list.
// kConflict "pack.redirect" for one that makes the file depend on another layer: none can
// be made under the options of a sandbox's root.
Result<OverlayMarks> TakeOverlayXattrs(XattrList& xattrs);

// kConflict "pack.foreign_id" for an id outside the range.
Result<uint32_t> IdInLayer(uint32_t id, const IdRange& ids);
// The same for the ids within access control lists and file capabilities. What is malformed is left
// as it is.
Result<void> MapXattrIds(XattrList& xattrs, const IdRange& ids);

}  // namespace dsec::image

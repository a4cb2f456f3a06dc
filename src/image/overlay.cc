// SPDX-License-Identifier: Apache-2.0
#include "image/overlay.h"

#include <cstring>
#include <string_view>

#include "image/layer.h"

namespace dsec::image {
namespace {

constexpr std::string_view kPrefix = "trusted.overlay.";

uint32_t Load(const std::string& bytes, size_t at) {
  uint32_t value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}
void Store(std::string& bytes, size_t at, uint32_t value) {
  std::memcpy(bytes.data() + at, &value, sizeof(value));
}

// linux/posix_acl_xattr.h: a version, then entries of {u16 tag, u16 permissions, u32 id}.
Result<void> MapAcl(std::string& value, const IdRange& ids) {
  constexpr size_t kHeader = 4;
  constexpr size_t kEntry = 8;
  constexpr uint32_t kUser = 0x02, kGroup = 0x08;
  for (size_t at = kHeader; at + kEntry <= value.size(); at += kEntry) {
    const uint32_t tag = Load(value, at) & 0xffff;
    if (tag != kUser && tag != kGroup) continue;
    DSEC_TRY(const uint32_t id, IdInLayer(Load(value, at + 4), ids));
    Store(value, at + 4, id);
  }
  return Ok();
}

// linux/capability.h: revision 3 is revision 2 with the root that it is meant for behind it.
Result<void> MapCapability(std::string& value, const IdRange& ids) {
  constexpr uint32_t kRevision2 = 0x02000000, kRevision3 = 0x03000000, kFlags = 0x00ffffff;
  constexpr size_t kSize2 = 20, kSize3 = 24;
  if (value.size() != kSize3 || (Load(value, 0) & ~kFlags) != kRevision3) return Ok();
  DSEC_TRY(const uint32_t root, IdInLayer(Load(value, kSize2), ids));
  if (root != 0) {
    Store(value, kSize2, root);
    return Ok();
  }
  Store(value, 0, kRevision2 | (Load(value, 0) & kFlags));
  value.resize(kSize2);
  return Ok();
}

}  // namespace

Result<OverlayMarks> TakeOverlayXattrs(XattrList& xattrs) {
  OverlayMarks marks;
  for (const auto& [name, value] : xattrs) {
    if (!name.starts_with(kPrefix)) continue;
    const std::string_view what = std::string_view(name).substr(kPrefix.size());
    if (what == "redirect" || what == "metacopy") {
      return Error(Code::kConflict, "pack.redirect",
                   fmt::format("xattr {} makes it depend on a file of another layer", name));
    }
    // "x": the folder holds whiteouts in the form of xattrs, and hides nothing itself.
    if (what == "opaque" && value == "y") marks.opaque = true;
    if (what == "whiteout") marks.whiteout = true;
  }
  std::erase_if(xattrs, [](const auto& xattr) { return xattr.first.starts_with(kPrefix); });
  return marks;
}

Result<uint32_t> IdInLayer(uint32_t id, const IdRange& ids) {
  if (ids.whole()) return id;
  if (id >= ids.first && id - ids.first < ids.count) return id - ids.first;
  return Error(
      Code::kConflict, "pack.foreign_id",
      fmt::format("belongs to id {}, which is none of {} from {}", id, ids.count, ids.first));
}

Result<void> MapXattrIds(XattrList& xattrs, const IdRange& ids) {
  for (auto& [name, value] : xattrs) {
    if (name == "system.posix_acl_access" || name == "system.posix_acl_default") {
      DSEC_TRY_VOID(MapAcl(value, ids));
    } else if (name == "security.capability") {
      DSEC_TRY_VOID(MapCapability(value, ids));
    }
  }
  return Ok();
}

}  // namespace dsec::image

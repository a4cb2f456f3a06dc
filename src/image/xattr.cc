// SPDX-License-Identifier: Apache-2.0
#include "image/xattr.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "image/erofs_format.h"

namespace dsec::image {
namespace {

struct Space {
  std::string_view prefix;
  uint8_t index;
  bool whole;  // the prefix is the whole name
};
constexpr std::array<Space, 5> kSpaces = {{
    {"user.", erofs::kUser, false},
    {"system.posix_acl_access", erofs::kAclAccess, true},
    {"system.posix_acl_default", erofs::kAclDefault, true},
    {"trusted.", erofs::kTrusted, false},
    {"security.", erofs::kSecurity, false},
}};
constexpr size_t kMaxName = 255;  // XATTR_NAME_MAX, linux/limits.h

template <typename T>
T Load(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

// linux/posix_acl_xattr.h: a version and entries of {tag, permissions, id}, in the order of the
// tags, each but the named ones once, a mask when there are named ones.
bool IsAcl(std::string_view value) {
  constexpr size_t kHeader = 4;
  constexpr size_t kEntry = 8;
  constexpr uint32_t kVersion = 2;
  constexpr uint16_t kUserObj = 0x01, kUser = 0x02, kGroupObj = 0x04, kGroup = 0x08, kMask = 0x10,
                     kOther = 0x20;
  if (value.size() < kHeader || (value.size() - kHeader) % kEntry != 0 ||
      Load<uint32_t>(value, 0) != kVersion) {
    return false;
  }
  uint16_t last = 0;
  uint16_t seen = 0;
  for (size_t at = kHeader; at < value.size(); at += kEntry) {
    const auto tag = Load<uint16_t>(value, at);
    const bool named = tag == kUser || tag == kGroup;
    if (!named && tag != kUserObj && tag != kGroupObj && tag != kMask && tag != kOther) {
      return false;
    }
    if (Load<uint16_t>(value, at + 2) > 7 || tag < last || (tag == last && !named)) return false;
    last = tag;
    seen |= tag;
  }
  constexpr uint16_t kNeeded = kUserObj | kGroupObj | kOther;
  if ((seen & kNeeded) != kNeeded) return false;
  return (seen & (kUser | kGroup)) == 0 || (seen & kMask) != 0;
}

// linux/capability.h VFS_CAP_REVISION_2 and _3 with their sizes.
bool IsCapability(std::string_view value) {
  if (value.size() < 4) return false;
  const uint32_t revision = Load<uint32_t>(value, 0) & ~1U;  // VFS_CAP_FLAGS_EFFECTIVE
  return (revision == 0x02000000 && value.size() == 20) ||
         (revision == 0x03000000 && value.size() == 24);
}

}  // namespace

uint64_t Xattr::entry_bytes() const {
  const uint64_t bytes = sizeof(erofs::XattrEntry) + suffix.size() + value.size();
  return (bytes + erofs::kXattrAlign - 1) & ~(erofs::kXattrAlign - 1);
}

std::optional<Xattr> ToXattr(std::string_view name, std::string_view value, mode_t mode) {
  if (name.size() > kMaxName) return std::nullopt;
  const auto space = std::ranges::find_if(kSpaces, [&](const Space& candidate) {
    return candidate.whole
               ? name == candidate.prefix
               : name.starts_with(candidate.prefix) && name.size() > candidate.prefix.size();
  });
  if (space == kSpaces.end()) return std::nullopt;
  switch (space->index) {
    case erofs::kUser:
      if (!S_ISREG(mode) && !S_ISDIR(mode)) return std::nullopt;
      break;
    case erofs::kAclAccess:
      if (S_ISLNK(mode) || !IsAcl(value)) return std::nullopt;
      break;
    case erofs::kAclDefault:
      if (!S_ISDIR(mode) || !IsAcl(value)) return std::nullopt;
      break;
    default:
      if (name == "security.capability" && !IsCapability(value)) return std::nullopt;
      break;
  }
  return Xattr{space->index, std::string(name.substr(space->prefix.size())), std::string(value)};
}

uint32_t XattrTable::Intern(const std::vector<Xattr>& list) {
  if (list.empty()) return std::numeric_limits<uint32_t>::max();
  std::map<std::pair<uint8_t, std::string_view>, const Xattr*> last;
  for (const Xattr& xattr : list) last[{xattr.index, xattr.suffix}] = &xattr;
  Set set;
  for (const auto& [name, xattr] : last) set.push_back(&*items_.insert(*xattr).first);
  const auto [known, added] = known_.try_emplace(set, static_cast<uint32_t>(sets_.size()));
  if (added) sets_.push_back(std::move(set));
  return known->second;
}

}  // namespace dsec::image

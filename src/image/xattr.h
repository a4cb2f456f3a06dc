// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dsec::image {

// An extended attribute as EROFS keeps it.
struct Xattr {
  uint8_t index = 0;   // erofs::XattrIndex, stands for the prefix of the name
  std::string suffix;  // the name without that prefix
  std::string value;
  auto operator<=>(const Xattr&) const = default;
  // Bytes of its entry on disk, aligned.
  uint64_t entry_bytes() const;
};

// How the kernel would take an attribute of an inode of this mode, after xattr(7), acl(5) and
// security/commoncap.c: nullopt for a name space that Linux does not have, for user.* on what is
// neither file nor folder, and for an access control list or file capability that is malformed (a
// read of it would fail, and with it each copy of the file).
std::optional<Xattr> ToXattr(std::string_view name, std::string_view value, mode_t mode);

// Sets of attributes, each kept once: most inodes of an image that have any have the same.
class XattrTable {
 public:
  using Set = std::vector<const Xattr*>;  // ordered by name

  // kNone for an empty list. The last of several attributes of one name counts.
  uint32_t Intern(const std::vector<Xattr>& list);
  const Set& set(uint32_t index) const { return sets_[index]; }
  size_t count() const { return sets_.size(); }

 private:
  std::set<Xattr> items_;
  std::vector<Set> sets_;
  std::map<Set, uint32_t> known_;
};

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace dsec::aether {

// Who code in the sandbox runs as, or a new file belongs to, in the sandbox's own numbering.
struct Identity {
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::vector<uint32_t> groups;  // supplementary
  std::string name = "root";     // empty: not in passwd
  std::string home = "/root";
};

inline constexpr uint32_t kMaxId = 65535;  // the last id that the sandbox's user namespace maps
inline constexpr size_t kMaxAccountFile = 1 << 20;

// True when `user` needs no look-up: empty, "root" and "0" are root, without reading any file.
bool IsPlainRoot(std::string_view user);

// `user` is name, uid, name:group or uid:gid; `passwd` and `group` are the sandbox's own files,
// which may hold anything: malformed lines are passed over. A number that passwd does not know has
// group 0 and home "/", as container runtimes do. Errors: kInvalidArgument "user.unknown" or
// "user.invalid", field "user".
Result<Identity> ResolveIdentity(std::string_view user, std::string_view passwd,
                                 std::string_view group);

}  // namespace dsec::aether

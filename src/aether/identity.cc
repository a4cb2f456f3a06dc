// SPDX-License-Identifier: Apache-2.0
#include "aether/identity.h"

#include <array>
#include <charconv>
#include <optional>

#include "spawn/agent_abi.h"

namespace dsec::aether {
namespace {

std::optional<uint32_t> ParseId(std::string_view text) {
  uint32_t value = 0;
  auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Calls visit(fields) for each line that has at least N fields, until it returns true.
template <size_t N, typename Visit>
void ForEachLine(std::string_view text, Visit visit) {
  while (!text.empty()) {
    size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    std::array<std::string_view, N> fields;
    size_t count = 0;
    while (count < N) {
      size_t colon = line.find(':');
      fields[count++] = line.substr(0, colon);
      if (colon == std::string_view::npos) break;
      line.remove_prefix(colon + 1);
    }
    if (count == N && visit(fields)) return;
  }
}

// Like getpwnam and getpwuid: the first line that matches.
bool FindUser(std::string_view passwd, std::string_view wanted, bool by_id, Identity& found) {
  std::optional<uint32_t> wanted_id = by_id ? ParseId(wanted) : std::nullopt;
  bool hit = false;
  ForEachLine<6>(passwd, [&](const std::array<std::string_view, 6>& fields) {
    std::optional<uint32_t> uid = ParseId(fields[2]);
    std::optional<uint32_t> gid = ParseId(fields[3]);
    if (!uid || !gid || *uid > kMaxId || *gid > kMaxId || fields[0].empty()) return false;
    if (by_id ? uid != wanted_id : fields[0] != wanted) return false;
    found.uid = *uid;
    found.gid = *gid;
    found.name = fields[0];
    bool usable = fields[5].starts_with('/') && fields[5].size() < 4096 &&
                  fields[5].find('\0') == std::string_view::npos;
    found.home = usable ? fields[5] : std::string_view("/");
    hit = true;
    return true;
  });
  return hit;
}

std::optional<uint32_t> FindGroup(std::string_view group, std::string_view wanted) {
  std::optional<uint32_t> found;
  ForEachLine<3>(group, [&](const std::array<std::string_view, 3>& fields) {
    std::optional<uint32_t> gid = ParseId(fields[2]);
    if (!gid || *gid > kMaxId || fields[0] != wanted) return false;
    found = gid;
    return true;
  });
  return found;
}

std::vector<uint32_t> GroupsOf(std::string_view group, std::string_view name) {
  std::vector<uint32_t> groups;
  ForEachLine<4>(group, [&](const std::array<std::string_view, 4>& fields) {
    std::optional<uint32_t> gid = ParseId(fields[2]);
    if (!gid || *gid > kMaxId) return false;
    std::string_view members = fields[3];
    while (!members.empty()) {
      size_t comma = members.find(',');
      if (members.substr(0, comma) == name) {
        groups.push_back(*gid);
        break;
      }
      members.remove_prefix(comma == std::string_view::npos ? members.size() : comma + 1);
    }
    return groups.size() == spawn::abi::kMaxGroups;
  });
  return groups;
}

Error Unknown(std::string_view user, std::string_view what) {
  return Error(Code::kInvalidArgument, "user.unknown",
               fmt::format("the sandbox has no {} {}", what, user))
      .WithField("user");
}

}  // namespace

bool IsPlainRoot(std::string_view user) { return user.empty() || user == "root" || user == "0"; }

Result<Identity> ResolveIdentity(std::string_view user, std::string_view passwd,
                                 std::string_view group) {
  if (IsPlainRoot(user)) return Identity();
  if (user.size() > 256 || user.find('\0') != std::string_view::npos) {
    return Error(Code::kInvalidArgument, "user.invalid",
                 "user must be at most 256 bytes without NUL")
        .WithField("user");
  }
  size_t colon = user.find(':');
  std::string_view who = user.substr(0, colon);
  Identity identity;
  bool numeric = ParseId(who).has_value();
  // A name of digits only is a number, as for chown(1) and container runtimes.
  if (!FindUser(passwd, who, numeric, identity)) {
    if (!numeric) return Unknown(who, "user");
    identity.uid = *ParseId(who);
    identity.gid = 0;
    identity.name.clear();
    identity.home = "/";
  }
  if (identity.uid == 0 && numeric && identity.name.empty()) identity.home = "/root";
  if (colon != std::string_view::npos) {
    std::string_view wanted = user.substr(colon + 1);
    std::optional<uint32_t> gid = ParseId(wanted);
    if (!gid) gid = FindGroup(group, wanted);
    if (!gid) return Unknown(wanted, "group");
    identity.gid = *gid;
  } else if (!identity.name.empty()) {
    identity.groups = GroupsOf(group, identity.name);
  }
  if (identity.uid > kMaxId || identity.gid > kMaxId) {
    return Error(Code::kInvalidArgument, "user.invalid",
                 fmt::format("user {} is out of range: ids go from 0 to {}", user, kMaxId))
        .WithField("user");
  }
  return identity;
}

}  // namespace dsec::aether

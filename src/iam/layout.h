// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "iam/project.h"

// The keys of IAM in the store (docs/design/iam.md, section 3).
namespace dsec::iam::layout {

inline constexpr std::string_view kConfig = "iam/c/";
inline constexpr std::string_view kProjects = "iam/c/project/";
inline constexpr std::string_view kPrincipals = "iam/c/principal/";
inline constexpr std::string_view kKeys = "iam/c/key/";
inline constexpr std::string_view kRoles = "iam/c/role/";
inline constexpr std::string_view kGrants = "iam/c/grant/";
inline constexpr std::string_view kLedgers = "iam/q/ledger/";
inline constexpr std::string_view kSlices = "iam/q/slice/";

inline std::string Join(std::string_view prefix, std::string_view rest) {
  return std::string(prefix) + std::string(rest);
}
inline std::string Project(const ProjectPath& path) { return Join(kProjects, path.Key()); }
inline std::string Ledger(const ProjectPath& path) { return Join(kLedgers, path.Key()); }
inline std::string Principal(std::string_view id) { return Join(kPrincipals, id); }
inline std::string ApiKey(std::string_view id) { return Join(kKeys, id); }
inline std::string Role(std::string_view name) { return Join(kRoles, name); }
inline std::string Grant(const ProjectPath& path, std::string_view principal) {
  return Join(kGrants, path.Key() + "/" + std::string(principal));
}
inline std::string NodeSlices(std::string_view node) {
  return Join(kSlices, std::string(node) + "/");
}
inline std::string Slice(std::string_view node, const ProjectPath& path) {
  return NodeSlices(node) + path.Key();
}

}  // namespace dsec::iam::layout

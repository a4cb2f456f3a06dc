// SPDX-License-Identifier: Apache-2.0
#include "iam/rights.h"

#include <array>

namespace dsec::iam {
namespace {

constexpr std::array<std::string_view, kRightCount> kNames = {
    "sandbox.create",   "sandbox.read", "sandbox.use",  "sandbox.delete",
    "sandbox.pack",     "layer.read",   "layer.manage", "fn.call",
    "fn.manage",        "node.read",    "iam.read",     "project.manage",
    "principal.manage", "grant.manage", "role.manage",  "audit.read"};

}  // namespace

std::string_view RightName(Right right) { return kNames[static_cast<size_t>(right)]; }

std::vector<std::string> Rights::Names() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < kRightCount; ++i) {
    if (Has(static_cast<Right>(i))) names.emplace_back(kNames[i]);
  }
  return names;
}

Rights Rights::Of(const v1::IamRights& names) {
  Rights rights;
  for (const std::string& name : names.names()) {
    for (size_t i = 0; i < kRightCount; ++i) {
      if (kNames[i] == name) rights = rights | Rights{static_cast<Right>(i)};
    }
  }
  return rights;
}

void Rights::Into(v1::IamRights& names) const {
  names.clear_names();
  for (std::string& name : Names()) names.add_names(std::move(name));
}

Result<Right> ParseRight(std::string_view name, const std::string& field) {
  for (size_t i = 0; i < kRightCount; ++i) {
    if (kNames[i] == name) return static_cast<Right>(i);
  }
  return Error(Code::kInvalidArgument, "iam.right_unknown",
               fmt::format("{}: {} is none of the rights {}", field, name.substr(0, 64),
                           fmt::join(kNames, ", ")))
      .WithField(field);
}

const std::vector<BuiltInRole>& BuiltInRoles() {
  using enum Right;
  static const Rights kAgent = {kSandboxCreate, kSandboxRead, kSandboxUse,
                                kSandboxDelete, kLayerRead,   kFnCall};
  static const Rights kDeveloper = kAgent | Rights{kSandboxPack, kIamRead};
  static const Rights kManager =
      kDeveloper | Rights{kProjectManage, kPrincipalManage, kGrantManage, kAuditRead};
  static const std::vector<BuiltInRole> kRoles = {
      {"owner", Rights::All(), "Everything"},
      {"manager", kManager, "A developer who also hands out projects, principals and grants"},
      {"developer", kDeveloper, "Sandboxes, calls, packing layers, and seeing who has what"},
      {"agent", kAgent, "Sandboxes and calls"},
      {"viewer", {kSandboxRead, kLayerRead, kIamRead}, "Looks and changes nothing"},
      {"operator",
       {kNodeRead, kLayerRead, kLayerManage, kFnManage, kSandboxRead, kSandboxDelete, kIamRead,
        kAuditRead},
       "Runs the nodes: metrics, layers, task types, ending sandboxes"},
  };
  return kRoles;
}

}  // namespace dsec::iam

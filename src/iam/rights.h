// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "dsec/v1/iam.pb.h"

namespace dsec::iam {

enum class Right : uint8_t {
  kSandboxCreate,
  kSandboxRead,    // list, get, stats, events
  kSandboxUse,     // commands, files, renew
  kSandboxDelete,  // end it
  kSandboxPack,    // make a layer of it
  kLayerRead,
  kLayerManage,  // delete, and names outside of the own project's
  kFnCall,
  kFnManage,  // task types
  kNodeRead,  // metrics and events of the node
  kIamRead,   // projects, principals, grants
  kProjectManage,
  kPrincipalManage,  // principals and their keys
  kGrantManage,
  kRoleManage,
  kAuditRead,
};
inline constexpr size_t kRightCount = 16;

// "sandbox.create".
std::string_view RightName(Right right);

// A set of rights; a value.
class Rights {
 public:
  constexpr Rights() = default;
  constexpr Rights(std::initializer_list<Right> rights) {
    for (const Right right : rights) bits_ |= Bit(right);
  }
  static constexpr Rights All() { return Rights((1u << kRightCount) - 1); }

  constexpr bool Has(Right right) const { return (bits_ & Bit(right)) != 0; }
  constexpr bool empty() const { return bits_ == 0; }
  // All of this is in `other`.
  constexpr bool Within(Rights other) const { return (bits_ & ~other.bits_) == 0; }
  constexpr Rights operator&(Rights other) const { return Rights(bits_ & other.bits_); }
  constexpr Rights operator|(Rights other) const { return Rights(bits_ | other.bits_); }
  constexpr Rights Without(Rights other) const { return Rights(bits_ & ~other.bits_); }
  constexpr bool operator==(const Rights&) const = default;

  std::vector<std::string> Names() const;
  // Names of this version; others are passed over.
  static Rights Of(const v1::IamRights& names);
  void Into(v1::IamRights& names) const;

 private:
  constexpr explicit Rights(uint32_t bits) : bits_(bits) {}
  static constexpr uint32_t Bit(Right right) { return 1u << static_cast<uint8_t>(right); }
  uint32_t bits_ = 0;
};

// kInvalidArgument iam.right_unknown, which names `field` and the rights there are.
Result<Right> ParseRight(std::string_view name, const std::string& field);

struct BuiltInRole {
  std::string_view name;
  Rights rights;
  std::string_view description;
};
// owner, manager, developer, agent, viewer, operator.
const std::vector<BuiltInRole>& BuiltInRoles();

}  // namespace dsec::iam

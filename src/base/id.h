// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <functional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/result.h"

namespace dsec {

// An opaque identifier of one kind. Distinct kinds do not convert into one another.
template <typename Tag>
class StrongId {
 public:
  StrongId() = default;
  explicit StrongId(std::string text) : text_(std::move(text)) {}
  const std::string& str() const { return text_; }
  bool empty() const { return text_.empty(); }
  auto operator<=>(const StrongId&) const = default;

 private:
  std::string text_;
};

using NodeId = StrongId<struct NodeIdTag>;        // [a-z0-9]{1,32}
using SandboxId = StrongId<struct SandboxIdTag>;  // sb-<node>-<ulid>
using OpId = StrongId<struct OpIdTag>;  // chosen by the client or by us, 1..128 of [A-Za-z0-9_.:-]
using LayerId = StrongId<struct LayerIdTag>;  // sha256:<64 hex>

// 26 characters of Crockford base32, lower case: 48 bits of wall time in ms, 80 random bits
// (github.com/ulid/spec).
std::string NewUlid(const Clock& clock);

SandboxId NewSandboxId(const NodeId& node, const Clock& clock);
// Node part of a sandbox id; kInvalidArgument if the text is not a sandbox id.
Result<NodeId> NodeOf(const SandboxId& id);
Result<SandboxId> ParseSandboxId(std::string_view text);
Result<NodeId> ParseNodeId(std::string_view text);
// `field` is named in the error.
Result<OpId> ParseOpId(std::string_view text, std::string_view field);
Result<LayerId> ParseLayerId(std::string_view text);

}  // namespace dsec

template <typename Tag>
struct std::hash<dsec::StrongId<Tag>> {
  size_t operator()(const dsec::StrongId<Tag>& id) const noexcept {
    return std::hash<std::string>()(id.str());
  }
};

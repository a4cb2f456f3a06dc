// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace dsec::sandbox {

// Names everything on the host that belongs to one use of a slot: cgroup directories, socket, id
// range. An index is used by one owner at a time; the generation never repeats for an index, also
// not over restarts, so that the remains of an earlier use are never taken for the present one.
struct SlotName {
  uint32_t index = 0;
  uint64_t generation = 0;

  // "s<index>-<generation>".
  std::string str() const;
  // Exactly what str() writes; nothing else is ours.
  static std::optional<SlotName> Parse(std::string_view text);
  auto operator<=>(const SlotName&) const = default;
};

}  // namespace dsec::sandbox

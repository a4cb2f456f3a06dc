// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "base/result.h"

namespace dsec::sandbox {

enum class SlotKind : char { kSandbox = 's', kWorker = 'f', kVm = 'v' };

// Names everything on the host that belongs to one use of a slot: cgroup directories, socket, id
// range. An index is used by one owner at a time; the generation never repeats for an index, also
// not over restarts, so that the remains of an earlier use are never taken for the present one.
struct SlotName {
  uint32_t index = 0;
  uint64_t generation = 0;
  SlotKind kind = SlotKind::kSandbox;

  // "s<index>-<generation>", of a worker of FnCall "f<index>-<generation>", of a
  // virtual machine "v<index>-<generation>".
  std::string str() const;
  // Exactly what str() writes; nothing else is ours.
  static std::optional<SlotName> Parse(std::string_view text);
  auto operator<=>(const SlotName&) const = default;
};

// The one space of indices of a node, over all kinds. Thread-safe.
class SlotIndices {
 public:
  virtual ~SlotIndices() = default;
  // A new name. kResourceExhausted "capacity.slots".
  virtual Result<SlotName> Reserve(SlotKind kind) = 0;
  // Makes a foreign name one of this process; false when it is not there.
  virtual bool Adopt(const SlotName& name) = 0;
  // Nothing of that name is left on the host. Unknown names are ignored.
  virtual void Release(const SlotName& name) = 0;
  // Names that were found on the host and belong to nobody in this process.
  virtual std::set<SlotName> Foreign() const = 0;
};

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/slot_name.h"

#include <fmt/format.h>

#include <charconv>

namespace dsec::sandbox {
namespace {

template <typename T>
bool TakeNumber(std::string_view& text, T& value) {
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

}  // namespace

std::string SlotName::str() const {
  return fmt::format("{}{}-{}", static_cast<char>(kind), index, generation);
}

std::optional<SlotName> SlotName::Parse(std::string_view text) {
  SlotName name;
  std::string_view rest = text;
  if (rest.starts_with('f')) {
    name.kind = SlotKind::kWorker;
  } else if (rest.starts_with('v')) {
    name.kind = SlotKind::kVm;
  } else if (!rest.starts_with('s')) {
    return std::nullopt;
  }
  rest.remove_prefix(1);
  if (!TakeNumber(rest, name.index) || !rest.starts_with('-')) return std::nullopt;
  rest.remove_prefix(1);
  if (!TakeNumber(rest, name.generation) || !rest.empty()) return std::nullopt;
  if (name.str() != text) return std::nullopt;  // leading zeros
  return name;
}

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
// What base/log.h declares, for a program whose log is the machine's console.
#include "base/log.h"

#include "guest/boot.h"

namespace dsec::log {

void Write(Level /*level*/, std::string_view event, Fields fields) noexcept {
  std::string line(event);
  for (const Field& field : fields) {
    const auto& value = field.value.variant();
    if (const auto* text = std::get_if<std::string_view>(&value)) {
      line += fmt::format(" {}={}", field.key, *text);
    } else if (const auto* owned = std::get_if<std::string>(&value)) {
      line += fmt::format(" {}={}", field.key, *owned);
    }
  }
  guest::Say(line);
}

}  // namespace dsec::log

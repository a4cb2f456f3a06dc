// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/control_file.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "os/file.h"

namespace dsec::sandbox {

std::string_view TakeWord(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\n"), text.size()));
  const std::string_view word = text.substr(0, text.find_first_of(" \t\n"));
  text.remove_prefix(word.size());
  return word;
}

uint64_t ToNumber(std::string_view word) {
  uint64_t value = 0;
  std::from_chars(word.data(), word.data() + word.size(), value);
  return value;
}

uint64_t ControlValue(std::string_view text, std::string_view key) {
  if (key.empty()) return ToNumber(TakeWord(text));
  while (!text.empty()) {
    const std::string_view word = TakeWord(text);
    const std::string_view value = TakeWord(text);
    if (word == key) return ToNumber(value);
  }
  return 0;
}

uint64_t ReadControl(int dir, std::string_view path, std::string_view key) {
  constexpr size_t kMaxBytes = 1 << 20;
  const auto text = os::ReadFile(dir, std::string(path).c_str(), kMaxBytes);
  return text.ok() ? ControlValue(*text, key) : 0;
}

uint64_t ReadControl(const os::UniqueFd& file, std::string_view key) {
  // A read from the start is answered anew. The longest, memory.stat, has some two KiB.
  char text[4096];
  const ssize_t n = ::pread(file.get(), text, sizeof(text), 0);
  return n > 0 ? ControlValue({text, static_cast<size_t>(n)}, key) : 0;
}

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "os/unique_fd.h"

namespace dsec::sandbox {

// Files of cgroups and the like: words between blanks, tabs and newlines.

// The first word, taken off the front; empty when there is none.
std::string_view TakeWord(std::string_view& text);
// 0 when it is none.
uint64_t ToNumber(std::string_view word);
// The value behind `key` in a file of "key value" lines; without a key, of a file with one number.
// 0 when there is none.
uint64_t ControlValue(std::string_view text, std::string_view key = {});
// Likewise, of a file; 0 when it cannot be read.
uint64_t ReadControl(int dir, std::string_view path, std::string_view key = {});
// Likewise, of a file that is kept open; -1 reads as 0.
uint64_t ReadControl(const os::UniqueFd& file, std::string_view key = {});

}  // namespace dsec::sandbox

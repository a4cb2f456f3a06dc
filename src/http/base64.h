// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace dsec::http {

// Standard base64 with padding (RFC 4648 section 4).
void AppendBase64(std::string_view bytes, std::string& out);
// Strict: no white space, no missing or superfluous padding, no stray bits. Nullopt otherwise.
std::optional<std::string> DecodeBase64(std::string_view text);

}  // namespace dsec::http

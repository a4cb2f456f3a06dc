// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace dsec::iam {

using KeyDigest = std::array<uint8_t, 32>;

// SHA-256.
KeyDigest DigestOf(std::string_view text);
// In constant time.
bool SameDigest(const KeyDigest& digest, std::string_view bytes);

// An API key: "dsec_<id>_<secret>", 16 and 64 hexadecimal digits. The secret has 256 random bits
// and is shown once; its digest is what is kept.
struct KeyText {
  std::string id;
  std::string secret;

  std::string Text() const { return "dsec_" + id + "_" + secret; }
};
KeyText NewKey();
// nullopt when it is not of that form.
std::optional<KeyText> ParseKey(std::string_view text);
// Of a key: 16 hexadecimal digits.
bool IsKeyId(std::string_view text);

}  // namespace dsec::iam

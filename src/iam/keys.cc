// SPDX-License-Identifier: Apache-2.0
#include "iam/keys.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>

#include "base/rng.h"

namespace dsec::iam {
namespace {

constexpr std::string_view kPrefix = "dsec_";
constexpr size_t kIdDigits = 16;
constexpr size_t kSecretDigits = 64;

bool Hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

template <size_t N>
std::string RandomHex() {
  std::array<uint8_t, N / 2> bytes;
  SecureRandom(bytes);
  return fmt::format("{:02x}", fmt::join(bytes, ""));
}

}  // namespace

KeyDigest DigestOf(std::string_view text) {
  KeyDigest digest{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

bool SameDigest(const KeyDigest& digest, std::string_view bytes) {
  return bytes.size() == digest.size() &&
         CRYPTO_memcmp(digest.data(), bytes.data(), digest.size()) == 0;
}

KeyText NewKey() { return {RandomHex<kIdDigits>(), RandomHex<kSecretDigits>()}; }

std::optional<KeyText> ParseKey(std::string_view text) {
  if (text.size() != kPrefix.size() + kIdDigits + 1 + kSecretDigits || !text.starts_with(kPrefix))
    return std::nullopt;
  const std::string_view id = text.substr(kPrefix.size(), kIdDigits);
  const std::string_view secret = text.substr(kPrefix.size() + kIdDigits + 1);
  if (text[kPrefix.size() + kIdDigits] != '_' || !Hex(id) || !Hex(secret)) return std::nullopt;
  return KeyText{std::string(id), std::string(secret)};
}

bool IsKeyId(std::string_view text) { return text.size() == kIdDigits && Hex(text); }

}  // namespace dsec::iam

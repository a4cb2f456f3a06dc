// SPDX-License-Identifier: Apache-2.0
#include "fn/digest.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <span>

#include "base/check.h"

namespace dsec::fn {
namespace {

constexpr std::string_view kPrefix = "sha256:";
constexpr size_t kHexDigits = 64;

std::string Hex(std::span<const unsigned char> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  out.reserve(bytes.size() * 2);
  for (const unsigned char byte : bytes) {
    out += kDigits[byte >> 4];
    out += kDigits[byte & 15];
  }
  return out;
}

}  // namespace

FieldDigest::FieldDigest() : context_(EVP_MD_CTX_new()) {
  DSEC_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1);
}

FieldDigest::~FieldDigest() { EVP_MD_CTX_free(context_); }

void FieldDigest::Add(uint64_t number) {
  std::array<unsigned char, 8> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<unsigned char>(number >> (8 * i));
  }
  DSEC_CHECK(EVP_DigestUpdate(context_, bytes.data(), bytes.size()) == 1);
}

void FieldDigest::Add(std::string_view field) {
  Add(static_cast<uint64_t>(field.size()));
  DSEC_CHECK(EVP_DigestUpdate(context_, field.data(), field.size()) == 1);
}

std::string FieldDigest::Finish() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  DSEC_CHECK(EVP_DigestFinal_ex(context_, digest.data(), &size) == 1);
  return Hex(std::span(digest).first(size));
}

std::string ArtifactDigest(std::string_view bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  DSEC_CHECK(EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) ==
             1);
  return std::string(kPrefix) + Hex(std::span(digest).first(size));
}

bool IsArtifactDigest(std::string_view text) {
  if (!text.starts_with(kPrefix)) return false;
  text.remove_prefix(kPrefix.size());
  return text.size() == kHexDigits && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

}  // namespace dsec::fn

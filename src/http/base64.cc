// SPDX-License-Identifier: Apache-2.0
#include "http/base64.h"

#include <array>
#include <cstdint>

namespace dsec::http {
namespace {

constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr uint8_t kBad = 0xff;

// Two characters for each 12 bits: one store in place of two look-ups.
constexpr auto kPairs = [] {
  std::array<std::array<char, 2>, 4096> pairs{};
  for (size_t i = 0; i < pairs.size(); ++i) pairs[i] = {kAlphabet[i >> 6], kAlphabet[i & 63]};
  return pairs;
}();

constexpr auto kValues = [] {
  std::array<uint8_t, 256> values{};
  values.fill(kBad);
  for (uint8_t i = 0; i < 64; ++i) values[static_cast<uint8_t>(kAlphabet[i])] = i;
  return values;
}();

}  // namespace

void AppendBase64(std::string_view bytes, std::string& out) {
  const size_t start = out.size();
  out.resize(start + (bytes.size() + 2) / 3 * 4);
  char* to = out.data() + start;
  const auto* from = reinterpret_cast<const uint8_t*>(bytes.data());
  size_t left = bytes.size();
  for (; left >= 3; left -= 3, from += 3, to += 4) {
    const uint32_t word = uint32_t{from[0]} << 16 | uint32_t{from[1]} << 8 | from[2];
    const auto& high = kPairs[word >> 12];
    const auto& low = kPairs[word & 0xfff];
    to[0] = high[0];
    to[1] = high[1];
    to[2] = low[0];
    to[3] = low[1];
  }
  if (left == 0) return;
  const uint32_t word = uint32_t{from[0]} << 16 | (left == 2 ? uint32_t{from[1]} << 8 : 0);
  to[0] = kAlphabet[word >> 18];
  to[1] = kAlphabet[word >> 12 & 63];
  to[2] = left == 2 ? kAlphabet[word >> 6 & 63] : '=';
  to[3] = '=';
}

std::optional<std::string> DecodeBase64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  std::string out;
  if (text.empty()) return out;
  const size_t padding = text.back() != '=' ? 0 : text[text.size() - 2] != '=' ? 1 : 2;
  out.resize(text.size() / 4 * 3 - padding);
  char* to = out.data();
  const auto value = [&](size_t i) { return uint32_t{kValues[static_cast<uint8_t>(text[i])]}; };
  const size_t whole = text.size() - (padding != 0 ? 4 : 0);
  size_t i = 0;
  for (; i < whole; i += 4, to += 3) {
    const uint32_t a = value(i), b = value(i + 1), c = value(i + 2), d = value(i + 3);
    if (((a | b | c | d) & 0x80) != 0) return std::nullopt;
    const uint32_t word = a << 18 | b << 12 | c << 6 | d;
    to[0] = static_cast<char>(word >> 16);
    to[1] = static_cast<char>(word >> 8);
    to[2] = static_cast<char>(word);
  }
  if (padding == 0) return out;
  const uint32_t a = value(i), b = value(i + 1), c = padding == 1 ? value(i + 2) : 0;
  if (((a | b | c) & 0x80) != 0) return std::nullopt;
  const uint32_t word = a << 18 | b << 12 | c << 6;
  if ((word & (padding == 1 ? 0xffu : 0xffffu)) != 0) return std::nullopt;
  *to++ = static_cast<char>(word >> 16);
  if (padding == 1) *to = static_cast<char>(word >> 8);
  return out;
}

}  // namespace dsec::http

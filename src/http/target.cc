// SPDX-License-Identifier: Apache-2.0
#include "http/target.h"

#include <algorithm>
#include <charconv>

namespace dsec::http {
namespace {

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// All of `text`, digits only.
std::optional<uint64_t> ParseDecimal(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

Error BadRange(std::string_view rule) {
  return Error(Code::kInvalidArgument, "request.invalid", fmt::format("Range: {}", rule))
      .WithField("Range");
}

}  // namespace

Result<Target> SplitTarget(std::string_view target) {
  constexpr std::string_view kScheme = "http://";
  if (target.starts_with(kScheme)) {
    const size_t slash = target.find('/', kScheme.size());
    if (slash != std::string_view::npos) target.remove_prefix(slash);
  }
  if (!target.starts_with('/')) {
    return Error(Code::kInvalidArgument, "request.malformed",
                 "the request-target must begin with /");
  }
  const size_t question = target.find('?');
  if (question == std::string_view::npos) return Target{target, {}};
  return Target{target.substr(0, question), target.substr(question + 1)};
}

Result<std::string> PercentDecode(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    const int high = i + 2 < text.size() ? HexValue(text[i + 1]) : -1;
    const int low = i + 2 < text.size() ? HexValue(text[i + 2]) : -1;
    if (high < 0 || low < 0) {
      return Error(Code::kInvalidArgument, "request.malformed",
                   "a % in the request-target must be followed by two hex digits");
    }
    out += static_cast<char>(high << 4 | low);
    i += 2;
  }
  return out;
}

std::string PercentEncode(std::string_view bytes) {
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : bytes) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                       c == '-' || c == '.' || c == '_' || c == '~';
    if (plain) {
      out += c;
    } else {
      out += '%';
      out += kHex[static_cast<unsigned char>(c) >> 4];
      out += kHex[static_cast<unsigned char>(c) & 15];
    }
  }
  return out;
}

Result<QueryPairs> ParseQuery(std::string_view query) {
  QueryPairs pairs;
  while (!query.empty()) {
    const size_t end = std::min(query.find('&'), query.size());
    const std::string_view pair = query.substr(0, end);
    query.remove_prefix(std::min(end + 1, query.size()));
    if (pair.empty()) continue;
    const size_t equals = std::min(pair.find('='), pair.size());
    DSEC_TRY(std::string key, PercentDecode(pair.substr(0, equals)));
    DSEC_TRY(std::string value, PercentDecode(pair.substr(std::min(equals + 1, pair.size()))));
    pairs.emplace_back(std::move(key), std::move(value));
  }
  return pairs;
}

Result<Range> ParseRange(std::string_view value) {
  constexpr std::string_view kUnit = "bytes=";
  if (!value.starts_with(kUnit)) return BadRange("must begin with bytes=");
  value.remove_prefix(kUnit.size());
  if (value.find(',') != std::string_view::npos) return BadRange("only one range is served");
  const size_t dash = value.find('-');
  if (dash == std::string_view::npos) return BadRange("must be a-b, a- or -n");
  const std::string_view first = value.substr(0, dash);
  const std::string_view last = value.substr(dash + 1);
  Range range;
  if (first.empty()) {
    range.suffix = ParseDecimal(last);
    if (!range.suffix) return BadRange("must be a-b, a- or -n");
    return range;
  }
  const auto from = ParseDecimal(first);
  if (!from) return BadRange("must be a-b, a- or -n");
  range.first = *from;
  if (last.empty()) return range;
  range.last = ParseDecimal(last);
  if (!range.last || *range.last < range.first) return BadRange("must be a-b with a <= b");
  return range;
}

std::optional<Slice> Resolve(const Range& range, uint64_t size) {
  if (range.suffix) {
    const uint64_t length = std::min(*range.suffix, size);
    if (length == 0) return std::nullopt;
    return Slice{size - length, length};
  }
  if (range.first >= size) return std::nullopt;
  const uint64_t last = std::min(range.last.value_or(size - 1), size - 1);
  return Slice{range.first, last - range.first + 1};
}

}  // namespace dsec::http

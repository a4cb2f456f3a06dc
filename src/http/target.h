// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace dsec::http {

// A request-target cut at its first '?'; views into it, still encoded.
struct Target {
  std::string_view path;
  std::string_view query;
};
// Origin form, or absolute form with scheme http. kInvalidArgument "request.malformed".
Result<Target> SplitTarget(std::string_view target);

// Turns %XX into bytes and leaves all else, '+' too. kInvalidArgument "request.malformed" for a '%'
// without two hex digits.
Result<std::string> PercentDecode(std::string_view text);
// The inverse for one segment or value: letters, digits and -._~ stay, all else is encoded.
std::string PercentEncode(std::string_view bytes);

// key=value pairs in order, both decoded. Empty pairs are left out. kInvalidArgument
// "request.malformed".
using QueryPairs = std::vector<std::pair<std::string, std::string>>;
Result<QueryPairs> ParseQuery(std::string_view query);

// One range of a Range header.
struct Range {
  uint64_t first = 0;
  std::optional<uint64_t> last;    // inclusive
  std::optional<uint64_t> suffix;  // the last so many bytes; then first and last mean nothing
};
// kInvalidArgument "request.invalid" with the field Range: another unit, more than one range, or
// bad form.
Result<Range> ParseRange(std::string_view value);

// Which bytes of a file of `size` bytes a range means; nullopt when it lies past the end (416).
struct Slice {
  uint64_t offset = 0;
  uint64_t length = 0;
};
std::optional<Slice> Resolve(const Range& range, uint64_t size);

}  // namespace dsec::http

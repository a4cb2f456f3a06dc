// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "image/content_order.h"

namespace dsec::image {

// In the folder of a layer, where a recording has left one (format_spec.md, "Traces").
inline constexpr char kTraceName[] = "first_touch";
// Code in sandboxes decides what a trace holds: it is bounded wherever one is made or read.
inline constexpr size_t kMaxTraceText = 4 << 20;
inline constexpr size_t kMaxTraceParts = 65'536;
inline constexpr uint64_t kMaxTraceBytes = 8ull << 30;
inline constexpr uint64_t kTracePage = 4096;

// What has been seen of one file, as disjoint ranges. Takes as much memory as it has ranges.
class RangeSet {
 public:
  using Range = std::pair<uint64_t, uint64_t>;  // begin, end
  // What of it is new, in order; it is known from now on.
  std::vector<Range> Add(uint64_t begin, uint64_t end);

 private:
  std::map<uint64_t, uint64_t> ranges_;  // begin to end
};

// Which parts of the files of a layer runs have read, in the order of their first reads. A part is
// made of whole pages of 4 KiB; its file may end within the last one.
struct LayerTrace {
  std::vector<FirstTouch> parts;

  uint64_t bytes() const;
  // Drops what is beyond the bounds, or has a name that the text cannot hold. True: something was.
  bool Bound();
  // Of a trace within its bounds: the lines that `dsec layer build --first-touch` takes.
  std::string Lines() const;
  // The file: a line with the version, then Lines().
  std::string Encode() const;
  // Accepts exactly what Encode writes within the bounds. kInternal "layer.bad_trace".
  static Result<LayerTrace> Parse(std::string_view text);
  // The parts of `first`, then what only `second` has.
  static LayerTrace Merge(const LayerTrace& first, const LayerTrace& second);
};

// The trace in the folder of a layer; nullopt: it has none. Blocking, on the file system of the
// store. kInternal "layer.bad_trace", kUnavailable "layer.unreachable".
Result<std::optional<LayerTrace>> ReadTrace(const std::string& folder);

// A trace as requests for reading ahead: parts of one file that lie close to each other become one
// request, at the place of the first of them, until it is `size` long.
std::vector<FirstTouch> PlanReads(const LayerTrace& trace, uint64_t size);

}  // namespace dsec::image

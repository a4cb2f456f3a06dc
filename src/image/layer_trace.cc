// SPDX-License-Identifier: Apache-2.0
#include "image/layer_trace.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <iterator>
#include <optional>

#include "image/layer.h"
#include "image/path.h"
#include "image/root_calls.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr std::string_view kHeader = "dsec-first-touch 1\n";
// Beyond any file of a layer (ImportLimits), so that sums cannot overflow.
constexpr uint64_t kMaxOffset = 1ull << 46;
// Parts this close are read together: what lies between costs less than another request.
constexpr uint64_t kGap = 64 << 10;

Error Bad(std::string_view what) {
  return Error(Code::kInternal, "layer.bad_trace", fmt::format("trace of first reads: {}", what));
}

// Names with a tab or newline are rare enough to go without.
bool GoodPath(std::string_view path) {
  const auto plain = [](char c) { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f; };
  if (path.empty() || !std::ranges::all_of(path, plain)) return false;
  const auto clean = CleanPath(path, UINT64_MAX);
  return clean.ok() && *clean == path;
}

bool GoodPart(const FirstTouch& part) {
  return part.offset % kTracePage == 0 && part.length % kTracePage == 0 && part.length > 0 &&
         part.offset <= kMaxOffset && part.length <= kMaxOffset && GoodPath(part.path);
}

std::string LineOf(const FirstTouch& part) {
  return fmt::format("{}\t{}\t{}\n", part.path, part.offset, part.length);
}

// Decimal without leading zeros: each part has one spelling.
std::optional<uint64_t> Number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (text.size() > 1 && text.front() == '0') return std::nullopt;
  return value;
}

std::optional<FirstTouch> ParseLine(std::string_view line) {
  const size_t first = line.find('\t');
  if (first == std::string_view::npos) return std::nullopt;
  const size_t second = line.find('\t', first + 1);
  if (second == std::string_view::npos) return std::nullopt;
  const auto offset = Number(line.substr(first + 1, second - first - 1));
  const auto length = Number(line.substr(second + 1));
  if (!offset || !length) return std::nullopt;
  FirstTouch part{std::string(line.substr(0, first)), *offset, *length};
  if (!GoodPart(part)) return std::nullopt;
  return part;
}

}  // namespace

std::vector<RangeSet::Range> RangeSet::Add(uint64_t begin, uint64_t end) {
  std::vector<Range> fresh;
  if (begin >= end) return fresh;
  uint64_t from = begin, to = end, seen = begin;
  auto it = ranges_.upper_bound(begin);
  if (it != ranges_.begin() && std::prev(it)->second >= begin) --it;
  while (it != ranges_.end() && it->first <= end) {
    if (it->first > seen) fresh.emplace_back(seen, it->first);
    seen = std::max(seen, it->second);
    from = std::min(from, it->first);
    to = std::max(to, it->second);
    it = ranges_.erase(it);
  }
  if (seen < end) fresh.emplace_back(seen, end);
  ranges_.emplace(from, to);
  return fresh;
}

uint64_t LayerTrace::bytes() const {
  uint64_t total = 0;
  for (const FirstTouch& part : parts) total += part.length;
  return total;
}

bool LayerTrace::Bound() {
  size_t count = 0, text = kHeader.size();
  uint64_t total = 0;
  bool full = false;
  const size_t dropped = std::erase_if(parts, [&](const FirstTouch& part) {
    if (full || !GoodPart(part)) return true;
    const size_t line = LineOf(part).size();
    full = count == kMaxTraceParts || line > kMaxTraceText - text ||
           part.length > kMaxTraceBytes - total;
    if (full) return true;
    ++count;
    text += line;
    total += part.length;
    return false;
  });
  return dropped > 0;
}

std::string LayerTrace::Lines() const {
  std::string text;
  for (const FirstTouch& part : parts) text += LineOf(part);
  return text;
}

std::string LayerTrace::Encode() const { return std::string(kHeader) + Lines(); }

Result<LayerTrace> LayerTrace::Parse(std::string_view text) {
  if (text.size() > kMaxTraceText) return Bad("too large");
  if (!text.starts_with(kHeader)) return Bad("not of version 1");
  text.remove_prefix(kHeader.size());
  LayerTrace trace;
  uint64_t total = 0;
  for (size_t number = 2; !text.empty(); ++number) {
    const size_t newline = text.find('\n');
    auto part =
        newline == std::string_view::npos ? std::nullopt : ParseLine(text.substr(0, newline));
    if (!part) return Bad(fmt::format("line {} is not PATH<tab>OFFSET<tab>LENGTH", number));
    text.remove_prefix(newline + 1);
    if (trace.parts.size() == kMaxTraceParts) return Bad("too many parts");
    if (part->length > kMaxTraceBytes - total) return Bad("too many bytes");
    total += part->length;
    trace.parts.push_back(*std::move(part));
  }
  return trace;
}

LayerTrace LayerTrace::Merge(const LayerTrace& first, const LayerTrace& second) {
  LayerTrace merged;
  std::map<std::string, RangeSet> seen;
  for (const LayerTrace* trace : {&first, &second}) {
    for (const FirstTouch& part : trace->parts) {
      for (const auto& [begin, end] : seen[part.path].Add(part.offset, part.offset + part.length))
        merged.parts.push_back({part.path, begin, end - begin});
    }
  }
  return merged;
}

Result<std::optional<LayerTrace>> ReadTrace(const std::string& folder) {
  const std::string path = folder + "/" + kTraceName;
  // Whatever else is there is not waited for.
  auto file = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (!file.ok()) {
    if (file.error().sys_errno() == ENOENT) return std::optional<LayerTrace>();
    return RootError(std::move(file).error());
  }
  auto text = os::ReadAll(file->get(), kMaxTraceText);
  if (!text.ok() && text.error().reason() == "os.file_too_large") return Bad("too large");
  if (!text.ok()) return RootError(std::move(text).error());
  DSEC_TRY(auto trace, LayerTrace::Parse(*text));
  return std::optional(std::move(trace));
}

std::vector<FirstTouch> PlanReads(const LayerTrace& trace, uint64_t size) {
  // What is left to read of each file.
  std::map<std::string_view, std::map<uint64_t, uint64_t>> left;
  {
    std::map<std::string_view, RangeSet> seen;
    for (const FirstTouch& part : trace.parts) {
      for (const auto& [begin, end] : seen[part.path].Add(part.offset, part.offset + part.length)) {
        for (uint64_t at = begin; at < end; at += size)
          left[part.path].emplace(at, std::min(at + size, end));
      }
    }
  }
  std::vector<FirstTouch> plan;
  for (const FirstTouch& part : trace.parts) {
    auto& file = left[part.path];
    // Pieces that begin in this part: all of them, unless an earlier request took them along.
    for (auto it = file.lower_bound(part.offset);
         it != file.end() && it->first < part.offset + part.length;) {
      uint64_t begin = it->first, end = it->second;
      it = file.erase(it);
      while (it != file.begin()) {
        const auto before = std::prev(it);
        if (before->second + kGap < begin || end - before->first > size) break;
        begin = before->first;
        it = file.erase(before);
      }
      while (it != file.end() && it->first <= end + kGap && it->second - begin <= size) {
        end = it->second;
        it = file.erase(it);
      }
      plan.push_back({part.path, begin, end - begin});
    }
  }
  return plan;
}

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/ids.h"

#include <fcntl.h>

#include <charconv>
#include <optional>
#include <string_view>
#include <vector>

#include "os/file.h"

namespace dsec::sandbox {
namespace {

constexpr size_t kMaxFile = 16 << 20;
constexpr uint64_t kIdSpace = 0xfffffffe;  // the last two 32-bit ids mean "none"

struct Span {
  uint64_t first = 0;
  uint64_t count = 0;
  bool Overlaps(const Span& other) const {
    return count != 0 && other.count != 0 && first < other.first + other.count &&
           other.first < first + count;
  }
};

std::vector<std::string_view> Fields(std::string_view line) {
  std::vector<std::string_view> fields;
  while (true) {
    const size_t end = line.find(':');
    fields.push_back(line.substr(0, end));
    if (end == std::string_view::npos) return fields;
    line.remove_prefix(end + 1);
  }
}

std::optional<uint64_t> Number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

struct Source {
  const char* path;
  size_t first;  // field of the first id
  size_t count;  // field of the count; 0: the entry is a single id
};
// passwd(5), group(5), subuid(5)
constexpr Source kSources[] = {
    {"/etc/passwd", 2, 0}, {"/etc/group", 2, 0}, {"/etc/subuid", 1, 2}, {"/etc/subgid", 1, 2}};

Result<void> CheckFile(const std::string& root, const Source& source, const Span* ours, size_t n) {
  const std::string path = root + source.path;
  auto text = os::ReadFile(AT_FDCWD, path.c_str(), kMaxFile);
  if (!text.ok()) {
    if (text.error().sys_errno() == ENOENT) return Ok();
    return std::move(text).error();
  }
  std::string_view rest = *text;
  for (size_t line_number = 1; !rest.empty(); ++line_number) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    const auto fields = Fields(line);
    if (fields.size() <= std::max(source.first, source.count)) continue;
    const auto first = Number(fields[source.first]);
    const auto count =
        source.count == 0 ? std::optional<uint64_t>(1) : Number(fields[source.count]);
    if (!first.has_value() || !count.has_value()) continue;
    for (size_t i = 0; i < n; ++i) {
      if (!ours[i].Overlaps({*first, *count})) continue;
      return Error(
          Code::kFailedPrecondition, "ids.overlap",
          fmt::format(
              "host ids {}..{} are meant for sandboxes, but line {} of {} gives {}..{} to {}",
              ours[i].first, ours[i].first + ours[i].count - 1, line_number, path, *first,
              *first + *count - 1, fields[0]));
    }
  }
  return Ok();
}

}  // namespace

Result<void> IdPlan::Check(const std::string& root) const {
  const Span ours[] = {{id_base, uint64_t{slots} * kIdsPerSlot}, {agent_uid_base, slots}};
  auto bad = [](std::string message) {
    return Error(Code::kInvalidArgument, "ids.range", std::move(message));
  };
  if (slots == 0) return bad("no slots");
  if (id_base < kIdsPerSlot || agent_uid_base < kIdsPerSlot) {
    return bad(fmt::format("ids below {} belong to the host", kIdsPerSlot));
  }
  for (const Span& span : ours) {
    if (span.first + span.count > kIdSpace) {
      return bad(fmt::format("{} slots from id {} on pass the last id {}", slots, span.first,
                             kIdSpace - 1));
    }
  }
  if (ours[0].Overlaps(ours[1])) {
    return bad(fmt::format("agent ids {}..{} lie in the ids of the sandboxes {}..{}", ours[1].first,
                           ours[1].first + slots - 1, ours[0].first,
                           ours[0].first + ours[0].count - 1));
  }
  for (const Source& source : kSources) DSEC_TRY_VOID(CheckFile(root, source, ours, 2));
  return Ok();
}

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#include "base/id.h"

#include <algorithm>
#include <array>

#include "base/rng.h"

namespace dsec {
namespace {

constexpr std::string_view kCrockford = "0123456789abcdefghjkmnpqrstvwxyz";
constexpr size_t kUlidLength = 26;

bool IsNodeText(std::string_view text) {
  return !text.empty() && text.size() <= 32 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
  });
}

Error Invalid(std::string_view field, std::string_view rule) {
  return Error(Code::kInvalidArgument, "request.invalid", fmt::format("{}: {}", field, rule))
      .WithField(std::string(field));
}

}  // namespace

std::string NewUlid(const Clock& clock) {
  std::array<uint8_t, 10> random;
  SecureRandom(random);
  const auto millis = static_cast<uint64_t>(UnixMillis(clock.Wall()));
  std::string text(kUlidLength, '0');
  for (size_t i = 0; i < 10; ++i) text[i] = kCrockford[(millis >> (45 - 5 * i)) & 31];
  uint64_t high = 0;
  uint64_t low = 0;
  for (size_t i = 0; i < 5; ++i) high = high << 8 | random[i];
  for (size_t i = 5; i < 10; ++i) low = low << 8 | random[i];
  for (size_t i = 0; i < 8; ++i) {
    text[10 + i] = kCrockford[(high >> (35 - 5 * i)) & 31];
    text[18 + i] = kCrockford[(low >> (35 - 5 * i)) & 31];
  }
  return text;
}

SandboxId NewSandboxId(const NodeId& node, const Clock& clock) {
  return SandboxId(fmt::format("sb-{}-{}", node.str(), NewUlid(clock)));
}

Result<SandboxId> ParseSandboxId(std::string_view text) {
  const size_t dash = text.size() >= kUlidLength + 1 ? text.size() - kUlidLength - 1 : 0;
  if (!text.starts_with("sb-") || dash < 4 || text[dash] != '-' ||
      !IsNodeText(text.substr(3, dash - 3)) ||
      text.substr(dash + 1).find_first_not_of(kCrockford) != std::string_view::npos) {
    return Error(Code::kNotFound, "sandbox.not_found",
                 "no such sandbox (an id looks like sb-<node>-<26 characters>)");
  }
  return SandboxId(std::string(text));
}

Result<NodeId> NodeOf(const SandboxId& id) {
  DSEC_TRY(auto parsed, ParseSandboxId(id.str()));
  return NodeId(parsed.str().substr(3, parsed.str().size() - 3 - kUlidLength - 1));
}

Result<NodeId> ParseNodeId(std::string_view text) {
  if (!IsNodeText(text)) return Invalid("node_id", "must be 1 to 32 of [a-z0-9]");
  return NodeId(std::string(text));
}

Result<OpId> ParseOpId(std::string_view text, std::string_view field) {
  const bool good =
      !text.empty() && text.size() <= 128 && std::all_of(text.begin(), text.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '_' || c == '.' || c == ':' || c == '-';
      });
  if (!good) return Invalid(field, "must be 1 to 128 of [A-Za-z0-9_.:-]");
  return OpId(std::string(text));
}

Result<LayerId> ParseLayerId(std::string_view text) {
  constexpr std::string_view kPrefix = "sha256:";
  if (!text.starts_with(kPrefix) || text.size() != kPrefix.size() + 64 ||
      text.substr(kPrefix.size()).find_first_not_of("0123456789abcdef") != std::string_view::npos) {
    return Invalid("layer", "a layer id is sha256: and 64 lower-case hex digits");
  }
  return LayerId(std::string(text));
}

}  // namespace dsec

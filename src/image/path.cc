// SPDX-License-Identifier: Apache-2.0
#include "image/path.h"

#include "image/layer.h"

namespace dsec::image {
namespace {

constexpr size_t kMaxComponent = 255;  // NAME_MAX, linux/limits.h
constexpr size_t kMaxPath = 3800;
constexpr std::string_view kPrefix = ".wh.";
constexpr std::string_view kAufsPrefix = ".wh..wh.";
constexpr std::string_view kOpaque = ".wh..wh..opq";

Error BadPath(std::string_view path, std::string_view rule) {
  return Error(Code::kInvalidArgument, "layer.bad_path",
               fmt::format("member \"{}\": {}", Printable(path), rule));
}

Error BadWhiteout(std::string_view path, std::string_view rule) {
  return Error(Code::kInvalidArgument, "layer.bad_whiteout",
               fmt::format("member \"{}\": {}", Printable(path), rule));
}

}  // namespace

Result<std::string> CleanPath(std::string_view raw, uint64_t max_depth) {
  if (raw.find('\0') != std::string_view::npos) return BadPath(raw, "holds a NUL byte");
  std::string clean;
  uint64_t depth = 0;
  for (size_t start = 0; start <= raw.size();) {
    const size_t slash = std::min(raw.find('/', start), raw.size());
    const std::string_view part = raw.substr(start, slash - start);
    start = slash + 1;
    if (part.empty() || part == ".") continue;
    if (part == "..") return BadPath(raw, "\"..\" leads out of its folder");
    if (part.size() > kMaxComponent) return BadPath(raw, "a component is longer than 255 bytes");
    if (++depth > max_depth) return BadPath(raw, fmt::format("more than {} deep", max_depth));
    if (!clean.empty()) clean += '/';
    clean += part;
    if (clean.size() > kMaxPath) return BadPath(raw, fmt::format("longer than {} bytes", kMaxPath));
  }
  return clean;
}

SplitPath Split(std::string_view clean) {
  const size_t slash = clean.rfind('/');
  if (slash == std::string_view::npos) return {{}, clean};
  return {clean.substr(0, slash), clean.substr(slash + 1)};
}

Result<Whiteout> ClassifyWhiteout(std::string_view clean) {
  for (size_t start = 0; start < clean.size();) {
    const size_t slash = std::min(clean.find('/', start), clean.size());
    const std::string_view part = clean.substr(start, slash - start);
    const bool last = slash == clean.size();
    start = slash + 1;
    if (!part.starts_with(kPrefix)) continue;
    if (last && part == kOpaque) return Whiteout{Whiteout::Kind::kOpaque, {}};
    if (part.starts_with(kAufsPrefix)) return Whiteout{Whiteout::Kind::kIgnored, {}};
    if (!last) return BadWhiteout(clean, "lies below a whiteout");
    const std::string_view target = part.substr(kPrefix.size());
    if (target.empty() || target == "." || target == "..") {
      return BadWhiteout(clean, "the whiteout names nothing");
    }
    return Whiteout{Whiteout::Kind::kRemove, target};
  }
  return Whiteout();
}

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#include "image/pack_rules.h"

#include <fnmatch.h>
#include <string.h>

#include <algorithm>

#include "image/layer.h"
#include "image/path.h"

namespace dsec::image {
namespace {

constexpr size_t kMaxPatterns = 256;
constexpr size_t kMaxPatternBytes = 1024;
// fnmatch tries the ways in which stars can share a name; with this many it stays quick.
constexpr ptrdiff_t kMaxWildcards = 16;
constexpr size_t kMaxContents = 32;
constexpr size_t kMinContentBytes = 4;
constexpr size_t kMaxContentBytes = 256;

constexpr std::string_view kDefaultScrub[] = {
    // Written by each sandbox for itself.
    "/etc/hostname", "/etc/hosts", "/etc/resolv.conf",
    // Temporary files.
    "/tmp/*", "/var/tmp/*", "/run/*", "/var/run/*", "/dev/*", "/proc/*", "/sys/*",
    // Logs.
    "/var/log/*",
    // Histories.
    ".bash_history", ".ash_history", ".sh_history", ".zsh_history", ".python_history",
    ".node_repl_history", ".sqlite_history", ".psql_history", ".mysql_history", ".irb_history",
    ".lesshst", ".viminfo", ".wget-hsts",
    // Caches.
    ".cache", "/var/cache/apt/*", "/var/lib/apt/lists/*", "/var/cache/debconf/*-old",
    "/var/cache/apk/*", "/var/cache/dnf/*", "/var/cache/yum/*", "/var/cache/pacman/pkg/*",
    "_cacache", ".npm", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ccache"};

Error Canary(std::string_view path, std::string_view what, size_t index, std::string_view rule) {
  return Error(Code::kConflict, "pack.canary",
               fmt::format("\"{}\" hits {}[{}] \"{}\"", Printable(path), what, index,
                           Printable(rule)))
      .WithField(fmt::format("{}[{}]", what, index));
}

Result<void> CheckPatterns(const std::vector<std::string>& patterns, std::string_view field) {
  const auto bad = [&](std::string where, std::string_view rule) {
    return Error(Code::kInvalidArgument, "pack.bad_rule", fmt::format("{}: {}", where, rule))
        .WithField(where);
  };
  if (patterns.size() > kMaxPatterns) {
    return bad(std::string(field), fmt::format("more than {} patterns", kMaxPatterns));
  }
  for (size_t i = 0; i < patterns.size(); ++i) {
    const std::string& pattern = patterns[i];
    const std::string where = fmt::format("{}[{}]", field, i);
    if (pattern.empty() || pattern == "/" || pattern.size() > kMaxPatternBytes) {
      return bad(where, fmt::format("is 1 to {} bytes and not /", kMaxPatternBytes));
    }
    if (pattern.find('\0') != std::string::npos) return bad(where, "holds a NUL");
    if (!pattern.starts_with('/') && pattern.find('/') != std::string::npos) {
      return bad(where, "a pattern with a / starts with one");
    }
    const auto wildcards =
        std::ranges::count_if(pattern, [](char c) { return c == '*' || c == '?' || c == '['; });
    if (wildcards > kMaxWildcards) {
      return bad(where, fmt::format("has more than {} wildcards", kMaxWildcards));
    }
  }
  return Ok();
}

}  // namespace

Result<void> PackRules::Check() const {
  DSEC_TRY_VOID(CheckPatterns(scrub, "scrub"));
  DSEC_TRY_VOID(CheckPatterns(canary_paths, "canary_paths"));
  const auto bad = [&](std::string where, std::string_view rule) {
    return Error(Code::kInvalidArgument, "pack.bad_rule", fmt::format("{}: {}", where, rule))
        .WithField(where);
  };
  if (canary_contents.size() > kMaxContents) {
    return bad("canary_contents", fmt::format("more than {}", kMaxContents));
  }
  for (size_t i = 0; i < canary_contents.size(); ++i) {
    const std::string& content = canary_contents[i];
    if (content.size() < kMinContentBytes || content.size() > kMaxContentBytes ||
        content.find('\0') != std::string::npos) {
      return bad(fmt::format("canary_contents[{}]", i),
                 fmt::format("is {} to {} bytes without NUL", kMinContentBytes, kMaxContentBytes));
    }
  }
  return Ok();
}

std::span<const std::string_view> DefaultScrub() { return kDefaultScrub; }

void PatternList::Add(const std::string& pattern) {
  const bool whole = pattern.starts_with('/');
  const std::string text = whole ? pattern.substr(1) : pattern;
  const size_t literal = text.find_first_of("*?[\\");
  const size_t index = count_++;
  if (literal == std::string::npos) {
    (whole ? paths_ : names_).try_emplace(text, index);
  } else {
    wild_.push_back({text, literal, index, whole});
  }
}

std::optional<size_t> PatternList::Match(std::string_view path) const {
  const std::string_view name = Split(path).name;
  std::optional<size_t> first;
  const auto take = [&](size_t index) {
    if (!first || index < *first) first = index;
  };
  if (const auto found = names_.find(name); found != names_.end()) take(found->second);
  if (const auto found = paths_.find(path); found != paths_.end()) take(found->second);
  for (const Wild& wild : wild_) {
    const std::string_view text = wild.whole ? path : name;
    if (!text.starts_with(std::string_view(wild.pattern).substr(0, wild.literal))) continue;
    if (::fnmatch(wild.pattern.c_str(), std::string(text).c_str(), FNM_PATHNAME) == 0) {
      take(wild.index);
    }
  }
  return first;
}

PackFilter::PackFilter(PackRules rules) : rules_(std::move(rules)) {
  for (const std::string& pattern : rules_.scrub) scrub_.Add(pattern);
  if (rules_.default_scrub) {
    for (const std::string_view pattern : kDefaultScrub) scrub_.Add(std::string(pattern));
  }
  for (const std::string& pattern : rules_.canary_paths) canaries_.Add(pattern);
  for (const std::string& content : rules_.canary_contents) {
    longest_ = std::max(longest_, content.size());
  }
}

bool PackFilter::Scrub(std::string_view path) {
  const bool hit = scrub_.Match(path).has_value();
  scrubbed_ += hit;
  return hit;
}

Result<void> PackFilter::CheckPath(std::string_view path) const {
  const auto hit = canaries_.Match(path);
  return hit ? Result<void>(Canary(path, "canary_paths", *hit, rules_.canary_paths[*hit])) : Ok();
}

void PackFilter::BeginContent(std::string_view path) {
  path_ = path;
  tail_.clear();
}

Result<void> PackFilter::CheckContent(std::string_view bytes, bool joined) {
  if (longest_ == 0) return Ok();
  if (!joined) tail_.clear();
  // Where two pieces meet, then the piece itself.
  const size_t tail = tail_.size();
  tail_ += bytes.substr(0, longest_ - 1);
  for (const std::string_view part : {std::string_view(tail_), bytes}) {
    if (part.data() == tail_.data() && tail == 0) continue;
    for (size_t i = 0; i < rules_.canary_contents.size(); ++i) {
      const std::string& rule = rules_.canary_contents[i];
      if (::memmem(part.data(), part.size(), rule.data(), rule.size()) != nullptr) {
        return Canary(path_, "canary_contents", i, rule);
      }
    }
  }
  if (bytes.size() >= longest_ - 1) {
    tail_ = bytes.substr(bytes.size() - (longest_ - 1));
  } else if (tail_.size() > longest_ - 1) {
    tail_.erase(0, tail_.size() - (longest_ - 1));
  }
  return Ok();
}

}  // namespace dsec::image

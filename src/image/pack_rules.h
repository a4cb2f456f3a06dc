// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace dsec::image {

// A pattern of paths, as in fnmatch(3): * and ? match within one name. With a "/" at its start it
// is a whole path from the root of the layer, else the name of a file or folder anywhere. What lies
// below a folder that matches is matched too.
//
// What may get into a layer that is packed from a sandbox.
struct PackRules {
  std::vector<std::string> scrub = {};         // patterns of what is left out
  bool default_scrub = true;                   // DefaultScrub() too
  std::vector<std::string> canary_paths = {};  // patterns of what must not be in it
  std::vector<std::string> canary_contents =
      {};  // bytes that no file, link or xattr of it may hold

  // kInvalidArgument "pack.bad_rule" with the field: more than 256 patterns or 32 contents,
  // patterns that are empty, hold a NUL or more than 16 of * ? [, or are over 1,024 bytes long,
  // contents of fewer than 4 or more than 256 bytes or with a NUL.
  Result<void> Check() const;
};

// What is left out unless a request says otherwise: what a sandbox writes for itself, temporary
// files, logs, histories and caches (format_spec.md has the list).
std::span<const std::string_view> DefaultScrub();

// A list of patterns, made to be asked often.
class PatternList {
 public:
  void Add(const std::string& pattern);
  // The first pattern that matches a clean path, by its place in the list.
  std::optional<size_t> Match(std::string_view path) const;

 private:
  struct Wild {
    std::string pattern;
    size_t literal;  // bytes before its first wildcard
    size_t index;
    bool whole;  // of a whole path
  };
  using Literals = std::map<std::string, size_t, std::less<>>;
  size_t count_ = 0;
  Literals names_;
  Literals paths_;
  std::vector<Wild> wild_;
};

// The rules at work. Single-threaded.
class PackFilter {
 public:
  explicit PackFilter(PackRules rules);

  // Whether a member is left out; counts those. Of a clean path ("a/b") whose parents have been
  // asked about before, and were no match.
  bool Scrub(std::string_view path);
  uint64_t scrubbed() const { return scrubbed_; }
  // kConflict "pack.canary" names the path and the rule.
  Result<void> CheckPath(std::string_view path) const;

  // The content of one file, in ascending pieces; `joined`: it begins where the last one ended.
  // The same error.
  void BeginContent(std::string_view path);
  Result<void> CheckContent(std::string_view bytes, bool joined);

 private:
  PackRules rules_;
  PatternList scrub_;
  PatternList canaries_;
  size_t longest_ = 0;
  uint64_t scrubbed_ = 0;
  std::string path_;
  std::string tail_;  // the last bytes of the piece before, one fewer than the longest content
};

}  // namespace dsec::image

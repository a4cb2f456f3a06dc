// SPDX-License-Identifier: Apache-2.0
#include "iam/project.h"

#include <algorithm>

#include "base/utf8.h"

namespace dsec::iam {
namespace {

constexpr size_t kMaxSegment = 40;
constexpr size_t kMaxName = 63;
constexpr size_t kMaxDescription = 256;

bool Alnum(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

bool GoodSegment(std::string_view text) {
  return !text.empty() && text.size() <= kMaxSegment && Alnum(text[0]) &&
         std::all_of(text.begin(), text.end(),
                     [](char c) { return Alnum(c) || c == '_' || c == '-'; });
}

bool GoodPath(std::string_view text) {
  if (text.size() > ProjectPath::kMaxBytes) return false;
  if (text != "root" && !text.starts_with("root/")) return false;
  while (true) {
    const size_t slash = text.find('/');
    if (!GoodSegment(text.substr(0, slash))) return false;
    if (slash == std::string_view::npos) return true;
    text.remove_prefix(slash + 1);
  }
}

// What was given, fit for a message.
std::string Shown(std::string_view text) {
  std::string shown(text.substr(0, 80));
  for (char& c : shown) {
    if (c < ' ' || c > '~') c = '?';
  }
  return shown;
}

}  // namespace

Result<ProjectPath> ProjectPath::Parse(std::string_view text, const std::string& field) {
  if (!GoodPath(text)) {
    return Error(Code::kInvalidArgument, "iam.project_name",
                 fmt::format("{}: \"{}\" is not a project: root, or root/NAME/... with names of "
                             "1..{} of a-z 0-9 _ - and at most {} bytes in all",
                             field, Shown(text), kMaxSegment, kMaxBytes))
        .WithField(field);
  }
  return ProjectPath(std::string(text));
}

Result<ProjectPath> ProjectPath::FromRecord(std::string_view text) {
  if (text.empty()) return ProjectPath();
  return Parse(text, "project");
}

ProjectPath ProjectPath::Parent() const { return ProjectPath(text_.substr(0, text_.rfind('/'))); }

std::vector<ProjectPath> ProjectPath::Chain() const {
  std::vector<ProjectPath> chain = {*this};
  while (!chain.back().root()) chain.push_back(chain.back().Parent());
  return chain;
}

bool ProjectPath::Within(const ProjectPath& other) const {
  return text_.starts_with(other.text_) &&
         (text_.size() == other.text_.size() || text_[other.text_.size()] == '/');
}

std::string ProjectPath::Key() const {
  std::string key = text_;
  std::replace(key.begin(), key.end(), '/', '!');
  return key;
}

Result<ProjectPath> ProjectPath::FromKey(std::string_view key) {
  std::string text(key);
  std::replace(text.begin(), text.end(), '!', '/');
  return Parse(text, "key");
}

Result<void> CheckName(std::string_view text, const std::string& field) {
  const bool good = !text.empty() && text.size() <= kMaxName && Alnum(text[0]) &&
                    std::all_of(text.begin(), text.end(), [](char c) {
                      return Alnum(c) || c == '_' || c == '-' || c == '.';
                    });
  if (good) return Ok();
  return Error(Code::kInvalidArgument, "iam.name",
               fmt::format(
                   "{}: \"{}\" is not a name: 1..{} of a-z 0-9 . _ -, the first a letter or digit",
                   field, Shown(text), kMaxName))
      .WithField(field);
}

Result<void> CheckDescription(std::string_view text, const std::string& field) {
  const bool control =
      std::any_of(text.begin(), text.end(), [](char c) { return (c >= 0 && c < ' ') || c == 127; });
  if (text.size() <= kMaxDescription && !control && IsUtf8(text)) return Ok();
  return Error(Code::kInvalidArgument, "iam.text",
               fmt::format("{}: must be one line of UTF-8 of at most {} bytes, it has {}", field,
                           kMaxDescription, text.size()))
      .WithField(field);
}

}  // namespace dsec::iam

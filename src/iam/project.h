// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace dsec::iam {

// Where a project stands in the tree: "root", "root/team", "root/team/job". At most 240 bytes, each
// name [a-z0-9][a-z0-9_-]{0,39}. A value, always well formed.
class ProjectPath {
 public:
  static constexpr size_t kMaxBytes = 240;

  ProjectPath() : text_("root") {}
  // kInvalidArgument iam.project_name, which names `field` and the rule.
  static Result<ProjectPath> Parse(std::string_view text, const std::string& field);
  // As sandbox records hold it: empty for the root, as in records from before there were projects.
  static Result<ProjectPath> FromRecord(std::string_view text);
  std::string ForRecord() const { return root() ? std::string() : text_; }

  const std::string& str() const { return text_; }
  bool root() const { return text_.size() == 4; }
  // Must not be the root.
  ProjectPath Parent() const;
  // From itself up to the root.
  std::vector<ProjectPath> Chain() const;
  // It is `other` or lies below it.
  bool Within(const ProjectPath& other) const;
  // Of a key in the store: '!' for '/', so that what lies below a project sorts right behind it.
  std::string Key() const;
  static Result<ProjectPath> FromKey(std::string_view key);

  auto operator<=>(const ProjectPath&) const = default;

 private:
  explicit ProjectPath(std::string text) : text_(std::move(text)) {}
  std::string text_;
};

// A name of a principal or role: [a-z0-9][a-z0-9._-]{0,62}. kInvalidArgument iam.name.
Result<void> CheckName(std::string_view text, const std::string& field);
// Free text: UTF-8 without control characters, at most 256 bytes. kInvalidArgument iam.text.
Result<void> CheckDescription(std::string_view text, const std::string& field);

}  // namespace dsec::iam

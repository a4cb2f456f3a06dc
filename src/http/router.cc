// SPDX-License-Identifier: Apache-2.0
#include "http/router.h"

#include <algorithm>

#include "base/check.h"
#include "http/target.h"

namespace dsec::http {

struct Router::Node {
  std::vector<std::pair<std::string, std::unique_ptr<Node>>> literals;
  std::unique_ptr<Node> any;
  std::string any_name;
  std::vector<std::pair<std::string, size_t>> methods;

  Node* Literal(std::string_view segment) const {
    for (const auto& [text, node] : literals) {
      if (text == segment) return node.get();
    }
    return nullptr;
  }
};

namespace {

// Takes the first segment off a path that begins with '/'.
std::string_view NextSegment(std::string_view& path) {
  path.remove_prefix(1);
  const std::string_view segment = path.substr(0, path.find('/'));
  path.remove_prefix(segment.size());
  return segment;
}

std::string Join(const std::vector<std::pair<std::string, size_t>>& methods) {
  std::string text;
  for (const auto& [method, route] : methods) text += (text.empty() ? "" : ", ") + method;
  return text;
}

}  // namespace

Router::Router() : root_(std::make_unique<Node>()) {}
Router::~Router() = default;

void Router::Add(std::string_view method, std::string_view pattern, size_t route) {
  DSEC_CHECK(pattern.starts_with('/'));
  Node* node = root_.get();
  while (!pattern.empty()) {
    const std::string_view segment = NextSegment(pattern);
    if (segment.starts_with('{')) {
      DSEC_CHECK(segment.ends_with('}'));
      if (node->any == nullptr) {
        node->any = std::make_unique<Node>();
        node->any_name = segment;
      }
      DSEC_CHECK(node->any_name == segment);
      node = node->any.get();
    } else if (Node* next = node->Literal(segment); next != nullptr) {
      node = next;
    } else {
      node = node->literals.emplace_back(segment, std::make_unique<Node>()).second.get();
    }
  }
  const bool fresh = std::none_of(node->methods.begin(), node->methods.end(),
                                  [&](const auto& entry) { return entry.first == method; });
  DSEC_CHECK(fresh);
  node->methods.emplace_back(method, route);
}

const Router::Node* Router::Walk(std::string_view path, std::vector<std::string>& params) const {
  if (!path.starts_with('/')) return nullptr;
  const Node* node = root_.get();
  while (!path.empty()) {
    const std::string_view raw = NextSegment(path);
    auto decoded = PercentDecode(raw);
    if (!decoded.ok()) return nullptr;
    if (const Node* next = node->Literal(*decoded); next != nullptr) {
      node = next;
    } else if (node->any != nullptr && !decoded->empty()) {
      node = node->any.get();
      params.push_back(std::move(decoded).value());
    } else {
      return nullptr;
    }
  }
  return node->methods.empty() ? nullptr : node;
}

Result<RouteMatch> Router::Find(std::string_view method, std::string_view path) const {
  RouteMatch match;
  const Node* node = Walk(path, match.params);
  if (node == nullptr) return Error(Code::kNotFound, "request.path", "there is no such path");
  for (const auto& [name, route] : node->methods) {
    if (name == method) {
      match.route = route;
      return match;
    }
  }
  return Error(Code::kInvalidArgument, "request.method",
               fmt::format("this path takes {}", Join(node->methods)));
}

std::string Router::Allowed(std::string_view path) const {
  std::vector<std::string> params;
  const Node* node = Walk(path, params);
  return node == nullptr ? "" : Join(node->methods);
}

}  // namespace dsec::http

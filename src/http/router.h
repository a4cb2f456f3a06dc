// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace dsec::http {

// What a path matched. `params` are the decoded segments of the pattern's {names}, in order.
struct RouteMatch {
  size_t route = 0;
  std::vector<std::string> params;
};

// Maps method and path to the number of a route. Patterns are absolute, their segments literals or
// {name}; a literal wins over a name. Immutable after set-up, then any thread.
class Router {
 public:
  Router();
  ~Router();

  // Invariants: no pattern twice for one method, no two names for one place.
  void Add(std::string_view method, std::string_view pattern, size_t route);

  // `path` is still encoded: it is cut at '/' first, so an encoded slash belongs to its segment.
  // kNotFound "request.path"; kInvalidArgument "request.method" (405), whose message names the
  // methods that the path has.
  Result<RouteMatch> Find(std::string_view method, std::string_view path) const;
  // For the Allow header: "GET, POST"; empty when there is no such path.
  std::string Allowed(std::string_view path) const;

 private:
  struct Node;
  const Node* Walk(std::string_view path, std::vector<std::string>& params) const;

  const std::unique_ptr<Node> root_;
};

}  // namespace dsec::http

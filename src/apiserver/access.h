// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "iam/rights.h"

namespace dsec::apiserver {

// Where a route wants its right.
enum class Scope {
  kOpen,     // no key
  kAny,      // any valid key; a right, if there is one, in some project
  kRoot,     // at the root: what belongs to the node or to all
  kSandbox,  // in the project of the sandbox that the path names
  kProject,  // in a project that path, body or query names: the handler asks (Call::Project)
};

enum class Audit {
  kNone,    // reads, and the parts of a command that is under way
  kAfter,   // what was done
  kAround,  // changes of IAM: before and after
};

struct Access {
  std::string_view route;  // "METHOD /pattern" as in the table of routes
  Scope scope;
  std::optional<iam::Right> right;
  Audit audit = Audit::kNone;
};

// One row a route. A route without a row is the root principal's alone; a test compares both
// tables.
std::span<const Access> AccessTable();
// The row of a route, or that of one without.
const Access& AccessOf(std::string_view method, std::string_view pattern);

}  // namespace dsec::apiserver

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"
#include "dsec/v1/fncall.pb.h"

namespace dsec::fn {

inline constexpr size_t kMaxTypeBytes = 1 << 20;

// A task type as JSON; docs/fn_types.md is the reference. Strict: unknown and repeated keys, wrong
// types and numbers that are no integers are kInvalidArgument request.{malformed,unknown_field,
// wrong_type,duplicate} with the field. What the values mean is checked by CheckTaskType (rules.h).
Result<v1::FnTaskType> ParseTaskType(std::string_view json);
// One object, indented, with a newline at its end; fields at their default are left out.
// ParseTaskType reads it back to the same.
std::string FormatTaskType(const v1::FnTaskType& type);

}  // namespace dsec::fn

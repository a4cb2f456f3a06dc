// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <google/protobuf/repeated_ptr_field.h>

#include <functional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "dsec/v1/fncall.pb.h"

// What task types and calls may say. All errors are kInvalidArgument "fn.invalid" with the field,
// the value and the rule unless said otherwise.
namespace dsec::fn {

inline constexpr std::string_view kSourceWord = "{source}";
inline constexpr std::string_view kArgsWord = "{args}";

// Bounds of one call; they protect the node, the limits of the kernel are not reached by them.
inline constexpr size_t kMaxFiles = 4096;
inline constexpr size_t kMaxFetch = 1024;
inline constexpr size_t kMaxArgs = 4096;
inline constexpr size_t kMaxArgBytes = 1 << 20;     // of all together
inline constexpr size_t kMaxInputBytes = 64 << 20;  // code, files and stdin together
inline constexpr size_t kMaxGpus = 64;

// FnBackend::Normalize: fills and checks limits; the second argument is the prefix of the field.
using NormalizeLimits = std::function<Result<v1::FnLimits>(v1::FnLimits, std::string_view)>;

template <typename... Args>
Error Invalid(std::string_view field, fmt::format_string<Args...> format, Args&&... args) {
  return Error(Code::kInvalidArgument, "fn.invalid",
               fmt::format("{}: {}", field, fmt::format(format, std::forward<Args>(args)...)))
      .WithField(std::string(field));
}

// [a-z0-9][a-z0-9_+.-]{0,62}
Result<void> CheckTypeName(std::string_view name, std::string_view field);
// Of a file below the working folder: relative, no empty, "." or ".." component, no NUL, at most
// kMaxPathBytes, each component at most 255 bytes.
Result<void> CheckRelativePath(std::string_view path, std::string_view field);

// Every rule that a type must meet on its own; limits against the node's policy by `normalize`.
Result<void> CheckTaskType(const v1::FnTaskType& type, const NormalizeLimits& normalize);
// A call against its type; limits aside.
Result<void> CheckCall(const v1::FnCall& call, const v1::FnTaskType& type);

// The call's limits with those of the type in place of 0.
v1::FnLimits MergeLimits(const v1::FnLimits& call, const v1::FnLimits& type);

}  // namespace dsec::fn

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <concepts>
#include <tl/expected.hpp>
#include <utility>

#include "base/error.h"

namespace dsec {

// A value or an Error. The only way to report failure across a module; exceptions do not cross one.
template <typename T>
class [[nodiscard]] Result {
 public:
  using value_type = T;

  Result(Error error)
      : value_(tl::unexpect, std::move(error)) {}  // NOLINT(google-explicit-constructor)
  template <typename U = T>
    requires(std::constructible_from<T, U &&> && !std::same_as<std::remove_cvref_t<U>, Error> &&
             !std::same_as<std::remove_cvref_t<U>, Result>)
  Result(U&& value) : value_(std::forward<U>(value)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  explicit operator bool() const { return ok(); }

  // Require ok().
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

  // Require !ok().
  Error& error() & { return value_.error(); }
  const Error& error() const& { return value_.error(); }
  Error&& error() && { return std::move(value_).error(); }

  template <typename... Args>
  Result&& Context(fmt::format_string<Args...> format, Args&&... args) && {
    if (!ok()) std::move(value_.error()).Context(format, std::forward<Args>(args)...);
    return std::move(*this);
  }

 private:
  tl::expected<T, Error> value_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  using value_type = void;

  Result() = default;
  Result(Error error)
      : value_(tl::unexpect, std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  explicit operator bool() const { return ok(); }
  void value() const {}

  Error& error() & { return value_.error(); }
  const Error& error() const& { return value_.error(); }
  Error&& error() && { return std::move(value_).error(); }

  template <typename... Args>
  Result&& Context(fmt::format_string<Args...> format, Args&&... args) && {
    if (!ok()) std::move(value_.error()).Context(format, std::forward<Args>(args)...);
    return std::move(*this);
  }

 private:
  tl::expected<void, Error> value_;
};

inline Result<void> Ok() { return {}; }

}  // namespace dsec

#define DSEC_CONCAT_INNER(a, b) a##b
#define DSEC_CONCAT(a, b) DSEC_CONCAT_INNER(a, b)

// DSEC_TRY(auto value, Function(...)): declares or assigns `value`, or returns the error from this
// function.
#define DSEC_TRY(declaration, ...) \
  DSEC_TRY_IMPL(DSEC_CONCAT(dsec_try_, __LINE__), return, declaration, __VA_ARGS__)
// DSEC_TRY_VOID(Function(...)): the same for Result<void> or an unneeded value.
#define DSEC_TRY_VOID(...) DSEC_TRY_VOID_IMPL(DSEC_CONCAT(dsec_try_, __LINE__), return, __VA_ARGS__)
// The same inside a coroutine; the operand of co_await must be a plain call or a named object.
#define DSEC_CO_TRY(declaration, ...) \
  DSEC_TRY_IMPL(DSEC_CONCAT(dsec_try_, __LINE__), co_return, declaration, __VA_ARGS__)
#define DSEC_CO_TRY_VOID(...) \
  DSEC_TRY_VOID_IMPL(DSEC_CONCAT(dsec_try_, __LINE__), co_return, __VA_ARGS__)

#define DSEC_TRY_IMPL(temporary, leave, declaration, ...)  \
  auto temporary = __VA_ARGS__;                            \
  if (!temporary.ok()) leave std::move(temporary).error(); \
  declaration = std::move(temporary).value()
#define DSEC_TRY_VOID_IMPL(temporary, leave, ...) \
  if (auto temporary = __VA_ARGS__; !temporary.ok()) leave std::move(temporary).error()

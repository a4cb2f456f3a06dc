// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/code.h"

namespace dsec {

// One failure: canonical code, static dotted reason (metrics and SDK classes key on it), message
// for people, optional field of the request that is at fault, errno of the failed call (0 if none)
// and what was being attempted. Copyable, one pointer wide. Not thread-safe while Context() is
// being added.
class Error {
 public:
  // `reason` must have static storage (a literal such as "layer.missing").
  Error(Code code, std::string_view reason, std::string message);
  Error(const Error& other);
  Error& operator=(const Error& other);
  Error(Error&&) noexcept = default;
  Error& operator=(Error&&) noexcept = default;
  ~Error() = default;

  // From errno: maps the common values to codes (ENOENT -> kNotFound, ENOSPC/EMFILE/EAGAIN ->
  // kResourceExhausted, ...).
  static Error FromErrno(int sys_errno, std::string_view reason, std::string message);

  Code code() const { return rep_->code; }
  std::string_view reason() const { return rep_->reason; }
  const std::string& message() const { return rep_->message; }
  const std::string& field() const { return rep_->field; }
  int sys_errno() const { return rep_->sys_errno; }
  const std::vector<std::string>& frames() const { return rep_->frames; }

  // Names what was attempted, innermost first.
  template <typename... Args>
  Error&& Context(fmt::format_string<Args...> format, Args&&... args) && {
    rep_->frames.push_back(fmt::format(format, std::forward<Args>(args)...));
    return std::move(*this);
  }
  Error&& WithField(std::string field) && {
    rep_->field = std::move(field);
    return std::move(*this);
  }
  Error&& WithErrno(int sys_errno) && {
    rep_->sys_errno = sys_errno;
    return std::move(*this);
  }

  // One line for logs: "NOT_FOUND layer.missing: message (context; context) errno=2".
  std::string ToString() const;

 private:
  struct Rep {
    Code code;
    std::string_view reason;
    std::string message;
    std::string field;
    int sys_errno = 0;
    std::vector<std::string> frames;
  };
  std::unique_ptr<Rep> rep_;
};

}  // namespace dsec

// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

#include <cerrno>
#include <cstring>

namespace dsec {

std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case Code::kUnauthenticated:
      return "UNAUTHENTICATED";
    case Code::kPermissionDenied:
      return "PERMISSION_DENIED";
    case Code::kNotFound:
      return "NOT_FOUND";
    case Code::kAlreadyExists:
      return "ALREADY_EXISTS";
    case Code::kConflict:
      return "CONFLICT";
    case Code::kGone:
      return "GONE";
    case Code::kPayloadTooLarge:
      return "PAYLOAD_TOO_LARGE";
    case Code::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case Code::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case Code::kCancelled:
      return "CANCELLED";
    case Code::kInternal:
      return "INTERNAL";
    case Code::kUnavailable:
      return "UNAVAILABLE";
    case Code::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
  }
  return "INTERNAL";
}

int HttpStatus(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return 400;
    case Code::kUnauthenticated:
      return 401;
    case Code::kPermissionDenied:
      return 403;
    case Code::kNotFound:
      return 404;
    case Code::kAlreadyExists:
      return 409;
    case Code::kConflict:
      return 409;
    case Code::kGone:
      return 410;
    case Code::kPayloadTooLarge:
      return 413;
    case Code::kFailedPrecondition:
      return 412;
    case Code::kResourceExhausted:
      return 429;
    case Code::kCancelled:
      return 499;
    case Code::kInternal:
      return 500;
    case Code::kUnavailable:
      return 503;
    case Code::kDeadlineExceeded:
      return 504;
  }
  return 500;
}

bool Retriable(Code code) {
  return code == Code::kResourceExhausted || code == Code::kUnavailable ||
         code == Code::kDeadlineExceeded;
}

Error::Error(Code code, std::string_view reason, std::string message)
    : rep_(std::make_unique<Rep>()) {
  rep_->code = code;
  rep_->reason = reason;
  rep_->message = std::move(message);
}

Error::Error(const Error& other) : rep_(std::make_unique<Rep>(*other.rep_)) {}

Error& Error::operator=(const Error& other) {
  if (this != &other) rep_ = std::make_unique<Rep>(*other.rep_);
  return *this;
}

Error Error::FromErrno(int sys_errno, std::string_view reason, std::string message) {
  Code code = Code::kInternal;
  switch (sys_errno) {
    case ENOENT:
    case ESRCH:
      code = Code::kNotFound;
      break;
    case EEXIST:
      code = Code::kAlreadyExists;
      break;
    case EACCES:
    case EPERM:
    case EROFS:
      code = Code::kPermissionDenied;
      break;
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case EAGAIN:
    case EBUSY:
      code = Code::kResourceExhausted;
      break;
    case EINVAL:
    case ENAMETOOLONG:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case E2BIG:
      code = Code::kInvalidArgument;
      break;
    case ENOSYS:
    case EOPNOTSUPP:
    case ENODEV:
      code = Code::kFailedPrecondition;
      break;
    case ETIMEDOUT:
      code = Code::kDeadlineExceeded;
      break;
    case ECONNREFUSED:
    case ECONNRESET:
    case EPIPE:
    case ENOTCONN:
    case EIO:
      code = Code::kUnavailable;
      break;
    default:
      break;
  }
  message += ": ";
  message += strerrordesc_np(sys_errno) != nullptr ? strerrordesc_np(sys_errno) : "unknown errno";
  return Error(code, reason, std::move(message)).WithErrno(sys_errno);
}

std::string Error::ToString() const {
  std::string text = fmt::format("{} {}: {}", CodeName(code()), reason(), message());
  if (!frames().empty()) text += fmt::format(" ({})", fmt::join(frames(), "; "));
  if (!field().empty()) text += fmt::format(" field={}", field());
  if (sys_errno() != 0) text += fmt::format(" errno={}", sys_errno());
  return text;
}

}  // namespace dsec

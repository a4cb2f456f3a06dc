// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace dsec {

// The canonical error codes. Each maps to exactly one HTTP status and one retry rule, so that
// callers may branch on the code alone; the dotted reason in Error names the cause.
enum class Code {
  kInvalidArgument,     // 400: the request can never succeed as written
  kUnauthenticated,     // 401
  kPermissionDenied,    // 403
  kNotFound,            // 404: never existed, or not yours
  kAlreadyExists,       // 409: same key, other content
  kConflict,            // 409: not legal in the present state
  kGone,                // 410: existed, has ended; the reason says how
  kPayloadTooLarge,     // 413
  kFailedPrecondition,  // 412: needs a mechanism that this host lacks
  kResourceExhausted,   // 429: no capacity now; retry later or elsewhere
  kCancelled,           // 499
  kInternal,            // 500: our fault
  kUnavailable,         // 503: infrastructure is away; retry is safe
  kDeadlineExceeded,    // 504
};

std::string_view CodeName(Code code);
int HttpStatus(Code code);
// True when the same request may be sent again and may then succeed without any change.
bool Retriable(Code code);

}  // namespace dsec

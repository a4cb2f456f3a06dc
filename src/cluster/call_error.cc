// SPDX-License-Identifier: Apache-2.0
#include "cluster/call_error.h"

#include <array>
#include <mutex>
#include <set>
#include <string>

#include "base/utf8.h"

namespace dsec::cluster {
namespace {

constexpr size_t kMaxText = 4096;
constexpr size_t kMaxReason = 96;
constexpr size_t kMaxReasons = 2048;

constexpr std::array kCodes = {Code::kInvalidArgument,
                               Code::kUnauthenticated,
                               Code::kPermissionDenied,
                               Code::kNotFound,
                               Code::kAlreadyExists,
                               Code::kConflict,
                               Code::kGone,
                               Code::kPayloadTooLarge,
                               Code::kFailedPrecondition,
                               Code::kResourceExhausted,
                               Code::kCancelled,
                               Code::kInternal,
                               Code::kUnavailable,
                               Code::kDeadlineExceeded};

// Empty when it is none of ours or there are too many.
std::string_view Kept(const std::string& reason) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> kept;
  if (reason.empty() || reason.size() > kMaxReason ||
      reason.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_.") != std::string::npos) {
    return {};
  }
  const std::lock_guard lock(mutex);
  if (const auto found = kept.find(reason); found != kept.end()) return *found;
  if (kept.size() >= kMaxReasons) return {};
  return *kept.insert(reason).first;
}

// What is not UTF-8 becomes '?'.
std::string Text(std::string_view bytes) {
  std::string out;
  bytes = bytes.substr(0, kMaxText);
  while (!bytes.empty()) {
    const size_t length = Utf8SequenceLength(bytes);
    if (length == 0) {
      out += '?';
      bytes.remove_prefix(1);
    } else {
      out += bytes.substr(0, length);
      bytes.remove_prefix(length);
    }
  }
  return out;
}

}  // namespace

v1::CallError ToWire(const Error& error) {
  v1::CallError out;
  out.set_code(std::string(CodeName(error.code())));
  out.set_reason(std::string(error.reason()));
  std::string message = error.message();
  if (!error.frames().empty()) {
    message += fmt::format(" ({})", fmt::join(error.frames(), "; "));
  }
  out.set_message(Text(message));
  out.set_field(Text(error.field()));
  out.set_sys_errno(error.sys_errno());
  return out;
}

Error FromWire(const v1::CallError& error) {
  Code code = Code::kInternal;
  for (const Code candidate : kCodes) {
    if (CodeName(candidate) == error.code()) code = candidate;
  }
  std::string message = Text(error.message());
  std::string_view reason = Kept(error.reason());
  if (reason.empty()) {
    message = fmt::format("{}: {}", Text(error.reason()).substr(0, kMaxReason), message);
    reason = "edge.remote_error";
  }
  return Error(code, reason, std::move(message))
      .WithField(Text(error.field()))
      .WithErrno(error.sys_errno());
}

}  // namespace dsec::cluster

// SPDX-License-Identifier: Apache-2.0
#include "rpc/frame.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <set>

#include "base/check.h"
#include "dsec/v1/ttrpc.pb.h"

namespace dsec::rpc {
namespace {

constexpr std::string_view kDetailType = "dsec.v1.ErrorDetail";
constexpr size_t kMaxName = 256;
constexpr size_t kMaxMessage = 4096;
constexpr size_t kMaxReasons = 512;

uint32_t ReadBig32(const char* bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

void AppendBig32(std::string& out, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift & 255);
}

// Canonical gRPC codes (google.rpc.Code), by dsec::Code.
struct CodePair {
  Code ours;
  int theirs;
};
constexpr std::array kCodes = {CodePair{Code::kInvalidArgument, 3},
                               CodePair{Code::kUnauthenticated, 16},
                               CodePair{Code::kPermissionDenied, 7},
                               CodePair{Code::kNotFound, 5},
                               CodePair{Code::kAlreadyExists, 6},
                               CodePair{Code::kConflict, 10},
                               CodePair{Code::kGone, 9},
                               CodePair{Code::kPayloadTooLarge, 11},
                               CodePair{Code::kFailedPrecondition, 9},
                               CodePair{Code::kResourceExhausted, 8},
                               CodePair{Code::kCancelled, 1},
                               CodePair{Code::kInternal, 13},
                               CodePair{Code::kUnavailable, 14},
                               CodePair{Code::kDeadlineExceeded, 4},
                               CodePair{Code::kFailedPrecondition, 12}};

int ToStatusCode(Code code) {
  for (const CodePair& pair : kCodes) {
    if (pair.ours == code) return pair.theirs;
  }
  return 13;
}

Code FromStatusCode(int code) {
  // 9 is FAILED_PRECONDITION for every peer but us; ours sends the detail as well.
  if (code == 9) return Code::kFailedPrecondition;
  for (const CodePair& pair : kCodes) {
    if (pair.theirs == code) return pair.ours;
  }
  return Code::kInternal;
}

// Reasons have static storage in an Error. Those of peers are kept for the life of the process, a
// bounded number of them.
std::string_view Intern(const std::string& reason) {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789_.";
  if (reason.empty() || reason.size() > 64 ||
      reason.find_first_not_of(kLetters) != std::string::npos) {
    return "rpc.remote";
  }
  static std::mutex mutex;
  static std::set<std::string, std::less<>> known;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(reason); found != known.end()) return *found;
  if (known.size() >= kMaxReasons) return "rpc.remote";
  return *known.insert(reason).first;
}

}  // namespace

void AppendFrame(std::string& out, uint32_t stream, MessageType type, uint8_t flags,
                 std::string_view payload) {
  DSEC_CHECK(payload.size() <= kMaxFramePayload);
  AppendBig32(out, static_cast<uint32_t>(payload.size()));
  AppendBig32(out, stream);
  out += static_cast<char>(type);
  out += static_cast<char>(flags);
  out += payload;
}

void FrameParser::Feed(std::string_view bytes) {
  if (start_ > 0 && start_ >= buffer_.size() / 2) {
    buffer_.erase(0, start_);
    start_ = 0;
  }
  buffer_ += bytes;
}

Result<std::optional<Frame>> FrameParser::Next() {
  if (buffered() < kFrameHeaderSize) return std::optional<Frame>();
  const char* header = buffer_.data() + start_;
  const uint32_t length = ReadBig32(header);
  Frame frame;
  frame.stream = ReadBig32(header + 4);
  const auto type = static_cast<uint8_t>(header[8]);
  frame.flags = static_cast<uint8_t>(header[9]);
  if (length > max_payload_) {
    return Error(Code::kInvalidArgument, "rpc.frame",
                 fmt::format("a frame of {} bytes is over the limit of {}", length, max_payload_));
  }
  if (frame.stream == 0) return Error(Code::kInvalidArgument, "rpc.frame", "stream id 0");
  if (type < 1 || type > 3) {
    return Error(Code::kInvalidArgument, "rpc.frame", fmt::format("unknown frame type {}", type));
  }
  frame.type = static_cast<MessageType>(type);
  if (buffered() < kFrameHeaderSize + length) return std::optional<Frame>();
  frame.payload.assign(header + kFrameHeaderSize, length);
  start_ += kFrameHeaderSize + length;
  if (start_ == buffer_.size()) {
    // An idle connection keeps no buffer of the size of its largest frame.
    if (buffer_.capacity() > (size_t{64} << 10)) {
      std::string().swap(buffer_);
    } else {
      buffer_.clear();
    }
    start_ = 0;
  }
  return std::optional<Frame>(std::move(frame));
}

std::string SerializeRequest(const Request& request) {
  v1::ttrpc::Request message;
  message.set_service(request.service);
  message.set_method(request.method);
  message.set_payload(request.payload);
  message.set_timeout_nano(request.timeout_nanos);
  return message.SerializeAsString();
}

Result<Request> ParseRequest(std::string_view bytes) {
  v1::ttrpc::Request message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Error(Code::kInvalidArgument, "rpc.request", "not a request message");
  }
  if (message.service().empty() || message.service().size() > kMaxName ||
      message.method().empty() || message.method().size() > kMaxName) {
    return Error(Code::kInvalidArgument, "rpc.request",
                 "service and method must have 1 to 256 bytes");
  }
  Request request;
  request.service = std::move(*message.mutable_service());
  request.method = std::move(*message.mutable_method());
  request.payload = std::move(*message.mutable_payload());
  request.timeout_nanos = std::max<int64_t>(0, message.timeout_nano());
  return request;
}

std::string SerializeResponse(std::string_view payload) {
  v1::ttrpc::Response message;
  message.set_payload(payload.data(), payload.size());
  return message.SerializeAsString();
}

std::string SerializeError(const Error& error) {
  std::string text = error.message();
  if (!error.frames().empty()) text += fmt::format(" ({})", fmt::join(error.frames(), "; "));
  if (text.size() > kMaxMessage) text.resize(kMaxMessage);
  v1::ttrpc::ErrorDetail detail;
  detail.set_code(static_cast<int>(error.code()));
  detail.set_reason(std::string(error.reason()));
  detail.set_field(error.field());
  detail.set_sys_errno(error.sys_errno());
  v1::ttrpc::Response message;
  message.mutable_status()->set_code(ToStatusCode(error.code()));
  // proto3 strings must be UTF-8; a path in a message need not be.
  for (char& c : text) {
    if (static_cast<unsigned char>(c) >= 128) c = '?';
  }
  message.mutable_status()->set_message(text);
  auto* any = message.mutable_status()->add_details();
  any->set_type_url(std::string(kDetailType));
  any->set_value(detail.SerializeAsString());
  return message.SerializeAsString();
}

Result<std::string> ParseResponse(std::string_view bytes) {
  v1::ttrpc::Response message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Error(Code::kUnavailable, "rpc.response", "the peer's answer is not a response message");
  }
  if (!message.has_status() || message.status().code() == 0) {
    return std::move(*message.mutable_payload());
  }
  Code code = FromStatusCode(message.status().code());
  std::string_view reason = "rpc.remote";
  std::string field;
  int sys_errno = 0;
  for (const auto& any : message.status().details()) {
    v1::ttrpc::ErrorDetail detail;
    if (any.type_url() != kDetailType || !detail.ParseFromString(any.value())) continue;
    if (detail.code() >= 0 && detail.code() <= static_cast<int>(Code::kDeadlineExceeded)) {
      code = static_cast<Code>(detail.code());
    }
    reason = Intern(detail.reason());
    field = detail.field().substr(0, kMaxName);
    sys_errno = detail.sys_errno();
  }
  if (message.status().code() == 12 && reason == "rpc.remote") reason = "rpc.unimplemented";
  Error error(code, reason, message.status().message().substr(0, kMaxMessage));
  return std::move(error).WithField(std::move(field)).WithErrno(sys_errno);
}

}  // namespace dsec::rpc

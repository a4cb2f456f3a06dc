// SPDX-License-Identifier: Apache-2.0
#include "rpc/frame.h"

#include <algorithm>

#include "base/check.h"
#include "base/utf8.h"
#include "rpc/reasons.h"
#include "rpc/wire.h"

namespace dsec::rpc {
namespace {

constexpr size_t kMaxName = 256;
constexpr size_t kMaxMessage = 4096;
// A parser with little in it keeps no larger buffer than this.
constexpr size_t kIdleCapacity = size_t{64} << 10;

// Fields of ttrpc's Request, Response and KeyValue, of google.rpc.Status and google.protobuf.Any,
// and of our detail {string code = 1; string reason = 2; string field = 3; int32 sys_errno = 4}.
enum RequestField : uint32_t { kService = 1, kMethod = 2, kRequestPayload = 3, kTimeoutNano = 4 };
enum ResponseField : uint32_t { kStatus = 1, kResponsePayload = 2 };
enum StatusField : uint32_t { kStatusCode = 1, kStatusMessage = 2, kStatusDetails = 3 };
enum AnyField : uint32_t { kTypeUrl = 1, kAnyValue = 2 };
enum DetailField : uint32_t { kCode = 1, kReason = 2, kField = 3, kErrno = 4 };

constexpr std::string_view kDetailType = "type.googleapis.com/dsec.v1.ErrorDetail";

// google.rpc.Code
enum RpcCode : uint64_t {
  kRpcOk = 0,
  kRpcCancelled = 1,
  kRpcInvalidArgument = 3,
  kRpcDeadlineExceeded = 4,
  kRpcNotFound = 5,
  kRpcAlreadyExists = 6,
  kRpcPermissionDenied = 7,
  kRpcResourceExhausted = 8,
  kRpcFailedPrecondition = 9,
  kRpcAborted = 10,
  kRpcOutOfRange = 11,
  kRpcUnimplemented = 12,
  kRpcInternal = 13,
  kRpcUnavailable = 14,
  kRpcUnauthenticated = 16,
};

RpcCode ToRpcCode(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return kRpcInvalidArgument;
    case Code::kUnauthenticated:
      return kRpcUnauthenticated;
    case Code::kPermissionDenied:
      return kRpcPermissionDenied;
    case Code::kNotFound:
    case Code::kGone:
      return kRpcNotFound;
    case Code::kAlreadyExists:
      return kRpcAlreadyExists;
    case Code::kConflict:
      return kRpcAborted;
    case Code::kPayloadTooLarge:
      return kRpcOutOfRange;
    case Code::kFailedPrecondition:
      return kRpcFailedPrecondition;
    case Code::kResourceExhausted:
      return kRpcResourceExhausted;
    case Code::kCancelled:
      return kRpcCancelled;
    case Code::kInternal:
      return kRpcInternal;
    case Code::kUnavailable:
      return kRpcUnavailable;
    case Code::kDeadlineExceeded:
      return kRpcDeadlineExceeded;
  }
  return kRpcInternal;
}

Code FromRpcCode(uint64_t code) {
  switch (code) {
    case kRpcCancelled:
      return Code::kCancelled;
    case kRpcInvalidArgument:
    case kRpcOutOfRange:
      return Code::kInvalidArgument;
    case kRpcDeadlineExceeded:
      return Code::kDeadlineExceeded;
    case kRpcNotFound:
      return Code::kNotFound;
    case kRpcAlreadyExists:
      return Code::kAlreadyExists;
    case kRpcPermissionDenied:
      return Code::kPermissionDenied;
    case kRpcResourceExhausted:
      return Code::kResourceExhausted;
    case kRpcFailedPrecondition:
    case kRpcUnimplemented:
      return Code::kFailedPrecondition;
    case kRpcAborted:
      return Code::kConflict;
    case kRpcUnavailable:
      return Code::kUnavailable;
    case kRpcUnauthenticated:
      return Code::kUnauthenticated;
    default:
      return Code::kInternal;
  }
}

std::optional<Code> CodeByName(std::string_view name) {
  for (int code = 0; code <= static_cast<int>(Code::kDeadlineExceeded); ++code) {
    if (name == CodeName(static_cast<Code>(code))) return static_cast<Code>(code);
  }
  return std::nullopt;
}

// Well-formed UTF-8 of at most `limit` bytes: proto3 strings must be, a path in a message need not.
std::string CleanText(std::string_view text, size_t limit) {
  std::string out;
  while (!text.empty()) {
    const size_t length = Utf8SequenceLength(text);
    const std::string_view piece = length > 0 ? text.substr(0, length) : "\xef\xbf\xbd";
    if (out.size() + piece.size() > limit) break;
    out += piece;
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out;
}

uint32_t ReadBig32(const char* bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

void AppendBig32(std::string& out, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift & 255);
}

Error BadFrame(std::string message) {
  return Error(Code::kInvalidArgument, "rpc.frame", std::move(message));
}

Error BadRequest(std::string_view message) {
  return Error(Code::kInvalidArgument, "rpc.request", std::string(message));
}

Error BadResponse() {
  return Error(Code::kUnavailable, "rpc.response", "the peer's answer is not a response message");
}

bool IsName(std::string_view text) {
  return !text.empty() && text.size() <= kMaxName && IsUtf8(text);
}

struct Detail {
  std::optional<Code> code;
  std::string_view reason;
  std::string_view field;
  int sys_errno = 0;
};

// False when `bytes` is no Any; others' details are ignored.
bool ReadDetail(std::string_view bytes, Detail& out) {
  std::string_view type;
  std::string_view value;
  WireReader any(bytes);
  while (any.Next()) {
    if (any.field() == kTypeUrl) type = any.Bytes();
    if (any.field() == kAnyValue) value = any.Bytes();
  }
  if (any.failed() || type != kDetailType) return !any.failed();
  WireReader detail(value);
  while (detail.Next()) {
    switch (detail.field()) {
      case kCode:
        out.code = CodeByName(detail.Bytes());
        break;
      case kReason:
        out.reason = detail.Bytes();
        break;
      case kField:
        out.field = detail.Bytes();
        break;
      case kErrno:
        out.sys_errno = static_cast<int>(detail.Number());
        break;
      default:
        break;
    }
  }
  return !detail.failed();
}

Error ReadStatus(std::string_view bytes, uint64_t code) {
  std::string_view message;
  Detail detail;
  WireReader status(bytes);
  while (status.Next()) {
    if (status.field() == kStatusMessage) message = status.Bytes();
    if (status.field() == kStatusDetails && !ReadDetail(status.Bytes(), detail)) {
      return BadResponse();
    }
  }
  if (status.failed()) return BadResponse();
  std::string_view reason = KnownReason(detail.reason);
  if (!reason.empty() && message.starts_with(reason) &&
      message.substr(reason.size()).starts_with(": ")) {
    message.remove_prefix(reason.size() + 2);
  }
  if (reason.empty()) reason = code == kRpcUnimplemented ? "rpc.unimplemented" : "rpc.remote";
  Error error(detail.code.value_or(FromRpcCode(code)), reason, CleanText(message, kMaxMessage));
  return std::move(error).WithField(CleanText(detail.field, kMaxName)).WithErrno(detail.sys_errno);
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
  const size_t unwanted = std::min(skip_, bytes.size());
  skip_ -= unwanted;
  bytes.remove_prefix(unwanted);
  // Moves each byte at most once for as many as were consumed before it.
  if (start_ > 0 && start_ >= buffered()) {
    buffer_.erase(0, start_);
    start_ = 0;
  }
  buffer_ += bytes;
}

void FrameParser::Consume(size_t count) {
  start_ += count;
  if (start_ == buffer_.size()) {
    buffer_.clear();
    start_ = 0;
  }
  if (buffer_.capacity() > kIdleCapacity && buffered() <= kIdleCapacity / 2) {
    buffer_.substr(start_).swap(buffer_);
    start_ = 0;
  }
}

void FrameParser::Skip(const FrameHeader& header) {
  const size_t size = kFrameHeaderSize + header.length;
  const size_t here = std::min(size, buffered());
  skip_ += size - here;
  Consume(here);
}

Result<std::optional<Frame>> FrameParser::Next() {
  while (!wanted_) {
    if (buffered() < kFrameHeaderSize) return std::optional<Frame>();
    const char* bytes = buffer_.data() + start_;
    const auto type = static_cast<uint8_t>(bytes[8]);
    const FrameHeader header{.length = ReadBig32(bytes),
                             .stream = ReadBig32(bytes + 4),
                             .type = static_cast<MessageType>(type),
                             .flags = static_cast<uint8_t>(bytes[9])};
    if (header.length > max_payload_) {
      return BadFrame(
          fmt::format("a frame of {} bytes is over the limit of {}", header.length, max_payload_));
    }
    if (header.stream == 0) return BadFrame("stream id 0");
    bool wanted = type >= 1 && type <= 3;
    if (wanted && filter_) {
      DSEC_TRY(wanted, filter_(header));
    }
    if (wanted) {
      wanted_ = header;
    } else {
      Skip(header);
    }
  }
  if (buffered() < kFrameHeaderSize + wanted_->length) return std::optional<Frame>();
  Frame frame{wanted_->stream, wanted_->type, wanted_->flags,
              buffer_.substr(start_ + kFrameHeaderSize, wanted_->length)};
  Consume(kFrameHeaderSize + wanted_->length);
  wanted_.reset();
  return std::optional<Frame>(std::move(frame));
}

void FrameParser::Drop(uint32_t stream) {
  if (!wanted_ || wanted_->stream != stream) return;
  Skip(*wanted_);
  wanted_.reset();
}

std::string SerializeRequest(const Request& request) {
  std::string out;
  AppendBytes(out, kService, request.service);
  AppendBytes(out, kMethod, request.method);
  AppendBytes(out, kRequestPayload, request.payload);
  AppendNumber(out, kTimeoutNano, static_cast<uint64_t>(request.timeout_nanos));
  return out;
}

Result<Request> ParseRequest(std::string_view bytes) {
  std::string_view service;
  std::string_view method;
  std::string_view payload;
  Request request;
  WireReader reader(bytes);
  while (reader.Next()) {
    switch (reader.field()) {
      case kService:
        service = reader.Bytes();
        break;
      case kMethod:
        method = reader.Bytes();
        break;
      case kRequestPayload:
        payload = reader.Bytes();
        break;
      case kTimeoutNano:
        request.timeout_nanos = static_cast<int64_t>(reader.Number());
        break;
      default:
        break;
    }
  }
  if (reader.failed()) return BadRequest("not a request message");
  if (!IsName(service) || !IsName(method)) {
    return BadRequest("service and method must have 1 to 256 bytes of UTF-8");
  }
  if (request.timeout_nanos < 0) return BadRequest("timeout_nano must not be negative");
  request.service = service;
  request.method = method;
  request.payload = payload;
  return request;
}

std::string SerializeResponse(std::string_view payload) {
  std::string out;
  AppendBytes(out, kResponsePayload, payload);
  return out;
}

std::string SerializeError(const Error& error) {
  std::string message = fmt::format("{}: {}", error.reason(), error.message());
  if (!error.frames().empty()) message += fmt::format(" ({})", fmt::join(error.frames(), "; "));

  std::string detail;
  AppendBytes(detail, kCode, CodeName(error.code()));
  AppendBytes(detail, kReason, error.reason());
  AppendBytes(detail, kField, CleanText(error.field(), kMaxName));
  AppendNumber(detail, kErrno, static_cast<uint64_t>(int64_t{error.sys_errno()}));
  std::string any;
  AppendBytes(any, kTypeUrl, kDetailType);
  AppendBytes(any, kAnyValue, detail);
  std::string status;
  AppendNumber(status, kStatusCode, ToRpcCode(error.code()));
  AppendBytes(status, kStatusMessage, CleanText(message, kMaxMessage));
  AppendBytes(status, kStatusDetails, any);
  std::string out;
  AppendBytes(out, kStatus, status);
  return out;
}

Result<std::string> ParseResponse(std::string_view bytes) {
  std::string_view status;
  std::string_view payload;
  WireReader reader(bytes);
  while (reader.Next()) {
    if (reader.field() == kStatus) status = reader.Bytes();
    if (reader.field() == kResponsePayload) payload = reader.Bytes();
  }
  if (reader.failed()) return BadResponse();
  uint64_t code = kRpcOk;
  WireReader fields(status);
  while (fields.Next()) {
    if (fields.field() == kStatusCode) code = fields.Number();
  }
  if (fields.failed()) return BadResponse();
  if (code != kRpcOk) return ReadStatus(status, code);
  return std::string(payload);
}

}  // namespace dsec::rpc

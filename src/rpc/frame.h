// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

// The ttrpc wire format without I/O (github.com/containerd/ttrpc, PROTOCOL.md): a 10-byte header
// {u32 length, u32 stream id, u8 type, u8 flags}, big-endian, then the payload. aether uses this
// too: no Asio, nothing generated.
namespace dsec::rpc {

constexpr size_t kFrameHeaderSize = 10;
constexpr size_t kMaxFramePayload = size_t{4} << 20;  // messageLengthMax of the reference

enum class MessageType : uint8_t { kRequest = 1, kResponse = 2, kData = 3 };

constexpr uint8_t kFlagRemoteClosed = 1;  // the sender sends no more data on this stream
constexpr uint8_t kFlagRemoteOpen = 2;    // of a request: the sender goes on with data
constexpr uint8_t kFlagNoData = 4;        // a data frame without a message in it

struct FrameHeader {
  uint32_t length = 0;  // of the payload
  uint32_t stream = 0;  // odd: the client's; never 0
  MessageType type = MessageType::kRequest;
  uint8_t flags = 0;
};

struct Frame {
  uint32_t stream = 0;
  MessageType type = MessageType::kRequest;
  uint8_t flags = 0;
  std::string payload;
};

// Appends a frame to `out`. Requires payload.size() <= kMaxFramePayload.
void AppendFrame(std::string& out, uint32_t stream, MessageType type, uint8_t flags,
                 std::string_view payload);

// Cuts a byte stream from a peer that may be hostile into frames. Holds at most one frame and what
// the last Feed brought beyond it, and memory only for bytes that have come. Frames of unknown type
// are dropped, as the reference does. After an error the stream cannot be resynchronised: close the
// connection.
class FrameParser {
 public:
  // Says from the header whether a frame is wanted. The payload of one that is not is dropped as it
  // comes. An error is the parser's.
  using Filter = std::function<Result<bool>(const FrameHeader&)>;

  explicit FrameParser(size_t max_payload = kMaxFramePayload, Filter filter = {})
      : max_payload_(max_payload), filter_(std::move(filter)) {}
  void Feed(std::string_view bytes);
  // The next whole frame, or nullopt when more bytes are needed. kInvalidArgument "rpc.frame":
  // stream id 0 or a payload over the limit.
  Result<std::optional<Frame>> Next();
  // The frame of `stream` that is half here, if there is one, is not wanted any more.
  void Drop(uint32_t stream);
  size_t buffered() const { return buffer_.size() - start_; }
  // Of the buffer, used or not.
  size_t capacity() const { return buffer_.capacity(); }

 private:
  void Consume(size_t count);
  void Skip(const FrameHeader& header);

  size_t max_payload_;
  Filter filter_;
  std::string buffer_;
  size_t start_ = 0;
  size_t skip_ = 0;                    // bytes to come that nobody wants
  std::optional<FrameHeader> wanted_;  // header at start_, accepted; its payload is not all here
};

struct Request {
  std::string service;
  std::string method;
  std::string payload;
  int64_t timeout_nanos = 0;  // 0 = none
};

std::string SerializeRequest(const Request& request);
// kInvalidArgument "rpc.request": no protobuf message, a negative timeout, or a service or method
// that is not 1 to 256 bytes of UTF-8. Metadata is ignored.
Result<Request> ParseRequest(std::string_view bytes);

std::string SerializeResponse(std::string_view payload);
// Code, reason, field, errno and message survive the way; context frames are joined to the message.
// Foreign peers see the nearest google.rpc.Code and "<reason>: <message>".
std::string SerializeError(const Error& error);
// The payload, or the error that the peer answered. Its texts are cut to 4 KiB. A reason arrives as
// itself when it is in the table of rpc/reasons.h, else as "rpc.remote" with the message
// "<reason>: ...". A broken response: kUnavailable "rpc.response".
Result<std::string> ParseResponse(std::string_view bytes);

}  // namespace dsec::rpc

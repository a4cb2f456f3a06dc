// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

// The ttrpc wire format without I/O (github.com/containerd/ttrpc, PROTOCOL.md): a 10-byte header
// {u32 length, u32 stream id, u8 type, u8 flags}, big-endian, then the payload. aether uses this
// too, so no Asio and no allocation beyond the payloads.
namespace dsec::rpc {

constexpr size_t kFrameHeaderSize = 10;
constexpr size_t kMaxFramePayload = size_t{4}
                                    << 20;  // messageLengthMax of the reference implementation

enum class MessageType : uint8_t { kRequest = 1, kResponse = 2, kData = 3 };

constexpr uint8_t kFlagRemoteClosed = 1;  // the sender sends no more data on this stream
constexpr uint8_t kFlagRemoteOpen = 2;    // the sender goes on sending data on this stream
constexpr uint8_t kFlagNoData = 4;        // a data frame without a message in it

struct Frame {
  uint32_t stream = 0;  // odd: the client's; never 0
  MessageType type = MessageType::kRequest;
  uint8_t flags = 0;
  std::string payload;
};

// Appends a frame to `out`. Requires payload.size() <= kMaxFramePayload.
void AppendFrame(std::string& out, uint32_t stream, MessageType type, uint8_t flags,
                 std::string_view payload);

// Cuts a byte stream from a peer that may be hostile into frames. Holds at most one frame and what
// the last Feed brought beyond it. After an error the stream cannot be resynchronised: close the
// connection.
class FrameParser {
 public:
  explicit FrameParser(size_t max_payload = kMaxFramePayload) : max_payload_(max_payload) {}
  void Feed(std::string_view bytes);
  // The next whole frame, or nullopt when more bytes are needed. kInvalidArgument "rpc.frame":
  // stream id 0, unknown type, or a payload over the limit.
  Result<std::optional<Frame>> Next();
  size_t buffered() const { return buffer_.size() - start_; }

 private:
  size_t max_payload_;
  std::string buffer_;
  size_t start_ = 0;
};

struct Request {
  std::string service;
  std::string method;
  std::string payload;
  int64_t timeout_nanos = 0;  // 0 = none
};

std::string SerializeRequest(const Request& request);
// kInvalidArgument "rpc.request": no protobuf message, or service or method empty or over 256
// bytes.
Result<Request> ParseRequest(std::string_view bytes);

std::string SerializeResponse(std::string_view payload);
// Code, reason, field, errno and message survive the way; context frames are joined to the message.
std::string SerializeError(const Error& error);
// The payload, or the error that the peer answered. The peer's strings are bounded; a reason of
// ours arrives as itself, and one that is no dotted word, or comes after 512 different ones, as
// "rpc.remote". A broken response: kUnavailable "rpc.response".
Result<std::string> ParseResponse(std::string_view bytes);

}  // namespace dsec::rpc

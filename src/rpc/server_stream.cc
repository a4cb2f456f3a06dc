// SPDX-License-Identifier: Apache-2.0
#include "rpc/server_stream.h"

#include <utility>

namespace dsec::rpc {
namespace {

constexpr size_t kMaxUnread = 64;
constexpr size_t kMaxUnreadBytes = size_t{8} << 20;

}  // namespace

runtime::Task<std::optional<std::string>> SocketServerStream::Receive(runtime::Deadline deadline) {
  while (messages_.empty()) {
    if (error_) co_return *error_;
    if (ended_) co_return std::optional<std::string>();
    arrived_.Reset();
    auto waited = co_await arrived_.Wait(deadline);
    if (!waited.ok()) co_return std::move(waited).error();
  }
  std::optional<std::string> message(std::move(messages_.front()));
  messages_.pop_front();
  bytes_ -= message->size();
  co_return message;
}

Result<void> SocketServerStream::Send(std::string payload) {
  return socket_->Send(id_, MessageType::kData, 0, payload);
}

void SocketServerStream::OnData(Frame frame) {
  if (error_ || ended_) return;
  if ((frame.flags & kFlagNoData) == 0) {
    bytes_ += frame.payload.size();
    if (messages_.size() >= kMaxUnread || bytes_ > kMaxUnreadBytes) {
      messages_.clear();
      return Fail(Error(Code::kResourceExhausted, "rpc.stream_overrun", "too much waits unread"));
    }
    messages_.push_back(std::move(frame.payload));
  }
  ended_ = (frame.flags & kFlagRemoteClosed) != 0;
  arrived_.Set();
}

void SocketServerStream::OnClosed() {
  if (!ended_) Fail(Error(Code::kUnavailable, "rpc.closed", "the connection is closed"));
}

void SocketServerStream::Fail(Error error) {
  error_ = std::move(error);
  arrived_.Set();
}

}  // namespace dsec::rpc

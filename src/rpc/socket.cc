// SPDX-License-Identifier: Apache-2.0
#include "rpc/socket.h"

#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

namespace dsec::rpc {
namespace {

namespace asio = boost::asio;

constexpr size_t kMaxBacklog = size_t{64} << 20;
constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);

Error Closed() { return Error(Code::kUnavailable, "rpc.closed", "the connection is closed"); }

}  // namespace

Result<void> FrameSocket::Send(uint32_t stream, MessageType type, uint8_t flags,
                               std::string_view payload) {
  if (closed_) return Closed();
  if (payload.size() > kMaxFramePayload) {
    return Error(Code::kInvalidArgument, "rpc.too_large",
                 fmt::format("a message of {} bytes does not fit a frame of {}", payload.size(),
                             kMaxFramePayload));
  }
  if (queued_.size() + payload.size() > kMaxBacklog) {
    return Error(Code::kResourceExhausted, "rpc.backlog", "the peer does not read its messages");
  }
  AppendFrame(queued_, stream, type, flags, payload);
  if (!busy_) {
    busy_ = true;
    idle_.Reset();
    asio::co_spawn(socket_.get_executor(), WriteQueued(), asio::detached);
  }
  return {};
}

asio::awaitable<void> FrameSocket::WriteQueued() {
  const auto self = shared_from_this();
  while (!queued_.empty() && !closed_) {
    writing_.clear();
    writing_.swap(queued_);
    const auto [error, written] =
        co_await asio::async_write(socket_, asio::buffer(writing_), kTuple);
    if (error) Close();
  }
  // An idle connection keeps no large buffers.
  if (writing_.capacity() > (size_t{64} << 10)) std::string().swap(writing_);
  if (queued_.empty() && queued_.capacity() > (size_t{64} << 10)) std::string().swap(queued_);
  busy_ = false;
  idle_.Set();
}

runtime::Task<Frame> FrameSocket::Receive() {
  const auto self = shared_from_this();
  for (;;) {
    auto frame = parser_.Next();
    if (!frame.ok()) co_return std::move(frame).error();
    if (frame->has_value()) co_return std::move(**frame);
    if (closed_) co_return Closed();
    std::array<char, 16 << 10> chunk;
    const auto [error, got] = co_await socket_.async_read_some(asio::buffer(chunk), kTuple);
    if (error) co_return Closed();
    parser_.Feed({chunk.data(), got});
  }
}

void FrameSocket::Close() {
  if (closed_) return;
  closed_ = true;
  boost::system::error_code ignored;
  socket_.shutdown(Socket::shutdown_both, ignored);
  socket_.close(ignored);
}

runtime::Task<void> FrameSocket::Flushed(runtime::Deadline deadline) {
  const auto self = shared_from_this();
  while (busy_) {
    auto waited = co_await idle_.Wait(deadline);
    if (!waited.ok()) co_return std::move(waited).error();
  }
  co_return Ok();
}

}  // namespace dsec::rpc

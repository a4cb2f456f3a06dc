// SPDX-License-Identifier: Apache-2.0
#include "rpc/socket.h"

#include <sys/socket.h>

#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>
#include <cstring>

#include "rpc/tls_session.h"

namespace dsec::rpc {
namespace {

namespace asio = boost::asio;

// Reading goes through one buffer per thread, so that thousands of idle connections hold none.
constexpr size_t kReadBytes = size_t{64} << 10;
constexpr size_t kIdleCapacity = size_t{64} << 10;

Error Closed(std::string_view why) {
  return Error(Code::kUnavailable, "rpc.closed", fmt::format("the connection is closed{}", why));
}

}  // namespace

FrameSocket::FrameSocket(Socket socket, FrameParser::Filter filter, std::unique_ptr<TlsSession> tls)
    : socket_(std::move(socket)),
      tls_(std::move(tls)),
      parser_(kMaxFramePayload, std::move(filter)) {
  boost::system::error_code error;
  socket_.non_blocking(true, error);
  if (error) Close();
}

FrameSocket::~FrameSocket() = default;

ssize_t FrameSocket::ReadSome(char* to, size_t size) {
  if (tls_ != nullptr) return tls_->Read(to, size);
  return ::recv(socket_.native_handle(), to, size, 0);
}

ssize_t FrameSocket::WriteSome(const char* from, size_t size) {
  if (tls_ != nullptr) return tls_->Write(from, size);
  return ::send(socket_.native_handle(), from, size, MSG_NOSIGNAL);
}

FrameSocket::Socket::wait_type FrameSocket::AfterRead() const {
  return tls_ != nullptr && tls_->wants_write() ? Socket::wait_write : Socket::wait_read;
}

Error FrameSocket::BrokenBy(int sys_errno) const {
  if (tls_ != nullptr && sys_errno == EPROTO) return Closed(fmt::format(": TLS: {}", tls_->why()));
  return Closed(fmt::format(": {}", strerrordesc_np(sys_errno))).WithErrno(sys_errno);
}

Result<void> FrameSocket::Send(uint32_t stream, MessageType type, uint8_t flags,
                               std::string_view payload) {
  if (closed_) return Closed("");
  if (payload.size() > kMaxFramePayload) {
    return Error(Code::kInvalidArgument, "rpc.too_large",
                 fmt::format("a message of {} bytes does not fit a frame of {}", payload.size(),
                             kMaxFramePayload));
  }
  if (queued_.size() - sent_ + payload.size() > kMaxBacklog) {
    return Error(Code::kResourceExhausted, "rpc.backlog",
                 fmt::format("the peer has left {} bytes unread", queued_.size() - sent_));
  }
  AppendFrame(queued_, stream, type, flags, payload);
  if (!flush_pending_) {
    flush_pending_ = true;
    flushed_.Reset();
    asio::post(socket_.get_executor(), [self = shared_from_this()] { self->Flush(); });
  }
  return Ok();
}

void FrameSocket::Flush() {
  while (!closed_ && sent_ < queued_.size()) {
    const ssize_t taken = WriteSome(queued_.data() + sent_, queued_.size() - sent_);
    if (taken >= 0) {
      sent_ += static_cast<size_t>(taken);
    } else if (errno == EAGAIN) {
      // Keeps the front short while the peer reads slowly and frames keep coming.
      if (sent_ > queued_.size() / 2) {
        queued_.erase(0, sent_);
        sent_ = 0;
      }
      socket_.async_wait(
          Socket::wait_write,
          [self = shared_from_this()](const boost::system::error_code&) { self->Flush(); });
      return;
    } else if (errno != EINTR) {
      Close();
    }
  }
  flush_pending_ = false;
  sent_ = 0;
  queued_.clear();
  if (queued_.capacity() > kIdleCapacity) queued_.shrink_to_fit();
  flushed_.Set();
}

runtime::Task<Frame> FrameSocket::Receive() {
  const auto self = shared_from_this();
  Socket::wait_type wait = Socket::wait_read;
  bool blocked = false;  // by the last read
  for (;;) {
    auto frame = parser_.Next();
    if (!frame.ok()) co_return std::move(frame).error();
    if (frame->has_value()) co_return std::move(**frame);
    if (closed_) co_return Closed("");
    // What TLS holds already no event announces.
    if (tls_ == nullptr || blocked || !tls_->pending()) {
      const auto [error] = co_await socket_.async_wait(wait, asio::as_tuple(asio::use_awaitable));
      if (closed_ || error) co_return Closed("");
    }
    thread_local std::array<char, kReadBytes> buffer;
    const ssize_t got = ReadSome(buffer.data(), buffer.size());
    blocked = got < 0 && errno == EAGAIN;
    wait = blocked ? AfterRead() : Socket::wait_read;
    if (got == 0) co_return Closed(" by the peer");
    if (got > 0) {
      parser_.Feed({buffer.data(), static_cast<size_t>(got)});
    } else if (errno != EAGAIN && errno != EINTR) {
      co_return BrokenBy(errno);
    }
  }
}

runtime::Task<void> FrameSocket::Flushed(runtime::Deadline deadline) {
  const auto self = shared_from_this();
  if (flush_pending_ && !closed_) co_return co_await flushed_.Wait(deadline);
  co_return Ok();
}

void FrameSocket::Close() {
  if (closed_) return;
  if (flush_pending_ && sent_ < queued_.size()) {
    // Best effort: the peer may still be reading.
    (void)WriteSome(queued_.data() + sent_, queued_.size() - sent_);
  }
  if (tls_ != nullptr) tls_->Shutdown();
  closed_ = true;
  boost::system::error_code ignored;
  socket_.shutdown(Socket::shutdown_both, ignored);
  socket_.close(ignored);
  flushed_.Set();
}

}  // namespace dsec::rpc

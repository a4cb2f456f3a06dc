// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/asio/generic/stream_protocol.hpp>
#include <memory>
#include <string>

#include "rpc/frame.h"
#include "runtime/async_event.h"
#include "runtime/task.h"

namespace dsec::rpc {

class TlsSession;

// A connected stream socket that frames go through, in order. Sending never waits: what the kernel
// does not take at once is queued, up to a bound. Belongs to one shard and is kept alive by its own
// work under way. An idle one holds no buffers.
class FrameSocket : public std::enable_shared_from_this<FrameSocket> {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;
  static constexpr size_t kMaxBacklog = size_t{16} << 20;

  // With `tls` the frames travel through it; its handshake is done.
  FrameSocket(Socket socket, FrameParser::Filter filter, std::unique_ptr<TlsSession> tls = nullptr);
  ~FrameSocket();

  // Frames sent in one turn of the shard leave together at its end. kUnavailable "rpc.closed";
  // kInvalidArgument "rpc.too_large" when the payload does not fit a frame; kResourceExhausted
  // "rpc.backlog" when the peer does not read and kMaxBacklog bytes wait already.
  Result<void> Send(uint32_t stream, MessageType type, uint8_t flags, std::string_view payload);
  // The next frame. One caller at a time. kUnavailable "rpc.closed" at the end of the connection;
  // errors of FrameParser.
  runtime::Task<Frame> Receive();
  // FrameParser::Drop.
  void Drop(uint32_t stream) { parser_.Drop(stream); }
  // Everything queued has been taken by the kernel, or the connection has ended.
  runtime::Task<void> Flushed(runtime::Deadline deadline);
  // Sends of what is queued as much as the kernel takes now; nothing is sent or received later.
  void Close();
  bool closed() const { return closed_; }
  int fd() { return socket_.native_handle(); }

 private:
  void Flush();
  // As recv(2) and send(2).
  ssize_t ReadSome(char* to, size_t size);
  ssize_t WriteSome(const char* from, size_t size);
  // What to wait for after EAGAIN of the one or the other.
  Socket::wait_type AfterRead() const;
  Error BrokenBy(int sys_errno) const;

  Socket socket_;
  const std::unique_ptr<TlsSession> tls_;
  FrameParser parser_;
  std::string queued_;
  size_t sent_ = 0;             // of queued_
  bool flush_pending_ = false;  // posted, or waiting for the kernel to take more
  bool closed_ = false;
  runtime::AsyncEvent flushed_;
};

}  // namespace dsec::rpc

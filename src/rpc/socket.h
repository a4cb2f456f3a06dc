// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <string>

#include "rpc/frame.h"
#include "runtime/async_event.h"
#include "runtime/task.h"

namespace dsec::rpc {

// A socket that frames are written to in order without waiting: what is queued is bounded, one
// write is under way at a time. Belongs to one shard; shared with the writes that it has started.
class FrameSocket : public std::enable_shared_from_this<FrameSocket> {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;

  FrameSocket(Socket socket, size_t max_payload)
      : socket_(std::move(socket)), parser_(max_payload) {}

  // Queues a frame. kUnavailable "rpc.closed"; kResourceExhausted "rpc.backlog" when the peer does
  // not read (64 MiB queued).
  Result<void> Send(uint32_t stream, MessageType type, uint8_t flags, std::string_view payload);
  // The next frame; kUnavailable "rpc.closed" at the end of the connection, kInvalidArgument
  // "rpc.frame" for nonsense.
  runtime::Task<Frame> Receive();
  // Sends what is queued, then no more.
  void Close();
  bool closed() const { return closed_; }
  // No frame is queued or under way.
  runtime::Task<void> Flushed(runtime::Deadline deadline);

 private:
  boost::asio::awaitable<void> WriteQueued();

  Socket socket_;
  FrameParser parser_;
  std::string queued_;
  std::string writing_;
  bool busy_ = false;
  bool closed_ = false;
  runtime::AsyncEvent idle_;
};

}  // namespace dsec::rpc

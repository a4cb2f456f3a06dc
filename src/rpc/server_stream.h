// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "rpc/server.h"
#include "rpc/socket.h"
#include "runtime/async_event.h"

namespace dsec::rpc {

// One stream of one connection, between the connection's read loop and the handler; on one shard.
class SocketServerStream final : public ServerStream {
 public:
  // `ended`: the client sends no data.
  SocketServerStream(std::shared_ptr<FrameSocket> socket, uint32_t id, bool ended)
      : socket_(std::move(socket)), id_(id), ended_(ended) {}

  runtime::Task<std::optional<std::string>> Receive(runtime::Deadline deadline) override;
  Result<void> Send(std::string payload) override;

  // From the read loop.
  void OnData(Frame frame);
  void OnClosed();

 private:
  void Fail(Error error);

  const std::shared_ptr<FrameSocket> socket_;
  const uint32_t id_;
  std::deque<std::string> messages_;
  size_t bytes_ = 0;
  bool ended_;
  std::optional<Error> error_;
  runtime::AsyncEvent arrived_;
};

}  // namespace dsec::rpc

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "aether/loop.h"
#include "base/result.h"
#include "os/unique_fd.h"
#include "rpc/frame.h"

namespace dsec::aether {

// ttrpc over the listening Unix socket. Several connections at once; each call is answered once, in
// any order. What a peer can make the agent hold is bounded: one frame in, kMaxPendingCalls calls,
// and no more is read while kMaxUnsent bytes wait to be taken by it.
class Server {
 public:
  static constexpr size_t kMaxConnections = 8;
  static constexpr size_t kMaxPendingCalls = 1024;
  static constexpr size_t kMaxUnsent = 4u << 20;

  // Answers a call; its connection may be gone by then. The payload is a serialised reply.
  using Respond = std::function<void(Result<std::string>)>;
  // `authenticated` is set by the handler of Hello; until then the handler must refuse everything
  // else.
  struct Call {
    uint64_t caller = 0;            // the connection, never reused
    bool* authenticated = nullptr;  // valid during the handler
    rpc::Request request;
    Respond respond;
  };
  using Handler = std::function<void(Call)>;

  // `dropped` is told of each connection that has ended.
  Server(Loop& loop, os::UniqueFd listener, Handler handler, std::function<void(uint64_t)> dropped);

  // Ends a connection once what waits for it has been sent.
  void CloseAfterReplies(uint64_t caller);
  // Nothing waits to be sent.
  bool Flushed() const;

 private:
  struct Connection {
    uint64_t id = 0;
    os::UniqueFd socket;
    FdWatch watch;
    rpc::FrameParser parser;
    std::string out;
    size_t sent = 0;  // of out
    size_t pending = 0;
    bool authenticated = false;
    bool closing = false;
  };

  void Accept();
  void OnEvents(uint64_t id, uint32_t events);
  void ReadFrom(Connection& connection);
  void HandleFrames(uint64_t id);
  void Answer(uint64_t id, uint32_t stream, const Result<std::string>& result);
  bool Flush(Connection& connection);
  void UpdateInterest(Connection& connection);
  void Drop(uint64_t id);

  Loop& loop_;
  os::UniqueFd listener_;
  FdWatch watch_;
  Timer accept_again_;
  Handler handler_;
  std::function<void(uint64_t)> dropped_;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;
  uint64_t next_id_ = 1;
};

}  // namespace dsec::aether

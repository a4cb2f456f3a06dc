// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "rpc/tls.h"
#include "runtime/async_event.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::rpc {

// The client end of one ttrpc connection: many calls at once. Lives on one shard, on which every
// call must be made and the last reference must go. The peer may be hostile: frames are bounded,
// answers that nobody waits for are dropped unread, a protocol error closes the channel. An idle
// channel holds no buffers.
class Channel {
 public:
  // A stream of messages both ways, opened by OpenStream. ttrpc has no credit: when 64 messages
  // or 8 MiB wait unread the stream ends with kResourceExhausted "rpc.stream_overrun". Destroying
  // it forgets the stream; the peer learns that from the deadline alone.
  class Stream {
   public:
    virtual ~Stream() = default;
    // Errors of FrameSocket::Send; kFailedPrecondition "rpc.stream_closed" after CloseSend.
    virtual Result<void> Send(std::string payload) = 0;
    virtual Result<void> CloseSend() = 0;
    // The next message; nullopt when the peer has ended the stream in order. One caller at a time.
    virtual runtime::Task<std::optional<std::string>> Receive(runtime::Deadline deadline) = 0;
  };

  // kUnavailable "rpc.connect" with the errno; kDeadlineExceeded "rpc.deadline"; kInvalidArgument
  // "rpc.connect" for a path that is too long for a socket. A full backlog is waited for. TCP tries
  // each address of `host`.
  static runtime::Task<std::shared_ptr<Channel>> ConnectUnix(runtime::Executor executor,
                                                             std::string path,
                                                             runtime::Deadline deadline);
  static runtime::Task<std::shared_ptr<Channel>> ConnectTcp(runtime::Executor executor,
                                                            std::string host, uint16_t port,
                                                            runtime::Deadline deadline);
  // The same with TLS: errors of ShakeHands (rpc/tls_session.h) as well. A server that refuses this
  // side's certificate says so after the handshake: the first call then gets "rpc.closed" with its
  // alert.
  static runtime::Task<std::shared_ptr<Channel>> ConnectTls(
      runtime::Executor executor, std::string host, uint16_t port,
      std::shared_ptr<const TlsContext> context, TlsExpect expect, runtime::Deadline deadline);
  // Over a connected stream socket of any kind, non-blocking, which is the channel's from now on.
  // `peer` names it in messages. kInternal "rpc.connect".
  static Result<std::shared_ptr<Channel>> Over(runtime::Executor executor, int socket,
                                               std::string peer);
  virtual ~Channel() = default;

  // One request, one answer. The peer's error as ParseResponse gives it; kDeadlineExceeded
  // "rpc.deadline"; kUnavailable "rpc.closed" when the connection ends first; kInvalidArgument
  // "rpc.too_large" for a request that does not fit a frame; kResourceExhausted "rpc.backlog". A
  // cancelled or expired call is forgotten here; the peer learns the deadline with the request.
  virtual runtime::Task<std::string> CallRaw(std::string_view service, std::string_view method,
                                             std::string payload, runtime::Deadline deadline) = 0;
  // The same with protobuf messages; an answer that does not parse: kUnavailable "rpc.response".
  // The request is serialised before this returns.
  template <typename Reply, typename Request>
  runtime::Task<Reply> Call(std::string_view service, std::string_view method,
                            const Request& request, runtime::Deadline deadline) {
    return Parsed<Reply>(CallRaw(service, method, request.SerializeAsString(), deadline));
  }
  // `payload` is the first message where the method takes one.
  virtual Result<std::unique_ptr<Stream>> OpenStream(std::string_view service,
                                                     std::string_view method, std::string payload,
                                                     runtime::Deadline deadline) = 0;

  virtual bool closed() const = 0;
  // Ok when the connection has ended, by either side. Any number of waiters.
  virtual runtime::Task<void> WaitClosed() = 0;
  // Ends the connection; calls under way get "rpc.closed".
  virtual void Close() = 0;

 private:
  template <typename Reply>
  static runtime::Task<Reply> Parsed(runtime::Task<std::string> call) {
    auto answer = co_await std::move(call);
    if (!answer.ok()) co_return std::move(answer).error();
    Reply reply;
    if (!reply.ParseFromString(*answer)) {
      co_return Error(Code::kUnavailable, "rpc.response", "the peer's answer does not parse");
    }
    co_return reply;
  }
};

}  // namespace dsec::rpc

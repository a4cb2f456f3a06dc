// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/async_event.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::rpc {

// The client end of one ttrpc connection: many calls at once. Lives on one shard, on which every
// call must be made. The peer may be hostile: frames are bounded, answers to unknown calls are
// dropped, a protocol error closes the channel.
class Channel : public std::enable_shared_from_this<Channel> {
 public:
  // A stream of messages both ways, opened by OpenStream. Unread messages are bounded (64, then the
  // channel closes with kResourceExhausted "rpc.stream_overrun": ttrpc has no credit). Destroying
  // it forgets the stream.
  class Stream {
   public:
    virtual ~Stream() = default;
    // kUnavailable "rpc.closed"; kFailedPrecondition "rpc.stream_closed" after CloseSend.
    virtual Result<void> Send(std::string payload) = 0;
    virtual Result<void> CloseSend() = 0;
    // The next message; nullopt when the peer has ended the stream in order.
    virtual runtime::Task<std::optional<std::string>> Receive(runtime::Deadline deadline) = 0;
  };

  // kUnavailable "rpc.connect".
  static runtime::Task<std::shared_ptr<Channel>> ConnectUnix(runtime::Executor executor,
                                                             std::string path,
                                                             runtime::Deadline deadline);
  static runtime::Task<std::shared_ptr<Channel>> ConnectTcp(runtime::Executor executor,
                                                            std::string host, uint16_t port,
                                                            runtime::Deadline deadline);
  virtual ~Channel() = default;

  // One request, one answer. The peer's error as it was sent; kDeadlineExceeded "rpc.deadline";
  // kUnavailable "rpc.closed" when the connection ends first; kInvalidArgument "rpc.too_large" for
  // a request that does not fit a frame. A cancelled or expired call is forgotten here; the peer
  // learns the deadline with the request.
  virtual runtime::Task<std::string> CallRaw(std::string_view service, std::string_view method,
                                             std::string payload, runtime::Deadline deadline) = 0;
  // The same with protobuf messages; an answer that does not parse: kUnavailable "rpc.response".
  template <typename Reply, typename Request>
  runtime::Task<Reply> Call(std::string_view service, std::string_view method,
                            const Request& request, runtime::Deadline deadline) {
    return CallTyped<Reply>(shared_from_this(), service, method, request.SerializeAsString(),
                            deadline);
  }
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
  static runtime::Task<Reply> CallTyped(std::shared_ptr<Channel> self, std::string_view service,
                                        std::string_view method, std::string payload,
                                        runtime::Deadline deadline) {
    auto answer = co_await self->CallRaw(service, method, std::move(payload), deadline);
    if (!answer.ok()) co_return std::move(answer).error();
    Reply reply;
    if (!reply.ParseFromString(*answer)) {
      co_return Error(Code::kUnavailable, "rpc.response",
                      fmt::format("the answer to {} does not parse", method));
    }
    co_return reply;
  }
};

}  // namespace dsec::rpc

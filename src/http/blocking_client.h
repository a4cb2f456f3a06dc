// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "http/client.h"

namespace dsec::http {

// The client for programs without an event loop: each call blocks its thread. One thread at a time,
// but for Abort.
// A timeout of zero means none; it holds for the whole of Call, and for each wait of a stream.
// Errors as of Client.
class BlockingClient {
 public:
  class Stream {
   public:
    ~Stream();
    const ResponseHead& head() const;
    Result<std::string> Read(size_t max, std::chrono::nanoseconds timeout);
    Result<std::optional<std::string>> ReadLine(std::chrono::nanoseconds timeout);

   private:
    friend class BlockingClient;
    Stream(BlockingClient& client, std::unique_ptr<ReplyStream> stream);
    BlockingClient& client_;
    std::unique_ptr<ReplyStream> stream_;
  };

  static Result<std::unique_ptr<BlockingClient>> Create(ClientOptions options);
  ~BlockingClient();

  Result<Reply> Call(ClientRequest request, std::chrono::nanoseconds timeout,
                     uint64_t max_body = 64 << 20);
  // Must be destroyed before the client.
  Result<std::unique_ptr<Stream>> Open(ClientRequest request, std::chrono::nanoseconds timeout);

  // From any thread: ends the call under way, and all later ones, with kCancelled "client.aborted".
  void Abort();

  // A body source from a plain function.
  static BodySource Source(std::function<Result<std::string>()> next);

 private:
  struct Loop;
  BlockingClient();
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<Client> client_;
};

}  // namespace dsec::http

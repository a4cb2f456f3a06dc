// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "http/message.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::http {

// Gives the next piece of a body, empty at its end.
using BodySource = std::function<runtime::Task<std::string>()>;

struct ClientRequest {
  std::string method;
  std::string target;  // encoded
  Headers headers = {};
  std::string body = {};
  // In place of `body`: an upload in pieces, chunked unless the length is known.
  BodySource source = {};
  std::optional<uint64_t> source_length = {};
};

struct Reply {
  int status = 0;
  Fields fields;
  std::string body;
};

struct ClientOptions {
  std::string endpoint;  // "http://host:port" or "unix:/path"
  Headers headers = {};  // sent with every request, for example Authorization
  size_t max_idle = 32;  // connections kept for the next request
  size_t max_line_bytes = 64 << 20;
};

// The reply to one request, whose body is read as it comes. One reader. Destroyed before the end of
// the body it closes the connection, which is how a caller leaves a stream.
class ReplyStream {
 public:
  virtual ~ReplyStream() = default;
  virtual const ResponseHead& head() const = 0;
  // At least one byte, at most `max`; empty at the end. kUnavailable "client.connection": cut
  // before the end.
  virtual runtime::Task<std::string> Read(size_t max, runtime::Deadline deadline) = 0;
  // One line without its newline; nullopt at the end. A cut in the middle of a line is an error.
  virtual runtime::Task<std::optional<std::string>> ReadLine(runtime::Deadline deadline) = 0;
};

// HTTP/1.1 client with a pool of connections to one server. Lives on one shard; any number of calls
// at once. Must outlive its streams. kUnavailable "client.unreachable": no connection, so nothing
// was sent; kUnavailable "client.connection": it broke before the whole reply; kDeadlineExceeded
// "client.timeout"; kInternal "client.protocol": what came was not HTTP. A reply with an error
// status is a reply (see error_body.h). Nothing is sent twice, except when a kept connection turns
// out to be closed before the first byte of the reply to a GET.
class Client {
 public:
  // kInvalidArgument "client.endpoint".
  static Result<std::unique_ptr<Client>> Create(runtime::Executor executor, ClientOptions options);
  ~Client();

  // The whole reply; kPayloadTooLarge "reply.too_large" above `max_body`.
  runtime::Task<Reply> Call(ClientRequest request, runtime::Deadline deadline,
                            uint64_t max_body = 64 << 20);
  // Returns with the head of the reply. A reply that comes before the upload is complete ends the
  // upload.
  runtime::Task<std::unique_ptr<ReplyStream>> Open(ClientRequest request,
                                                   runtime::Deadline deadline);

 private:
  struct Impl;
  explicit Client(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl> impl_;
};

}  // namespace dsec::http

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::rpc {

// What a handler knows about its call.
struct CallContext {
  runtime::Deadline deadline;  // the client's
};

// The server's end of a stream both ways.
class ServerStream {
 public:
  virtual ~ServerStream() = default;
  // The next message of the client; nullopt when it has ended its side.
  virtual runtime::Task<std::optional<std::string>> Receive(runtime::Deadline deadline) = 0;
  virtual Result<void> Send(std::string payload) = 0;
};

struct ServerOptions {
  size_t max_connections = 1024;
  size_t max_calls_per_connection =
      4096;  // further requests are answered kResourceExhausted "rpc.busy"
};

// Serves ttrpc. Handlers run on the executor that the server was made with. Register before Listen.
class Server {
 public:
  using Unary = std::function<runtime::Task<std::string>(std::string payload, CallContext context)>;
  // Ends the stream by returning.
  using Streaming = std::function<runtime::Task<void>(std::string payload, ServerStream& stream,
                                                      CallContext context)>;

  explicit Server(runtime::Executor executor, ServerOptions options = {});
  // Requires that Stop has completed, or that the executor's shard has ended.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  void Register(std::string service, std::string method, Unary handler);
  void RegisterStream(std::string service, std::string method, Streaming handler);

  // Any number of listeners. The socket file must not exist; it is made with mode 0600 and removed
  // by Stop.
  Result<void> ListenUnix(const std::string& path);
  // Port 0 picks one; returns the port.
  Result<uint16_t> ListenTcp(const std::string& host, uint16_t port);
  // No new connection or call; waits for calls under way until the deadline, then closes the
  // connections and waits for the handlers to end. On the server's shard.
  boost::asio::awaitable<void> Stop(runtime::Deadline deadline);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace dsec::rpc

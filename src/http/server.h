// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/metrics.h"
#include "base/result.h"
#include "http/message.h"
#include "runtime/async_event.h"
#include "runtime/deadline.h"
#include "runtime/shards.h"
#include "runtime/task.h"

namespace dsec::http {

class Connection;

// One request and its reply. Lives for one call of the handler, on the shard of its connection;
// only the handler's own coroutine awaits it.
//
// Reads and writes fail with kCancelled "client.gone" once the connection is broken; reads with
// kDeadlineExceeded "request.timeout" when the client is too slow with its body.
class Exchange {
 public:
  explicit Exchange(Connection& connection) : connection_(connection) {}
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const RequestHead& head() const;
  // The client's X-Request-Id when it is well formed, else our own.
  const std::string& request_id() const;
  // "127.0.0.1:5000" or "unix".
  std::string Peer() const;

  // --- body ---
  // All of it. kPayloadTooLarge "request.too_large" above `limit`, before reading when the length
  // was announced.
  runtime::Task<std::string> ReadAll(uint64_t limit);
  // The next `max` bytes; less only at the end, nothing after it.
  runtime::Task<std::string> Read(size_t max);
  bool body_done() const;

  // --- reply: either Reply, or Begin, Write..., End ---
  runtime::Task<void> Reply(int status, const Headers& headers, std::string_view body);
  // Without a length the body is chunked. Nothing is sent before the first Write, Flush or End.
  void Begin(int status, const Headers& headers, std::optional<uint64_t> length = std::nullopt);
  runtime::Task<void> Flush();
  // Returns when the kernel has taken all of it: a client that does not read holds the handler
  // back.
  runtime::Task<void> Write(std::string_view data);
  // Write and End in one packet.
  runtime::Task<void> WriteLast(std::string_view data);
  runtime::Task<void> End(const Headers& trailers = {});
  // A handler that returns between Begin and End cuts the connection, which tells the client that
  // the body is not whole.
  bool begun() const;
  // Of the reply; 0 before it has begun.
  int status() const;

  // --- the client ---
  // Looks at the connection now: closed, broken, or its sending side shut down.
  bool Gone() const;
  // Set when the client has gone or the server is stopping. The first call starts watching the
  // connection.
  runtime::AsyncEvent& attention();
  bool stopping() const;
  // Whether there is a reason for attention, as far as is known without looking.
  bool left() const;

 private:
  Connection& connection_;
};

// Must reply. What it returns without a reply becomes 500.
using Handler = std::function<boost::asio::awaitable<void>(Exchange&)>;

struct ServerOptions {
  size_t max_connections = 8192;                   // beyond it: 503 and closed
  size_t max_in_flight = 6144;                     // requests in handlers; beyond it: 503
  size_t max_head_bytes = 32 << 10;                // 431
  std::chrono::milliseconds idle_timeout{75'000};  // between requests
  std::chrono::milliseconds head_timeout{
      10'000};  // from connect or first byte to the whole head; 408
  std::chrono::milliseconds body_patience{
      30'000};  // spent waiting for the body, beyond size / min_body_rate; 408
  uint64_t min_body_rate = 16 << 10;                  // bytes a second
  std::chrono::milliseconds write_patience{120'000};  // without the client taking a byte
  std::chrono::milliseconds peer_patience{
      15'000};  // of a watched peer: sent bytes not acknowledged by its host
  std::chrono::milliseconds linger{
      5'000};  // reading on after a reply that refused a body, each wait; six times that in all
  std::chrono::milliseconds sweep_period{250};  // how exactly the above are kept
};

// HTTP/1.1 on TCP and Unix sockets. A connection stays on one shard; the listeners live on the
// first. One request at a time per connection, pipelined ones wait in a bounded buffer. Metrics:
// dsec_http_connections, dsec_http_connections_total, dsec_http_refused_total{why}.
class Server {
 public:
  // `listen`: "127.0.0.1:7878", "[::1]:0" (numeric, port 0 = any) or "unix:/path" (a socket file
  // that nobody answers on is replaced). `shards`, `registry` and what `handler` uses must outlive
  // the server. kInvalidArgument "listen.address"; errno with "listen.bind".
  static Result<std::unique_ptr<Server>> Start(runtime::Shards& shards,
                                               const std::vector<std::string>& listen,
                                               ServerOptions options, Handler handler,
                                               metrics::Registry& registry);
  // Stop must have returned, or the shards must have been stopped.
  ~Server();

  // What it listens on, as a client takes it: "http://127.0.0.1:7878", "unix:/path".
  const std::vector<std::string>& addresses() const;
  // Takes no new connection, closes idle ones, sets attention() of the others and waits for their
  // handlers; at `deadline` it cuts the connections and cancels the handlers. Once.
  boost::asio::awaitable<void> Stop(runtime::Deadline deadline);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace dsec::http

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "rpc/socket.h"
#include "rpc/tls.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::rpc {

// Who is at the other end. The credentials are the kernel's word on who connected a Unix socket;
// over TCP they are -1. With TLS the name is proved by a certificate.
struct Peer {
  std::string address;  // "unix" or ADDRESS:PORT
  int64_t pid = -1;
  int64_t uid = -1;
  int64_t gid = -1;
  std::optional<TlsPeer> tls = std::nullopt;  // none: no TLS, or a client without a certificate
};

// What a handler knows about its call.
struct CallContext {
  runtime::Deadline deadline = runtime::Deadline::Never();  // the client's
  std::shared_ptr<const Peer> peer;
};

// The server's end of a stream both ways; valid while its handler runs.
class ServerStream {
 public:
  virtual ~ServerStream() = default;
  // The next message of the client; nullopt when it has ended its side. kUnavailable "rpc.closed"
  // when the connection has ended; kResourceExhausted "rpc.stream_overrun" when 64 messages or 8
  // MiB had waited unread.
  virtual runtime::Task<std::optional<std::string>> Receive(runtime::Deadline deadline) = 0;
  // Errors of FrameSocket::Send.
  virtual Result<void> Send(std::string payload) = 0;
};

struct ServerOptions {
  size_t max_connections = 1024;  // one more is closed at once
  // Of ListenTls: handshakes at once, in all and with one address (one more is closed at once), and
  // how long one may take.
  size_t max_handshakes = 256;
  size_t max_handshakes_per_address = 64;
  std::chrono::milliseconds handshake_time{5'000};
  // What one connection may have under way; a further request is answered kResourceExhausted
  // "rpc.busy".
  size_t max_calls_per_connection = 1024;
  size_t max_request_bytes_per_connection = size_t{64} << 20;
  // Those of ListenTls who have shown no certificate: connections, beside max_connections; how long
  // one lasts; what it may send in all. One call at a time.
  size_t max_anonymous_connections = 64;
  std::chrono::milliseconds anonymous_time{15'000};
  size_t max_anonymous_bytes = size_t{128} << 10;
};

// Serves ttrpc. Everything runs on the one executor that the server was made with, handlers too;
// calls of this class are made there as well, or before its shard has anything to do with it.
class Server {
 public:
  // A handler is cancelled when its connection ends; what must be carried on belongs elsewhere.
  using Unary = std::function<runtime::Task<std::string>(std::string payload, CallContext context)>;
  // Ends the stream by returning. `payload` is the first message where the method takes one.
  using Streaming = std::function<runtime::Task<void>(std::string payload, ServerStream& stream,
                                                      CallContext context)>;

  explicit Server(runtime::Executor executor, ServerOptions options = {});
  // Requires that Stop has completed.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Before Listen.
  void Register(std::string service, std::string method, Unary handler);
  void RegisterStream(std::string service, std::string method, Streaming handler);

  // Any number of listeners. kUnavailable "rpc.listen" with the errno. The socket file must not
  // exist; it is made with mode 0600 and removed by Stop.
  Result<void> ListenUnix(const std::string& path);
  // An address, not a name. Port 0 picks one; returns the port.
  Result<uint16_t> ListenTcp(const std::string& address, uint16_t port);
  // The same with TLS; each handshake uses what the holder has then.
  Result<uint16_t> ListenTls(const std::string& address, uint16_t port,
                             std::shared_ptr<const TlsHolder> holder, TlsExpect expect);
  // No new connection; a new request is answered kUnavailable "rpc.stopping". Waits until the
  // deadline for calls under way and for clients to take their answers, then closes the
  // connections, cancels what still runs and waits for that.
  boost::asio::awaitable<void> Stop(runtime::Deadline deadline);

 private:
  class Connection;
  struct State;

  struct Tls {
    std::shared_ptr<const TlsHolder> holder;
    TlsExpect expect;
  };

  static void Accepted(const std::shared_ptr<State>& state, FrameSocket::Socket socket, Peer peer,
                       std::unique_ptr<TlsSession> session);
  static boost::asio::awaitable<void> Secure(std::shared_ptr<State> state,
                                             FrameSocket::Socket socket, Peer peer,
                                             std::shared_ptr<const Tls> tls, uint64_t id);
  Result<uint16_t> Listen(const std::string& address, uint16_t port,
                          std::shared_ptr<const Tls> tls);
  template <typename Acceptor>
  void Start(std::shared_ptr<Acceptor> acceptor, std::shared_ptr<const Tls> tls = nullptr);
  template <typename Acceptor>
  static boost::asio::awaitable<void> AcceptLoop(std::shared_ptr<State> state,
                                                 std::shared_ptr<Acceptor> acceptor,
                                                 std::shared_ptr<const Tls> tls);

  const std::shared_ptr<State> state_;
};

}  // namespace dsec::rpc

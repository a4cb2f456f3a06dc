// SPDX-License-Identifier: Apache-2.0
#include "rpc/server.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/system_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>
#include <map>
#include <set>
#include <unordered_map>

#include "base/log.h"
#include "rpc/server_stream.h"
#include "rpc/socket.h"
#include "rpc/tls_session.h"
#include "runtime/gate.h"
#include "runtime/shards.h"

namespace dsec::rpc {
namespace {

namespace asio = boost::asio;
using runtime::Deadline;
using runtime::Task;
using LocalAcceptor = asio::local::stream_protocol::acceptor;
using TcpAcceptor = asio::ip::tcp::acceptor;

// Before accepting is tried again after a failure such as EMFILE: no event tells when to.
constexpr std::chrono::milliseconds kAcceptPause(50);

Error ListenError(std::string_view name, const boost::system::error_code& error) {
  return Error(Code::kUnavailable, "rpc.listen",
               fmt::format("listen on {}: {}", name, error.message()))
      .WithErrno(error.value());
}

Peer PeerOf(asio::local::stream_protocol::socket& socket) {
  Peer peer{.address = "unix"};
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(socket.native_handle(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0) {
    peer.pid = credentials.pid;
    peer.uid = credentials.uid;
    peer.gid = credentials.gid;
  }
  return peer;
}

Peer PeerOf(asio::ip::tcp::socket& socket) {
  boost::system::error_code error;
  const auto endpoint = socket.remote_endpoint(error);
  socket.set_option(asio::ip::tcp::no_delay(true), error);
  socket.set_option(asio::socket_base::keep_alive(true), error);
  return {.address = fmt::format("{}:{}", endpoint.address().to_string(), endpoint.port())};
}

std::string HostOf(const Peer& peer) { return peer.address.substr(0, peer.address.rfind(':')); }

}  // namespace

struct Server::State {
  using Name = std::pair<std::string, std::string>;

  State(runtime::Executor on, const ServerOptions& with) : executor(std::move(on)), options(with) {}

  const runtime::Executor executor;
  const ServerOptions options;
  std::map<Name, Unary> unaries;
  std::map<Name, Streaming> streamings;
  std::vector<std::function<void()>> close_listeners;
  std::vector<std::string> paths;
  std::set<std::shared_ptr<Connection>> connections;
  std::map<uint64_t, runtime::Running> handshakes;  // under way
  std::map<std::string, size_t> handshakes_of;      // an address without its port
  uint64_t next_handshake = 0;
  size_t anonymous = 0;  // of connections
  bool stopping = false;
  size_t calls = 0;           // under way, on all connections
  runtime::AsyncEvent quiet;  // set when `calls` falls to 0
  runtime::Gate gate;         // accept loops, connections and calls
};

// One client. Its read loop lasts as long as the connection; each call is a coroutine of its own.
class Server::Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<State> state, FrameSocket::Socket socket, Peer peer,
             std::unique_ptr<TlsSession> tls)
      : state_(std::move(state)),
        peer_(std::make_shared<const Peer>(std::move(peer))),
        anonymous_(tls != nullptr && !peer_->tls),
        may_send_(state_->options.max_anonymous_bytes),
        age_(state_->executor),
        certificate_end_(state_->executor),
        socket_(std::make_shared<FrameSocket>(
            std::move(socket),
            anonymous_ ? [this](const FrameHeader& header) { return Afford(header); }
                       : FrameParser::Filter(),
            std::move(tls))) {}

  // Once, before anything is read.
  void Watch() {
    const auto close_at = [this](auto& timer, std::string_view why) {
      timer.async_wait([weak = weak_from_this(), why](const boost::system::error_code& error) {
        const auto self = weak.lock();
        if (error || !self) return;
        log::Info("rpc.connection_ended", {{"peer", self->peer_->address}, {"why", why}});
        self->Close();
      });
    };
    if (anonymous_) {
      age_.expires_after(state_->options.anonymous_time);
      close_at(age_, "no certificate");
    } else if (peer_->tls && peer_->tls->ends_unix_ms > 0) {
      certificate_end_.expires_at(std::chrono::system_clock::time_point(
          std::chrono::milliseconds(peer_->tls->ends_unix_ms)));
      close_at(certificate_end_, "the certificate has ended");
    }
  }

  static asio::awaitable<void> Serve(std::shared_ptr<Connection> self) {
    for (;;) {
      auto frame = co_await self->socket_->Receive();
      auto taken =
          frame.ok() ? self->OnFrame(std::move(*frame)) : Result<void>(std::move(frame).error());
      if (taken.ok()) continue;
      if (taken.error().reason() != "rpc.closed") {
        log::Warn("rpc.protocol_error", {{"peer", self->peer_->address}, {"error", taken.error()}});
      }
      break;
    }
    self->Close();
    if (self->anonymous_) --self->state_->anonymous;
    self->state_->connections.erase(self);
  }

  void Close() {
    age_.cancel();
    certificate_end_.cancel();
    socket_->Close();
    for (const auto& [id, call] : calls_) {
      if (call.stream) call.stream->OnClosed();
      call.running.Cancel();
    }
  }

  FrameSocket& socket() { return *socket_; }
  bool anonymous() const { return anonymous_; }

 private:
  // Whether one without a certificate may send this frame, too.
  Result<bool> Afford(const FrameHeader& header) {
    const size_t size = kFrameHeaderSize + header.length;
    if (size > may_send_) {
      return Error(Code::kResourceExhausted, "rpc.frame",
                   "more bytes than a client without a certificate may send");
    }
    may_send_ -= size;
    return true;
  }

  struct Call {
    size_t bytes = 0;
    std::shared_ptr<SocketServerStream> stream;  // null for a unary call
    runtime::Running running;
  };

  // Takes its call off the books, whichever way the coroutine goes.
  class Ending {
   public:
    Ending(std::shared_ptr<Connection> connection, uint32_t id)
        : connection_(std::move(connection)), id_(id) {}
    Ending(Ending&&) noexcept = default;
    Ending& operator=(Ending&&) = delete;
    ~Ending() {
      if (connection_) connection_->EndCall(id_);
    }

   private:
    std::shared_ptr<Connection> connection_;
    uint32_t id_;
  };

  Result<void> OnFrame(Frame frame) {
    if (frame.stream % 2 == 0) return Nonsense("an even stream id", frame);
    switch (frame.type) {
      case MessageType::kRequest:
        if (frame.stream <= last_stream_) return Nonsense("a stream id that does not grow", frame);
        last_stream_ = frame.stream;
        OnRequest(frame);
        return Ok();
      case MessageType::kData: {
        if (frame.stream > last_stream_) return Nonsense("data before its request", frame);
        // That of calls which have ended meanwhile is dropped.
        const auto found = calls_.find(frame.stream);
        if (found != calls_.end() && found->second.stream) {
          found->second.stream->OnData(std::move(frame));
        }
        return Ok();
      }
      case MessageType::kResponse:
        break;
    }
    return Nonsense("a response", frame);
  }

  static Error Nonsense(std::string_view what, const Frame& frame) {
    return Error(Code::kInvalidArgument, "rpc.frame",
                 fmt::format("the client sent {} (stream {})", what, frame.stream));
  }

  void OnRequest(const Frame& frame) {
    const uint32_t id = frame.stream;
    auto request = ParseRequest(frame.payload);
    if (!request.ok()) return Answer(id, std::move(request).error());
    if (state_->stopping) {
      return Answer(id, Error(Code::kUnavailable, "rpc.stopping", "the server is stopping"));
    }
    const size_t bytes = request->payload.size();
    const ServerOptions& options = state_->options;
    const size_t most_calls = anonymous_ ? 1 : options.max_calls_per_connection;
    if (calls_.size() >= most_calls ||
        request_bytes_ + bytes > options.max_request_bytes_per_connection) {
      return Answer(id, Error(Code::kResourceExhausted, "rpc.busy",
                              fmt::format("{} calls with {} bytes of this connection are under way",
                                          calls_.size(), request_bytes_)));
    }
    CallContext context{.peer = peer_};
    if (request->timeout_nanos > 0) {
      context.deadline = Deadline::After(std::chrono::nanoseconds(request->timeout_nanos));
    }
    const State::Name name(request->service, request->method);
    Call call;
    call.bytes = bytes;
    Ending ending(shared_from_this(), id);
    asio::awaitable<void> work;
    if (const auto unary = state_->unaries.find(name); unary != state_->unaries.end()) {
      work = RunUnary(std::move(ending), shared_from_this(), id,
                      unary->second(std::move(request->payload), context));
    } else if (const auto streaming = state_->streamings.find(name);
               streaming != state_->streamings.end()) {
      call.stream =
          std::make_shared<SocketServerStream>(socket_, id, (frame.flags & kFlagRemoteClosed) != 0);
      work = RunStream(std::move(ending), shared_from_this(), id, call.stream,
                       streaming->second(std::move(request->payload), *call.stream, context));
    } else {
      return Answer(id, Error(Code::kFailedPrecondition, "rpc.unimplemented",
                              fmt::format("no method {}/{}", name.first, name.second)));
    }
    calls_.emplace(id, std::move(call));
    request_bytes_ += bytes;
    ++state_->calls;
    auto running = runtime::SpawnCancellable(state_->gate, state_->executor, std::move(work));
    if (const auto entry = calls_.find(id); entry != calls_.end()) {
      entry->second.running = std::move(running);
    }
  }

  // The task lives as long as the Ending: both die with the coroutine.
  static asio::awaitable<void> RunUnary([[maybe_unused]] Ending ending,
                                        std::shared_ptr<Connection> self, uint32_t id,
                                        Task<std::string> task) {
    auto result = co_await runtime::internal::Caught(std::move(task));
    if (result.ok()) {
      self->Answer(id, SerializeResponse(*result));
    } else {
      self->Answer(id, std::move(result).error());
    }
  }

  static asio::awaitable<void> RunStream([[maybe_unused]] Ending ending,
                                         std::shared_ptr<Connection> self, uint32_t id,
                                         [[maybe_unused]] std::shared_ptr<ServerStream> stream,
                                         Task<void> task) {
    auto result = co_await runtime::internal::Caught(std::move(task));
    if (result.ok()) {
      self->Answer(id, std::string());
    } else {
      self->Answer(id, std::move(result).error());
    }
  }

  void EndCall(uint32_t id) {
    const auto found = calls_.find(id);
    if (found == calls_.end()) return;
    request_bytes_ -= found->second.bytes;
    calls_.erase(found);
    if (--state_->calls == 0) state_->quiet.Set();
  }

  void Answer(uint32_t id, const Error& error) { Answer(id, SerializeError(error)); }
  void Answer(uint32_t id, const std::string& response) {
    auto sent = socket_->Send(id, MessageType::kResponse, 0, response);
    if (sent.ok()) return;
    if (sent.error().reason() == "rpc.too_large") {
      sent = socket_->Send(
          id, MessageType::kResponse, 0,
          SerializeError(Error(Code::kInternal, "rpc.too_large", sent.error().message())));
      if (sent.ok()) return;
    }
    // A client that takes no answers is cut off.
    if (sent.error().reason() != "rpc.closed") {
      log::Warn("rpc.client_cut_off", {{"peer", peer_->address}, {"error", sent.error()}});
    }
    socket_->Close();
  }

  const std::shared_ptr<State> state_;
  const std::shared_ptr<const Peer> peer_;
  const bool anonymous_;
  size_t may_send_;  // when anonymous
  asio::steady_timer age_;
  // Of the wall clock, which is looked at again and again while it waits.
  asio::system_timer certificate_end_;
  const std::shared_ptr<FrameSocket> socket_;
  uint32_t last_stream_ = 0;
  size_t request_bytes_ = 0;  // of calls under way
  std::unordered_map<uint32_t, Call> calls_;
};

Server::Server(runtime::Executor executor, ServerOptions options)
    : state_(std::make_shared<State>(std::move(executor), options)) {}

Server::~Server() = default;

void Server::Register(std::string service, std::string method, Unary handler) {
  state_->unaries[{std::move(service), std::move(method)}] = std::move(handler);
}

void Server::RegisterStream(std::string service, std::string method, Streaming handler) {
  state_->streamings[{std::move(service), std::move(method)}] = std::move(handler);
}

void Server::Accepted(const std::shared_ptr<State>& state, FrameSocket::Socket socket, Peer peer,
                      std::unique_ptr<TlsSession> session) {
  const bool anonymous = session != nullptr && !peer.tls;
  const size_t others = anonymous ? state->anonymous : state->connections.size() - state->anonymous;
  if (others >=
      (anonymous ? state->options.max_anonymous_connections : state->options.max_connections)) {
    log::Warn("rpc.too_many_connections", {{"peer", peer.address}, {"anonymous", anonymous}});
    return;
  }
  auto connection =
      std::make_shared<Connection>(state, std::move(socket), std::move(peer), std::move(session));
  state->connections.insert(connection);
  if (anonymous) ++state->anonymous;
  connection->Watch();
  if (!runtime::Spawn(state->gate, state->executor, Connection::Serve(connection))) {
    if (anonymous) --state->anonymous;
    state->connections.erase(connection);
  }
}

asio::awaitable<void> Server::Secure(std::shared_ptr<State> state, FrameSocket::Socket socket,
                                     Peer peer, std::shared_ptr<const Tls> tls, uint64_t id) {
  auto shaken =
      co_await ShakeHands(std::move(socket), tls->holder->Get(), TlsSide::kServer, tls->expect,
                          peer.address, Deadline::After(state->options.handshake_time));
  state->handshakes.erase(id);
  if (const auto of = state->handshakes_of.find(HostOf(peer));
      of != state->handshakes_of.end() && --of->second == 0) {
    state->handshakes_of.erase(of);
  }
  if (!shaken.ok()) {
    log::Warn("rpc.tls_refused", {{"peer", peer.address}, {"error", shaken.error()}});
    co_return;
  }
  if (state->stopping) co_return;
  peer.tls = shaken->session->peer();
  Accepted(state, std::move(shaken->socket), std::move(peer), std::move(shaken->session));
}

template <typename Acceptor>
void Server::Start(std::shared_ptr<Acceptor> acceptor, std::shared_ptr<const Tls> tls) {
  state_->close_listeners.push_back([acceptor] {
    boost::system::error_code ignored;
    acceptor->close(ignored);
  });
  runtime::Spawn(state_->gate, state_->executor,
                 AcceptLoop(state_, std::move(acceptor), std::move(tls)));
}

template <typename Acceptor>
asio::awaitable<void> Server::AcceptLoop(std::shared_ptr<State> state,
                                         std::shared_ptr<Acceptor> acceptor,
                                         std::shared_ptr<const Tls> tls) {
  while (acceptor->is_open()) {
    auto [error, socket] = co_await acceptor->async_accept(asio::as_tuple(asio::use_awaitable));
    if (!acceptor->is_open()) co_return;
    if (!error) {
      Peer peer = PeerOf(socket);
      FrameSocket::Socket stream(std::move(socket));
      if (tls == nullptr) {
        Accepted(state, std::move(stream), std::move(peer), nullptr);
      } else if (size_t& of = state->handshakes_of[HostOf(peer)];
                 state->handshakes.size() >= state->options.max_handshakes ||
                 of >= state->options.max_handshakes_per_address) {
        log::Warn("rpc.too_many_handshakes", {{"peer", peer.address}});
        if (of == 0) state->handshakes_of.erase(HostOf(peer));
      } else {
        ++of;
        const uint64_t id = state->next_handshake++;
        state->handshakes.emplace(id, runtime::Running());
        auto running =
            runtime::SpawnCancellable(state->gate, state->executor,
                                      Secure(state, std::move(stream), std::move(peer), tls, id));
        if (const auto entry = state->handshakes.find(id); entry != state->handshakes.end()) {
          entry->second = std::move(running);
        }
      }
      continue;
    }
    log::Warn("rpc.accept_failed", {{"error", error.message()}});
    (void)co_await runtime::SleepUntil(Deadline::After(kAcceptPause));
  }
}

Result<void> Server::ListenUnix(const std::string& path) {
  boost::system::error_code error;
  auto acceptor = std::make_shared<LocalAcceptor>(state_->executor);
  if (path.empty() || path.size() >= sizeof(sockaddr_un::sun_path)) {
    return ListenError(path, asio::error::name_too_long);
  }
  acceptor->open(asio::local::stream_protocol(), error);
  if (!error) acceptor->bind(asio::local::stream_protocol::endpoint(path), error);
  if (error) return ListenError(path, error);
  state_->paths.push_back(path);
  // Nobody can connect before listen.
  if (::chmod(path.c_str(), 0600) != 0) {
    error = boost::system::error_code(errno, boost::system::system_category());
  }
  if (!error) acceptor->listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    ::unlink(path.c_str());
    state_->paths.pop_back();
    return ListenError(path, error);
  }
  Start(std::move(acceptor));
  return Ok();
}

Result<uint16_t> Server::ListenTcp(const std::string& address, uint16_t port) {
  return Listen(address, port, nullptr);
}

Result<uint16_t> Server::ListenTls(const std::string& address, uint16_t port,
                                   std::shared_ptr<const TlsHolder> holder, TlsExpect expect) {
  return Listen(address, port,
                std::make_shared<const Tls>(Tls{std::move(holder), std::move(expect)}));
}

Result<uint16_t> Server::Listen(const std::string& address, uint16_t port,
                                std::shared_ptr<const Tls> tls) {
  const std::string name = fmt::format("{}:{}", address, port);
  boost::system::error_code error;
  const auto literal = asio::ip::make_address(address, error);
  if (error) return ListenError(name, error);
  const asio::ip::tcp::endpoint endpoint(literal, port);
  auto acceptor = std::make_shared<TcpAcceptor>(state_->executor);
  acceptor->open(endpoint.protocol(), error);
  if (!error) acceptor->set_option(TcpAcceptor::reuse_address(true), error);
  if (!error) acceptor->bind(endpoint, error);
  if (!error) acceptor->listen(asio::socket_base::max_listen_connections, error);
  asio::ip::tcp::endpoint bound;
  if (!error) bound = acceptor->local_endpoint(error);
  if (error) return ListenError(name, error);
  Start(std::move(acceptor), std::move(tls));
  return bound.port();
}

asio::awaitable<void> Server::Stop(Deadline deadline) {
  const auto state = state_;
  state->stopping = true;
  for (const auto& close : state->close_listeners) close();
  state->close_listeners.clear();
  for (const std::string& path : state->paths) ::unlink(path.c_str());
  state->paths.clear();
  for (const auto& [id, running] : state->handshakes) running.Cancel();
  while (state->calls > 0) {
    state->quiet.Reset();
    auto waited = co_await state->quiet.Wait(deadline);
    if (!waited.ok()) break;
  }
  const auto connections = state->connections;
  for (const auto& connection : connections) {
    (void)co_await connection->socket().Flushed(deadline);
    connection->Close();
  }
  co_await state->gate.Close();
}

}  // namespace dsec::rpc

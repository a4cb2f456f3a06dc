// SPDX-License-Identifier: Apache-2.0
#include "http/server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>

#include "base/check.h"
#include "base/log.h"
#include "base/rng.h"
#include "http/address.h"
#include "http/connection.h"
#include "http/error_body.h"
#include "runtime/gate.h"
#include "runtime/periodic.h"

namespace dsec::http {
namespace {

constexpr auto kTuple = boost::asio::as_tuple(boost::asio::use_awaitable);
constexpr int kAcceptsAtOnce = 64;

struct Listener {
  Listener(const runtime::Executor& executor, int fd, bool tcp_socket)
      : descriptor(executor, fd), tcp(tcp_socket) {}
  boost::asio::posix::stream_descriptor descriptor;
  const bool tcp;
};

// Finds a peer that has gone without a word within half a minute while nothing is sent.
void SetTcpOptions(int fd) {
  const auto set = [fd](int level, int name, int value) {
    (void)::setsockopt(fd, level, name, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

boost::asio::awaitable<void> SweepShard(std::shared_ptr<ShardState> state) {
  state->Sweep(Clock::System().Mono());
  co_return;
}

}  // namespace

struct Server::Impl {
  Impl(runtime::Shards& runtime_shards, ServerOptions options, Handler handler,
       metrics::Registry& registry)
      : shards(runtime_shards), shared(std::make_shared<ServerShared>()) {
    shared->options = options;
    shared->handler = std::move(handler);
    shared->request_prefix =
        fmt::format("{:08x}-", static_cast<uint32_t>(Rng::FromSystem().Next()));
    shared->open =
        &registry.GetGauge("dsec_http_connections", "Open connections of the HTTP server.");
    accepted = &registry.GetCounter("dsec_http_connections_total", "Connections accepted.");
    constexpr std::string_view kRefused = "dsec_http_refused_total";
    constexpr std::string_view kHelp =
        "Connections and requests answered 503 because of a bound of the server.";
    refused_connections = &registry.GetCounter(kRefused, kHelp, {{"why", "connections"}});
    shared->refused_in_flight = &registry.GetCounter(kRefused, kHelp, {{"why", "in_flight"}});
    for (size_t i = 0; i < shards.size(); ++i) {
      states.push_back(std::make_shared<ShardState>());
      states.back()->date = HttpDate(Clock::System().Wall());
    }
  }

  Result<void> Open(std::string_view text);
  boost::asio::awaitable<void> Accept(std::shared_ptr<Listener> listener);
  void Take(int fd, bool tcp);

  runtime::Shards& shards;
  const std::shared_ptr<ServerShared> shared;
  runtime::Gate gate;
  std::vector<std::shared_ptr<ShardState>> states;
  std::vector<std::unique_ptr<runtime::Periodic>> sweepers;
  std::vector<std::shared_ptr<Listener>> listeners;  // used on shard 0
  std::vector<std::string> addresses;
  std::vector<std::string> socket_files;
  size_t next_shard = 0;  // shard 0
  metrics::Counter* accepted = nullptr;
  metrics::Counter* refused_connections = nullptr;
};

Result<void> Server::Impl::Open(std::string_view text) {
  DSEC_TRY(const Address address, ParseAddress(text));
  DSEC_TRY(const int fd, Listen(address));
  listeners.push_back(std::make_shared<Listener>(shards.at(0), fd, !address.is_unix()));
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    return Error::FromErrno(errno, "listen.bind", "getsockname");
  }
  if (address.is_unix()) {
    addresses.push_back(FormatAddress(bound));
    socket_files.emplace_back(reinterpret_cast<const sockaddr_un&>(bound).sun_path);
  } else {
    addresses.push_back("http://" + FormatAddress(bound));
  }
  return Ok();
}

boost::asio::awaitable<void> Server::Impl::Accept(std::shared_ptr<Listener> listener) {
  while (!shared->stopping.load(std::memory_order_relaxed)) {
    const auto [error] = co_await listener->descriptor.async_wait(
        boost::asio::posix::stream_descriptor::wait_read, kTuple);
    if (error) co_return;
    for (int i = 0; i < kAcceptsAtOnce; ++i) {
      const int fd = ::accept4(listener->descriptor.native_handle(), nullptr, nullptr,
                               SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd >= 0) {
        Take(fd, listener->tcp);
        continue;
      }
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) break;
      // Out of descriptors or memory: the kernel tells nobody when there are some again.
      log::Warn("http.accept_failed", {{"errno", errno}});
      (void)co_await runtime::SleepUntil(runtime::Deadline::After(std::chrono::milliseconds(100)));
      break;
    }
  }
}

void Server::Impl::Take(int fd, bool tcp) {
  accepted->Add();
  if (shared->connections.fetch_add(1, std::memory_order_relaxed) >=
      shared->options.max_connections) {
    shared->connections.fetch_sub(1, std::memory_order_relaxed);
    refused_connections->Add();
    const Error error(Code::kUnavailable, "http.overloaded", "too many connections");
    const std::string body = ErrorBody(error, "none");
    const std::string reply = fmt::format(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: "
        "{}\r\n"
        "Retry-After: 1\r\nConnection: close\r\n\r\n{}",
        body.size(), body);
    (void)::send(fd, reply.data(), reply.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)::shutdown(fd, SHUT_WR);
    ::close(fd);
    return;
  }
  if (tcp) SetTcpOptions(fd);
  const size_t index = next_shard++ % shards.size();
  const boost::asio::generic::stream_protocol protocol(tcp ? AF_INET : AF_UNIX, 0);
  auto connection = std::make_shared<Connection>(Connection::Socket(shards.at(index), protocol, fd),
                                                 tcp, shared, states[index]);
  auto running = runtime::SpawnCancellable(gate, shards.at(index), Connection::Serve(connection));
  boost::asio::post(shards.at(index),
                    [connection = std::move(connection), running = std::move(running)]() mutable {
                      connection->SetRunning(std::move(running));
                    });
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() = default;

Result<std::unique_ptr<Server>> Server::Start(runtime::Shards& shards,
                                              const std::vector<std::string>& listen,
                                              ServerOptions options, Handler handler,
                                              metrics::Registry& registry) {
  auto impl = std::make_unique<Impl>(shards, options, std::move(handler), registry);
  for (const std::string& text : listen) DSEC_TRY_VOID(impl->Open(text));
  for (size_t i = 0; i < shards.size(); ++i) {
    impl->sweepers.push_back(std::make_unique<runtime::Periodic>(
        shards.at(i), "http.sweep", options.sweep_period,
        [state = impl->states[i]] { return SweepShard(state); }));
  }
  for (const auto& listener : impl->listeners) {
    (void)runtime::Spawn(impl->gate, shards.at(0), impl->Accept(listener));
  }
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

const std::vector<std::string>& Server::addresses() const { return impl_->addresses; }

boost::asio::awaitable<void> Server::Stop(runtime::Deadline deadline) {
  Impl& impl = *impl_;
  impl.shared->stopping.store(true, std::memory_order_relaxed);
  const auto close_listeners = [](Impl& of) -> runtime::Task<void> {
    for (const auto& listener : of.listeners) listener->descriptor.close();
    for (const std::string& file : of.socket_files) (void)::unlink(file.c_str());
    co_return Ok();
  };
  (void)co_await runtime::On(impl.shards.at(0), close_listeners(impl));
  const auto tell = [](ShardState& state, MonoTime cut_at) -> runtime::Task<void> {
    state.cut_at = cut_at;
    for (Connection* connection : state.connections) connection->Stop();
    co_return Ok();
  };
  for (size_t i = 0; i < impl.shards.size(); ++i) {
    (void)co_await runtime::On(impl.shards.at(i), tell(*impl.states[i], deadline.at()));
  }
  co_await impl.gate.Close();
  for (const auto& sweeper : impl.sweepers) co_await sweeper->Join();
}

}  // namespace dsec::http

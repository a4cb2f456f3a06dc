// SPDX-License-Identifier: Apache-2.0
#include "rpc/dial.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>
#include <cstring>
#include <vector>

#include "runtime/async_event.h"
#include "runtime/shards.h"

namespace dsec::rpc {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using runtime::Deadline;
using runtime::Task;
using Socket = FrameSocket::Socket;

constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);

Error Failed(std::string_view name, std::string_view why, int sys_errno) {
  return Error(Code::kUnavailable, "rpc.connect", fmt::format("connect to {}: {}", name, why))
      .WithErrno(sys_errno);
}

Error TooLate(std::string_view name) {
  return Error(Code::kDeadlineExceeded, "rpc.deadline",
               fmt::format("connect to {}: no connection in time", name));
}

// What a resolver finds. Shared with the lookup, which nothing can stop and the deadline leaves
// behind.
struct Lookup {
  runtime::AsyncEvent done;
  boost::system::error_code error;
  std::vector<tcp::endpoint> endpoints;
};

asio::awaitable<void> Resolve(runtime::Executor executor, std::string host, uint16_t port,
                              std::shared_ptr<Lookup> lookup) {
  tcp::resolver resolver(executor);
  const auto [error, found] = co_await resolver.async_resolve(host, std::to_string(port), kTuple);
  lookup->error = error;
  for (const auto& entry : found) lookup->endpoints.push_back(entry.endpoint());
  lookup->done.Set();
}

// Closing the socket is what ends a connect that takes too long.
Task<Socket> DialEndpoint(runtime::Executor executor, tcp::endpoint endpoint, std::string name,
                          Deadline deadline) {
  const auto socket = std::make_shared<tcp::socket>(executor);
  asio::steady_timer timer(executor, deadline.at());
  timer.async_wait([weak = std::weak_ptr(socket)](const boost::system::error_code& error) {
    const auto pending = weak.lock();
    boost::system::error_code ignored;
    if (!error && pending) pending->close(ignored);
  });
  auto [error] = co_await socket->async_connect(endpoint, kTuple);
  if (!socket->is_open()) co_return TooLate(name);
  if (error == asio::error::operation_aborted) {
    co_return Error(Code::kCancelled, "task.cancelled", "the task was cancelled");
  }
  // Requests and answers are small and each is waited for.
  if (!error) socket->set_option(tcp::no_delay(true), error);
  if (!error) socket->set_option(asio::socket_base::keep_alive(true), error);
  if (error) co_return Failed(name, error.message(), error.value());
  co_return Socket(std::move(*socket));
}

}  // namespace

Task<Socket> DialUnix(runtime::Executor executor, std::string path, Deadline deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path) ||
      path.find('\0') != std::string::npos) {
    co_return Error(Code::kInvalidArgument, "rpc.connect",
                    fmt::format("socket path \"{}\" must have 1 to {} bytes and no NUL", path,
                                sizeof(address.sun_path) - 1));
  }
  path.copy(address.sun_path, path.size());
  for (std::chrono::milliseconds pause{1};;
       pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) co_return Error::FromErrno(errno, "rpc.connect", "socket");
    boost::system::error_code error;
    Socket socket(executor);
    socket.assign(asio::generic::stream_protocol(AF_UNIX, 0), fd, error);
    if (error) {
      ::close(fd);
      co_return Failed(path, error.message(), error.value());
    }
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      co_return std::move(socket);
    }
    const int sys_errno = errno;
    if (sys_errno != EAGAIN) co_return Failed(path, strerrordesc_np(sys_errno), sys_errno);
    // The listener's backlog is full (connect(2)). The kernel does not tell when there is room.
    socket.close(error);
    auto paused = co_await runtime::SleepUntil(Deadline::After(pause).Sooner(deadline));
    if (!paused.ok()) co_return std::move(paused).error();
    if (deadline.Expired()) co_return TooLate(path);
  }
}

Task<Socket> DialTcp(runtime::Executor executor, std::string host, uint16_t port,
                     Deadline deadline) {
  std::string name = fmt::format("{}:{}", host, port);
  const auto lookup = std::make_shared<Lookup>();
  const auto literal = asio::ip::make_address(host, lookup->error);
  if (!lookup->error) {
    lookup->endpoints.emplace_back(literal, port);
  } else {
    runtime::internal::StartDetached(executor, Resolve(executor, std::move(host), port, lookup));
    auto resolved = co_await lookup->done.Wait(deadline);
    if (!resolved.ok()) {
      if (resolved.error().code() == Code::kDeadlineExceeded) co_return TooLate(name);
      co_return std::move(resolved).error();
    }
    if (lookup->error) co_return Failed(name, lookup->error.message(), 0);
  }
  Error error = Failed(name, "the name has no address", 0);
  for (const tcp::endpoint& endpoint : lookup->endpoints) {
    auto socket = co_await DialEndpoint(executor, endpoint, name, deadline);
    if (socket.ok()) co_return std::move(socket);
    error = std::move(socket).error();
    if (error.code() != Code::kUnavailable) break;
  }
  co_return error;
}

}  // namespace dsec::rpc

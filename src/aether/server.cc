// SPDX-License-Identifier: Apache-2.0
#include "aether/server.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace dsec::aether {
namespace {

constexpr size_t kReadBytes = 64 << 10;
constexpr std::chrono::milliseconds kAcceptPause(100);

}  // namespace

Server::Server(Loop& loop, os::UniqueFd listener, Handler handler,
               std::function<void(uint64_t)> dropped)
    : loop_(loop),
      listener_(std::move(listener)),
      watch_(loop, listener_.get(), EPOLLIN, [this](uint32_t) { Accept(); }),
      handler_(std::move(handler)),
      dropped_(std::move(dropped)) {}

void Server::Accept() {
  os::UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // The connection stays in the queue, and the listener readable.
      watch_.Set(0);
      accept_again_ = Timer(loop_, loop_.now() + kAcceptPause, [this] { watch_.Set(EPOLLIN); });
    }
    return;
  }
  if (connections_.size() >= kMaxConnections) {
    // The oldest that has not said who it is, else the oldest: an edge that came back is never shut
    // out by dead ones.
    uint64_t victim = connections_.begin()->first;
    for (const auto& [id, connection] : connections_) {
      if (!connection->authenticated) {
        victim = id;
        break;
      }
    }
    Drop(victim);
  }
  auto connection = std::make_unique<Connection>();
  uint64_t id = next_id_++;
  connection->id = id;
  connection->socket = std::move(socket);
  connection->watch = FdWatch(loop_, connection->socket.get(), EPOLLIN,
                              [this, id](uint32_t events) { OnEvents(id, events); });
  connections_[id] = std::move(connection);
}

void Server::OnEvents(uint64_t id, uint32_t events) {
  auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  if ((events & EPOLLOUT) != 0 && !Flush(connection)) return Drop(id);
  if ((events & EPOLLIN) != 0) return ReadFrom(connection);
  if ((events & (EPOLLERR | EPOLLHUP)) != 0) return Drop(id);
  // Room may have come for calls that were held back.
  HandleFrames(id);
}

void Server::ReadFrom(Connection& connection) {
  // Of the process and not of the call: only the pages that a frame fills are ever touched.
  static std::array<char, kReadBytes> buffer;
  uint64_t id = connection.id;
  ssize_t size = ::recv(connection.socket.get(), buffer.data(), buffer.size(), 0);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size <= 0) return Drop(id);
  connection.parser.Feed(std::string_view(buffer.data(), static_cast<size_t>(size)));
  HandleFrames(id);
}

void Server::HandleFrames(uint64_t id) {
  while (true) {
    // Looked up each time: a handler may have closed it.
    auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Connection& connection = *found->second;
    if (connection.closing || connection.out.size() - connection.sent > kMaxUnsent) break;
    Result<std::optional<rpc::Frame>> frame = connection.parser.Next();
    if (!frame.ok()) return Drop(id);
    if (!frame->has_value()) break;
    if ((*frame)->type != rpc::MessageType::kRequest) continue;  // the service has no streams
    uint32_t stream = (*frame)->stream;
    Result<rpc::Request> request = rpc::ParseRequest((*frame)->payload);
    frame->reset();
    ++connection.pending;
    if (!request.ok()) {
      Answer(id, stream, std::move(request).error());
    } else if (connection.pending > kMaxPendingCalls) {
      Answer(id, stream,
             Error(Code::kResourceExhausted, "rpc.too_many_calls",
                   fmt::format("{} calls of this connection are under way", kMaxPendingCalls)));
    } else {
      handler_(
          {id, &connection.authenticated, std::move(*request),
           [this, id, stream](const Result<std::string>& result) { Answer(id, stream, result); }});
    }
  }
  auto found = connections_.find(id);
  if (found != connections_.end()) UpdateInterest(*found->second);
}

void Server::Answer(uint64_t id, uint32_t stream, const Result<std::string>& result) {
  auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  --connection.pending;
  std::string response =
      result.ok() ? rpc::SerializeResponse(*result) : rpc::SerializeError(result.error());
  if (response.size() > rpc::kMaxFramePayload) {
    response = rpc::SerializeError(Error(Code::kInternal, "rpc.too_large",
                                         fmt::format("the answer has {} bytes", response.size())));
  }
  rpc::AppendFrame(connection.out, stream, rpc::MessageType::kResponse, 0, response);
  // Failing to send is found again, and acted on, by the loop: this may run inside the handler of
  // another connection.
  if (Flush(connection)) UpdateInterest(connection);
}

bool Server::Flush(Connection& connection) {
  while (connection.sent < connection.out.size()) {
    ssize_t size = ::send(connection.socket.get(), connection.out.data() + connection.sent,
                          connection.out.size() - connection.sent, MSG_NOSIGNAL);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return errno == EAGAIN;
    connection.sent += static_cast<size_t>(size);
  }
  connection.out = std::string();
  connection.sent = 0;
  return true;
}

void Server::UpdateInterest(Connection& connection) {
  size_t unsent = connection.out.size() - connection.sent;
  if (connection.closing && unsent == 0) {
    uint64_t id = connection.id;
    loop_.Post([this, id] { Drop(id); });
    return;
  }
  uint32_t events = unsent > 0 ? EPOLLOUT : 0u;
  if (unsent <= kMaxUnsent && !connection.closing) events |= EPOLLIN;
  connection.watch.Set(events);
}

void Server::CloseAfterReplies(uint64_t caller) {
  auto found = connections_.find(caller);
  if (found == connections_.end()) return;
  found->second->closing = true;
  UpdateInterest(*found->second);
}

bool Server::Flushed() const {
  for (const auto& [id, connection] : connections_) {
    if (connection->sent < connection->out.size()) return false;
  }
  return true;
}

void Server::Drop(uint64_t id) {
  if (connections_.erase(id) > 0) dropped_(id);
}

}  // namespace dsec::aether

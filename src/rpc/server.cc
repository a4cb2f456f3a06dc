// SPDX-License-Identifier: Apache-2.0
#include "rpc/server.h"

#include <sys/stat.h>
#include <unistd.h>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <deque>
#include <map>
#include <set>
#include <unordered_map>

#include "rpc/socket.h"
#include "runtime/gate.h"

namespace dsec::rpc {
namespace {

namespace asio = boost::asio;
using runtime::Deadline;
using runtime::Task;

constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);
constexpr size_t kMaxUnread = 64;

Error FromSystem(const boost::system::error_code& error, std::string what) {
  return Error(Code::kUnavailable, "rpc.listen", fmt::format("{}: {}", what, error.message()));
}

class Connection;

// One stream of one connection, between the read loop and its handler.
class HandlerStream final : public ServerStream {
 public:
  HandlerStream(std::shared_ptr<FrameSocket> socket, uint32_t id, bool remote_closed)
      : socket_(std::move(socket)), id_(id), remote_closed_(remote_closed) {}

  Task<std::optional<std::string>> Receive(Deadline deadline) override {
    using Message = std::optional<std::string>;
    while (messages_.empty()) {
      if (remote_closed_) co_return Message();
      if (socket_->closed()) {
        co_return Error(Code::kUnavailable, "rpc.closed", "the connection is closed");
      }
      arrived_.Reset();
      auto waited = co_await arrived_.Wait(deadline);
      if (!waited.ok()) co_return std::move(waited).error();
    }
    Message message(std::move(messages_.front()));
    messages_.pop_front();
    co_return message;
  }

  Result<void> Send(std::string payload) override {
    return socket_->Send(id_, MessageType::kData, kFlagRemoteOpen, payload);
  }

  // From the read loop; false when the handler does not keep up.
  bool Push(Frame frame) {
    if (messages_.size() >= kMaxUnread) return false;
    if ((frame.flags & kFlagNoData) == 0) messages_.push_back(std::move(frame.payload));
    if ((frame.flags & kFlagRemoteClosed) != 0) remote_closed_ = true;
    arrived_.Set();
    return true;
  }
  void Wake() { arrived_.Set(); }

 private:
  const std::shared_ptr<FrameSocket> socket_;
  const uint32_t id_;
  bool remote_closed_;
  std::deque<std::string> messages_;
  runtime::AsyncEvent arrived_;
};

}  // namespace

struct Server::State : std::enable_shared_from_this<State> {
  State(runtime::Executor on, ServerOptions with) : executor(std::move(on)), options(with) {}

  template <typename Acceptor>
  static asio::awaitable<void> Accept(std::shared_ptr<State> self,
                                      std::shared_ptr<Acceptor> acceptor) {
    for (;;) {
      typename Acceptor::protocol_type::socket socket(self->executor);
      const auto [error] = co_await acceptor->async_accept(socket, kTuple);
      if (error == asio::error::operation_aborted || !acceptor->is_open()) co_return;
      if (error) {
        // Out of descriptors, most likely: give others time to close theirs.
        (void)co_await runtime::SleepUntil(Deadline::After(std::chrono::milliseconds(50)));
        continue;
      }
      if (self->connections.size() >= self->options.max_connections) continue;
      auto framed =
          std::make_shared<FrameSocket>(FrameSocket::Socket(std::move(socket)), kMaxFramePayload);
      self->connections.insert(framed);
      runtime::Spawn(self->gate, self->executor, Serve(self, framed));
    }
  }

  static asio::awaitable<void> Serve(std::shared_ptr<State> self,
                                     std::shared_ptr<FrameSocket> socket) {
    auto streams = std::make_shared<std::unordered_map<uint32_t, std::shared_ptr<HandlerStream>>>();
    auto calls = std::make_shared<size_t>(0);
    uint32_t last = 0;
    for (;;) {
      auto frame = co_await socket->Receive();
      if (!frame.ok()) break;
      if (frame->type == MessageType::kData) {
        const auto found = streams->find(frame->stream);
        if (found != streams->end() && !found->second->Push(std::move(*frame))) break;
        continue;
      }
      // Stream ids of a client are odd and grow.
      if (frame->type != MessageType::kRequest || frame->stream % 2 == 0 || frame->stream <= last)
        break;
      last = frame->stream;
      self->OnRequest(socket, std::move(*frame), streams, calls);
    }
    socket->Close();
    for (auto& [id, stream] : *streams) stream->Wake();
    self->connections.erase(socket);
  }

  using Streams = std::shared_ptr<std::unordered_map<uint32_t, std::shared_ptr<HandlerStream>>>;

  void OnRequest(const std::shared_ptr<FrameSocket>& socket, Frame frame, const Streams& streams,
                 const std::shared_ptr<size_t>& calls) {
    const uint32_t id = frame.stream;
    auto request = ParseRequest(frame.payload);
    if (!request.ok()) return Answer(*socket, id, SerializeError(request.error()));
    if (stopping) {
      return Answer(*socket, id,
                    SerializeError(Error(Code::kUnavailable, "rpc.stopping", "the server stops")));
    }
    if (*calls >= options.max_calls_per_connection) {
      return Answer(
          *socket, id,
          SerializeError(Error(Code::kResourceExhausted, "rpc.busy", "too many calls under way")));
    }
    const std::pair key(std::move(request->service), std::move(request->method));
    const CallContext context{
        request->timeout_nanos == 0
            ? Deadline::Never()
            : Deadline::After(std::chrono::nanoseconds(request->timeout_nanos))};
    if (const auto unary = unaries.find(key); unary != unaries.end()) {
      runtime::Spawn(gate, executor,
                     RunUnary(shared_from_this(), socket, id, unary->second,
                              std::move(request->payload), context, calls));
      return;
    }
    if (const auto streaming = streamings.find(key); streaming != streamings.end()) {
      const bool closed = (frame.flags & kFlagRemoteClosed) != 0;
      auto stream = std::make_shared<HandlerStream>(socket, id, closed);
      streams->emplace(id, stream);
      runtime::Spawn(gate, executor,
                     RunStream(shared_from_this(), socket, id, streaming->second,
                               std::move(request->payload), context, streams, stream, calls));
      return;
    }
    Answer(*socket, id,
           SerializeError(Error(Code::kFailedPrecondition, "rpc.unimplemented",
                                fmt::format("no method {}/{}", key.first, key.second))));
  }

  static void Answer(FrameSocket& socket, uint32_t id, const std::string& response) {
    auto sent = socket.Send(id, MessageType::kResponse, 0, response);
    if (!sent.ok() && sent.error().code() == Code::kInvalidArgument) {
      sent = socket.Send(id, MessageType::kResponse, 0, SerializeError(sent.error()));
    }
    if (!sent.ok()) socket.Close();
  }

  static asio::awaitable<void> RunUnary(std::shared_ptr<State> self,
                                        std::shared_ptr<FrameSocket> socket, uint32_t id,
                                        Unary handler, std::string payload, CallContext context,
                                        std::shared_ptr<size_t> calls) {
    ++*calls;
    ++self->running;
    auto task = handler(std::move(payload), context);
    auto result = co_await std::move(task);
    --*calls;
    if (--self->running == 0) self->quiet.Set();
    Answer(*socket, id, result.ok() ? SerializeResponse(*result) : SerializeError(result.error()));
  }

  static asio::awaitable<void> RunStream(std::shared_ptr<State> self,
                                         std::shared_ptr<FrameSocket> socket, uint32_t id,
                                         Streaming handler, std::string payload,
                                         CallContext context, Streams streams,
                                         std::shared_ptr<HandlerStream> stream,
                                         std::shared_ptr<size_t> calls) {
    ++*calls;
    ++self->running;
    auto task = handler(std::move(payload), *stream, context);
    auto result = co_await std::move(task);
    --*calls;
    if (--self->running == 0) self->quiet.Set();
    streams->erase(id);
    Answer(*socket, id, result.ok() ? SerializeResponse("") : SerializeError(result.error()));
  }

  const runtime::Executor executor;
  const ServerOptions options;
  std::map<std::pair<std::string, std::string>, Unary> unaries;
  std::map<std::pair<std::string, std::string>, Streaming> streamings;
  std::set<std::shared_ptr<FrameSocket>> connections;
  std::vector<std::function<void()>> close_listeners;
  std::vector<std::string> paths;
  bool stopping = false;
  size_t running = 0;
  runtime::AsyncEvent quiet;
  runtime::Gate gate;
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

Result<void> Server::ListenUnix(const std::string& path) {
  using Acceptor = asio::local::stream_protocol::acceptor;
  auto acceptor = std::make_shared<Acceptor>(state_->executor);
  boost::system::error_code error;
  acceptor->open(asio::local::stream_protocol(), error);
  if (!error) {
    const mode_t before = umask(0177);
    acceptor->bind(asio::local::stream_protocol::endpoint(path), error);
    umask(before);
  }
  if (!error) acceptor->listen(asio::socket_base::max_listen_connections, error);
  if (error) return FromSystem(error, path);
  state_->paths.push_back(path);
  state_->close_listeners.push_back([acceptor] {
    boost::system::error_code ignored;
    acceptor->close(ignored);
  });
  runtime::Spawn(state_->gate, state_->executor, State::Accept(state_, acceptor));
  return {};
}

Result<uint16_t> Server::ListenTcp(const std::string& host, uint16_t port) {
  using Acceptor = asio::ip::tcp::acceptor;
  boost::system::error_code error;
  const auto address = asio::ip::make_address(host, error);
  if (error) return FromSystem(error, host);
  const asio::ip::tcp::endpoint endpoint(address, port);
  auto acceptor = std::make_shared<Acceptor>(state_->executor);
  acceptor->open(endpoint.protocol(), error);
  if (!error) acceptor->set_option(Acceptor::reuse_address(true), error);
  if (!error) acceptor->bind(endpoint, error);
  if (!error) acceptor->listen(asio::socket_base::max_listen_connections, error);
  if (error) return FromSystem(error, fmt::format("{}:{}", host, port));
  const uint16_t bound = acceptor->local_endpoint().port();
  state_->close_listeners.push_back([acceptor] {
    boost::system::error_code ignored;
    acceptor->close(ignored);
  });
  runtime::Spawn(state_->gate, state_->executor, State::Accept(state_, acceptor));
  return bound;
}

asio::awaitable<void> Server::Stop(Deadline deadline) {
  const auto state = state_;
  state->stopping = true;
  for (const auto& close : state->close_listeners) close();
  for (const auto& path : state->paths) unlink(path.c_str());
  state->paths.clear();
  bool waiting = true;
  while (waiting && state->running > 0) {
    state->quiet.Reset();
    auto waited = co_await state->quiet.Wait(deadline);
    waiting = waited.ok();
  }
  const auto open = state->connections;
  for (const auto& socket : open) {
    (void)co_await socket->Flushed(deadline);
    socket->Close();
  }
  co_await state->gate.Close();
}

}  // namespace dsec::rpc

// SPDX-License-Identifier: Apache-2.0
#include "rpc/channel.h"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <deque>
#include <optional>
#include <unordered_map>

#include "rpc/socket.h"

namespace dsec::rpc {
namespace {

namespace asio = boost::asio;
using runtime::Deadline;
using runtime::Task;

constexpr size_t kMaxUnread = 64;
constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);

Error Closed() { return Error(Code::kUnavailable, "rpc.closed", "the connection is closed"); }

int64_t TimeoutNanos(Deadline deadline) {
  if (deadline.never()) return 0;
  return std::max<int64_t>(1, deadline.Remaining().count());
}

// What waits for frames of one stream id. Owned by the caller, known to the channel while it waits.
struct Inbox {
  runtime::AsyncEvent arrived;
  std::deque<Frame> frames;
  bool closed = false;  // the connection has ended
  bool overrun = false;
};

class SocketChannel final : public Channel {
 public:
  explicit SocketChannel(FrameSocket::Socket socket)
      : socket_(std::make_shared<FrameSocket>(std::move(socket), kMaxFramePayload)) {}
  ~SocketChannel() override { socket_->Close(); }

  // The read loop keeps only the socket alive: the channel ends when its last user lets go.
  static void Start(const std::shared_ptr<SocketChannel>& channel,
                    const runtime::Executor& executor) {
    asio::co_spawn(executor, ReadLoop(channel, channel->socket_), asio::detached);
  }

  Task<std::string> CallRaw(std::string_view service, std::string_view method, std::string payload,
                            Deadline deadline) override {
    const auto self = shared_from_this();
    Inbox inbox;
    auto sent = Register(service, method, std::move(payload), deadline, 0, inbox);
    if (!sent.ok()) co_return std::move(sent).error();
    const uint32_t id = *sent;
    auto frame = co_await Take(inbox, deadline);
    inboxes_.erase(id);
    if (!frame.ok()) co_return std::move(frame).error();
    if (frame->type != MessageType::kResponse) {
      Close();
      co_return Error(Code::kUnavailable, "rpc.response", "the peer answered a call with data");
    }
    co_return ParseResponse(frame->payload);
  }

  Result<std::unique_ptr<Stream>> OpenStream(std::string_view service, std::string_view method,
                                             std::string payload, Deadline deadline) override;

  bool closed() const override { return ended_; }

  Task<void> WaitClosed() override {
    const auto self = shared_from_this();
    auto waited = co_await closed_.Wait(Deadline::Never());
    co_return waited;
  }

  void Close() override {
    socket_->Close();
    End();
  }

 private:
  friend class SocketStream;

  static asio::awaitable<void> ReadLoop(std::weak_ptr<SocketChannel> weak,
                                        std::shared_ptr<FrameSocket> socket) {
    for (;;) {
      auto frame = co_await socket->Receive();
      const auto channel = weak.lock();
      if (!channel) co_return;
      if (!frame.ok()) {
        channel->Close();
        co_return;
      }
      channel->OnFrame(std::move(*frame));
    }
  }

  void OnFrame(Frame frame) {
    // Answers to calls that nobody waits for any more are dropped.
    const auto found = inboxes_.find(frame.stream);
    if (found == inboxes_.end()) return;
    Inbox& inbox = *found->second;
    if (frame.type == MessageType::kRequest) {
      Close();
      return;
    }
    if (inbox.frames.size() >= kMaxUnread) {
      inbox.overrun = true;
      Close();
      return;
    }
    inbox.frames.push_back(std::move(frame));
    inbox.arrived.Set();
  }

  Result<uint32_t> Register(std::string_view service, std::string_view method, std::string payload,
                            Deadline deadline, uint8_t flags, Inbox& inbox) {
    if (ended_) return Closed();
    if (deadline.Expired()) {
      return Error(Code::kDeadlineExceeded, "rpc.deadline",
                   fmt::format("{}: no time left", method));
    }
    if (next_stream_ > 0xfffffff0u) {
      Close();
      return Closed();
    }
    const uint32_t id = next_stream_;
    const std::string request = SerializeRequest(
        {std::string(service), std::string(method), std::move(payload), TimeoutNanos(deadline)});
    DSEC_TRY_VOID(socket_->Send(id, MessageType::kRequest, flags, request));
    next_stream_ += 2;
    inboxes_[id] = &inbox;
    return id;
  }

  static Task<Frame> Take(Inbox& inbox, Deadline deadline) {
    while (inbox.frames.empty()) {
      if (inbox.overrun) {
        co_return Error(Code::kResourceExhausted, "rpc.stream_overrun", "too many unread messages");
      }
      if (inbox.closed) co_return Closed();
      inbox.arrived.Reset();
      auto waited = co_await inbox.arrived.Wait(deadline);
      if (!waited.ok()) {
        if (waited.error().code() == Code::kDeadlineExceeded) {
          co_return Error(Code::kDeadlineExceeded, "rpc.deadline", "no answer in time");
        }
        co_return std::move(waited).error();
      }
    }
    Frame frame = std::move(inbox.frames.front());
    inbox.frames.pop_front();
    co_return frame;
  }

  void End() {
    if (ended_) return;
    ended_ = true;
    for (auto& [id, inbox] : inboxes_) {
      inbox->closed = true;
      inbox->arrived.Set();
    }
    closed_.Set();
  }

  const std::shared_ptr<FrameSocket> socket_;
  std::unordered_map<uint32_t, Inbox*> inboxes_;
  uint32_t next_stream_ = 1;
  bool ended_ = false;
  runtime::AsyncEvent closed_;
};

class SocketStream final : public Channel::Stream {
 public:
  explicit SocketStream(std::shared_ptr<SocketChannel> channel) : channel_(std::move(channel)) {}
  ~SocketStream() override { channel_->inboxes_.erase(id_); }

  Result<void> Open(std::string_view service, std::string_view method, std::string payload,
                    Deadline deadline) {
    DSEC_TRY(id_, channel_->Register(service, method, std::move(payload), deadline, kFlagRemoteOpen,
                                     inbox_));
    return {};
  }

  Result<void> Send(std::string payload) override {
    DSEC_TRY_VOID(CanSend());
    return channel_->socket_->Send(id_, MessageType::kData, kFlagRemoteOpen, payload);
  }

  Result<void> CloseSend() override {
    DSEC_TRY_VOID(CanSend());
    send_closed_ = true;
    return channel_->socket_->Send(id_, MessageType::kData, kFlagRemoteClosed | kFlagNoData, "");
  }

  Task<std::optional<std::string>> Receive(Deadline deadline) override {
    using Message = std::optional<std::string>;
    while (!received_all_) {
      auto frame = co_await SocketChannel::Take(inbox_, deadline);
      if (!frame.ok()) co_return std::move(frame).error();
      if (frame->type == MessageType::kResponse) {
        received_all_ = true;
        auto answer = ParseResponse(frame->payload);
        if (!answer.ok()) co_return std::move(answer).error();
        if (!answer->empty()) co_return Message(std::move(*answer));
        break;
      }
      received_all_ = (frame->flags & kFlagRemoteClosed) != 0;
      if ((frame->flags & kFlagNoData) == 0) co_return Message(std::move(frame->payload));
    }
    co_return Message();
  }

 private:
  Result<void> CanSend() const {
    if (!send_closed_) return {};
    return Error(Code::kFailedPrecondition, "rpc.stream_closed", "this side has ended the stream");
  }

  const std::shared_ptr<SocketChannel> channel_;
  Inbox inbox_;
  uint32_t id_ = 0;
  bool send_closed_ = false;
  bool received_all_ = false;
};

Result<std::unique_ptr<Channel::Stream>> SocketChannel::OpenStream(std::string_view service,
                                                                   std::string_view method,
                                                                   std::string payload,
                                                                   Deadline deadline) {
  auto stream =
      std::make_unique<SocketStream>(std::static_pointer_cast<SocketChannel>(shared_from_this()));
  DSEC_TRY_VOID(stream->Open(service, method, std::move(payload), deadline));
  return std::unique_ptr<Channel::Stream>(std::move(stream));
}

// Connects within the deadline: closing the socket is what ends a connect that takes too long.
Task<std::shared_ptr<Channel>> Connect(runtime::Executor executor,
                                       asio::generic::stream_protocol::endpoint endpoint,
                                       std::string name, Deadline deadline) {
  auto socket = std::make_shared<FrameSocket::Socket>(executor);
  asio::steady_timer timer(executor);
  timer.expires_at(deadline.at());
  timer.async_wait([weak = std::weak_ptr(socket)](const boost::system::error_code& error) {
    const auto pending = weak.lock();
    boost::system::error_code ignored;
    if (!error && pending) pending->close(ignored);
  });
  const auto [error] = co_await socket->async_connect(endpoint, kTuple);
  timer.cancel();
  if (error) {
    if (deadline.Expired()) {
      co_return Error(Code::kDeadlineExceeded, "rpc.deadline", fmt::format("connect to {}", name));
    }
    co_return Error(Code::kUnavailable, "rpc.connect",
                    fmt::format("connect to {}: {}", name, error.message()));
  }
  auto channel = std::make_shared<SocketChannel>(std::move(*socket));
  SocketChannel::Start(channel, executor);
  co_return std::shared_ptr<Channel>(std::move(channel));
}

}  // namespace

Task<std::shared_ptr<Channel>> Channel::ConnectUnix(runtime::Executor executor, std::string path,
                                                    Deadline deadline) {
  if (path.size() > 107) {  // sun_path, unix(7)
    co_return Error(Code::kInvalidArgument, "rpc.connect",
                    fmt::format("socket path {} is over 107 bytes", path));
  }
  const asio::local::stream_protocol::endpoint endpoint(path);
  auto channel = co_await Connect(executor, endpoint, path, deadline);
  co_return channel;
}

Task<std::shared_ptr<Channel>> Channel::ConnectTcp(runtime::Executor executor, std::string host,
                                                   uint16_t port, Deadline deadline) {
  asio::ip::tcp::resolver resolver(executor);
  const auto [error, found] = co_await resolver.async_resolve(host, std::to_string(port), kTuple);
  if (error || found.empty()) {
    co_return Error(Code::kUnavailable, "rpc.connect",
                    fmt::format("resolve {}: {}", host, error.message()));
  }
  const asio::ip::tcp::endpoint endpoint = found.begin()->endpoint();
  auto channel = co_await Connect(executor, endpoint, fmt::format("{}:{}", host, port), deadline);
  co_return channel;
}

}  // namespace dsec::rpc

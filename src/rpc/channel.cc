// SPDX-License-Identifier: Apache-2.0
#include "rpc/channel.h"

#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/system_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <deque>
#include <unordered_map>

#include "base/log.h"
#include "rpc/dial.h"
#include "rpc/socket.h"
#include "rpc/tls_session.h"
#include "runtime/shards.h"

namespace dsec::rpc {
namespace {

namespace asio = boost::asio;
using runtime::Deadline;
using runtime::Task;

constexpr size_t kMaxUnread = 64;
constexpr size_t kMaxUnreadBytes = size_t{8} << 20;

int64_t TimeoutNanos(Deadline deadline) {
  if (deadline.never()) return 0;
  return std::max<int64_t>(1, deadline.Remaining().count());
}

class SocketChannel;

// What has come for one stream id. The channel knows it from Open on; its destructor forgets it.
class Inbox {
 public:
  Inbox(std::shared_ptr<SocketChannel> channel, bool streaming)
      : channel_(std::move(channel)), streaming_(streaming) {}
  ~Inbox();
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  Result<void> Open(const Request& request, uint8_t flags, Deadline deadline);
  Task<Frame> Take(Deadline deadline);

  SocketChannel& channel() const { return *channel_; }
  uint32_t id() const { return id_; }
  // A call has one answer.
  bool WantsMore() const { return streaming_ || frames_.empty(); }
  // False when there is no room.
  bool Put(Frame frame);
  void Fail(const Error& error);

 private:
  const std::shared_ptr<SocketChannel> channel_;
  const bool streaming_;
  uint32_t id_ = 0;
  std::string method_;
  std::deque<Frame> frames_;
  size_t bytes_ = 0;
  std::optional<Error> error_;
  runtime::AsyncEvent arrived_;
};

class SocketChannel final : public Channel, public std::enable_shared_from_this<SocketChannel> {
 public:
  SocketChannel(FrameSocket::Socket socket, std::string peer, std::unique_ptr<TlsSession> tls)
      : peer_(std::move(peer)),
        ends_unix_ms_(tls != nullptr && tls->peer() ? tls->peer()->ends_unix_ms : 0),
        certificate_end_(socket.get_executor()),
        socket_(std::make_shared<FrameSocket>(
            std::move(socket), [this](const FrameHeader& header) { return Wanted(header); },
            std::move(tls))) {}
  ~SocketChannel() override { socket_->Close(); }

  // The read loop keeps only the socket alive: the channel ends when its last user lets go.
  static std::shared_ptr<Channel> Start(FrameSocket::Socket socket, std::string peer,
                                        const runtime::Executor& executor,
                                        std::unique_ptr<TlsSession> tls = nullptr) {
    auto channel =
        std::make_shared<SocketChannel>(std::move(socket), std::move(peer), std::move(tls));
    channel->WatchCertificate();
    runtime::internal::StartDetached(executor, ReadLoop(channel, channel->socket_));
    return channel;
  }

  Task<std::string> CallRaw(std::string_view service, std::string_view method, std::string payload,
                            Deadline deadline) override {
    return RunCall(shared_from_this(),
                   {std::string(service), std::string(method), std::move(payload)}, deadline);
  }

  Result<std::unique_ptr<Stream>> OpenStream(std::string_view service, std::string_view method,
                                             std::string payload, Deadline deadline) override;

  bool closed() const override { return close_error_.has_value(); }
  Task<void> WaitClosed() override { return RunWaitClosed(shared_from_this()); }
  void Close() override {
    End(Error(Code::kUnavailable, "rpc.closed", "the connection was closed on this side"));
  }

  // --- for Inbox ---

  Result<uint32_t> Send(Request request, uint8_t flags, Deadline deadline, Inbox& inbox) {
    if (close_error_) return *close_error_;
    if (deadline.Expired()) {
      return Error(Code::kDeadlineExceeded, "rpc.deadline",
                   fmt::format("{}: no time left", request.method));
    }
    if (next_stream_ > UINT32_MAX - 2) {
      End(Error(Code::kUnavailable, "rpc.closed", "the connection has used up its stream ids"));
      return *close_error_;
    }
    request.timeout_nanos = TimeoutNanos(deadline);
    const uint32_t id = next_stream_;
    DSEC_TRY_VOID(socket_->Send(id, MessageType::kRequest, flags, SerializeRequest(request)));
    next_stream_ += 2;
    inboxes_.emplace(id, &inbox);
    return id;
  }
  Result<void> SendData(uint32_t id, uint8_t flags, std::string_view payload) {
    return socket_->Send(id, MessageType::kData, flags, payload);
  }
  void Forget(uint32_t id) {
    inboxes_.erase(id);
    socket_->Drop(id);
  }

 private:
  static Task<std::string> RunCall(std::shared_ptr<SocketChannel> self, Request request,
                                   Deadline deadline) {
    const auto cancellation = co_await asio::this_coro::cancellation_state;
    if (cancellation.cancelled() != asio::cancellation_type::none) {
      co_return Error(Code::kCancelled, "task.cancelled", "the task was cancelled");
    }
    Inbox inbox(std::move(self), false);
    DSEC_CO_TRY_VOID(inbox.Open(request, 0, deadline));
    request = {};
    auto frame = co_await inbox.Take(deadline);
    if (!frame.ok()) co_return std::move(frame).error();
    if (frame->type != MessageType::kResponse) {
      co_return Error(Code::kUnavailable, "rpc.response", "the peer answered a call with data");
    }
    co_return ParseResponse(frame->payload);
  }

  static Task<void> RunWaitClosed(std::shared_ptr<SocketChannel> self) {
    auto waited = co_await self->ended_.Wait(Deadline::Never());
    co_return std::move(waited);
  }

  static asio::awaitable<void> ReadLoop(std::weak_ptr<SocketChannel> weak,
                                        std::shared_ptr<FrameSocket> socket) {
    for (;;) {
      auto frame = co_await socket->Receive();
      const auto channel = weak.lock();
      if (!channel) co_return;
      if (!frame.ok()) {
        channel->OnBroken(std::move(frame).error());
        co_return;
      }
      channel->OnFrame(std::move(*frame));
    }
  }

  Result<bool> Wanted(const FrameHeader& header) const {
    if (header.type == MessageType::kRequest || header.stream % 2 == 0 ||
        header.stream >= next_stream_) {
      return Error(Code::kInvalidArgument, "rpc.frame",
                   fmt::format("frame of type {} for stream {}, which was never opened",
                               static_cast<int>(header.type), header.stream));
    }
    const auto found = inboxes_.find(header.stream);
    return found != inboxes_.end() && found->second->WantsMore();
  }

  void OnFrame(Frame frame) {
    const auto found = inboxes_.find(frame.stream);
    if (found == inboxes_.end()) return;
    Inbox& inbox = *found->second;
    if (inbox.Put(std::move(frame))) return;
    inboxes_.erase(found);
    inbox.Fail(Error(Code::kResourceExhausted, "rpc.stream_overrun", "too much waits unread"));
  }

  void OnBroken(Error error) {
    if (error.reason() != "rpc.closed") {
      log::Warn("rpc.protocol_error", {{"peer", peer_}, {"error", error}});
    }
    End(Error(Code::kUnavailable, "rpc.closed", fmt::format("{}: {}", peer_, error.message()))
            .WithErrno(error.sys_errno()));
  }

  // The chain was checked by the handshake; its end comes later.
  void WatchCertificate() {
    if (ends_unix_ms_ <= 0) return;
    certificate_end_.expires_at(
        std::chrono::system_clock::time_point(std::chrono::milliseconds(ends_unix_ms_)));
    certificate_end_.async_wait([weak = weak_from_this()](const boost::system::error_code& error) {
      const auto self = weak.lock();
      if (error || !self) return;
      self->End(Error(Code::kUnavailable, "rpc.closed",
                      fmt::format("{}: its certificate has ended", self->peer_)));
    });
  }

  void End(Error error) {
    if (close_error_) return;
    certificate_end_.cancel();
    close_error_ = std::move(error);
    socket_->Close();
    for (const auto& [id, inbox] : inboxes_) inbox->Fail(*close_error_);
    inboxes_.clear();
    ended_.Set();
  }

  const std::string peer_;
  const int64_t ends_unix_ms_;  // the peer's certificate; 0: none
  // Of the wall clock, which is looked at again and again while it waits.
  asio::system_timer certificate_end_;
  const std::shared_ptr<FrameSocket> socket_;
  std::unordered_map<uint32_t, Inbox*> inboxes_;
  uint32_t next_stream_ = 1;
  std::optional<Error> close_error_;
  runtime::AsyncEvent ended_;
};

Inbox::~Inbox() {
  if (id_ != 0) channel_->Forget(id_);
}

Result<void> Inbox::Open(const Request& request, uint8_t flags, Deadline deadline) {
  method_ = request.method;
  DSEC_TRY(id_, channel_->Send(request, flags, deadline, *this));
  return Ok();
}

bool Inbox::Put(Frame frame) {
  bytes_ += frame.payload.size();
  if (frames_.size() >= kMaxUnread || bytes_ > kMaxUnreadBytes) return false;
  frames_.push_back(std::move(frame));
  arrived_.Set();
  return true;
}

void Inbox::Fail(const Error& error) {
  // What came before the end of the connection is still good; what overran is not.
  if (error.reason() == "rpc.stream_overrun") frames_.clear();
  error_ = error;
  arrived_.Set();
}

Task<Frame> Inbox::Take(Deadline deadline) {
  while (frames_.empty()) {
    if (error_) co_return *error_;
    arrived_.Reset();
    auto waited = co_await arrived_.Wait(deadline);
    if (waited.ok()) continue;
    if (waited.error().code() == Code::kDeadlineExceeded) {
      co_return Error(Code::kDeadlineExceeded, "rpc.deadline",
                      fmt::format("{}: no answer in time", method_));
    }
    co_return std::move(waited).error();
  }
  Frame frame = std::move(frames_.front());
  frames_.pop_front();
  bytes_ -= frame.payload.size();
  co_return frame;
}

class SocketStream final : public Channel::Stream {
 public:
  explicit SocketStream(std::shared_ptr<SocketChannel> channel)
      : inbox_(std::move(channel), true) {}

  Result<void> Open(const Request& request, Deadline deadline) {
    return inbox_.Open(request, kFlagRemoteOpen, deadline);
  }

  Result<void> Send(std::string payload) override {
    DSEC_TRY_VOID(CanSend());
    return inbox_.channel().SendData(inbox_.id(), 0, payload);
  }

  Result<void> CloseSend() override {
    DSEC_TRY_VOID(CanSend());
    send_closed_ = true;
    return inbox_.channel().SendData(inbox_.id(), kFlagRemoteClosed | kFlagNoData, "");
  }

  Task<std::optional<std::string>> Receive(Deadline deadline) override {
    using Message = std::optional<std::string>;
    while (!received_all_) {
      auto frame = co_await inbox_.Take(deadline);
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
    if (!send_closed_) return Ok();
    return Error(Code::kFailedPrecondition, "rpc.stream_closed", "this side has ended the stream");
  }

  Inbox inbox_;
  bool send_closed_ = false;
  bool received_all_ = false;
};

Result<std::unique_ptr<Channel::Stream>> SocketChannel::OpenStream(std::string_view service,
                                                                   std::string_view method,
                                                                   std::string payload,
                                                                   Deadline deadline) {
  auto stream = std::make_unique<SocketStream>(shared_from_this());
  DSEC_TRY_VOID(
      stream->Open({std::string(service), std::string(method), std::move(payload)}, deadline));
  return std::unique_ptr<Channel::Stream>(std::move(stream));
}

}  // namespace

Task<std::shared_ptr<Channel>> Channel::ConnectUnix(runtime::Executor executor, std::string path,
                                                    Deadline deadline) {
  auto socket = co_await DialUnix(executor, path, deadline);
  if (!socket.ok()) co_return std::move(socket).error();
  co_return SocketChannel::Start(std::move(*socket), std::move(path), executor);
}

Result<std::shared_ptr<Channel>> Channel::Over(runtime::Executor executor, int socket,
                                               std::string peer) {
  boost::system::error_code error;
  FrameSocket::Socket wrapped(executor);
  wrapped.assign(asio::generic::stream_protocol(AF_UNIX, 0), socket, error);
  if (error) {
    ::close(socket);
    return Error(Code::kInternal, "rpc.connect", fmt::format("{}: {}", peer, error.message()));
  }
  return SocketChannel::Start(std::move(wrapped), std::move(peer), executor);
}

Task<std::shared_ptr<Channel>> Channel::ConnectTcp(runtime::Executor executor, std::string host,
                                                   uint16_t port, Deadline deadline) {
  std::string peer = fmt::format("{}:{}", host, port);
  auto socket = co_await DialTcp(executor, std::move(host), port, deadline);
  if (!socket.ok()) co_return std::move(socket).error();
  co_return SocketChannel::Start(std::move(*socket), std::move(peer), executor);
}

Task<std::shared_ptr<Channel>> Channel::ConnectTls(runtime::Executor executor, std::string host,
                                                   uint16_t port,
                                                   std::shared_ptr<const TlsContext> context,
                                                   TlsExpect expect, Deadline deadline) {
  std::string peer = fmt::format("{}:{}", host, port);
  auto socket = co_await DialTcp(executor, std::move(host), port, deadline);
  if (!socket.ok()) co_return std::move(socket).error();
  auto shaken = co_await ShakeHands(std::move(*socket), std::move(context), TlsSide::kClient,
                                    std::move(expect), peer, deadline);
  if (!shaken.ok()) co_return std::move(shaken).error();
  co_return SocketChannel::Start(std::move(shaken->socket), std::move(peer), executor,
                                 std::move(shaken->session));
}

}  // namespace dsec::rpc

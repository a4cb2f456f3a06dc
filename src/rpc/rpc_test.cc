// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <filesystem>
#include <future>
#include <latch>

#include "base/log.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "runtime/gate.h"
#include "runtime/shards.h"

namespace dsec::rpc {
namespace {

using boost::asio::awaitable;
using runtime::BlockOn;
using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;
using std::chrono::seconds;

Deadline Late() { return Deadline::After(seconds(60)); }
Deadline Soon() { return Deadline::After(milliseconds(10)); }

sockaddr_un UnixAddress(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  return address;
}

// The other end of a connection, by hand, blocking, with a time limit on each read.
class RawPeer {
 public:
  explicit RawPeer(int fd) : fd_(fd) {
    const timeval limit{.tv_sec = 60, .tv_usec = 0};
    EXPECT_EQ(setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
  }
  RawPeer(RawPeer&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  RawPeer& operator=(RawPeer&&) = delete;
  ~RawPeer() { Close(); }

  static RawPeer Connect(const std::string& path) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_un address = UnixAddress(path);
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return RawPeer(fd);
  }

  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  void SendBytes(std::string_view bytes) {
    EXPECT_EQ(send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void Send(uint32_t stream, MessageType type, uint8_t flags, std::string_view payload) {
    std::string out;
    AppendFrame(out, stream, type, flags, payload);
    SendBytes(out);
  }
  // nullopt when the connection has ended.
  std::optional<Frame> Receive() {
    for (;;) {
      auto frame = parser_.Next();
      EXPECT_TRUE(frame.ok());
      if (frame->has_value()) return std::move(*frame);
      char buffer[4096];
      const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
      if (got <= 0) {
        EXPECT_TRUE(got == 0 || errno == ECONNRESET) << strerror(errno);
        return std::nullopt;
      }
      parser_.Feed({buffer, static_cast<size_t>(got)});
    }
  }

 private:
  int fd_;
  FrameParser parser_;
};

class RawListener {
 public:
  RawListener(const std::string& path, int backlog) {
    const sockaddr_un address = UnixAddress(path);
    EXPECT_EQ(bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(fd_, backlog), 0);
  }
  ~RawListener() { close(fd_); }
  RawListener(const RawListener&) = delete;
  RawListener& operator=(const RawListener&) = delete;
  RawPeer Accept() { return RawPeer(accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC)); }

 private:
  const int fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
};

// Clients on shard 1. A channel is only touched there; the test's thread waits for each step.
class ClientTest : public testing::Test {
 protected:
  ClientTest() : shards_(2) {
    std::string name = std::filesystem::temp_directory_path() / "dsec-rpc-XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = folder_ + "/s";
    log::Configure({.sink = [](std::string_view) {}});
  }
  ~ClientTest() override {
    LetGo();
    shards_.Stop();
    log::Configure({});
    std::filesystem::remove_all(folder_);
  }

  void OnClientShard(const std::function<void()>& function) {
    std::promise<void> done;
    boost::asio::post(shards_.at(1), [&] {
      function();
      done.set_value();
    });
    done.get_future().wait();
  }
  void LetGo() {
    OnClientShard([this] {
      stream_.reset();
      channel_.reset();
    });
  }

  Result<void> Connect(Deadline deadline = Late()) {
    auto channel = BlockOn(shards_.at(1), Channel::ConnectUnix(shards_.at(1), path_, deadline));
    if (!channel.ok()) return std::move(channel).error();
    channel_ = std::move(*channel);
    return Ok();
  }
  Result<std::string> Call(std::string_view method, std::string payload = "",
                           Deadline deadline = Late()) {
    return BlockOn(shards_.at(1), channel_->CallRaw("t", method, std::move(payload), deadline));
  }
  // A call that the test goes on beside.
  std::future<Result<std::string>> CallAside(std::string_view method, std::string payload = "",
                                             Deadline deadline = Late()) {
    std::promise<Result<std::string>> promise;
    auto future = promise.get_future();
    runtime::internal::StartDetached(
        shards_.at(1),
        runtime::internal::RunInto<std::string>(
            channel_->CallRaw("t", method, std::move(payload), deadline), std::move(promise)));
    return future;
  }
  Result<void> OpenStream(std::string_view method, std::string payload = "") {
    Result<void> opened;
    OnClientShard([&] {
      auto stream = channel_->OpenStream("t", method, std::move(payload), Late());
      if (stream.ok()) {
        stream_ = std::move(*stream);
      } else {
        opened = std::move(stream).error();
      }
    });
    return opened;
  }
  Result<void> StreamSend(std::string payload) {
    Result<void> sent;
    OnClientShard([&] { sent = stream_->Send(std::move(payload)); });
    return sent;
  }
  Result<void> StreamCloseSend() {
    Result<void> sent;
    OnClientShard([&] { sent = stream_->CloseSend(); });
    return sent;
  }
  Result<std::optional<std::string>> StreamReceive() {
    return BlockOn(shards_.at(1), stream_->Receive(Late()));
  }

  std::string folder_;
  std::string path_;
  runtime::Shards shards_;
  std::shared_ptr<Channel> channel_;
  std::unique_ptr<Channel::Stream> stream_;
};

// --- a client and peers made by hand ---

TEST_F(ClientTest, NobodyListens_IsUnavailable) {
  auto failed = Connect();
  EXPECT_EQ(failed.error().reason(), "rpc.connect");
  EXPECT_EQ(failed.error().code(), Code::kUnavailable);
  EXPECT_EQ(failed.error().sys_errno(), ENOENT);
  path_ = folder_ + std::string(100, 'x');
  EXPECT_EQ(Connect().error().code(), Code::kInvalidArgument);
}

TEST_F(ClientTest, FullBacklog_IsWaitedForUntilTheDeadline) {
  RawListener listener(path_, 0);
  std::vector<RawPeer> fillers;
  fillers.push_back(RawPeer::Connect(path_));  // a backlog of 0 holds one
  EXPECT_EQ(Connect(Soon()).error().code(), Code::kDeadlineExceeded);
  std::promise<Result<void>> connected;
  std::thread client([&] { connected.set_value(Connect()); });
  RawPeer first = listener.Accept();
  RawPeer second = listener.Accept();
  client.join();
  EXPECT_TRUE(connected.get_future().get().ok());
}

TEST_F(ClientTest, Request_SaysMethodPayloadAndTimeLeft) {
  RawListener listener(path_, 1);
  ASSERT_TRUE(Connect().ok());
  RawPeer peer = listener.Accept();
  auto answer = CallAside("m", "p", Deadline::After(seconds(60)));
  auto frame = peer.Receive();
  EXPECT_EQ(frame->stream, 1u);
  EXPECT_EQ(frame->type, MessageType::kRequest);
  EXPECT_EQ(frame->flags, 0);
  auto request = ParseRequest(frame->payload);
  EXPECT_EQ(request->service, "t");
  EXPECT_EQ(request->method, "m");
  EXPECT_EQ(request->payload, "p");
  EXPECT_GT(request->timeout_nanos, 50'000'000'000);
  EXPECT_LE(request->timeout_nanos, 60'000'000'000);
  peer.Send(1, MessageType::kResponse, 0, SerializeResponse("r"));
  EXPECT_EQ(*answer.get(), "r");
  auto second = CallAside("m", "", Deadline::Never());
  frame = peer.Receive();
  EXPECT_EQ(frame->stream, 3u);
  EXPECT_EQ(ParseRequest(frame->payload)->timeout_nanos, 0);
  peer.Send(3, MessageType::kResponse, 0, "");
  EXPECT_EQ(*second.get(), "");
}

TEST_F(ClientTest, ExpiredCall_ForgetsItsLateAnswer) {
  RawListener listener(path_, 1);
  ASSERT_TRUE(Connect().ok());
  RawPeer peer = listener.Accept();
  EXPECT_EQ(Call("m", "", Soon()).error().reason(), "rpc.deadline");
  EXPECT_EQ(Call("m", "", Deadline::At(MonoTime())).error().reason(), "rpc.deadline");
  peer.Receive();
  peer.Send(1, MessageType::kResponse, 0, SerializeResponse(std::string(1 << 20, 'x')));
  auto answer = CallAside("m");
  EXPECT_EQ(peer.Receive()->stream, 3u);  // nothing was sent for the call without time
  peer.Send(3, MessageType::kResponse, 0, SerializeResponse("r"));
  EXPECT_EQ(*answer.get(), "r");
}

awaitable<void> CallInto(std::shared_ptr<Channel> channel, std::promise<Result<std::string>>& out) {
  auto answer = co_await channel->CallRaw("t", "m", "", Late());
  out.set_value(std::move(answer));
}

TEST_F(ClientTest, CancelledCall_EndsAtOnceAndTheChannelGoesOn) {
  RawListener listener(path_, 1);
  ASSERT_TRUE(Connect().ok());
  RawPeer peer = listener.Accept();
  runtime::Gate gate;
  std::promise<Result<std::string>> cancelled;
  auto running = runtime::SpawnCancellable(gate, shards_.at(1), CallInto(channel_, cancelled));
  peer.Receive();
  running.Cancel();
  EXPECT_EQ(cancelled.get_future().get().error().code(), Code::kCancelled);
  peer.Send(1, MessageType::kResponse, 0, "");
  auto answer = CallAside("m");
  peer.Receive();
  peer.Send(3, MessageType::kResponse, 0, SerializeResponse("r"));
  EXPECT_EQ(*answer.get(), "r");
  while (gate.count() > 0) std::this_thread::yield();
}

TEST_F(ClientTest, PeerDiesInACall_EndsItAsUnavailable) {
  RawListener listener(path_, 1);
  ASSERT_TRUE(Connect().ok());
  RawPeer peer = listener.Accept();
  auto answer = CallAside("m");
  peer.Receive();
  // Half an answer, and gone.
  std::string half;
  AppendFrame(half, 1, MessageType::kResponse, 0, "abcdef");
  peer.SendBytes(std::string_view(half).substr(0, 13));
  peer.Close();
  auto result = answer.get();
  EXPECT_EQ(result.error().code(), Code::kUnavailable);
  EXPECT_EQ(result.error().reason(), "rpc.closed");
  EXPECT_TRUE(BlockOn(shards_.at(1), channel_->WaitClosed()).ok());
  OnClientShard([&] { EXPECT_TRUE(channel_->closed()); });
  EXPECT_EQ(Call("m").error().reason(), "rpc.closed");
}

TEST_F(ClientTest, HostileFrames_CloseTheChannel) {
  std::string unopened;
  AppendFrame(unopened, 99, MessageType::kResponse, 0, "");
  std::string even;
  AppendFrame(even, 2, MessageType::kResponse, 0, "");
  std::string request;
  AppendFrame(request, 1, MessageType::kRequest, 0, "");
  for (const std::string& bytes : {std::string(64, '\xff'), unopened, even, request}) {
    std::filesystem::remove(path_);
    RawListener listener(path_, 1);
    ASSERT_TRUE(Connect().ok());
    RawPeer peer = listener.Accept();
    auto answer = CallAside("m");
    peer.Receive();
    peer.SendBytes(bytes);
    EXPECT_EQ(answer.get().error().reason(), "rpc.closed");
    EXPECT_FALSE(peer.Receive().has_value());
    LetGo();
  }
}

TEST_F(ClientTest, BrokenAnswer_EndsItsCallAlone) {
  RawListener listener(path_, 1);
  ASSERT_TRUE(Connect().ok());
  RawPeer peer = listener.Accept();
  auto data = CallAside("m");
  peer.Receive();
  peer.Send(1, MessageType::kData, 0, "x");
  EXPECT_EQ(data.get().error().reason(), "rpc.response");
  auto garbage = CallAside("m");
  peer.Receive();
  peer.Send(3, MessageType::kResponse, 0, "\xff\xff");
  EXPECT_EQ(garbage.get().error().reason(), "rpc.response");
}

TEST_F(ClientTest, PeerThatDoesNotRead_IsABacklog) {
  RawListener listener(path_, 1);
  ASSERT_TRUE(Connect().ok());
  RawPeer peer = listener.Accept();
  std::vector<std::future<Result<std::string>>> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(CallAside("m", std::string(3 << 20, 'x')));
  EXPECT_EQ(calls.back().get().error().reason(), "rpc.backlog");
  OnClientShard([&] { channel_->Close(); });
  EXPECT_EQ(calls.front().get().error().reason(), "rpc.closed");
}

TEST_F(ClientTest, LastUserGone_ClosesTheConnection) {
  RawListener listener(path_, 1);
  ASSERT_TRUE(Connect().ok());
  RawPeer peer = listener.Accept();
  LetGo();
  EXPECT_FALSE(peer.Receive().has_value());
}

TEST_F(ClientTest, StreamOverrun_EndsTheStreamAlone) {
  RawListener listener(path_, 1);
  ASSERT_TRUE(Connect().ok());
  RawPeer peer = listener.Accept();
  ASSERT_TRUE(OpenStream("s").ok());
  EXPECT_EQ(peer.Receive()->flags, kFlagRemoteOpen);
  for (int i = 0; i < 65; ++i) peer.Send(1, MessageType::kData, 0, "x");
  auto answer = CallAside("m");
  peer.Receive();
  peer.Send(3, MessageType::kResponse, 0, "");
  EXPECT_TRUE(answer.get().ok());
  EXPECT_EQ(StreamReceive().error().reason(), "rpc.stream_overrun");
}

TEST_F(ClientTest, StreamEnd_ByDataFlagOrResponse) {
  RawListener listener(path_, 1);
  ASSERT_TRUE(Connect().ok());
  RawPeer peer = listener.Accept();
  ASSERT_TRUE(OpenStream("s").ok());
  peer.Receive();
  peer.Send(1, MessageType::kData, 0, "a");
  peer.Send(1, MessageType::kData, kFlagRemoteClosed, "b");
  EXPECT_EQ(**StreamReceive(), "a");
  EXPECT_EQ(**StreamReceive(), "b");
  EXPECT_FALSE(StreamReceive()->has_value());
  ASSERT_TRUE(OpenStream("s").ok());
  peer.Receive();
  peer.Send(3, MessageType::kResponse, 0, SerializeError(Error(Code::kGone, "exec.ended", "over")));
  EXPECT_EQ(StreamReceive().error().reason(), "exec.ended");
}

// --- with the real server, on shard 0 ---

class ServerTest : public ClientTest {
 protected:
  ServerTest()
      : server_(shards_.at(0), {.max_connections = 3,
                                .max_calls_per_connection = 1000,
                                .max_request_bytes_per_connection = 6 << 20}) {
    server_.Register("t", "echo", &Echo);
    server_.Register("t", "fail", &Fail);
    server_.Register("t", "huge", &Huge);
    server_.Register("t", "who", &Who);
    server_.Register("t", "throw", &Throw);
    server_.Register("t", "hang",
                     [this](std::string, CallContext context) { return Hang(*this, context); });
    server_.RegisterStream("t", "double", &Double);
    server_.RegisterStream("t", "slow", [this](std::string, ServerStream& stream, CallContext) {
      return Slow(*this, stream);
    });
    EXPECT_TRUE(server_.ListenUnix(path_).ok());
  }
  ~ServerTest() override {
    LetGo();
    StopServer(Late());
  }

  void StopServer(Deadline deadline) {
    EXPECT_TRUE(BlockOn(shards_.at(0), Stop(server_, deadline)).ok());
  }
  static Task<void> Stop(Server& server, Deadline deadline) {
    co_await server.Stop(deadline);
    co_return Ok();
  }

  static Task<std::string> Echo(std::string payload, CallContext) { co_return payload; }
  static Task<std::string> Fail(std::string, CallContext) {
    co_return Error(Code::kGone, "exec.ended", "it has ended").WithField("op_id").WithErrno(EIO);
  }
  static Task<std::string> Huge(std::string, CallContext) {
    co_return std::string(kMaxFramePayload + 1, 'x');
  }
  static Task<std::string> Who(std::string, CallContext context) {
    co_return fmt::format("{} {} {}", context.peer->address, context.peer->pid, context.peer->uid);
  }
  static Task<std::string> Throw(std::string, CallContext) {
    throw std::runtime_error("boom");
    co_return std::string();
  }
  // Until it is cancelled or let go; says how it ended.
  static Task<std::string> Hang(ServerTest& test, CallContext context) {
    test.hanging_.count_down();
    auto waited = co_await test.release_.Wait(context.deadline);
    test.ended_.set_value(waited.ok() ? Code::kInternal : waited.error().code());
    if (!waited.ok()) co_return std::move(waited).error();
    co_return "released";
  }
  static Task<void> Double(std::string payload, ServerStream& stream, CallContext context) {
    DSEC_CO_TRY_VOID(stream.Send("got " + payload));
    for (;;) {
      auto message = co_await stream.Receive(context.deadline);
      if (!message.ok()) co_return std::move(message).error();
      if (!message->has_value()) co_return Ok();
      DSEC_CO_TRY_VOID(stream.Send(**message + **message));
    }
  }
  // Reads once it has been let go.
  static Task<void> Slow(ServerTest& test, ServerStream& stream) {
    DSEC_CO_TRY_VOID(co_await test.release_.Wait(Late()));
    auto message = co_await stream.Receive(Late());
    if (!message.ok()) co_return std::move(message).error();
    co_return Ok();
  }
  void Release() {
    boost::asio::post(shards_.at(0), [this] { release_.Set(); });
  }

  std::latch hanging_{1};
  runtime::AsyncEvent release_;
  std::promise<Code> ended_;
  Server server_;
};

TEST_F(ServerTest, UnixAndTcp_Answer) {
  ASSERT_TRUE(Connect().ok());
  EXPECT_EQ(*Call("echo", "hello"), "hello");
  EXPECT_EQ(*Call("who"), fmt::format("unix {} {}", getpid(), getuid()));
  LetGo();
  const uint16_t port = *server_.ListenTcp("127.0.0.1", 0);
  for (const char* host : {"127.0.0.1", "localhost"}) {
    auto channel = BlockOn(shards_.at(1), Channel::ConnectTcp(shards_.at(1), host, port, Late()));
    ASSERT_TRUE(channel.ok()) << channel.error().ToString();
    channel_ = std::move(*channel);
    EXPECT_EQ(*Call("echo", "hello"), "hello");
    EXPECT_TRUE(Call("who")->starts_with("127.0.0.1:"));
    LetGo();
  }
  StopServer(Late());
  EXPECT_EQ(BlockOn(shards_.at(1), Channel::ConnectTcp(shards_.at(1), "127.0.0.1", port, Late()))
                .error()
                .sys_errno(),
            ECONNREFUSED);
  EXPECT_EQ(BlockOn(shards_.at(1),
                    Channel::ConnectTcp(shards_.at(1), "no.such.name.invalid", port, Late()))
                .error()
                .reason(),
            "rpc.connect");
}

TEST_F(ServerTest, LargestMessages_Pass) {
  ASSERT_TRUE(Connect().ok());
  const std::string payload(kMaxFramePayload - 100, 'x');
  EXPECT_EQ(*Call("echo", payload), payload);
}

TEST_F(ServerTest, Error_ArrivesWhole) {
  ASSERT_TRUE(Connect().ok());
  EXPECT_EQ(Call("fail").error().ToString(), "GONE exec.ended: it has ended field=op_id errno=5");
  EXPECT_EQ(Call("nope").error().reason(), "rpc.unimplemented");
  EXPECT_EQ(Call("huge").error().reason(), "rpc.too_large");
  EXPECT_EQ(Call("echo", std::string(kMaxFramePayload, 'x')).error().reason(), "rpc.too_large");
  EXPECT_EQ(Call("throw").error().code(), Code::kInternal);
  EXPECT_EQ(*Call("echo", "still here"), "still here");
}

TEST_F(ServerTest, Deadline_TravelsToTheHandler) {
  ASSERT_TRUE(Connect().ok());
  EXPECT_EQ(Call("hang", "", Soon()).error().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(ended_.get_future().get(), Code::kDeadlineExceeded);
}

TEST_F(ServerTest, ClientGone_CancelsItsHandlers) {
  ASSERT_TRUE(Connect().ok());
  auto answer = CallAside("hang");
  hanging_.wait();
  OnClientShard([&] { channel_->Close(); });
  EXPECT_EQ(answer.get().error().reason(), "rpc.closed");
  EXPECT_EQ(ended_.get_future().get(), Code::kCancelled);
}

awaitable<void> EchoOwn(std::shared_ptr<Channel> channel, size_t number,
                        std::atomic<size_t>& right) {
  const std::string text = std::to_string(number) + std::string(number, 'x');
  auto answer = co_await channel->CallRaw("t", "echo", text, Late());
  if (answer.ok() && *answer == text) ++right;
}

TEST_F(ServerTest, ThousandCallsInFlight_AllGetTheirOwnAnswer) {
  ASSERT_TRUE(Connect().ok());
  runtime::Gate gate;
  std::atomic<size_t> right = 0;
  OnClientShard([&] {
    for (size_t i = 0; i < 1000; ++i) {
      runtime::Spawn(gate, shards_.at(1), EchoOwn(channel_, i, right));
    }
  });
  while (gate.count() > 0) std::this_thread::yield();
  EXPECT_EQ(right, 1000u);
}

TEST_F(ServerTest, TooMuchUnderWay_IsRefused) {
  ASSERT_TRUE(Connect().ok());
  std::vector<std::future<Result<std::string>>> calls;
  calls.push_back(CallAside("hang", std::string(3 << 20, 'x')));
  hanging_.wait();
  EXPECT_EQ(Call("echo", std::string((3 << 20) + 1, 'x')).error().reason(), "rpc.busy");
  EXPECT_TRUE(Call("echo", std::string(3 << 20, 'x')).ok());
  Release();
  EXPECT_EQ(*calls[0].get(), "released");
  EXPECT_TRUE(Call("echo", std::string((3 << 20) + 1, 'x')).ok());
}

TEST_F(ServerTest, TooManyConnections_AreClosed) {
  std::vector<RawPeer> peers;
  for (int i = 0; i < 3; ++i) {
    peers.push_back(RawPeer::Connect(path_));
    peers.back().Send(1, MessageType::kRequest, 0, SerializeRequest({"t", "echo", "x", 0}));
    EXPECT_TRUE(peers.back().Receive().has_value());
  }
  EXPECT_FALSE(RawPeer::Connect(path_).Receive().has_value());
}

TEST_F(ServerTest, Stream_BothWaysEndsInOrder) {
  ASSERT_TRUE(Connect().ok());
  ASSERT_TRUE(OpenStream("double", "it").ok());
  EXPECT_EQ(**StreamReceive(), "got it");
  for (const char* word : {"a", "bc"}) {
    EXPECT_TRUE(StreamSend(word).ok());
    EXPECT_EQ(**StreamReceive(), std::string(word) + word);
  }
  EXPECT_TRUE(StreamCloseSend().ok());
  EXPECT_EQ(StreamSend("x").error().reason(), "rpc.stream_closed");
  EXPECT_FALSE(StreamReceive()->has_value());
}

TEST_F(ServerTest, StreamOverrun_ReachesTheHandler) {
  RawPeer peer = RawPeer::Connect(path_);
  peer.Send(1, MessageType::kRequest, kFlagRemoteOpen, SerializeRequest({"t", "slow", "", 0}));
  for (int i = 0; i < 100; ++i) peer.Send(1, MessageType::kData, 0, "x");
  peer.Send(3, MessageType::kRequest, 0, SerializeRequest({"t", "echo", "x", 0}));
  EXPECT_EQ(peer.Receive()->stream, 3u);  // all of the stream has been read
  Release();
  auto ended = peer.Receive();
  EXPECT_EQ(ended->stream, 1u);
  EXPECT_EQ(ParseResponse(ended->payload).error().reason(), "rpc.stream_overrun");
}

TEST_F(ServerTest, HostileClient_IsCutOff) {
  const auto frame = [](uint32_t stream, MessageType type) {
    std::string out;
    AppendFrame(out, stream, type, 0, SerializeRequest({"t", "hang", "", 0}));
    return out;
  };
  for (const std::string& bytes :
       {std::string(20, '\xff'), frame(2, MessageType::kRequest), frame(1, MessageType::kResponse),
        frame(1, MessageType::kData),
        frame(5, MessageType::kRequest) + frame(3, MessageType::kRequest)}) {
    RawPeer peer = RawPeer::Connect(path_);
    peer.SendBytes(bytes);
    EXPECT_FALSE(peer.Receive().has_value());
  }
}

TEST_F(ServerTest, MalformedRequest_IsAnsweredAndTheConnectionStays) {
  RawPeer peer = RawPeer::Connect(path_);
  peer.Send(1, MessageType::kRequest, 0, "\xff");
  EXPECT_EQ(ParseResponse(peer.Receive()->payload).error().reason(), "rpc.request");
  peer.Send(3, MessageType::kRequest, 0, SerializeRequest({"t", "echo", "x", 0}));
  EXPECT_EQ(*ParseResponse(peer.Receive()->payload), "x");
}

TEST_F(ServerTest, Stop_WaitsForCallsAndRefusesNewOnes) {
  ASSERT_TRUE(Connect().ok());
  auto answer = CallAside("hang");
  hanging_.wait();
  std::promise<void> stopped;
  std::thread stopper([&] {
    StopServer(Late());
    stopped.set_value();
  });
  std::string_view reason;
  while (reason != "rpc.stopping") {
    auto refused = Call("echo");
    if (!refused.ok()) reason = refused.error().reason();
  }
  EXPECT_NE(access(path_.c_str(), F_OK), 0);
  Release();
  EXPECT_EQ(*answer.get(), "released");
  stopper.join();
  EXPECT_TRUE(BlockOn(shards_.at(1), channel_->WaitClosed()).ok());
}

TEST_F(ServerTest, StopPastItsDeadline_CancelsTheHandlers) {
  ASSERT_TRUE(Connect().ok());
  auto answer = CallAside("hang");
  hanging_.wait();
  StopServer(Soon());
  EXPECT_EQ(ended_.get_future().get(), Code::kCancelled);
  EXPECT_FALSE(answer.get().ok());
}

TEST_F(ServerTest, Listen_MakesAPrivateSocketAndRefusesATakenPath) {
  struct stat status{};
  ASSERT_EQ(stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(server_.ListenUnix(path_).error().sys_errno(), EADDRINUSE);
  EXPECT_EQ(access(path_.c_str(), F_OK), 0);
  EXPECT_EQ(server_.ListenUnix(std::string(200, 'x')).error().reason(), "rpc.listen");
  EXPECT_EQ(server_.ListenTcp("not an address", 0).error().reason(), "rpc.listen");
}

}  // namespace
}  // namespace dsec::rpc

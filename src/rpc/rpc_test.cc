// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>

#include "dsec/v1/aether.pb.h"
#include "os/file.h"
#include "rpc/channel.h"
#include "rpc/frame.h"
#include "rpc/server.h"
#include "runtime/gate.h"
#include "runtime/shards.h"

namespace dsec::rpc {
namespace {

using runtime::BlockOn;
using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;
using std::chrono::seconds;

Deadline Soon() { return Deadline::After(seconds(10)); }

// A server on shard 0 and clients on shard 1.
class RpcTest : public testing::Test {
 protected:
  RpcTest() : folder_(std::move(os::TempDir::Create("dsec-rpc-")).value()), shards_(2) {
    server_ =
        std::make_unique<Server>(shards_.at(0), ServerOptions{.max_calls_per_connection = 2000});
    server_->Register("t", "echo", [](std::string payload, CallContext) -> Task<std::string> {
      co_return payload;
    });
    server_->Register("t", "fail", [](std::string, CallContext) -> Task<std::string> {
      co_return Error(Code::kGone, "test.gone", "it has ended").WithField("id");
    });
    server_->Register("t", "hang", [this](std::string, CallContext context) -> Task<std::string> {
      saw_deadline_ = !context.deadline.never();
      auto waited =
          co_await runtime::SleepUntil(context.deadline.Sooner(Deadline::After(seconds(1))));
      if (!waited.ok()) co_return std::move(waited).error();
      co_return std::string("late");
    });
    server_->Register("t", "huge", [](std::string, CallContext) -> Task<std::string> {
      co_return std::string(kMaxFramePayload + 1, 'x');
    });
    server_->RegisterStream(
        "t", "double",
        [](std::string payload, ServerStream& stream, CallContext context) -> Task<void> {
          auto first = stream.Send("got " + payload);
          if (!first.ok()) co_return std::move(first).error();
          for (;;) {
            auto message = co_await stream.Receive(context.deadline);
            if (!message.ok()) co_return std::move(message).error();
            if (!message->has_value()) co_return Ok();
            auto sent = stream.Send(**message + **message);
            if (!sent.ok()) co_return std::move(sent).error();
          }
        });
    path_ = folder_.path() + "/s";
    EXPECT_TRUE(server_->ListenUnix(path_).ok());
    port_ = *server_->ListenTcp("127.0.0.1", 0);
  }
  ~RpcTest() override {
    auto stopped = BlockOn(shards_.at(0), StopServer(*server_));
    EXPECT_TRUE(stopped.ok());
    EXPECT_NE(access(path_.c_str(), F_OK), 0);
    shards_.Stop();
  }

  static Task<void> StopServer(Server& server) {
    co_await server.Stop(Deadline::After(milliseconds(200)));
    co_return Ok();
  }

  template <typename F>
  auto Client(F body) {
    return BlockOn(shards_.at(1), body());
  }
  Task<std::shared_ptr<Channel>> Connect() {
    auto channel = co_await Channel::ConnectUnix(shards_.at(1), path_, Soon());
    co_return channel;
  }

  os::TempDir folder_;
  std::string path_;
  uint16_t port_ = 0;
  std::atomic<bool> saw_deadline_ = false;
  runtime::Shards shards_;
  std::unique_ptr<Server> server_;
};

TEST_F(RpcTest, Call_OverUnixAndTcp_Answers) {
  auto done = Client([&]() -> Task<void> {
    auto unix_channel = co_await Connect();
    auto tcp_channel = co_await Channel::ConnectTcp(shards_.at(1), "127.0.0.1", port_, Soon());
    for (const auto& channel : {*unix_channel, *tcp_channel}) {
      auto answer = co_await channel->CallRaw("t", "echo", "hello", Soon());
      EXPECT_EQ(*answer, "hello");
      v1::PathRequest request;
      request.set_path("/x");
      auto typed = co_await channel->Call<v1::PathRequest>("t", "echo", request, Soon());
      EXPECT_EQ(typed->path(), "/x");
    }
    co_return Ok();
  });
  EXPECT_TRUE(done.ok());
}

TEST_F(RpcTest, Error_ArrivesWithReasonAndField) {
  auto done = Client([&]() -> Task<void> {
    auto channel = co_await Connect();
    auto failed = co_await (*channel)->CallRaw("t", "fail", "", Soon());
    EXPECT_EQ(failed.error().code(), Code::kGone);
    EXPECT_EQ(failed.error().reason(), "test.gone");
    EXPECT_EQ(failed.error().field(), "id");
    auto missing = co_await (*channel)->CallRaw("t", "nope", "", Soon());
    EXPECT_EQ(missing.error().reason(), "rpc.unimplemented");
    auto huge = co_await (*channel)->CallRaw("t", "huge", "", Soon());
    EXPECT_EQ(huge.error().reason(), "rpc.too_large");
    auto too_large =
        co_await (*channel)->CallRaw("t", "echo", std::string(kMaxFramePayload + 1, 'x'), Soon());
    EXPECT_EQ(too_large.error().reason(), "rpc.too_large");
    co_return Ok();
  });
  EXPECT_TRUE(done.ok());
}

TEST_F(RpcTest, Deadline_EndsTheCallHereAndTravelsThere) {
  auto done = Client([&]() -> Task<void> {
    auto channel = co_await Connect();
    auto late = co_await (*channel)->CallRaw("t", "hang", "", Deadline::After(milliseconds(30)));
    EXPECT_EQ(late.error().code(), Code::kDeadlineExceeded);
    EXPECT_TRUE(saw_deadline_);
    auto next = co_await (*channel)->CallRaw("t", "echo", "fine", Soon());
    EXPECT_EQ(*next, "fine");
    co_return Ok();
  });
  EXPECT_TRUE(done.ok());
}

TEST_F(RpcTest, ThousandCallsInFlight_AllAnswerTheirOwn) {
  runtime::Gate gate;
  std::atomic<int> right = 0;
  auto done = Client([&]() -> Task<void> {
    auto channel = co_await Connect();
    for (int i = 0; i < 1000; ++i) {
      runtime::Spawn(gate, shards_.at(1),
                     [](std::shared_ptr<Channel> on, int number,
                        std::atomic<int>& count) -> boost::asio::awaitable<void> {
                       const std::string text =
                           std::to_string(number) + std::string(static_cast<size_t>(number), 'x');
                       auto answer = co_await on->CallRaw("t", "echo", text, Soon());
                       if (answer.ok() && *answer == text) ++count;
                     }(*channel, i, right));
    }
    co_await gate.Close();
    co_return Ok();
  });
  EXPECT_TRUE(done.ok());
  EXPECT_EQ(right, 1000);
}

TEST_F(RpcTest, Stream_BothWays_EndsInOrder) {
  auto done = Client([&]() -> Task<void> {
    auto channel = co_await Connect();
    auto stream = (*channel)->OpenStream("t", "double", "it", Soon());
    auto hello = co_await (*stream)->Receive(Soon());
    EXPECT_EQ(**hello, "got it");
    for (const char* word : {"a", "bc"}) {
      EXPECT_TRUE((*stream)->Send(word).ok());
      auto twice = co_await (*stream)->Receive(Soon());
      EXPECT_EQ(**twice, std::string(word) + word);
    }
    EXPECT_TRUE((*stream)->CloseSend().ok());
    EXPECT_FALSE((*stream)->Send("x").ok());
    auto end = co_await (*stream)->Receive(Soon());
    EXPECT_FALSE(end->has_value());
    co_return Ok();
  });
  EXPECT_TRUE(done.ok());
}

TEST_F(RpcTest, Close_EndsCallsUnderWay) {
  auto done = Client([&]() -> Task<void> {
    auto channel = co_await Connect();
    runtime::Gate gate;
    bool closed = false;
    runtime::Spawn(gate, shards_.at(1),
                   [](std::shared_ptr<Channel> on, bool& seen) -> boost::asio::awaitable<void> {
                     auto answer = co_await on->CallRaw("t", "hang", "", Soon());
                     seen = !answer.ok() && answer.error().reason() == "rpc.closed";
                   }(*channel, closed));
    auto answer = co_await (*channel)->CallRaw("t", "echo", "", Soon());
    (*channel)->Close();
    co_await gate.Close();
    EXPECT_TRUE(closed);
    EXPECT_TRUE((*channel)->closed());
    auto waited = co_await (*channel)->WaitClosed();
    EXPECT_TRUE(waited.ok());
    co_return Ok();
  });
  EXPECT_TRUE(done.ok());
}

TEST_F(RpcTest, NobodyListens_IsUnavailable) {
  auto done = Client([&]() -> Task<void> {
    auto channel = co_await Channel::ConnectUnix(shards_.at(1), folder_.path() + "/none", Soon());
    EXPECT_EQ(channel.error().code(), Code::kUnavailable);
    auto long_path = co_await Channel::ConnectUnix(shards_.at(1), std::string(200, 'x'), Soon());
    EXPECT_EQ(long_path.error().code(), Code::kInvalidArgument);
    co_return Ok();
  });
  EXPECT_TRUE(done.ok());
}

// A peer that answers nonsense, on a raw socket.
TEST_F(RpcTest, HostilePeer_ClosesTheChannel) {
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = folder_.path() + "/hostile";
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  auto done = Client([&]() -> Task<void> {
    auto channel = co_await Channel::ConnectUnix(shards_.at(1), path, Soon());
    const int peer = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    const std::string nonsense(64, '\xff');
    EXPECT_EQ(write(peer, nonsense.data(), nonsense.size()), 64);
    auto answer = co_await (*channel)->CallRaw("t", "echo", "", Soon());
    EXPECT_EQ(answer.error().reason(), "rpc.closed");
    close(peer);
    co_return Ok();
  });
  close(listener);
  EXPECT_TRUE(done.ok());
}

}  // namespace
}  // namespace dsec::rpc

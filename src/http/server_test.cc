// SPDX-License-Identifier: Apache-2.0
#include "http/server.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "http/client.h"
#include "http/testing/raw_socket.h"

namespace dsec::http {
namespace {

using namespace std::chrono_literals;
using testing::RawReply;
using testing::RawSocket;

// What handlers tell the test.
class Notes {
 public:
  void Add(std::string note) {
    const std::lock_guard lock(mutex_);
    notes_.push_back(std::move(note));
    changed_.notify_all();
  }
  void Clear() {
    const std::lock_guard lock(mutex_);
    notes_.clear();
  }
  bool WaitFor(std::string_view note, std::chrono::milliseconds patience = 10s) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [&] {
      return std::find(notes_.begin(), notes_.end(), note) != notes_.end();
    });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> notes_;
};

constexpr uint64_t kEchoLimit = 1 << 20;

boost::asio::awaitable<void> Serve(Notes* notes, Exchange& exchange) {
  const std::string target = exchange.head().target;
  if (target == "/echo") {
    auto body = co_await exchange.ReadAll(kEchoLimit);
    if (!body.ok()) {
      notes->Add(std::string(body.error().reason()));
      (void)co_await exchange.Reply(StatusOf(body.error()), {}, "");
      co_return;
    }
    (void)co_await exchange.Reply(200, {}, *body);
  } else if (target == "/count") {
    uint64_t total = 0;
    size_t largest = 0;
    while (!exchange.body_done()) {
      auto piece = co_await exchange.Read(1 << 20);
      if (!piece.ok()) {
        notes->Add(std::string(piece.error().reason()));
        co_return;
      }
      total += piece->size();
      largest = std::max(largest, piece->size());
    }
    (void)co_await exchange.Reply(200, {}, fmt::format("{} {}", total, largest));
  } else if (target == "/refuse") {
    (void)co_await exchange.Reply(401, {}, "no");
  } else if (target == "/stream") {
    exchange.Begin(200, {{"Content-Type", "application/x-ndjson"}});
    (void)co_await exchange.Write("one\n");
    (void)co_await exchange.Write("two\n");
    (void)co_await exchange.End({{"X-Trailer", "yes"}});
  } else if (target == "/flood") {
    exchange.Begin(200, {});
    const std::string data(1 << 20, 'x');
    for (int i = 0; i < 256; ++i) {
      auto written = co_await exchange.Write(data);
      if (!written.ok()) {
        notes->Add("flood:" + std::string(written.error().reason()));
        co_return;
      }
      if (i == 64) notes->Add("flood:64");
    }
    (void)co_await exchange.End();
  } else if (target == "/cut") {
    exchange.Begin(200, {});
    (void)co_await exchange.Write("half");
  } else if (target == "/wait") {
    notes->Add("waiting");
    (void)co_await exchange.attention().Wait(runtime::Deadline::Never());
    notes->Add(exchange.stopping() ? "stopping" : "gone");
    (void)co_await exchange.Reply(200, {}, "late");
  } else if (target == "/throw") {
    throw std::runtime_error("a bug");
  } else if (target != "/silent") {
    (void)co_await exchange.Reply(404, {}, target);
  }
}

class ServerTest : public ::testing::Test {
 protected:
  void Start(ServerOptions options = {}, std::vector<std::string> listen = {"127.0.0.1:0"}) {
    options.sweep_period = 20ms;
    server_ = Server::Start(
                  shards_, listen, options,
                  [this](Exchange& exchange) { return Serve(&notes_, exchange); }, registry_)
                  .value();
  }
  void Stop(std::chrono::milliseconds grace = 5s) {
    const auto stop = [](Server& server, std::chrono::milliseconds time) -> runtime::Task<void> {
      co_await server.Stop(runtime::Deadline::After(time));
      co_return Ok();
    };
    (void)runtime::BlockOn(shards_.at(0), stop(*server_, grace));
    server_.reset();
  }
  ~ServerTest() override {
    if (server_ != nullptr) Stop();
  }
  const std::string& address() const { return server_->addresses()[0]; }

  runtime::Shards shards_{2};
  metrics::Registry registry_;
  Notes notes_;
  std::unique_ptr<Server> server_;
};

const std::string kHost = " HTTP/1.1\r\nHost: x\r\n";

std::string Post(std::string_view target, std::string_view body) {
  return fmt::format("POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{}", target,
                     body.size(), body);
}

TEST_F(ServerTest, KeepAlive_ServesManyRequestsOnOneConnection) {
  Start();
  RawSocket client(address());
  for (int i = 0; i < 100; ++i) {
    const std::string body(static_cast<size_t>(i) * 100, 'a');
    const RawReply reply = client.Ask(Post("/echo", body));
    ASSERT_EQ(reply.status, 200);
    EXPECT_EQ(reply.body, body);
    EXPECT_TRUE(reply.fields.Find("date") && reply.fields.Find("x-request-id"));
  }
  EXPECT_EQ(client.Ask("GET /nothing" + kHost + "X-Request-Id: mine-1\r\n\r\n")
                .fields.Find("X-Request-Id"),
            "mine-1");
  EXPECT_NE(client.Ask("GET /nothing" + kHost + "X-Request-Id: no good\r\n\r\n")
                .fields.Find("X-Request-Id"),
            "no good");
}

TEST_F(ServerTest, Pipelining_AnswersInOrder) {
  Start();
  RawSocket client(address());
  std::string requests;
  for (int i = 0; i < 200; ++i) requests += Post("/echo", std::to_string(i));
  ASSERT_TRUE(client.Send(requests));
  for (int i = 0; i < 200; ++i) EXPECT_EQ(client.ReadReply().body, std::to_string(i));
}

TEST_F(ServerTest, Smuggling_IsRefusedAndTheConnectionCloses) {
  Start();
  for (const char* framing :
       {"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 5\r\n", "Transfer-Encoding: gzip\r\n",
        "Transfer-Encoding : chunked\r\n", "Content-Length: 5, 6\r\n"}) {
    RawSocket client(address());
    ASSERT_TRUE(client.Send("POST /echo" + kHost + framing + "\r\n0\r\n\r\nGET /smuggled" + kHost +
                            "\r\n"));
    const RawReply reply = client.ReadReply();
    EXPECT_TRUE(reply.status == 400 || reply.status == 501) << framing << reply.status;
    EXPECT_EQ(client.ReadReply().status, 0) << framing;
    EXPECT_TRUE(client.WaitClosed()) << framing;
  }
}

TEST_F(ServerTest, Slowloris_IsCutOffAfterTheHeadTime) {
  Start({.head_timeout = 300ms});
  RawSocket client(address());
  const auto started = std::chrono::steady_clock::now();
  ASSERT_TRUE(client.Send("GET /echo HTTP/1.1\r\nHost: x\r\n"));
  std::string got;
  while (got.empty() && !client.closed()) {
    (void)client.Send("A: b\r\n");
    got = client.Receive(50ms);
  }
  EXPECT_TRUE(got.starts_with("HTTP/1.1 408 ")) << got;
  EXPECT_LT(std::chrono::steady_clock::now() - started, 2s);
}

TEST_F(ServerTest, SilentConnections_AreClosedWithoutAWord) {
  Start({.idle_timeout = 200ms, .head_timeout = 200ms});
  RawSocket fresh(address());
  RawSocket used(address());
  EXPECT_EQ(used.Ask(Post("/echo", "x")).status, 200);
  EXPECT_EQ(fresh.Receive(), "");
  EXPECT_TRUE(fresh.closed());
  EXPECT_EQ(used.Receive(), "");
  EXPECT_TRUE(used.closed());
}

TEST_F(ServerTest, SlowBody_IsCutOffByRate) {
  Start({.body_patience = 200ms});
  RawSocket client(address());
  ASSERT_TRUE(client.Send("POST /echo" + kHost + "Content-Length: 100000\r\n\r\n"));
  const auto started = std::chrono::steady_clock::now();
  while (!client.closed() && client.Receive(20ms).empty() && client.Send("a")) {
  }
  EXPECT_TRUE(notes_.WaitFor("request.timeout"));
  EXPECT_LT(std::chrono::steady_clock::now() - started, 3s);
}

TEST_F(ServerTest, HeaderFlood_Is431) {
  Start();
  RawSocket client(address());
  std::string head = "GET /echo" + kHost;
  while (head.size() < 40'000) head += "X-A: 1\r\n";
  EXPECT_EQ(client.Ask(head).status, 431);
  EXPECT_TRUE(client.WaitClosed());
}

TEST_F(ServerTest, LargeBody_StreamsInBoundedPieces) {
  Start();
  RawSocket client(address());
  const uint64_t size = 64 << 20;
  std::thread sender([&] {
    (void)client.Send(
        fmt::format("PUT /count HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", size));
    const std::string piece(1 << 20, 'z');
    for (uint64_t sent = 0; sent < size; sent += piece.size()) (void)client.Send(piece);
  });
  EXPECT_EQ(client.ReadReply().body, fmt::format("{} {}", size, 1 << 20));
  sender.join();
  ASSERT_TRUE(client.Send("PUT /count" + kHost + "Transfer-Encoding: chunked\r\n\r\n"));
  for (int i = 0; i < 100; ++i)
    ASSERT_TRUE(client.Send("10000\r\n" + std::string(65536, 'y') + "\r\n"));
  ASSERT_TRUE(client.Send("0\r\n\r\n"));
  EXPECT_EQ(client.ReadReply().body, fmt::format("{} {}", 6553600, 1 << 20));
}

TEST_F(ServerTest, BodyAboveTheLimit_Is413BeforeAndWhileReading) {
  Start();
  RawSocket announced(address());
  EXPECT_EQ(announced.Ask("POST /echo" + kHost + "Content-Length: 1048577\r\n\r\n").status, 413);
  RawSocket chunked(address());
  ASSERT_TRUE(chunked.Send("POST /echo" + kHost + "Transfer-Encoding: chunked\r\n\r\n"));
  for (int i = 0; i < 20; ++i) (void)chunked.Send("10000\r\n" + std::string(65536, 'y') + "\r\n");
  EXPECT_EQ(chunked.ReadReply().status, 413);
  RawSocket exact(address());
  EXPECT_EQ(exact.Ask(Post("/echo", std::string(kEchoLimit, 'x'))).body.size(), kEchoLimit);
}

TEST_F(ServerTest, RefusedUpload_GetsItsReplyAlthoughItGoesOnSending) {
  Start();
  RawSocket client(address());
  ASSERT_TRUE(client.Send("PUT /refuse" + kHost + "Content-Length: 20000000\r\n\r\n"));
  ASSERT_TRUE(client.Send(std::string(20'000'000, 'x')));
  const RawReply reply = client.ReadReply();
  EXPECT_EQ(reply.status, 401);
  EXPECT_EQ(reply.fields.Find("Connection"), "close");
}

TEST_F(ServerTest, SmallUnreadBody_KeepsTheConnection) {
  Start();
  RawSocket client(address());
  EXPECT_EQ(client.Ask(Post("/refuse", std::string(5000, 'x'))).status, 401);
  EXPECT_EQ(client.Ask(Post("/echo", "again")).body, "again");
}

TEST_F(ServerTest, ExpectContinue_IsAnsweredWhenTheBodyIsWanted) {
  Start();
  RawSocket client(address());
  ASSERT_TRUE(
      client.Send("POST /echo" + kHost + "Content-Length: 5\r\nExpect: 100-continue\r\n\r\n"));
  EXPECT_EQ(client.Receive(), "HTTP/1.1 100 Continue\r\n\r\n");
  ASSERT_TRUE(client.Send("hello"));
  EXPECT_EQ(client.ReadReply().body, "hello");
  RawSocket unwanted(address());
  EXPECT_EQ(
      unwanted.Ask("POST /refuse" + kHost + "Content-Length: 5\r\nExpect: 100-continue\r\n\r\n")
          .status,
      401);
  unwanted.ShutdownWrite();
  EXPECT_TRUE(unwanted.WaitClosed());
}

TEST_F(ServerTest, Stream_IsChunkedWithTrailersAndPlainForHttp10) {
  Start();
  RawSocket client(address());
  ASSERT_TRUE(client.Send("GET /stream" + kHost + "\r\n"));
  std::string bytes;
  while (bytes.find("X-Trailer: yes\r\n\r\n") == std::string::npos && !client.closed())
    bytes += client.Receive();
  EXPECT_NE(bytes.find("\r\n\r\n4\r\none\n\r\n4\r\ntwo\n\r\n0\r\nX-Trailer: yes\r\n\r\n"),
            std::string::npos)
      << bytes;
  RawSocket old(address());
  const RawReply reply = old.Ask("GET /stream HTTP/1.0\r\n\r\n");
  EXPECT_EQ(reply.body, "one\ntwo\n");
  EXPECT_FALSE(reply.fields.Find("Transfer-Encoding"));
}

TEST_F(ServerTest, UnfinishedReply_CutsTheConnection) {
  Start();
  RawSocket client(address());
  const RawReply reply = client.Ask("GET /cut" + kHost + "\r\n");
  EXPECT_EQ(reply.body, "half");
  EXPECT_FALSE(reply.whole);
}

TEST_F(ServerTest, HandlerThatThrowsOrIsSilent_Is500) {
  Start();
  RawSocket client(address());
  EXPECT_EQ(client.Ask("GET /throw" + kHost + "\r\n").status, 500);
  EXPECT_EQ(client.Ask("GET /silent" + kHost + "\r\n").status, 500);
  EXPECT_EQ(client.Ask(Post("/echo", "still here")).body, "still here");
}

TEST_F(ServerTest, ReaderThatDoesNotRead_HoldsTheHandlerAndIsCutInTheEnd) {
  Start({.write_patience = 500ms});
  RawSocket client(address(), 4096);
  ASSERT_TRUE(client.Send("GET /flood" + kHost + "\r\n"));
  EXPECT_TRUE(notes_.WaitFor("flood:client.gone"));
  EXPECT_FALSE(notes_.WaitFor("flood:64", 0ms))
      << "the handler ran ahead of a client that does not read";
}

TEST_F(ServerTest, ClientThatGoes_IsNoticedAtOnce) {
  Start();
  for (const std::string& how : {"close", "reset", "half-close"}) {
    Notes& notes = notes_;
    notes.Clear();
    RawSocket client(address());
    ASSERT_TRUE(client.Send("GET /wait" + kHost + "\r\n"));
    ASSERT_TRUE(notes.WaitFor("waiting"));
    const auto started = std::chrono::steady_clock::now();
    if (how == "close") client.Close();
    if (how == "reset") client.Reset();
    if (how == "half-close") client.ShutdownWrite();
    ASSERT_TRUE(notes.WaitFor("gone")) << how;
    EXPECT_LT(std::chrono::steady_clock::now() - started, 1s) << how;
    if (how == "half-close") EXPECT_EQ(client.ReadReply().body, "late");
  }
}

TEST_F(ServerTest, PipelinedBytesWhileWatching_AreServedLater) {
  Start();
  RawSocket client(address());
  ASSERT_TRUE(client.Send("GET /wait" + kHost + "\r\n"));
  ASSERT_TRUE(notes_.WaitFor("waiting"));
  ASSERT_TRUE(client.Send(Post("/echo", "queued")));
  client.ShutdownWrite();
  EXPECT_EQ(client.ReadReply().body, "late");
  EXPECT_EQ(client.ReadReply().body, "queued");
}

TEST_F(ServerTest, TooManyConnections_Get503) {
  Start({.max_connections = 2});
  RawSocket first(address());
  RawSocket second(address());
  EXPECT_EQ(first.Ask(Post("/echo", "x")).status, 200);
  EXPECT_EQ(second.Ask(Post("/echo", "x")).status, 200);
  RawSocket third(address());
  const RawReply refused = third.ReadReply();
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.fields.Find("Retry-After"), "1");
  first.Close();
  for (int i = 0;; ++i) {  // the close has to reach the server first
    RawSocket again(address());
    if (again.Ask(Post("/echo", "x")).status == 200) break;
    ASSERT_LT(i, 1000);
  }
}

TEST_F(ServerTest, TooManyRequestsInFlight_Get503) {
  Start({.max_in_flight = 1});
  RawSocket waiting(address());
  ASSERT_TRUE(waiting.Send("GET /wait" + kHost + "\r\n"));
  ASSERT_TRUE(notes_.WaitFor("waiting"));
  RawSocket other(address());
  EXPECT_EQ(other.Ask(Post("/echo", "x")).status, 503);
  waiting.Close();
  ASSERT_TRUE(notes_.WaitFor("gone"));
}

TEST_F(ServerTest, Stop_TellsHandlersAndClosesIdleConnections) {
  Start();
  RawSocket idle(address());
  EXPECT_EQ(idle.Ask(Post("/echo", "x")).status, 200);
  RawSocket busy(address());
  ASSERT_TRUE(busy.Send("GET /wait" + kHost + "\r\n"));
  ASSERT_TRUE(notes_.WaitFor("waiting"));
  const auto started = std::chrono::steady_clock::now();
  Stop();
  EXPECT_LT(std::chrono::steady_clock::now() - started, 3s);
  EXPECT_TRUE(notes_.WaitFor("stopping", 0ms));
  EXPECT_EQ(busy.ReadReply().body, "late");
  EXPECT_TRUE(idle.WaitClosed());
}

TEST_F(ServerTest, Stop_CutsClientsThatDoNotReadAtItsDeadline) {
  Start();
  RawSocket client(address(), 4096);
  ASSERT_TRUE(client.Send("GET /flood" + kHost + "\r\n"));
  EXPECT_FALSE(client.Receive().empty());
  const auto started = std::chrono::steady_clock::now();
  Stop(200ms);
  EXPECT_LT(std::chrono::steady_clock::now() - started, 3s);
  EXPECT_TRUE(notes_.WaitFor("flood:client.gone", 0ms));
}

class UnixServerTest : public ServerTest {
 protected:
  UnixServerTest() {
    char name[] = "/tmp/dsec-http-XXXXXX";
    folder_ = ::mkdtemp(name);
    path_ = folder_ + "/api.sock";
  }
  ~UnixServerTest() override {
    if (server_ != nullptr) Stop();
    (void)::unlink(path_.c_str());
    (void)::rmdir(folder_.c_str());
  }
  std::string folder_;
  std::string path_;
};

TEST_F(UnixServerTest, UnixSocket_ServesAndReplacesAStaleFile) {
  const Address address = ParseAddress("unix:" + path_).value();
  const int stale = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(::bind(stale, reinterpret_cast<const sockaddr*>(&address.storage), address.size), 0);
  ::close(stale);
  Start({}, {"unix:" + path_});
  EXPECT_EQ(server_->addresses()[0], "unix:" + path_);
  RawSocket client(server_->addresses()[0]);
  EXPECT_EQ(client.Ask(Post("/echo", "x")).body, "x");
  const auto second = Server::Start(shards_, {"unix:" + path_}, {}, {}, registry_);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().reason(), "listen.in_use");
  Stop();
  struct stat info{};
  EXPECT_NE(::stat(path_.c_str(), &info), 0);
}

TEST_F(ServerTest, BadAddresses_AreNamed) {
  for (const char* text :
       {"", "127.0.0.1", "host:1", "127.0.0.1:99999", "unix:relative", "[::1:80"}) {
    const auto server = Server::Start(shards_, {text}, {}, {}, registry_);
    ASSERT_FALSE(server.ok()) << text;
    EXPECT_EQ(server.error().reason(), "listen.address");
  }
}

// --- the client against the server ---

class ClientTest : public ServerTest {
 protected:
  template <typename T>
  Result<T> Run(runtime::Task<T> task) {
    return runtime::BlockOn(shards_.at(1), std::move(task));
  }
  std::unique_ptr<Client> Make(ClientOptions options = {}) {
    if (options.endpoint.empty()) options.endpoint = address();
    return Client::Create(shards_.at(1), std::move(options)).value();
  }
  // Clients live on their shard, and die there.
  void Drop(std::unique_ptr<Client> client) {
    const auto drop = [](std::unique_ptr<Client> gone) -> runtime::Task<void> {
      gone.reset();
      co_return Ok();
    };
    (void)Run(drop(std::move(client)));
  }
};

const auto kSoon = [] { return runtime::Deadline::After(10s); };

TEST_F(ClientTest, Call_KeepsTheConnection) {
  Start();
  auto client = Make();
  for (int i = 0; i < 20; ++i) {
    const auto reply =
        Run(client->Call({.method = "POST", .target = "/echo", .body = "hi"}, kSoon()));
    ASSERT_TRUE(reply.ok()) << reply.error().ToString();
    EXPECT_EQ(reply->body, "hi");
  }
  EXPECT_NE(registry_.RenderPrometheus().find("dsec_http_connections_total 1\n"),
            std::string::npos);
  Drop(std::move(client));
}

runtime::Task<std::string> NextPiece(std::shared_ptr<int> left) {
  if ((*left)-- <= 0) co_return std::string();
  co_return std::string(100'000, 'p');
}

TEST_F(ClientTest, Upload_StreamsFromItsSource) {
  Start();
  auto client = Make();
  auto left = std::make_shared<int>(50);
  ClientRequest request{.method = "PUT", .target = "/count"};
  request.source = [left] { return NextPiece(left); };
  const auto reply = Run(client->Call(std::move(request), kSoon()));
  ASSERT_TRUE(reply.ok()) << reply.error().ToString();
  EXPECT_EQ(reply->body, fmt::format("{} {}", 5'000'000, 1 << 20));
  *left = 1000;
  ClientRequest refused{.method = "PUT", .target = "/refuse"};
  refused.source = [left] { return NextPiece(left); };
  EXPECT_EQ(Run(client->Call(std::move(refused), kSoon())).value().status, 401);
  Drop(std::move(client));
}

runtime::Task<std::string> ReadLines(Client& client, std::string target) {
  ClientRequest request{.method = "GET", .target = std::move(target)};
  DSEC_CO_TRY(auto stream, co_await client.Open(std::move(request), kSoon()));
  std::string all;
  for (;;) {
    DSEC_CO_TRY(const auto line, co_await stream->ReadLine(kSoon()));
    if (!line) co_return all;
    all += *line + ";";
  }
}

TEST_F(ClientTest, Lines_ComeOneByOneAndACutIsAnError) {
  Start();
  auto client = Make();
  EXPECT_EQ(Run(ReadLines(*client, "/stream")).value(), "one;two;");
  const auto cut = Run(ReadLines(*client, "/cut"));
  ASSERT_FALSE(cut.ok());
  EXPECT_EQ(cut.error().reason(), "client.connection");
  Drop(std::move(client));
}

TEST_F(ClientTest, Deadlines_AreKept) {
  Start();
  auto client = Make();
  const auto reply =
      Run(client->Call({.method = "GET", .target = "/wait"}, runtime::Deadline::After(100ms)));
  ASSERT_FALSE(reply.ok());
  EXPECT_EQ(reply.error().reason(), "client.timeout");
  EXPECT_TRUE(notes_.WaitFor("gone"));
  Drop(std::move(client));
}

TEST_F(ClientTest, NobodyThere_IsUnavailable) {
  Start();
  ClientOptions options;
  options.endpoint = "unix:/nonexistent/socket";
  auto client = Make(options);
  const auto reply = Run(client->Call({.method = "GET", .target = "/"}, kSoon()));
  ASSERT_FALSE(reply.ok());
  EXPECT_EQ(reply.error().code(), Code::kUnavailable);
  Drop(std::move(client));
  EXPECT_FALSE(Client::Create(shards_.at(0), {.endpoint = "ftp://x"}).ok());
}

}  // namespace
}  // namespace dsec::http

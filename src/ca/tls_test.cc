// SPDX-License-Identifier: Apache-2.0
// TLS of src/rpc with certificates of this folder, against peers that are not what they should be.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <optional>

#include "base/log.h"
#include "ca/authority.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "runtime/shards.h"

namespace dsec::ca {
namespace {

using rpc::TlsContext;
using rpc::TlsExpect;
using rpc::TlsHolder;
using rpc::TlsName;
using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;
using std::chrono::seconds;

Deadline Late() { return Deadline::After(seconds(20)); }

struct Ca {
  KeyAndCertificate material;
  std::shared_ptr<const Authority> authority;
};
Ca NewCa(const std::string& cluster = "prod") {
  auto made = MakeAuthority(cluster, Clock::System().Wall());
  EXPECT_TRUE(made.ok());
  return {*made, *Authority::Load(*made)};
}

rpc::TlsOptions OptionsOf(const Ca& ca, const TlsName& name, const std::string& trusted,
                          std::chrono::hours age = {}, seconds life = kCertificateLife) {
  auto request = MakeRequest(name);
  EXPECT_TRUE(request.ok());
  auto parsed = ParseRequest(request->request);
  EXPECT_TRUE(parsed.ok());
  auto issued = ca.authority->Issue(*parsed, 5, Clock::System().Wall() - age, life);
  EXPECT_TRUE(issued.ok()) << issued.error().ToString();
  return {issued->certificate, request->key, trusted, name.cluster};
}

std::shared_ptr<const TlsContext> ContextOf(const rpc::TlsOptions& options) {
  auto context = TlsContext::Create(options);
  EXPECT_TRUE(context.ok()) << context.error().ToString();
  return *context;
}

class TlsTest : public ::testing::Test {
 public:
  TlsTest()
      : holder_(std::make_shared<TlsHolder>(
            ContextOf(OptionsOf(ca_, {"prod", "edge", "n1"}, ca_.material.certificate)))) {}
  ~TlsTest() override {
    if (server_) {
      (void)Run([](rpc::Server& server) -> Task<void> {
        co_await server.Stop(Late());
        co_return Ok();
      }(*server_));
    }
    server_.reset();
    shards_.Stop();
  }

  template <typename T>
  Result<T> Run(Task<T> task) {
    return runtime::BlockOn(shards_.at(0), std::move(task));
  }

  void Listen(rpc::ServerOptions options = {}, bool anonymous = false) {
    server_ = std::make_unique<rpc::Server>(shards_.at(0), options);
    server_->Register("t", "Who", [](std::string, rpc::CallContext context) -> Task<std::string> {
      co_return context.peer->tls ? context.peer->tls->name.Uri() : std::string("nobody");
    });
    server_->Register("t", "Echo", [](std::string payload, rpc::CallContext) -> Task<std::string> {
      co_return payload;
    });
    auto port = Run([](TlsTest* self, bool any) -> Task<uint16_t> {
      TlsExpect expect{.roles = {"apiserver", "watcher"}, .anonymous = any};
      co_return self->server_->ListenTls("127.0.0.1", 0, self->holder_, expect);
    }(this, anonymous));
    ASSERT_TRUE(port.ok()) << port.error().ToString();
    port_ = *port;
  }

  static TlsExpect Edge(const std::string& id = "n1") { return {.roles = {"edge"}, .id = id}; }

  // One connection and one call; what comes back or why nothing does.
  Result<std::string> Call(std::shared_ptr<const TlsContext> context, TlsExpect expect,
                           std::string method = "Who", std::string payload = {}) {
    return Run([](TlsTest* self, auto with, auto whom, auto what, auto bytes) -> Task<std::string> {
      auto channel = co_await rpc::Channel::ConnectTls(
          self->shards_.at(0), "127.0.0.1", self->port_, std::move(with), std::move(whom), Late());
      if (!channel.ok()) co_return std::move(channel).error();
      co_return co_await (*channel)->CallRaw("t", what, std::move(bytes), Late());
    }(this, std::move(context), std::move(expect), std::move(method), std::move(payload)));
  }
  std::shared_ptr<const TlsContext> Apiserver() {
    return ContextOf(OptionsOf(ca_, {"prod", "apiserver", "a1"}, ca_.material.certificate));
  }

  // A plain socket to the server, blocking.
  int Raw() {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port_);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    const timeval limit{.tv_sec = 20, .tv_usec = 0};
    EXPECT_EQ(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
    return fd;
  }
  // How long until the server has closed it.
  static milliseconds UntilClosed(int fd) {
    const auto start = std::chrono::steady_clock::now();
    char buffer[4096];
    ssize_t got = 1;
    while (got > 0) got = recv(fd, buffer, sizeof buffer, 0);
    EXPECT_TRUE(got == 0 || errno == ECONNRESET) << strerror(errno);
    close(fd);
    return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
  }

  runtime::Shards shards_{1};
  Ca ca_ = NewCa();
  std::shared_ptr<TlsHolder> holder_;
  std::unique_ptr<rpc::Server> server_;
  uint16_t port_ = 0;
};

TEST_F(TlsTest, BothSidesKnowEachOther) {
  Listen();
  auto who = Call(Apiserver(), Edge());
  ASSERT_TRUE(who.ok()) << who.error().ToString();
  EXPECT_EQ(*who, "dsec://prod/apiserver/a1");
}

TEST_F(TlsTest, LargeFramesGoThrough) {
  Listen();
  std::string payload(3 << 20, '\0');
  for (size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<char>(i * 31 + i / 4099);
  auto echoed = Call(Apiserver(), Edge(), "Echo", payload);
  ASSERT_TRUE(echoed.ok()) << echoed.error().ToString();
  EXPECT_TRUE(*echoed == payload);
}

TEST_F(TlsTest, ManyCallsShareAConnection) {
  Listen();
  auto sum = Run([](TlsTest* self, auto context) -> Task<size_t> {
    auto channel = co_await rpc::Channel::ConnectTls(self->shards_.at(0), "127.0.0.1", self->port_,
                                                     context, Edge(), Late());
    if (!channel.ok()) co_return std::move(channel).error();
    size_t total = 0;
    for (size_t i = 0; i < 300; ++i) {
      auto echoed = co_await (*channel)->CallRaw("t", "Echo", std::string(i * 700, 'x'), Late());
      if (!echoed.ok()) co_return std::move(echoed).error();
      total += echoed->size();
    }
    co_return total;
  }(this, Apiserver()));
  ASSERT_TRUE(sum.ok()) << sum.error().ToString();
  EXPECT_EQ(*sum, 700u * 299 * 300 / 2);
}

// The client has done its part of the handshake before the server looks at its certificate, so a
// refusal reaches it as the end of the connection, with the alert.
void ExpectRefused(const Result<std::string>& answer) {
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code(), Code::kUnavailable) << answer.error().ToString();
  EXPECT_TRUE(answer.error().reason() == "rpc.closed" || answer.error().reason() == "rpc.tls")
      << answer.error().ToString();
}

TEST_F(TlsTest, ServerRefusesWhoHasNoCertificate) {
  Listen();
  rpc::TlsOptions options{.trusted = ca_.material.certificate, .cluster = "prod"};
  ExpectRefused(Call(ContextOf(options), Edge()));
}

TEST_F(TlsTest, ServerMayAllowNobody) {
  Listen({}, true);
  rpc::TlsOptions options{.trusted = ca_.material.certificate, .cluster = "prod"};
  auto who = Call(ContextOf(options), Edge());
  ASSERT_TRUE(who.ok()) << who.error().ToString();
  EXPECT_EQ(*who, "nobody");
  // One that shows a certificate must show a good one.
  const Ca other = NewCa();
  ExpectRefused(Call(
      ContextOf(OptionsOf(other, {"prod", "apiserver", "a1"}, ca_.material.certificate)), Edge()));
}

TEST_F(TlsTest, ServerRefusesAnotherCa) {
  Listen();
  const Ca other = NewCa();
  ExpectRefused(Call(
      ContextOf(OptionsOf(other, {"prod", "apiserver", "a1"}, ca_.material.certificate)), Edge()));
}

TEST_F(TlsTest, ServerRefusesAnotherRole) {
  Listen();
  ExpectRefused(
      Call(ContextOf(OptionsOf(ca_, {"prod", "edge", "n2"}, ca_.material.certificate)), Edge()));
}

TEST_F(TlsTest, ServerRefusesWhatHasExpired) {
  Listen();
  ExpectRefused(Call(ContextOf(OptionsOf(ca_, {"prod", "apiserver", "a1"}, ca_.material.certificate,
                                         std::chrono::hours(30))),
                     Edge()));
}

TEST_F(TlsTest, ClientRefusesAnotherCa) {
  Listen();
  const Ca other = NewCa();
  auto answer = Call(
      ContextOf(OptionsOf(ca_, {"prod", "apiserver", "a1"}, other.material.certificate)), Edge());
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().reason(), "rpc.tls_untrusted") << answer.error().ToString();
}

TEST_F(TlsTest, ClientRefusesAnotherName) {
  Listen();
  for (const TlsExpect& expect : {Edge("n2"), TlsExpect{.roles = {"apiserver"}}}) {
    auto answer = Call(Apiserver(), expect);
    ASSERT_FALSE(answer.ok());
    EXPECT_EQ(answer.error().reason(), "rpc.tls_name") << answer.error().ToString();
    EXPECT_EQ(answer.error().code(), Code::kPermissionDenied);
  }
  // Of another cluster, though the CA is trusted.
  rpc::TlsOptions options = OptionsOf(ca_, {"prod", "apiserver", "a1"}, ca_.material.certificate);
  options.cluster = "other";
  auto answer = Call(ContextOf(options), Edge());
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().reason(), "rpc.tls_name");
}

TEST_F(TlsTest, ClientRefusesWhatHasExpired) {
  holder_->Replace(ContextOf(
      OptionsOf(ca_, {"prod", "edge", "n1"}, ca_.material.certificate, std::chrono::hours(30))));
  Listen();
  auto answer = Call(Apiserver(), Edge());
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().reason(), "rpc.tls_expired") << answer.error().ToString();
}

TEST_F(TlsTest, ClientMayKnowTheFingerprintAlone) {
  Listen({}, true);
  TlsExpect expect{.roles = {"edge"}, .pin = ca_.authority->fingerprint()};
  auto who = Call(ContextOf({}), expect);
  ASSERT_TRUE(who.ok()) << who.error().ToString();
  EXPECT_EQ(*who, "nobody");
  expect.pin = NewCa().authority->fingerprint();
  auto other = Call(ContextOf({}), expect);
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.error().reason(), "rpc.tls_untrusted");
  // The pin names a CA: one's own leaf is none.
  auto leaf = LookAt(OptionsOf(ca_, {"prod", "edge", "n1"}, "").certificate);
  expect.pin = leaf->sha256;
  EXPECT_FALSE(Call(ContextOf({}), expect).ok());
}

TEST_F(TlsTest, CasChangeWhileItServes) {
  Listen();
  const Ca next = NewCa();
  auto both = JoinBundles(next.material.certificate, ca_.material.certificate);
  ASSERT_TRUE(both.ok());
  const auto old_client = Apiserver();
  // Step 1: both are trusted everywhere; certificates are of the old one.
  holder_->Replace(ContextOf(OptionsOf(ca_, {"prod", "edge", "n1"}, *both)));
  const auto between = ContextOf(OptionsOf(ca_, {"prod", "apiserver", "a1"}, *both));
  EXPECT_TRUE(Call(old_client, Edge()).ok());
  EXPECT_TRUE(Call(between, Edge()).ok());
  // Step 2: certificates of the new one, while connections of the old ones go on.
  auto kept = Run([](TlsTest* self, auto with) -> Task<std::shared_ptr<rpc::Channel>> {
    auto channel = co_await rpc::Channel::ConnectTls(self->shards_.at(0), "127.0.0.1", self->port_,
                                                     with, Edge(), Late());
    co_return std::move(channel);
  }(this, between));
  ASSERT_TRUE(kept.ok());
  holder_->Replace(ContextOf(OptionsOf(next, {"prod", "edge", "n1"}, *both)));
  EXPECT_TRUE(Call(between, Edge()).ok());
  EXPECT_EQ(Call(old_client, Edge()).error().reason(), "rpc.tls_untrusted");
  auto still = Run([](auto channel) -> Task<std::string> {
    auto answer = co_await channel->CallRaw("t", "Who", "", Late());
    co_return std::move(answer);
  }(*kept));
  EXPECT_TRUE(still.ok());
  (void)Run([](auto channel) -> Task<void> {
    channel.reset();
    co_return Ok();
  }(std::move(*kept)));
  // Step 3: the old one is trusted no more.
  holder_->Replace(ContextOf(OptionsOf(next, {"prod", "edge", "n1"}, next.material.certificate)));
  ExpectRefused(Call(between, Edge()));
  EXPECT_TRUE(
      Call(ContextOf(OptionsOf(next, {"prod", "apiserver", "a1"}, next.material.certificate)),
           Edge())
          .ok());
}

// Ok once the connection that has been made has ended. Which of the two sides ends it is the
// test's.
Task<void> UntilEnded(TlsTest* self, std::shared_ptr<const TlsContext> context) {
  auto channel = co_await rpc::Channel::ConnectTls(self->shards_.at(0), "127.0.0.1", self->port_,
                                                   context, TlsTest::Edge(), Late());
  if (!channel.ok()) co_return std::move(channel).error();
  auto answer = co_await (*channel)->CallRaw("t", "Who", "", Late());
  if (!answer.ok()) co_return std::move(answer).error();
  for (const Deadline late = Late(); !(*channel)->closed();) {
    if (late.Expired()) {
      co_return Error(Code::kDeadlineExceeded, "test.late", "the connection goes on");
    }
    (void)co_await runtime::SleepUntil(Deadline::After(milliseconds(20)));
  }
  co_return Ok();
}

TEST_F(TlsTest, ServerEndsAConnectionWithTheCertificateOfItsClient) {
  Listen();
  const auto start = std::chrono::steady_clock::now();
  auto ended =
      Run(UntilEnded(this, ContextOf(OptionsOf(ca_, {"prod", "apiserver", "a1"},
                                               ca_.material.certificate, {}, seconds(3)))));
  EXPECT_TRUE(ended.ok()) << ended.error().ToString();
  EXPECT_GE(std::chrono::steady_clock::now() - start, seconds(1));  // whole seconds in X.509
}

TEST_F(TlsTest, ClientEndsAConnectionWithTheCertificateOfItsServer) {
  holder_->Replace(
      ContextOf(OptionsOf(ca_, {"prod", "edge", "n1"}, ca_.material.certificate, {}, seconds(3))));
  Listen();
  auto ended = Run(UntilEnded(this, Apiserver()));
  EXPECT_TRUE(ended.ok()) << ended.error().ToString();
}

TEST_F(TlsTest, WithoutACertificate_ManyConnectionsShutNobodyElseOut) {
  Listen({.max_connections = 4, .max_anonymous_connections = 2, .anonymous_time = seconds(1000)},
         true);
  const rpc::TlsOptions nobody{.trusted = ca_.material.certificate, .cluster = "prod"};
  auto held = Run([](TlsTest* self, auto context) -> Task<std::vector<bool>> {
    std::vector<std::shared_ptr<rpc::Channel>> channels;
    std::vector<bool> served;
    for (int i = 0; i < 6; ++i) {
      auto channel = co_await rpc::Channel::ConnectTls(self->shards_.at(0), "127.0.0.1",
                                                       self->port_, context, Edge(), Late());
      if (!channel.ok()) co_return std::move(channel).error();
      served.push_back((co_await (*channel)->CallRaw("t", "Who", "", Late())).ok());
      channels.push_back(*std::move(channel));
    }
    auto named = co_await rpc::Channel::ConnectTls(self->shards_.at(0), "127.0.0.1", self->port_,
                                                   self->Apiserver(), Edge(), Late());
    if (!named.ok()) co_return std::move(named).error();
    served.push_back((co_await (*named)->CallRaw("t", "Who", "", Late())).ok());
    co_return served;
  }(this, ContextOf(nobody)));
  ASSERT_TRUE(held.ok()) << held.error().ToString();
  EXPECT_EQ(*held, (std::vector<bool>{true, true, false, false, false, false, true}));
}

TEST_F(TlsTest, WithoutACertificate_AConnectionIsShortAndSmall) {
  Listen({.anonymous_time = milliseconds(300), .max_anonymous_bytes = 100 << 10}, true);
  const rpc::TlsOptions nobody{.trusted = ca_.material.certificate, .cluster = "prod"};
  auto ended = Run(UntilEnded(this, ContextOf(nobody)));
  EXPECT_TRUE(ended.ok()) << ended.error().ToString();
  EXPECT_TRUE(Call(ContextOf(nobody), Edge(), "Echo", std::string(90 << 10, 'x')).ok());
  EXPECT_FALSE(Call(ContextOf(nobody), Edge(), "Echo", std::string(110 << 10, 'x')).ok());
  EXPECT_TRUE(Call(Apiserver(), Edge(), "Echo", std::string(110 << 10, 'x')).ok());
}

TEST_F(TlsTest, HandshakesOfOneAddressAreItsShareAlone) {
  Listen({.max_handshakes = 100, .max_handshakes_per_address = 2, .handshake_time = seconds(20)});
  const int one = Raw();
  const int two = Raw();
  EXPECT_LT(UntilClosed(Raw()), seconds(10));
  close(one);
  close(two);
  // Their share is free again when they have ended.
  const Deadline late = Late();
  while (!Call(Apiserver(), Edge()).ok() && !late.Expired()) {
  }
  EXPECT_FALSE(late.Expired());
}

TEST_F(TlsTest, GarbageEndsBeforeTheTimeOfAHandshake) {
  Listen({.handshake_time = seconds(1000)});
  const int garbage = Raw();
  const std::string text(2000, 'x');
  ASSERT_EQ(send(garbage, text.data(), text.size(), MSG_NOSIGNAL), 2000);
  (void)UntilClosed(garbage);
}

TEST_F(TlsTest, SilenceEnds) {
  Listen({.handshake_time = milliseconds(300)});
  const int silent = Raw();
  const auto took = UntilClosed(silent);
  EXPECT_GE(took, milliseconds(250));
  EXPECT_LT(took, seconds(10));
  // The first bytes of a ClientHello of 16 KiB, and then a byte now and then.
  const int slow = Raw();
  const unsigned char head[] = {0x16, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc};
  ASSERT_EQ(send(slow, head, sizeof head, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof head));
  EXPECT_LT(UntilClosed(slow), seconds(10));
  EXPECT_TRUE(Call(Apiserver(), Edge()).ok());
}

TEST_F(TlsTest, HalfARecordHoldsNobodyUp) {
  Listen({}, true);
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_client_method()),
                                                             SSL_CTX_free);
  const std::unique_ptr<SSL, void (*)(SSL*)> ssl(SSL_new(context.get()), SSL_free);
  const int fd = Raw();
  ASSERT_EQ(SSL_set_fd(ssl.get(), fd), 1);
  ASSERT_EQ(SSL_connect(ssl.get()), 1);
  // The head of a record of 256 bytes, byte by byte, and some of its content.
  for (const char byte : std::string_view("\x17\x03\x03\x01\x00half of it", 15)) {
    ASSERT_EQ(send(fd, &byte, 1, MSG_NOSIGNAL), 1);
    EXPECT_TRUE(Call(Apiserver(), Edge()).ok());
  }
  close(fd);
}

TEST_F(TlsTest, HandshakesAtOnceAreBounded) {
  Listen({.max_handshakes = 2, .handshake_time = seconds(20)});
  const int one = Raw();
  const int two = Raw();
  // Accepted in this order, so the third is one too many.
  EXPECT_LT(UntilClosed(Raw()), seconds(10));
  close(one);
  close(two);
}

TEST_F(TlsTest, StopEndsHandshakes) {
  Listen({.handshake_time = seconds(1000)});
  const int silent = Raw();
  // The server has seen it: connections are taken in order.
  EXPECT_TRUE(Call(Apiserver(), Edge()).ok());
  const auto start = std::chrono::steady_clock::now();
  (void)Run([](rpc::Server& server) -> Task<void> {
    co_await server.Stop(Late());
    co_return Ok();
  }(*server_));
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
  server_.reset();
  close(silent);
}

TEST_F(TlsTest, ClientGivesUpInTime) {
  // A listener that takes connections and says nothing.
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener, 8), 0);
  socklen_t size = sizeof address;
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  auto channel =
      Run([](TlsTest* self, uint16_t port, auto context) -> Task<std::shared_ptr<rpc::Channel>> {
        auto made =
            co_await rpc::Channel::ConnectTls(self->shards_.at(0), "127.0.0.1", port, context,
                                              Edge(), Deadline::After(milliseconds(200)));
        co_return std::move(made);
      }(this, ntohs(address.sin_port), Apiserver()));
  close(listener);
  ASSERT_FALSE(channel.ok());
  EXPECT_EQ(channel.error().reason(), "rpc.deadline");
}

TEST(TlsMaterial, IsChecked) {
  const Ca ca = NewCa();
  rpc::TlsOptions good = OptionsOf(ca, {"prod", "edge", "n1"}, ca.material.certificate);
  EXPECT_TRUE(TlsContext::Create(good).ok());
  const auto field = [&](auto change) {
    rpc::TlsOptions options = good;
    change(options);
    auto made = TlsContext::Create(options);
    EXPECT_FALSE(made.ok());
    return made.ok() ? std::string() : made.error().field();
  };
  EXPECT_EQ(field([](auto& o) { o.certificate = "x"; }), "certificate");
  EXPECT_EQ(field([](auto& o) { o.key = "x"; }), "key");
  EXPECT_EQ(field([&](auto& o) { o.key = ca.material.key; }), "key");
  EXPECT_EQ(field([](auto& o) { o.trusted = "-----BEGIN CERTIFICATE-----\nAA\n"; }), "trusted");
}

TEST(TlsName, IsAUriOfThreeParts) {
  auto name = rpc::ParseTlsName("dsec://prod/edge/n1");
  ASSERT_TRUE(name.ok());
  EXPECT_EQ(name->Uri(), "dsec://prod/edge/n1");
  for (const char* bad : {"", "dsec://", "dsec://a/b", "dsec://a/b/c/d", "https://a/b/c",
                          "dsec://A/b/c", "dsec:///b/c", "dsec://a/b/c d"}) {
    EXPECT_FALSE(rpc::ParseTlsName(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace dsec::ca

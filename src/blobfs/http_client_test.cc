// SPDX-License-Identifier: Apache-2.0
#include "blobfs/http_client.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "blobfs/settings.h"
#include "os/file.h"
#include "os/unique_fd.h"

namespace dsec::blobfs {
namespace {

// A server on loopback that gives one connection after the other the next of some answers, which
// may be no HTTP at all.
class CannedServer {
 public:
  explicit CannedServer(std::vector<std::string> answers) : answers_(std::move(answers)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(listen_.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listen_.get(), 8), 0);
    EXPECT_EQ(::getsockname(listen_.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::jthread([this] { Serve(); });
  }
  ~CannedServer() { ::shutdown(listen_.get(), SHUT_RDWR); }
  HttpOptions Options() const {
    HttpOptions options;
    options.url = fmt::format("http://127.0.0.1:{}/base", port_);
    options.stall_timeout = std::chrono::seconds(1);
    options.patience = std::chrono::seconds(5);
    return options;
  }
  // After all answers were given.
  std::vector<std::string> Requests() {
    thread_.join();
    return requests_;
  }

 private:
  void Serve() {
    for (const std::string& answer : answers_) {
      const os::UniqueFd peer(::accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!peer.valid()) return;
      std::string request;
      char buffer[4096];
      while (request.find("\r\n\r\n") == std::string::npos) {
        const ssize_t got = ::read(peer.get(), buffer, sizeof buffer);
        if (got <= 0) break;
        request.append(buffer, static_cast<size_t>(got));
      }
      requests_.push_back(request);
      static_cast<void>(::send(peer.get(), answer.data(), answer.size(), MSG_NOSIGNAL));
    }
  }
  const std::vector<std::string> answers_;
  std::vector<std::string> requests_;
  const os::UniqueFd listen_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  uint16_t port_ = 0;
  std::jthread thread_;
};

std::string Answer(std::string_view status, std::string_view headers, std::string_view body) {
  return fmt::format("HTTP/1.1 {}\r\nContent-Length: {}\r\nConnection: close\r\n{}\r\n{}", status,
                     body.size(), headers, body);
}
std::string Good() { return Answer("206 Partial", "Content-Range: bytes 2-5/10\r\n", "cdef"); }

Result<std::string> Range(CannedServer& server) {
  HttpClient client(server.Options());
  std::string out(4, '?');
  DSEC_TRY_VOID(client.GetRange("/x", 2, 10, {reinterpret_cast<uint8_t*>(out.data()), out.size()}));
  return out;
}

TEST(HttpClient, Range_AsksForItAndTakesIt) {
  CannedServer server({Good()});
  const auto got = Range(server);
  ASSERT_TRUE(got.ok()) << got.error().ToString();
  EXPECT_EQ(*got, "cdef");
  const auto requests = server.Requests();
  EXPECT_THAT(requests[0], ::testing::StartsWith("GET /base/x HTTP/1.1\r\n"));
  EXPECT_THAT(requests[0], ::testing::HasSubstr("Range: bytes=2-5\r\n"));
}

TEST(HttpClient, OtherAnswers_AreRefused) {
  for (const std::string& answer : {
           Answer("200 OK", "", "abcdefghij"),
           Answer("206 Partial", "", "cdef"),
           Answer("206 Partial", "Content-Range: bytes 3-6/10\r\n", "cdef"),
           Answer("206 Partial", "Content-Range: bytes 2-5/11\r\n", "cdef"),
           Answer("206 Partial", "Content-Range: bytes 2-5/*\r\n", "cdef"),
           Answer("206 Partial", "Content-Range: bytes 2-9/10\r\n", "cdefghij"),
           Answer("206 Partial", "Content-Range: bytes 2-5/10\r\n", "cdefXXXX"),
           Answer("206 Partial", "Content-Range: bytes 2-5/10\r\nContent-Encoding: gzip\r\n",
                  "cdef"),
           Answer("302 Found", "Location: http://127.0.0.1:1/\r\n", ""),
           Answer("403 Forbidden", "", "no"),
           Answer("206 Partial", "Content-Range: bytes 2-5/10\r\n", ""),
       }) {
    CannedServer server({answer, answer, answer, answer, answer, answer, answer});
    const auto got = Range(server);
    ASSERT_FALSE(got.ok()) << answer;
    EXPECT_EQ(got.error().reason(), "layer.unreachable") << answer;
  }
}

TEST(HttpClient, PassingTrouble_IsRepeated) {
  CannedServer server(
      {Answer("500 Oops", "", "x"), Answer("429 Slow", "", ""), "", "garbage\r\n\r\n",
       "HTTP/1.1 206 P\r\nContent-Range: bytes 2-5/10\r\nContent-Length: 4\r\n\r\ncd", Good()});
  const auto got = Range(server);
  ASSERT_TRUE(got.ok()) << got.error().ToString();
  EXPECT_EQ(*got, "cdef");
  EXPECT_EQ(server.Requests().size(), 6U);
}

TEST(HttpClient, Missing_IsNotFound) {
  CannedServer server({Answer("404 No", "", "gone")});
  EXPECT_EQ(Range(server).error().reason(), "layer.not_found");
}

TEST(HttpClient, Whole_IsBounded) {
  CannedServer server({Answer("200 OK", "", "0123456789"), Answer("200 OK", "", "0123456789")});
  HttpClient client(server.Options());
  EXPECT_EQ(*client.Get("/m", 10), "0123456789");
  EXPECT_EQ(client.Get("/m", 9).error().reason(), "layer.unreachable");
}

TEST(HttpClient, Headers_GoWithEachRequest) {
  const auto folder = *os::TempDir::Create("dsec-http-");
  ASSERT_TRUE(
      os::CreateFile(folder.fd(), "headers", "Authorization: Bearer abc\n\nX-A: 1\n", 0600).ok());
  CannedServer server({Good()});
  HttpOptions options = server.Options();
  options.headers_file = folder.path() + "/headers";
  HttpClient client(options);
  std::vector<uint8_t> out(4);
  ASSERT_TRUE(client.GetRange("/x", 2, 10, out).ok());
  const auto requests = server.Requests();
  EXPECT_THAT(requests[0], ::testing::HasSubstr("Authorization: Bearer abc\r\n"));
  EXPECT_THAT(requests[0], ::testing::HasSubstr("X-A: 1\r\n"));
}

TEST(HttpClient, NobodyThere_IsUnreachableInTime) {
  HttpOptions options;
  options.url = "http://127.0.0.1:1";
  options.patience = std::chrono::milliseconds(300);
  HttpClient client(options);
  EXPECT_EQ(client.Get("/x", 10).error().reason(), "layer.unreachable");
  client.Stop();
  EXPECT_EQ(client.Get("/x", 10).error().reason(), "layer.unreachable");
}

TEST(ContentRange, Malformed_IsNone) {
  EXPECT_EQ(ParseContentRange("bytes 0-0/1")->last, 0U);
  EXPECT_EQ(ParseContentRange(" Bytes 5-9/10 \r\n")->first, 5U);
  for (const char* text :
       {"", "bytes", "bytes ", "bytes 0-1", "bytes -1/2", "bytes 1-0/2", "bytes 0-2/2", "bytes */5",
        "bytes 0-1/*", "bytes 0-1/18446744073709551616", "bytes +0-1/2", "bytes 0 -1/2",
        "items 0-1/2", "bytes 0-1/2x", "bytes 0/1-2"})
    EXPECT_FALSE(ParseContentRange(text)) << text;
}

TEST(Headers, Malformed_AreRefused) {
  EXPECT_EQ(ParseHeaders("A: b\r\nC-D: e f\n")->size(), 2U);
  for (const char* text : {"A", ": b", "A b: c", "A: b\x01", "A: \x80"})
    EXPECT_EQ(ParseHeaders(text).error().reason(), "layer.source") << text;
}

TEST(Settings, Encode_ReadsBack) {
  Settings settings;
  settings.url = "https://x";
  settings.cache_bytes = 7;
  settings.log.level = log::Level::kWarn;
  EXPECT_EQ(Settings::Parse(settings.Encode())->Encode(), settings.Encode());
  EXPECT_FALSE(Settings::Parse("{}").ok());
}

}  // namespace
}  // namespace dsec::blobfs

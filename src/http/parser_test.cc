// SPDX-License-Identifier: Apache-2.0
#include "http/parser.h"

#include <gtest/gtest.h>

namespace dsec::http {
namespace {

constexpr size_t kMaxHead = 4096;

struct Parsed {
  std::string method;
  std::string target;
  std::string body;
  bool operator==(const Parsed&) const = default;
};

// Feeds `bytes` in pieces of `step`, as a connection would, and returns the whole requests in them.
Result<std::vector<Parsed>> ParseAll(std::string_view bytes, size_t step) {
  RequestParser parser(kMaxHead);
  std::vector<Parsed> requests;
  std::string pending;
  std::string body;
  while (!bytes.empty() || !pending.empty()) {
    const size_t before = pending.size();
    pending += bytes.substr(0, step);
    bytes.remove_prefix(std::min(step, bytes.size()));
    for (;;) {
      size_t used = 0;
      if (!parser.head_done()) {
        DSEC_TRY(used, parser.Head(pending));
      } else {
        DSEC_TRY(used, parser.Body(pending, 1 << 20, body));
      }
      pending.erase(0, used);
      if (parser.body_done()) {
        requests.push_back({parser.head().method, parser.head().target, std::exchange(body, {})});
        parser.Reset();
        continue;
      }
      if (used == 0 && !(parser.head_done() && !pending.empty() && parser.plain_left() > 0)) break;
    }
    if (bytes.empty() && pending.size() >= before) break;
  }
  return requests;
}

std::string ReasonOf(std::string_view bytes) {
  const auto parsed = ParseAll(bytes, 1 << 20);
  return parsed.ok() ? "ok" : std::string(parsed.error().reason());
}

TEST(RequestParser, PipelinedRequests_AreTheSameInAnyPieces) {
  const std::string bytes =
      "GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
      "POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
      "POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n6\r\n "
      "world\r\n0\r\nTrailer: x\r\n\r\n"
      "\r\n\r\nGET /d?e HTTP/1.1\r\nHost: x\r\n\r\n";
  const std::vector<Parsed> expected = {{"GET", "/a", ""},
                                        {"POST", "/b", "hello"},
                                        {"POST", "/c", "hello world"},
                                        {"GET", "/d?e", ""}};
  for (size_t step : {1u, 2u, 3u, 7u, 16u, 100000u}) {
    const auto parsed = ParseAll(bytes, step);
    ASSERT_TRUE(parsed.ok()) << step << parsed.error().ToString();
    EXPECT_EQ(*parsed, expected) << step;
  }
}

TEST(RequestParser, AmbiguousFraming_IsRefused) {
  const std::string head = "POST / HTTP/1.1\r\nHost: x\r\n";
  EXPECT_EQ(ReasonOf(head + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"),
            "request.malformed");
  EXPECT_EQ(ReasonOf(head + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"),
            "request.malformed");
  EXPECT_EQ(ReasonOf(head + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello"),
            "request.malformed");
  EXPECT_EQ(ReasonOf(head + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"),
            "request.malformed");
  EXPECT_EQ(ReasonOf(head + "Content-Length: 5, 5\r\n\r\nhello"), "request.malformed");
  EXPECT_EQ(ReasonOf(head + "Content-Length: +5\r\n\r\nhello"), "request.malformed");
  EXPECT_EQ(ReasonOf(head + "Content-Length: -5\r\n\r\nhello"), "request.malformed");
  EXPECT_EQ(ReasonOf(head + "Content-Length: 0x5\r\n\r\nhello"), "request.malformed");
  EXPECT_EQ(ReasonOf(head + "Content-Length: 99999999999999999999\r\n\r\n"), "request.malformed");
  EXPECT_EQ(ReasonOf(head + "Transfer-Encoding: chunked, identity\r\n\r\n"),
            "request.transfer_coding");
  EXPECT_EQ(ReasonOf(head + "Transfer-Encoding: gzip, chunked\r\n\r\n"), "request.transfer_coding");
  EXPECT_EQ(ReasonOf(head + "Transfer-Encoding: xchunked\r\n\r\n"), "request.transfer_coding");
  EXPECT_EQ(ReasonOf(head + "Transfer-Encoding: identity\r\n\r\n"), "request.transfer_coding");
  EXPECT_NE(ReasonOf(head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"),
            "ok");
  EXPECT_NE(ReasonOf(head + "Transfer-Encoding : chunked\r\n\r\n"), "ok");
  EXPECT_EQ(ReasonOf("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), "request.malformed");
}

TEST(RequestParser, MalformedHeads_AreRefused) {
  for (const char* bytes : {
           "GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: x\r\nBad Name: y\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: x\r\nName : y\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: x\r\n: y\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: x\r\nA: b\x01\r\n\r\n",
           "GET / HTTP/1.1\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
           "GET /\x7f HTTP/1.1\r\nHost: x\r\n\r\n",
           "\r\n \r\n",
           "\x16\x03\x01\x02",
           "GET\r\n\r\n",
       }) {
    EXPECT_EQ(ReasonOf(bytes), "request.malformed") << bytes;
  }
  EXPECT_EQ(ReasonOf("GET / HTTP/2.0\r\nHost: x\r\n\r\n"), "request.version");
  EXPECT_EQ(ReasonOf("GET / HTTP/1.1\nHost: x\n\n"), "request.version");
  EXPECT_EQ(ReasonOf("GET / HTTP/1.1 \r\nHost: x\r\n\r\n"), "request.version");
  EXPECT_EQ(ReasonOf("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "request.version");
  EXPECT_EQ(ReasonOf("GET / HTTP/1.1\r\nHost: x\r\nExpect: magic\r\n\r\n"), "request.expectation");
}

TEST(RequestParser, HugeHeads_AreRefusedHoweverTheyCome) {
  const std::string line = "GET /" + std::string(kMaxHead, 'a');
  const std::string field = "GET / HTTP/1.1\r\nHost: x\r\nA: " + std::string(kMaxHead, 'a');
  std::string many = "GET / HTTP/1.1\r\nHost: x\r\n";
  while (many.size() < 2 * kMaxHead) many += "A: b\r\n";
  for (const std::string& bytes : {line, field, many}) {
    for (size_t step : {1u, 100u, 100000u}) {
      const auto parsed = ParseAll(bytes, step);
      ASSERT_FALSE(parsed.ok()) << step;
      EXPECT_EQ(parsed.error().reason(), "request.head_too_large") << step;
    }
  }
}

TEST(RequestParser, BadChunks_AreRefused) {
  const std::string head = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (const char* body :
       {"x\r\n", "5\r\nhello5\r\nhello\r\n", "5\nhello\r\n", "-1\r\n", "10000000000000000\r\nx",
        "\r\n\r\n", "0\r\nA\x01\r\n\r\n", "0\r\nA: b\n\r\n", "0000000000000005\r\nhello",
        "5 \r\nhello\r\n0\r\n\r\n"}) {
    EXPECT_EQ(ReasonOf(head + body), "request.malformed") << body;
  }
}

TEST(RequestParser, Trailers_DoNotReachTheHead) {
  RequestParser parser(kMaxHead);
  const std::string bytes =
      "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nAuthorization: Bearer "
      "x\r\n\r\n";
  const size_t used = parser.Head(bytes).value();
  std::string body;
  ASSERT_TRUE(parser.Body(std::string_view(bytes).substr(used), 10, body).ok());
  EXPECT_TRUE(parser.body_done());
  EXPECT_FALSE(parser.head().fields.Find("authorization"));
}

TEST(RequestParser, Body_IsGivenInBoundedPieces) {
  RequestParser parser(kMaxHead);
  std::string pending =
      "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
      "chunked\r\n\r\na\r\n0123456789\r\n0\r\n\r\n";
  pending.erase(0, parser.Head(pending).value());
  std::string body;
  while (!parser.body_done()) {
    std::string piece;
    pending.erase(0, parser.Body(pending, 3, piece).value());
    EXPECT_LE(piece.size(), 3u);
    body += piece;
  }
  EXPECT_EQ(body, "0123456789");
}

TEST(ResponseParser, Bodies_EndAsTheHeadSays) {
  const auto parse = [](std::string bytes, bool close) -> Result<std::string> {
    ResponseParser parser(kMaxHead);
    DSEC_TRY(const size_t used, parser.Head(bytes));
    bytes.erase(0, used);
    std::string body;
    if (!parser.body_done()) DSEC_TRY_VOID(parser.Body(bytes, 100, body));
    if (close) DSEC_TRY_VOID(parser.End());
    if (!parser.body_done()) return Error(Code::kInternal, "test.open", "not done");
    return body;
  };
  EXPECT_EQ(parse("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", false).value(), "ok");
  EXPECT_EQ(parse("HTTP/1.1 200 OK\r\n\r\nuntil close", true).value(), "until close");
  EXPECT_EQ(parse("HTTP/1.1 204 No Content\r\n\r\n", false).value(), "");
  EXPECT_FALSE(parse("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", true).ok());
  EXPECT_FALSE(
      parse("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", true).ok());
}

}  // namespace
}  // namespace dsec::http

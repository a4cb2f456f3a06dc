// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <random>

#include "http/base64.h"
#include "http/error_body.h"
#include "http/json_writer.h"
#include "http/line_buffer.h"
#include "http/message.h"
#include "http/router.h"
#include "http/target.h"

namespace dsec::http {
namespace {

std::string Encode(std::string_view bytes) {
  std::string out;
  AppendBase64(bytes, out);
  return out;
}

TEST(Base64, Rfc4648Vectors_Match) {
  EXPECT_EQ(Encode(""), "");
  EXPECT_EQ(Encode("f"), "Zg==");
  EXPECT_EQ(Encode("fo"), "Zm8=");
  EXPECT_EQ(Encode("foo"), "Zm9v");
  EXPECT_EQ(Encode("foob"), "Zm9vYg==");
  EXPECT_EQ(Encode("fooba"), "Zm9vYmE=");
  EXPECT_EQ(Encode("foobar"), "Zm9vYmFy");
}

TEST(Base64, AnyBytes_RoundTrip) {
  std::mt19937 random(1);
  for (size_t size = 0; size < 300; ++size) {
    std::string bytes(size, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    EXPECT_EQ(DecodeBase64(Encode(bytes)), bytes);
  }
}

TEST(Base64, LooseForms_AreRefused) {
  for (const char* text : {"Zg", "Zg=", "Zg===", "Zh==", "Zm9=", "Z===", "====", "Zm9v\n", " Zm9v",
                           "Zm9v====", "Zm-_", "=Zm9"}) {
    EXPECT_FALSE(DecodeBase64(text).has_value()) << text;
  }
}

TEST(Target, PathAndQuery_AreCutAtTheFirstQuestionMark) {
  EXPECT_EQ(SplitTarget("/a/b?c=d?e").value().path, "/a/b");
  EXPECT_EQ(SplitTarget("/a/b?c=d?e").value().query, "c=d?e");
  EXPECT_EQ(SplitTarget("http://host:1/a?b").value().path, "/a");
  for (const char* text : {"", "*", "a/b", "host:443", "http://host", "https://host/a"}) {
    EXPECT_FALSE(SplitTarget(text).ok()) << text;
  }
}

TEST(Percent, Bytes_RoundTripExactly) {
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  EXPECT_EQ(PercentDecode(PercentEncode(all)).value(), all);
  EXPECT_EQ(PercentDecode("a%2Fb+c%00").value(), std::string("a/b+c\0", 6));
  for (const char* text : {"%", "%4", "a%zz", "%4g", "%%41"})
    EXPECT_FALSE(PercentDecode(text).ok()) << text;
}

TEST(Query, Pairs_AreDecodedInOrder) {
  const auto pairs = ParseQuery("path=/a%20b&label=k%3Dv=w&&flag&x=").value();
  const QueryPairs expected = {{"path", "/a b"}, {"label", "k=v=w"}, {"flag", ""}, {"x", ""}};
  EXPECT_EQ(pairs, expected);
  EXPECT_FALSE(ParseQuery("a=%f").ok());
}

TEST(Range, Forms_AreUnderstood) {
  const auto resolve = [](std::string_view text, uint64_t size) {
    return Resolve(ParseRange(text).value(), size);
  };
  EXPECT_EQ(resolve("bytes=0-0", 10)->length, 1u);
  EXPECT_EQ(resolve("bytes=2-", 10)->length, 8u);
  EXPECT_EQ(resolve("bytes=2-100", 10)->length, 8u);
  EXPECT_EQ(resolve("bytes=-3", 10)->offset, 7u);
  EXPECT_EQ(resolve("bytes=-30", 10)->offset, 0u);
  EXPECT_EQ(resolve("bytes=-30", 10)->length, 10u);
  EXPECT_FALSE(resolve("bytes=10-", 10));
  EXPECT_FALSE(resolve("bytes=-0", 10));
  EXPECT_FALSE(resolve("bytes=0-", 0));
  EXPECT_EQ(resolve("bytes=0-18446744073709551615", 5)->length, 5u);
}

TEST(Range, BadForms_NameTheRule) {
  for (const char* text :
       {"", "bytes", "bytes=", "bytes=-", "bytes=a-b", "bytes=5-4", "bytes=0-1,3-4", "lines=0-1",
        "bytes=18446744073709551616-", "bytes= 0-1", "bytes=+1-2"}) {
    const auto range = ParseRange(text);
    ASSERT_FALSE(range.ok()) << text;
    EXPECT_EQ(range.error().field(), "Range");
  }
}

TEST(JsonWriter, Values_AreValidJson) {
  std::string out;
  JsonWriter json(out);
  json.BeginObject();
  json.Field("text", "a\"\\\n\x01\xff\xe2\x82\xac");
  json.Field("int", -5);
  json.Field("big", UINT64_MAX);
  json.Field("real", 0.5);
  json.Field("yes", true);
  json.Key("none");
  json.Null();
  json.BeginArray("list");
  json.Value(1);
  json.Value("two");
  json.BeginObject();
  json.EndObject();
  json.EndArray();
  json.Bytes("plain", "x");
  json.Bytes("raw", "\xff");
  json.Members("\"m\":1");
  json.EndObject();
  EXPECT_EQ(out,
            "{\"text\":\"a\\\"\\\\\\n\\u0001\\ufffd\xe2\x82\xac\",\"int\":-5,\"big\":"
            "18446744073709551615,\"real\":0.5,"
            "\"yes\":true,\"none\":null,\"list\":[1,\"two\",{}],\"plain\":\"x\",\"raw_b64\":\"/"
            "w==\",\"m\":1}");
}

TEST(ErrorBody, Error_SurvivesTheWire) {
  const Error error = Error(Code::kGone, "sandbox.ended.ttl", "it ended").WithField("id");
  const std::string body = ErrorBody(error, "r1", "\"termination\":{}");
  EXPECT_EQ(body,
            "{\"error\":{\"code\":\"GONE\",\"reason\":\"sandbox.ended.ttl\",\"message\":\"it "
            "ended\",\"field\":\"id\","
            "\"retriable\":false,\"request_id\":\"r1\",\"details\":{\"termination\":{}}}}");
  const Error back = ErrorFromReply(410, body);
  EXPECT_EQ(back.code(), Code::kGone);
  EXPECT_EQ(back.reason(), "sandbox.ended.ttl");
  EXPECT_EQ(back.field(), "id");
  EXPECT_EQ(ErrorFromReply(503, "<html>").reason(), "http.status");
  EXPECT_EQ(ErrorFromReply(503, "[]").code(), Code::kUnavailable);
}

TEST(LineBuffer, Lines_AreCutWhereverThePiecesEnd) {
  LineBuffer lines(10);
  std::vector<std::string> got;
  for (const char* piece : {"a", "b\n", "\nc\nd", "ef", "\n"}) {
    lines.Append(piece);
    for (;;) {
      auto line = lines.Next();
      ASSERT_TRUE(line.ok());
      if (!*line) break;
      got.push_back(**line);
    }
  }
  EXPECT_EQ(got, (std::vector<std::string>{"ab", "", "c", "def"}));
  EXPECT_TRUE(lines.empty());
  lines.Append("12345678901");
  EXPECT_FALSE(lines.Next().ok());
}

TEST(Router, Paths_FindTheirRouteAndParameters) {
  Router router;
  router.Add("GET", "/v1/sandboxes", 1);
  router.Add("POST", "/v1/sandboxes", 2);
  router.Add("POST", "/v1/sandboxes:batch", 3);
  router.Add("GET", "/v1/sandboxes/{id}", 4);
  router.Add("GET", "/v1/sandboxes/{id}/exec/{op}/stream", 5);
  router.Add("GET", "/v1/layers/{ref}", 6);
  EXPECT_EQ(router.Find("POST", "/v1/sandboxes").value().route, 2u);
  EXPECT_EQ(router.Find("POST", "/v1/sandboxes:batch").value().route, 3u);
  EXPECT_EQ(router.Find("GET", "/v1/sandboxes/sb-1/exec/op%3A1/stream").value().params,
            (std::vector<std::string>{"sb-1", "op:1"}));
  EXPECT_EQ(router.Find("GET", "/v1/layers/a%2Fb%3Ac").value().params[0], "a/b:c");
  EXPECT_EQ(router.Find("GET", "/v1/sandboxes/x/exec/../stream").value().params[1],
            "..");  // dots mean nothing
  EXPECT_EQ(router.Find("GET", "/v1/nothing").error().reason(), "request.path");
  EXPECT_EQ(StatusOf(router.Find("PUT", "/v1/sandboxes").error()), 405);
  EXPECT_EQ(router.Allowed("/v1/sandboxes"), "GET, POST");
  for (const char* path : {"", "/", "/v1/sandboxes/", "//v1/sandboxes", "/v1//sandboxes",
                           "/v1/sandboxes/x/", "/v1/layers/%zz", "v1/sandboxes"}) {
    ASSERT_FALSE(router.Find("GET", path).ok()) << path;
    EXPECT_EQ(router.Find("GET", path).error().reason(), "request.path") << path;
  }
}

TEST(HttpDate, Rfc9110Example_Matches) {
  EXPECT_EQ(HttpDate(WallTime(std::chrono::seconds(784111777))), "Sun, 06 Nov 1994 08:49:37 GMT");
}

}  // namespace
}  // namespace dsec::http

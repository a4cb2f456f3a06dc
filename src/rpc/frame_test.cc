// SPDX-License-Identifier: Apache-2.0
#include "rpc/frame.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cerrno>
#include <vector>

namespace dsec::rpc {
namespace {

std::string Wire(const std::vector<Frame>& frames) {
  std::string out;
  for (const Frame& frame : frames) {
    AppendFrame(out, frame.stream, frame.type, frame.flags, frame.payload);
  }
  return out;
}

TEST(Frame, Header_IsTenBigEndianBytes) {
  std::string out;
  AppendFrame(out, 0x01020305, MessageType::kData, kFlagRemoteClosed | kFlagNoData, "ab");
  EXPECT_EQ(out, std::string("\x00\x00\x00\x02\x01\x02\x03\x05\x03\x05"
                             "ab",
                             12));
}

RC_GTEST_PROP(FrameParser, AnySlicing_GivesTheSameFrames, ()) {
  const auto count = *rc::gen::inRange(0, 12);
  std::vector<Frame> frames;
  for (int i = 0; i < count; ++i) {
    frames.push_back({*rc::gen::inRange<uint32_t>(1, 0xffffffff),
                      static_cast<MessageType>(*rc::gen::inRange(1, 4)),
                      *rc::gen::arbitrary<uint8_t>(), *rc::gen::arbitrary<std::string>()});
  }
  const std::string wire = Wire(frames);
  FrameParser parser;
  std::vector<Frame> seen;
  size_t at = 0;
  while (at < wire.size()) {
    const size_t size = *rc::gen::inRange<size_t>(1, 40);
    parser.Feed(std::string_view(wire).substr(at, size));
    at += size;
    for (;;) {
      auto next = parser.Next();
      RC_ASSERT(next.ok());
      if (!next->has_value()) break;
      seen.push_back(std::move(**next));
    }
  }
  RC_ASSERT(seen.size() == frames.size());
  for (size_t i = 0; i < seen.size(); ++i) {
    RC_ASSERT(seen[i].stream == frames[i].stream);
    RC_ASSERT(seen[i].type == frames[i].type);
    RC_ASSERT(seen[i].flags == frames[i].flags);
    RC_ASSERT(seen[i].payload == frames[i].payload);
  }
  RC_ASSERT(parser.buffered() == 0u);
}

TEST(FrameParser, OverTheLimit_IsRefusedFromTheHeaderAlone) {
  FrameParser parser(100);
  parser.Feed(std::string_view("\x00\x00\x00\x65\x00\x00\x00\x01\x01\x00", 10));
  EXPECT_EQ(parser.Next().error().reason(), "rpc.frame");
}

TEST(FrameParser, StreamZeroOrUnknownType_IsRefused) {
  FrameParser zero;
  zero.Feed(std::string_view("\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00", 10));
  EXPECT_FALSE(zero.Next().ok());
  FrameParser type;
  type.Feed(std::string_view("\x00\x00\x00\x00\x00\x00\x00\x01\x09\x00", 10));
  EXPECT_FALSE(type.Next().ok());
}

TEST(Request, RoundTrip_KeepsAll) {
  auto parsed = ParseRequest(SerializeRequest({"s", "m", std::string("\0\xff", 2), 5}));
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->service, "s");
  EXPECT_EQ(parsed->method, "m");
  EXPECT_EQ(parsed->payload, std::string("\0\xff", 2));
  EXPECT_EQ(parsed->timeout_nanos, 5);
}

TEST(Request, EmptyOrEndlessNames_AreRefused) {
  EXPECT_FALSE(ParseRequest(SerializeRequest({"", "m", "", 0})).ok());
  EXPECT_FALSE(ParseRequest(SerializeRequest({"s", std::string(257, 'm'), "", 0})).ok());
  EXPECT_FALSE(ParseRequest("\xff\xff\xff").ok());
}

TEST(Response, Payload_ComesBack) {
  EXPECT_EQ(*ParseResponse(SerializeResponse("bytes")), "bytes");
  EXPECT_EQ(*ParseResponse(""), "");
}

TEST(Response, EachError_ArrivesWhole) {
  for (int code = 0; code <= static_cast<int>(Code::kDeadlineExceeded); ++code) {
    Error sent = Error(static_cast<Code>(code), "test.some_reason", "text")
                     .WithField("a.b")
                     .WithErrno(ENOSPC);
    auto got = ParseResponse(SerializeError(sent));
    ASSERT_FALSE(got.ok());
    EXPECT_EQ(got.error().code(), sent.code());
    EXPECT_EQ(got.error().reason(), "test.some_reason");
    EXPECT_EQ(got.error().field(), "a.b");
    EXPECT_EQ(got.error().sys_errno(), ENOSPC);
    EXPECT_EQ(got.error().message(), "text");
  }
}

TEST(Response, HostileReason_IsNotTaken) {
  auto got = ParseResponse(SerializeError(Error(Code::kInternal, "Not A\nReason", "x")));
  EXPECT_EQ(got.error().reason(), "rpc.remote");
}

TEST(Response, ManyDifferentReasons_AreBounded) {
  std::vector<std::string> reasons;
  for (int i = 0; i < 2000; ++i) reasons.push_back(fmt::format("flood.r{}", i));
  size_t kept = 0;
  for (const std::string& reason : reasons) {
    auto got = ParseResponse(SerializeError(Error(Code::kInternal, reason, "x")));
    if (got.error().reason() == reason) ++kept;
  }
  EXPECT_LE(kept, 512u);
}

}  // namespace
}  // namespace dsec::rpc

// SPDX-License-Identifier: Apache-2.0
#include "rpc/frame.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <vector>

#include "rpc/reasons.h"

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

TEST(FrameParser, StreamZero_IsRefused) {
  FrameParser parser;
  parser.Feed(std::string_view("\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00", 10));
  EXPECT_FALSE(parser.Next().ok());
}

TEST(FrameParser, UnknownType_IsPassedOver) {
  FrameParser parser;
  parser.Feed(
      Wire({{1, static_cast<MessageType>(9), 0, "future"}, {3, MessageType::kData, 0, "x"}}));
  EXPECT_EQ((*parser.Next())->stream, 3u);
}

TEST(FrameParser, Unwanted_IsDroppedUnbuffered) {
  const std::string wire = Wire({{1, MessageType::kResponse, 0, std::string(kMaxFramePayload, 'x')},
                                 {3, MessageType::kResponse, 0, "y"}});
  FrameParser parser(kMaxFramePayload,
                     [](const FrameHeader& header) -> Result<bool> { return header.stream != 1; });
  for (size_t at = 0; at < wire.size(); at += 1000) {
    parser.Feed(std::string_view(wire).substr(at, 1000));
    auto next = parser.Next();
    ASSERT_TRUE(next.ok());
    if (next->has_value()) {
      EXPECT_EQ((*next)->payload, "y");
    }
    EXPECT_LE(parser.capacity(), 4000u);
  }
  EXPECT_EQ(parser.buffered(), 0u);
}

TEST(FrameParser, Drop_FreesAFrameThatIsHalfHere) {
  const std::string wire = Wire({{1, MessageType::kResponse, 0, std::string(1 << 20, 'x')},
                                 {3, MessageType::kResponse, 0, "y"}});
  FrameParser parser;
  parser.Feed(std::string_view(wire).substr(0, 1 << 19));
  EXPECT_FALSE(parser.Next()->has_value());
  parser.Drop(3);  // not here
  EXPECT_EQ(parser.buffered(), size_t{1} << 19);
  parser.Drop(1);
  EXPECT_EQ(parser.buffered(), 0u);
  EXPECT_LE(parser.capacity(), size_t{64} << 10);
  parser.Feed(std::string_view(wire).substr(1 << 19));
  EXPECT_EQ((*parser.Next())->payload, "y");
}

TEST(FrameParser, AfterALargeFrame_KeepsNoLargeBuffer) {
  FrameParser parser;
  parser.Feed(Wire({{1, MessageType::kData, 0, std::string(kMaxFramePayload, 'x')}}) + "next");
  EXPECT_TRUE(parser.Next()->has_value());
  EXPECT_EQ(parser.buffered(), 4u);
  EXPECT_LE(parser.capacity(), size_t{64} << 10);
}

TEST(FrameParser, FilterError_IsTheParsers) {
  FrameParser parser(100, [](const FrameHeader&) -> Result<bool> {
    return Error(Code::kInvalidArgument, "rpc.frame", "never opened");
  });
  parser.Feed(Wire({{5, MessageType::kData, 0, ""}}));
  EXPECT_EQ(parser.Next().error().message(), "never opened");
}

TEST(Request, RoundTrip_KeepsAll) {
  auto parsed = ParseRequest(SerializeRequest({"s", "m", std::string("\0\xff", 2), 5}));
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->service, "s");
  EXPECT_EQ(parsed->method, "m");
  EXPECT_EQ(parsed->payload, std::string("\0\xff", 2));
  EXPECT_EQ(parsed->timeout_nanos, 5);
}

TEST(Request, Bytes_AreThoseOfTheReference) {
  // service = 1, method = 2, payload = 3, timeout_nano = 4 (ttrpc's request.proto)
  EXPECT_EQ(SerializeRequest({"s", "mm", "p", 300}), "\x0a\x01s\x12\x02mm\x1a\x01p\x20\xac\x02");
  auto parsed = ParseRequest(
      "\x20\x05\x0a\x01s\x2a\x06\x0a\x01k\x12\x01v\x12\x01m\x35"
      "1234\x3d"
      "1234");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->method, "m");
  EXPECT_EQ(parsed->timeout_nanos, 5);
}

TEST(Request, Malformed_IsRefused) {
  const std::string names = "\x0a\x01s\x12\x01m";
  EXPECT_TRUE(ParseRequest(names).ok());
  for (const std::string& bad : {
           std::string(), std::string("\xff\xff\xff"), SerializeRequest({"", "m", "", 0}),
           SerializeRequest({"s", std::string(257, 'm'), "", 0}),
           SerializeRequest({"s", "m\xff", "", 0}), SerializeRequest({"s", "m", "", -1}),
           names + "\x1a\x05xx",             // payload longer than what is left
           names + "\x18\x05",               // payload as a number
           names + "\x22\x01x",              // timeout as bytes
           names + "\x2b",                   // a group
           names + "\x02\x01x",              // field 0
           names + std::string(11, '\x80'),  // a varint without end
           names + "\x21"
                   "1234567",  // fixed64 cut short
       }) {
    auto parsed = ParseRequest(bad);
    ASSERT_FALSE(parsed.ok()) << testing::PrintToString(bad);
    EXPECT_EQ(parsed.error().reason(), "rpc.request");
  }
}

TEST(Response, Payload_ComesBack) {
  EXPECT_EQ(*ParseResponse(SerializeResponse("bytes")), "bytes");
  EXPECT_EQ(*ParseResponse(""), "");
  EXPECT_EQ(SerializeResponse("p"), "\x12\x01p");
}

TEST(Response, Malformed_IsRefused) {
  for (const char* bad :
       {"\x0a\x05xx", "\x12\x01", "\x10\x01", "\x0a\x02\x0a\x01", "\x0a\x05\x08\x05\x1a\x01\xff"}) {
    auto parsed = ParseResponse(bad);
    ASSERT_FALSE(parsed.ok()) << testing::PrintToString(bad);
    EXPECT_EQ(parsed.error().reason(), "rpc.response");
  }
}

TEST(Response, ForeignStatus_IsMapped) {
  auto not_found = ParseResponse("\x0a\x08\x08\x05\x12\x04gone");
  EXPECT_EQ(not_found.error().code(), Code::kNotFound);
  EXPECT_EQ(not_found.error().reason(), "rpc.remote");
  EXPECT_EQ(not_found.error().message(), "gone");
  auto unimplemented = ParseResponse("\x0a\x02\x08\x0c");
  EXPECT_EQ(unimplemented.error().code(), Code::kFailedPrecondition);
  EXPECT_EQ(unimplemented.error().reason(), "rpc.unimplemented");
  EXPECT_EQ(ParseResponse("\x0a\x02\x08\x63").error().code(), Code::kInternal);
  // Someone else's detail is no reason to fail.
  auto detail = ParseResponse("\x0a\x0b\x08\x08\x1a\x07\x0a\x02zz\x12\x01\xff");
  EXPECT_EQ(detail.error().code(), Code::kResourceExhausted);
}

TEST(Response, EachError_ArrivesWhole) {
  for (int code = 0; code <= static_cast<int>(Code::kDeadlineExceeded); ++code) {
    const Error sent = Error(static_cast<Code>(code), "exec.op_id_reused", "text \xe2\x82\xac")
                           .WithField("a.b")
                           .WithErrno(ENOSPC);
    auto got = ParseResponse(SerializeError(sent));
    ASSERT_FALSE(got.ok());
    EXPECT_EQ(got.error().ToString(), sent.ToString());
  }
}

TEST(Response, ContextFrames_JoinTheMessage) {
  const Error sent = Error(Code::kInternal, "exec.pipe", "broken").Context("op {}", 7);
  EXPECT_EQ(ParseResponse(SerializeError(sent)).error().message(), "broken (op 7)");
}

TEST(Response, HostileText_IsCleanedAndCut) {
  const Error sent = Error(Code::kInternal, "exec.pipe", "\xff" + std::string(5000, 'x'))
                         .WithField(std::string(1000, 'f'));
  auto got = ParseResponse(SerializeError(sent));
  EXPECT_EQ(got.error().reason(), "exec.pipe");
  EXPECT_TRUE(got.error().message().starts_with("\xef\xbf\xbdxx"));
  EXPECT_LE(got.error().message().size(), 4096u);
  EXPECT_EQ(got.error().field().size(), 256u);
}

TEST(Response, UnknownReason_StaysInTheMessage) {
  auto got = ParseResponse(SerializeError(Error(Code::kInternal, "never.heard", "text")));
  EXPECT_EQ(got.error().reason(), "rpc.remote");
  EXPECT_EQ(got.error().message(), "never.heard: text");
}

RC_GTEST_PROP(Codec, AnyBytes_NeverCrash, (const std::string& bytes)) {
  (void)ParseRequest(bytes);
  (void)ParseResponse(bytes);
  FrameParser parser(1 << 10);
  parser.Feed(bytes);
  for (;;) {
    auto next = parser.Next();
    if (!next.ok() || !next->has_value()) break;
  }
  RC_ASSERT(parser.buffered() <= bytes.size());
}

RC_GTEST_PROP(Codec, OneBitFlipped_NeverCrashes, ()) {
  std::string wire =
      SerializeError(Error(Code::kGone, "exec.ended", *rc::gen::arbitrary<std::string>())
                         .WithField(*rc::gen::arbitrary<std::string>())
                         .WithErrno(5));
  wire[*rc::gen::inRange<size_t>(0, wire.size())] ^=
      static_cast<char>(1 << *rc::gen::inRange(0, 8));
  (void)ParseResponse(wire);
}

// Every reason that aether, or what it is built from, can answer must be in the table of
// reasons.cc.
TEST(KnownReason, EveryReasonOfTheAgent_IsInTheTable) {
  // A dotted literal of these is a file of the kernel.
  const std::set<std::string> files = {"cgroup", "config", "cpu", "memory", "pids", "resolv"};
  const std::regex literal("\"(([a-z][a-z0-9_]*)(\\.[a-z0-9_]+)+)\"");
  size_t seen = 0;
  for (const char* folder : {"aether", "base", "os", "rpc", "spawn"}) {
    const std::filesystem::path root = std::filesystem::path(DSEC_SOURCE_DIR) / "src" / folder;
    for (const auto& entry : std::filesystem::directory_iterator(root)) {
      const std::string name = entry.path().filename();
      if (!name.ends_with(".cc") && !name.ends_with(".h")) continue;
      if (name.find("_test.") != std::string::npos) continue;
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) {
        line = line.substr(0, line.find("//"));
        for (std::sregex_iterator match(line.begin(), line.end(), literal), end; match != end;
             ++match) {
          if (files.contains((*match)[2])) continue;
          // Events of the log and metrics are not answers.
          if (line.find("log::") != std::string::npos) continue;
          ++seen;
          EXPECT_FALSE(KnownReason((*match)[1].str()).empty())
              << (*match)[1] << " of " << entry.path() << " is not in src/rpc/reasons.cc";
        }
      }
    }
  }
  EXPECT_GT(seen, 100u);
}

}  // namespace
}  // namespace dsec::rpc

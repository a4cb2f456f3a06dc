// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <set>

#include "base/id.h"
#include "base/result.h"
#include "base/rng.h"
#include "base/units.h"

namespace dsec {
namespace {

Result<int> Half(int value) {
  if (value % 2 != 0) return Error(Code::kInvalidArgument, "test.odd", "odd").WithField("value");
  return value / 2;
}

Result<int> Quarter(int value) {
  DSEC_TRY(const int half, Half(value));
  DSEC_TRY(const int quarter, Half(half));
  return quarter;
}

TEST(Result, Try_PassesErrorOn) {
  EXPECT_EQ(*Quarter(8), 2);
  auto failed = Quarter(6);
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().reason(), "test.odd");
  EXPECT_EQ(failed.error().field(), "value");
  EXPECT_EQ(std::move(failed).Context("quarter of {}", 6).error().ToString(),
            "INVALID_ARGUMENT test.odd: odd (quarter of 6) field=value");
}

TEST(Error, FromErrno_KeepsErrnoAndMapsCode) {
  const Error error = Error::FromErrno(ENOSPC, "disk.full", "write x");
  EXPECT_EQ(error.code(), Code::kResourceExhausted);
  EXPECT_EQ(error.sys_errno(), ENOSPC);
  const Error copy = error;
  EXPECT_EQ(copy.message(), error.message());
}

TEST(SandboxId, New_ParsesBackToItsNode) {
  FakeClock clock;
  const SandboxId id = NewSandboxId(NodeId("n1"), clock);
  ASSERT_TRUE(ParseSandboxId(id.str()).ok()) << id.str();
  EXPECT_EQ(NodeOf(id)->str(), "n1");
}

TEST(SandboxId, Malformed_IsNotFound) {
  for (const char* text :
       {"", "sb-", "sb-n1", "sb--0123456789abcdefghjkmnpqrs", "../../etc/passwd",
        "sb-n1-0123456789ABCDEFGHJKMNPQRS", "sb-n1-0123456789abcdefghjkmnpqr/"}) {
    auto parsed = ParseSandboxId(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.error().code(), Code::kNotFound);
  }
}

TEST(Ulid, TimeOrder_IsTextOrder) {
  FakeClock clock;
  const std::string first = NewUlid(clock);
  clock.Advance(std::chrono::milliseconds(1));
  EXPECT_LT(first, NewUlid(clock));
}

TEST(Rng, SameSeed_SameSequence) {
  Rng a(7);
  Rng b(7);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(a.Next(), b.Next());
}

TEST(Rng, Below_StaysInRangeAndReachesAll) {
  Rng rng(1);
  std::set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) {
    const uint64_t value = rng.Below(7);
    ASSERT_LT(value, 7u);
    seen.insert(value);
  }
  EXPECT_EQ(seen.size(), 7u);
}

TEST(MilliCpu, VisibleCores_RoundsUp) {
  EXPECT_EQ(MilliCpu(1).VisibleCores(), 1u);
  EXPECT_EQ(MilliCpu(1000).VisibleCores(), 1u);
  EXPECT_EQ(MilliCpu(1001).VisibleCores(), 2u);
}

}  // namespace
}  // namespace dsec

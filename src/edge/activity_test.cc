// SPDX-License-Identifier: Apache-2.0
#include "edge/activity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dsec::edge {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr int64_t kNow = 1'000'000;
constexpr int64_t kGrace = 5'000;

Activity Make(Activity::Rules rules) { return Activity(rules, 10'000, kNow); }

TEST(Activity, NoRules_NeverDue) {
  Activity activity = Make({});
  EXPECT_EQ(activity.Due(), 0);
  EXPECT_EQ(activity.Check(kNow * 10).end, "");
}

TEST(Activity, Ttl_EndsAtItsTimeWithTheConfiguredLimit) {
  Activity activity = Make({.expires_ms = kNow + 10'000});
  EXPECT_EQ(activity.Due(), kNow + 10'000);
  EXPECT_EQ(activity.Check(kNow + 9'999).end, "");
  const auto verdict = activity.Check(kNow + 10'000);
  EXPECT_EQ(verdict.end, "ttl");
  EXPECT_EQ(verdict.limit_ms, 10'000);
}

TEST(Activity, TtlHardPolicy_FollowedExecDoesNotHoldIt) {
  Activity activity = Make({.expires_ms = kNow + 10'000});
  activity.Attach("a", false, kNow);
  activity.ExecStarted("a", false, kNow, 0);
  EXPECT_EQ(activity.Check(kNow + 10'000).end, "ttl");
}

TEST(Activity, TtlWaitsForExec_EndsWhenTheExecHasEnded) {
  Activity activity =
      Make({.expires_ms = kNow + 10'000, .ttl_waits_for_exec = true, .ttl_extension_ms = 60'000});
  activity.Attach("a", false, kNow + 7'000);
  activity.ExecStarted("a", false, kNow + 7'000, 0);
  EXPECT_EQ(activity.Check(kNow + 10'000).end, "");
  EXPECT_EQ(activity.Due(), kNow + 70'000);
  EXPECT_TRUE(activity.ExecEnded("a", kNow + 13'000));
  EXPECT_EQ(activity.Due(), kNow + 10'000);
  EXPECT_EQ(activity.Check(kNow + 13'000).end, "ttl");
}

TEST(Activity, TtlWaitsForExec_HoldIsBounded) {
  Activity activity =
      Make({.expires_ms = kNow + 10'000, .ttl_waits_for_exec = true, .ttl_extension_ms = 60'000});
  activity.Attach("a", false, kNow);
  EXPECT_EQ(activity.Check(kNow + 69'999).end, "");
  EXPECT_EQ(activity.Check(kNow + 70'000).end, "ttl");
}

TEST(Activity, TtlWaitsForExec_LostFollowerHoldsItForTheGraceOnly) {
  Activity activity =
      Make({.expires_ms = kNow + 10'000, .ttl_waits_for_exec = true, .ttl_extension_ms = 60'000});
  activity.Attach("a", false, kNow);
  activity.ExecStarted("a", false, kNow, 0);
  activity.Detach("a", true, kNow + 9'000, kGrace);
  EXPECT_EQ(activity.Check(kNow + 10'000).end, "");
  EXPECT_THAT(activity.Check(kNow + 14'000).disconnected, ElementsAre("a"));
  EXPECT_EQ(activity.Check(kNow + 14'000).end, "ttl");
}

TEST(Activity, Idle_CallsAndFollowersHoldItReadsDoNot) {
  Activity activity = Make({.idle_ms = 10'000});
  EXPECT_EQ(activity.Due(), kNow + 10'000);
  activity.CallBegan(kNow + 5'000);
  EXPECT_EQ(activity.Due(), 0);
  EXPECT_EQ(activity.Check(kNow + 100'000).end, "");
  activity.CallEnded(kNow + 100'000);
  EXPECT_EQ(activity.Due(), kNow + 110'000);
  activity.Attach("a", false, kNow + 101'000);
  activity.ExecStarted("a", false, kNow + 101'000, 0);
  EXPECT_EQ(activity.Check(kNow + 200'000).end, "");
  activity.ExecEnded("a", kNow + 200'000);
  activity.Detach("a", false, kNow + 200'000, kGrace);
  EXPECT_EQ(activity.Check(kNow + 209'999).end, "");
  EXPECT_EQ(activity.Check(kNow + 210'000).end, "idle");
}

TEST(Activity, Idle_DetachedExecDoesNotHoldIt) {
  Activity activity = Make({.idle_ms = 10'000});
  activity.ExecStarted("a", true, kNow, 0);
  EXPECT_EQ(activity.Check(kNow + 10'000).end, "idle");
}

TEST(Activity, Claim_EndsUnlessUsed) {
  Activity unused = Make({.claim_until_ms = kNow + 60'000});
  EXPECT_EQ(unused.Check(kNow + 60'000).end, "unclaimed");
  Activity used = Make({.claim_until_ms = kNow + 60'000});
  used.CallBegan(kNow + 1);
  used.CallEnded(kNow + 2);
  EXPECT_EQ(used.Due(), 0);
}

TEST(Activity, VanishedFollower_ExecIsKilledOnceAfterTheGrace) {
  Activity activity = Make({});
  activity.Attach("a", false, kNow);
  activity.ExecStarted("a", false, kNow, 0);
  activity.Detach("a", true, kNow + 1'000, kGrace);
  EXPECT_EQ(activity.Due(), kNow + 6'000);
  EXPECT_THAT(activity.Check(kNow + 5'999).disconnected, IsEmpty());
  EXPECT_THAT(activity.Check(kNow + 6'000).disconnected, ElementsAre("a"));
  EXPECT_THAT(activity.Check(kNow + 7'000).disconnected, IsEmpty());
}

TEST(Activity, VanishedFollower_ReattachInTimeSavesTheExec) {
  Activity activity = Make({});
  activity.Attach("a", false, kNow);
  activity.ExecStarted("a", false, kNow, 0);
  activity.Detach("a", true, kNow, kGrace);
  activity.Attach("a", true, kNow + 4'000);  // the rule of the first attach stays
  EXPECT_EQ(activity.Due(), 0);
  activity.Detach("a", true, kNow + 5'000, kGrace);
  EXPECT_EQ(activity.Due(), kNow + 10'000);
}

TEST(Activity, VanishedFollower_OtherFollowerOrKeepRuleSavesTheExec) {
  Activity activity = Make({});
  activity.Attach("two", false, kNow);
  activity.Attach("two", false, kNow);
  activity.Detach("two", true, kNow, kGrace);
  EXPECT_EQ(activity.Due(), 0);
  activity.Attach("keep", true, kNow);
  activity.ExecStarted("keep", true, kNow, 0);
  activity.Detach("keep", true, kNow, kGrace);
  EXPECT_EQ(activity.Due(), 0);
  EXPECT_THAT(activity.RunningExecs(), ElementsAre("keep"));
}

TEST(Activity, Adoption_RunningExecWithoutFollowerIsKilledAfterTheLongerGrace) {
  Activity activity = Make({});
  activity.ExecStarted("attached", false, kNow, 60'000);
  activity.ExecStarted("detached", true, kNow, 60'000);
  EXPECT_EQ(activity.Due(), kNow + 60'000);
  EXPECT_THAT(activity.Check(kNow + 60'000).disconnected, ElementsAre("attached"));
}

TEST(Activity, ExecEnded_IsNewsExactlyOnce) {
  Activity activity = Make({});
  EXPECT_FALSE(activity.ExecEnded("unknown", kNow));
  activity.Attach("a", false, kNow);
  activity.ExecStarted("a", false, kNow, 0);
  EXPECT_TRUE(activity.ExecEnded("a", kNow));
  EXPECT_FALSE(activity.ExecEnded("a", kNow));
  activity.ExecStarted("a", false, kNow, 0);  // a late reply to a repeat must not revive it
  EXPECT_THAT(activity.RunningExecs(), IsEmpty());
  activity.Detach("a", true, kNow, kGrace);
  EXPECT_EQ(activity.Due(), 0);
  EXPECT_EQ(activity.Followers(), 0u);
}

}  // namespace
}  // namespace dsec::edge

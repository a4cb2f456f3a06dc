// SPDX-License-Identifier: Apache-2.0
#include "model/lifecycle.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <array>

namespace dsec::model {
namespace {

constexpr std::array kAllStates = {v1::STATE_UNSPECIFIED, v1::STATE_PENDING, v1::STATE_STARTING,
                                   v1::STATE_RUNNING,     v1::STATE_PAUSED,  v1::STATE_STOPPING,
                                   v1::STATE_STOPPED,     v1::STATE_FAILED,  v1::STATE_LOST};
constexpr std::array kAllCauses = {
    cause::kUserStop,       cause::kTtl,          cause::kIdle,         cause::kUnclaimed,
    cause::kEntrypointExit, cause::kCreateFailed, cause::kOom,          cause::kAgentDied,
    cause::kPurged,         cause::kNodeLost,     cause::kHostRestarted};

TEST(Lifecycle, Life_IsLegal) {
  v1::SandboxRecord record;
  for (const v1::State state : {v1::STATE_PENDING, v1::STATE_STARTING, v1::STATE_RUNNING,
                                v1::STATE_PAUSED, v1::STATE_RUNNING, v1::STATE_STOPPING}) {
    ASSERT_TRUE(Move(record, state).ok()) << StateName(state);
  }
  v1::Termination end;
  end.set_cause(std::string(cause::kTtl));
  ASSERT_TRUE(Terminate(record, end, std::nullopt, 77).ok());
  EXPECT_EQ(record.state(), v1::STATE_STOPPED);
  EXPECT_EQ(record.termination().at_unix_ms(), 77);
  EXPECT_EQ(record.ended_unix_ms(), 77);
}

TEST(Lifecycle, Terminal_LetsNothingOut) {
  for (const v1::State from : kAllStates) {
    for (const v1::State to : kAllStates) {
      if (IsTerminal(from)) {
        EXPECT_FALSE(CanMove(from, to)) << StateName(from) << " -> " << StateName(to);
      }
      EXPECT_FALSE(from == to && CanMove(from, to)) << StateName(from);
    }
  }
}

TEST(Lifecycle, EveryLiveState_CanEndInEveryWay) {
  for (const v1::State from : {v1::STATE_PENDING, v1::STATE_STARTING, v1::STATE_RUNNING,
                               v1::STATE_PAUSED, v1::STATE_STOPPING}) {
    for (const std::string_view why : kAllCauses) {
      v1::SandboxRecord record;
      record.set_state(from);
      v1::Termination end;
      end.set_cause(std::string(why));
      EXPECT_TRUE(Terminate(record, end, std::nullopt, 1).ok()) << StateName(from) << " " << why;
      EXPECT_TRUE(IsTerminal(record.state()));
    }
  }
}

TEST(Lifecycle, Move_RefusesTerminalStateAndKeepsRecord) {
  v1::SandboxRecord record;
  record.set_state(v1::STATE_RUNNING);
  auto moved = Move(record, v1::STATE_FAILED);
  ASSERT_FALSE(moved.ok());
  EXPECT_EQ(moved.error().reason(), "sandbox.state");
  EXPECT_EQ(record.state(), v1::STATE_RUNNING);
}

TEST(Lifecycle, AnySequence_HasAtMostOneEnd) {
  rc::check([] {
    v1::SandboxRecord record;
    int ends = 0;
    for (int step = 0; step < 40; ++step) {
      if (*rc::gen::inRange(0, 4) == 0) {
        v1::Termination end;
        end.set_cause(std::string(*rc::gen::elementOf(
            std::vector<std::string_view>(kAllCauses.begin(), kAllCauses.end()))));
        const v1::Termination before = record.termination();
        if (Terminate(record, end, std::nullopt, step + 1).ok()) {
          ++ends;
        } else {
          RC_ASSERT(record.termination().SerializeAsString() == before.SerializeAsString());
        }
      } else {
        (void)Move(record, *rc::gen::elementOf(
                               std::vector<v1::State>(kAllStates.begin(), kAllStates.end())))
            .ok();
      }
      RC_ASSERT(ends <= 1);
      RC_ASSERT((ends == 1) == IsTerminal(record.state()));
    }
  });
}

TEST(Fault, Cause_DecidesWhoseItIs) {
  EXPECT_EQ(FaultOf(cause::kUserStop, 0, std::nullopt), v1::FAULT_NONE);
  EXPECT_EQ(FaultOf(cause::kOom, 0, std::nullopt), v1::FAULT_WORKLOAD);
  EXPECT_EQ(FaultOf(cause::kAgentDied, 0, std::nullopt), v1::FAULT_INFRASTRUCTURE);
  EXPECT_EQ(FaultOf(cause::kNodeLost, 0, std::nullopt), v1::FAULT_INFRASTRUCTURE);
  EXPECT_EQ(FaultOf(cause::kEntrypointExit, 0, std::nullopt), v1::FAULT_NONE);
  EXPECT_EQ(FaultOf(cause::kEntrypointExit, 5, std::nullopt), v1::FAULT_WORKLOAD);
  EXPECT_EQ(FaultOf(cause::kCreateFailed, 0, Code::kNotFound), v1::FAULT_WORKLOAD);
  EXPECT_EQ(FaultOf(cause::kCreateFailed, 0, Code::kInternal), v1::FAULT_INFRASTRUCTURE);
  EXPECT_EQ(FaultOf(cause::kCreateFailed, 0, Code::kResourceExhausted), v1::FAULT_INFRASTRUCTURE);
}

TEST(Names, ParseIsInverse) {
  for (const v1::State state : kAllStates) {
    if (state == v1::STATE_UNSPECIFIED) continue;
    EXPECT_EQ(ParseState(StateName(state)), state);
  }
  EXPECT_EQ(ParseState("Running"), std::nullopt);
  EXPECT_EQ(ParseBackend("container"), v1::BACKEND_CONTAINER);
  EXPECT_EQ(ParseBackend(""), std::nullopt);
}

}  // namespace
}  // namespace dsec::model

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "aether/testing/agent_sandbox.h"

namespace dsec::aether::testing {

// One sandbox for each test, on the real kernel; skips with the reason where that cannot be.
class AgentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (auto missing = spawn::testing::WhatIsMissing()) GTEST_SKIP() << *missing;
    Make({}, {});
  }
  void TearDown() override { box_.reset(); }

  void Make(const AgentSandbox::Limits& limits, const v1::HelloRequest& hello) {
    box_.reset();
    auto made = AgentSandbox::Create(limits, hello);
    if (!made.ok() && made.error().code() == Code::kFailedPrecondition)
      GTEST_SKIP() << made.error().message();
    ASSERT_TRUE(made.ok()) << made.error().ToString();
    box_ = std::move(made).value();
  }
  // A failed test and an empty outcome when the call itself fails.
  Outcome Run(v1::ExecRequest request) {
    auto outcome = box_->Run(std::move(request));
    if (!outcome.ok()) {
      ADD_FAILURE() << outcome.error().ToString();
      return Outcome();
    }
    return std::move(outcome).value();
  }
  Outcome Run(std::string_view script) { return Run(box_->Script(script)); }
  template <typename Reply>
  Reply Call(std::string_view method, const google::protobuf::MessageLite& request) {
    auto reply = box_->client().Call<Reply>(method, request);
    if (!reply.ok()) {
      ADD_FAILURE() << method << ": " << reply.error().ToString();
      return Reply();
    }
    return std::move(reply).value();
  }
  Error Failure(std::string_view method, const google::protobuf::MessageLite& request) {
    auto reply = box_->client().Call<v1::Empty>(method, request);
    if (reply.ok()) {
      ADD_FAILURE() << method << " should have failed";
      return Error(Code::kInternal, "test", "");
    }
    return reply.error();
  }
  // Waits until the cgroups of ended execs are gone.
  bool CgroupsGone() {
    MonoTime end = spawn::testing::In(5);
    while (Clock::System().Mono() < end) {
      if (box_->ExecCgroups().empty()) return true;
      ::usleep(1000);  // the kernel has no event for a removed directory
    }
    return false;
  }

  std::unique_ptr<AgentSandbox> box_;
};

class Stopwatch {
 public:
  int64_t millis() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::System().Mono() - start_)
        .count();
  }

 private:
  MonoTime start_ = Clock::System().Mono();
};

}  // namespace dsec::aether::testing

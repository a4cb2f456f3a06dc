// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/verdict.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace dsec::sandbox {
namespace {

constexpr int Exited(int code) { return code << 8; }

v1::FnStep Judged(const Evidence& evidence) {
  v1::FnLimits limits;
  limits.set_cpu_ms(1000);
  limits.set_output_bytes(10);
  v1::FnStep step;
  Judge(evidence, limits, step);
  return step;
}

void Expect(const Evidence& evidence, v1::FnVerdict verdict, const std::string& limit) {
  const v1::FnStep step = Judged(evidence);
  EXPECT_EQ(step.verdict(), verdict);
  EXPECT_EQ(step.limit(), limit);
}

TEST(Verdict, ProgramAlone_IsToldByItsEnd) {
  Expect({}, v1::FN_OK, "");
  Expect({.wait_status = Exited(3)}, v1::FN_WRONG_EXIT, "");
  Expect({.wait_status = SIGSEGV}, v1::FN_SIGNALED, "");
  EXPECT_EQ(Judged({.wait_status = Exited(3)}).exit_code(), 3);
  EXPECT_EQ(Judged({.wait_status = SIGSEGV}).signal(), SIGSEGV);
}

TEST(Verdict, OomKill_WinsOverAllElse) {
  Expect({.oom_kills = 1}, v1::FN_MEMORY_LIMIT, "memory");
  Expect({.stopped_by = StoppedBy::kWall, .wait_status = SIGKILL, .oom_kills = 1},
         v1::FN_MEMORY_LIMIT, "memory");
}

TEST(Verdict, CpuTime_CountsAlsoWhenTheProgramEndedByItself) {
  Expect({.cpu_usec = 1'000'000}, v1::FN_OK, "");
  Expect({.cpu_usec = 1'000'001}, v1::FN_TIME_LIMIT, "cpu");
  Expect({.stopped_by = StoppedBy::kCpu, .wait_status = SIGKILL}, v1::FN_TIME_LIMIT, "cpu");
  Expect({.wait_status = SIGXCPU}, v1::FN_TIME_LIMIT, "cpu");
  Expect({.stopped_by = StoppedBy::kWall, .wait_status = SIGKILL}, v1::FN_TIME_LIMIT, "wall");
}

TEST(Verdict, Output_OfEitherStream) {
  Expect({.stdout_total = 10}, v1::FN_OK, "");
  Expect({.stdout_total = 11}, v1::FN_OUTPUT_LIMIT, "output");
  Expect({.stderr_total = 11}, v1::FN_OUTPUT_LIMIT, "output");
}

TEST(Verdict, WhatAProgramCanHandle_CountsOnlyWhenItFailed) {
  Expect({.forks_denied = 1}, v1::FN_OK, "");
  Expect({.wait_status = Exited(1), .forks_denied = 1}, v1::FN_PROCESS_LIMIT, "processes");
  Expect({.disk_full = true}, v1::FN_OK, "");
  Expect({.wait_status = Exited(1), .disk_full = true}, v1::FN_WRONG_EXIT, "disk");
  Expect({.wait_status = SIGXFSZ}, v1::FN_SIGNALED, "file");
}

}  // namespace
}  // namespace dsec::sandbox

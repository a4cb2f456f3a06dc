// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/verdict.h"

#include <signal.h>
#include <sys/wait.h>

namespace dsec::sandbox {
namespace {

void Set(v1::FnStep& step, v1::FnVerdict verdict, const char* limit) {
  step.set_verdict(verdict);
  step.set_limit(limit);
}

}  // namespace

void Judge(const Evidence& evidence, const v1::FnLimits& limits, v1::FnStep& step) {
  const int status = evidence.wait_status;
  const bool signaled = WIFSIGNALED(status);
  const int signal = signaled ? WTERMSIG(status) : 0;
  const bool failed = signaled || WEXITSTATUS(status) != 0;
  if (signaled) {
    step.set_signal(signal);
  } else {
    step.set_exit_code(WEXITSTATUS(status));
  }
  if (evidence.oom_kills > 0 || evidence.stopped_by == StoppedBy::kMemory) {
    return Set(step, v1::FN_MEMORY_LIMIT, "memory");
  }
  if (evidence.stopped_by == StoppedBy::kOutput || evidence.stdout_total > limits.output_bytes() ||
      evidence.stderr_total > limits.output_bytes()) {
    return Set(step, v1::FN_OUTPUT_LIMIT, "output");
  }
  if (evidence.stopped_by == StoppedBy::kCpu || evidence.cpu_usec > limits.cpu_ms() * 1000 ||
      signal == SIGXCPU) {
    return Set(step, v1::FN_TIME_LIMIT, "cpu");
  }
  if (evidence.stopped_by == StoppedBy::kWall) return Set(step, v1::FN_TIME_LIMIT, "wall");
  if (!failed) return Set(step, v1::FN_OK, "");
  if (evidence.forks_denied > 0) return Set(step, v1::FN_PROCESS_LIMIT, "processes");
  const char* hit = signal == SIGXFSZ ? "file" : evidence.disk_full ? "disk" : "";
  Set(step, signaled ? v1::FN_SIGNALED : v1::FN_WRONG_EXIT, hit);
}

}  // namespace dsec::sandbox

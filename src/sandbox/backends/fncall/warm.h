// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/result.h"
#include "dsec/v1/fncall.pb.h"
#include "os/process.h"
#include "os/unique_fd.h"
#include "runtime/deadline.h"
#include "sandbox/backends/fncall/program.h"
#include "sandbox/fn_backend.h"

namespace dsec::sandbox {

// An interpreter that was started in a cell ahead of its one call, has imported its modules and
// waits for the code. It is a program of the layer and counts as one of the call: nothing that it
// says is believed beyond "ready", and it gets what the call may know, no more.
struct WarmProgram {
  Program program;
  os::PidFd process;
  os::UniqueFd link;  // stream to it
};

// kInvalidArgument "fn.bad_warm" for what is no interpreter known here.
Result<void> CheckWarm(const v1::FnWarm& warm);

// Returns once it is ready. kFailedPrecondition "fn.warm_failed" with what it says; kCancelled when
// `cancel` becomes readable.
Result<WarmProgram> StartWarm(int channel, int group, const v1::FnWarm& warm, int cancel,
                              runtime::Deadline deadline);
// Limits, arguments and environment of the call; what follows is the call. What is written to an
// interpreter that has died is lost.
Result<void> HandOver(const WarmProgram& warm, const FnRun& run);

}  // namespace dsec::sandbox

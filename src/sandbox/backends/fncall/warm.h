// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "dsec/v1/fncall.pb.h"
#include "os/process.h"
#include "os/unique_fd.h"
#include "runtime/deadline.h"
#include "sandbox/backends/fncall/program.h"
#include "sandbox/fn_backend.h"
#include "spawn/worker.h"

namespace dsec::sandbox {

// The interpreter of a worker that has imported its modules; each call is a fork of it. It is a
// program of the layer: nothing that it says is believed beyond "ready", and of a call it gets
// nothing but the descriptors of its cell.
struct Zygote {
  os::PidFd process;
  os::UniqueFd link;  // SEQPACKET to it
  std::vector<uint8_t> fork_filter;
  uint32_t forks = 0;
};

// A fork in the cell of its one call, which waits for the code.
struct WarmProgram {
  Program program;
  os::PidFd process;
  os::UniqueFd link;  // stream to it
  int32_t pid = 0;    // as the runner numbers it
};

// What a fork must be found to be.
struct ForkPlace {
  const spawn::CellProcess* cell = nullptr;
  int user_ns = -1;
  int root = -1;       // of the cell
  pid_t runner = 0;    // its parent
  uint32_t owner = 0;  // host id of the calls' user
};

// kInvalidArgument "fn.bad_warm" for what is no interpreter known here.
Result<void> CheckWarm(const v1::FnWarm& warm);

// Returns once the modules are imported. `root` and `shm` are its own mounts. kFailedPrecondition
// "fn.warm_failed" with what it says; kCancelled when `cancel` becomes readable.
Result<Zygote> StartZygote(int control, int root, int shm, const v1::FnWarm& warm, int cancel,
                           runtime::Deadline deadline);
// Returns once the fork waits in its cell and has been looked at. kUnavailable "fn.worker_broken"
// when the zygote has ended or cannot do it, or the fork is not what it must be.
Result<WarmProgram> ForkZygote(Zygote& zygote, const ForkPlace& place, int cancel,
                               runtime::Deadline deadline);
// Limits, arguments and environment of the call; what follows is the call. kUnavailable
// "fn.worker_broken" when the fork has ended before.
Result<void> HandOver(const WarmProgram& warm, const FnRun& run);

// warm_check.cc: looks at a fork from outside. `link` is its end of the link. kUnavailable
// "fn.worker_broken" with what is wrong. On success `*pid` is its number in the runner's pid
// namespace.
Result<void> CheckFork(const os::PidFd& process, const Program& program, const struct stat& link,
                       const ForkPlace& place, int32_t* pid);

}  // namespace dsec::sandbox

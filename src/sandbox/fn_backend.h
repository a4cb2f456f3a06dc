// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "dsec/v1/edge.pb.h"
#include "dsec/v1/fncall.pb.h"
#include "os/unique_fd.h"
#include "runtime/deadline.h"
#include "runtime/task.h"
#include "sandbox/backend.h"

namespace dsec::sandbox {

// What a worker runs next: one program of one call, as a value. All limits are set (none is 0) and
// within the node's policy; paths of files are checked.
struct FnRun {
  std::vector<std::string> argv;
  std::vector<std::pair<std::string, std::string>> env;
  v1::FnLimits limits;
  std::string code_path;                 // of `code` below the working folder; empty: none
  std::string_view code;                 // borrowed until Run returns, as all views here
  std::vector<const v1::FnFile*> files;  // with content
  std::string_view stdin_bytes;
  std::vector<std::string> fetch;  // files to read back after the end; "dir/" = all below a folder,
                                   // "*" = all that the run made or changed
  uint64_t fetch_bytes = 0;        // bound of all of them together
  std::vector<std::string> devices;  // device files of the node that the call may open
};

struct FnFetched {
  std::string path;
  std::string content;
  uint32_t mode = 0;
};

// How a run ended. An error instead of a report is always the platform's fault
// (FN_INFRASTRUCTURE).
struct FnReport {
  v1::FnStep step;  // verdict as the kernel and the limits tell it; never FN_COMPILE_ERROR
  std::vector<FnFetched> files;
  std::vector<std::string> missing;
  // The worker cannot be used again (something of the call is left, a limit could not be set
  // back, ...). Destroy it.
  bool dirty = false;
  std::string dirt;  // why
};

// A container that exists and runs one call at a time; nothing of a call is left for the next.
// Lives on the shard that made it.
class FnWorker {
 public:
  virtual ~FnWorker() =
      default;  // ends its processes; what they leave is removed in the background
  virtual std::string_view name() const = 0;
  // Limits in the run are armed before the program's first instruction. Returns at the latest
  // wall_ms and a second after the start; `deadline` bounds the rest. kUnavailable "fn.worker_died"
  // when the container ended under it, "fn.worker_broken" when it could not be prepared;
  // "fn.exec_failed" with the errno of execve when argv[0] cannot be executed. After any error but
  // the last, cancellation included, the worker is over. Cancelling the coroutine kills the call.
  virtual runtime::Task<FnReport> Run(FnRun run, runtime::Deadline deadline) = 0;
  // Completes when the worker's own process has ended. At most one waiter.
  virtual runtime::Task<void> WaitEnd() = 0;
};

struct FnWorkerSpec {
  v1::FnEnvironment environment;  // layers, resolved by the backend
  v1::FnWarm warm;                // kind empty: none
};

// Calls in containers that exist ahead of them.
class FnBackend : public Backend {
 public:
  // Canonical form (layer ids in place of names): what makes two environments one pool. kNotFound
  // layer.not_found, kInvalidArgument layer.wrong_kind, with the field.
  virtual runtime::Task<v1::FnEnvironment> Resolve(v1::FnEnvironment environment,
                                                   runtime::Deadline deadline) = 0;
  // Limits with defaults in place of 0. kInvalidArgument with the field below `prefix` when one is
  // outside of the node's policy.
  virtual Result<v1::FnLimits> Normalize(v1::FnLimits limits, std::string_view prefix) const = 0;
  virtual runtime::Task<std::unique_ptr<FnWorker>> MakeWorker(FnWorkerSpec spec,
                                                              runtime::Deadline deadline) = 0;
};

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "sandbox/isolators/ids.h"
#include "sandbox/isolators/isolator.h"
#include "sandbox/isolators/views.h"

namespace dsec::sandbox {

// Limits of cgroups. `tree` must outlive it.
std::unique_ptr<Isolator> MakeCgroupIsolator(CgroupTree& tree);
// The writable layer. `scratch` must outlive it.
std::unique_ptr<Isolator> MakeScratchIsolator(Scratch& scratch);
// Host ids of user namespaces.
std::unique_ptr<Isolator> MakeIdsIsolator(const IdPlan& ids);
// How machine and kernel look from inside: /sys and files of /proc. `views` must outlive it.
std::unique_ptr<Isolator> MakeViewsIsolator(Views& views);

// What holds for each process: rlimits, cores, /dev/shm. Capabilities and seccomp programs are the
// spawner's defaults, which a plan can only widen with a token of spawn/rights.h; nothing here
// does.
struct ProcessHost {
  std::vector<uint32_t> cores;  // that the daemon may run on
  uint64_t max_open_files = 0;  // hard RLIMIT_NOFILE of the daemon
  uint64_t max_pids = 0;        // kernel.pid_max
  static Result<ProcessHost> Read();
};
std::unique_ptr<Isolator> MakeProcessIsolator(ProcessHost host);

}  // namespace dsec::sandbox

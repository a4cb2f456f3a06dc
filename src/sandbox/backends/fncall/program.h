// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "dsec/v1/fncall.pb.h"
#include "os/unique_fd.h"

namespace dsec::sandbox {

// A program of a cell, as the daemon holds it.
struct Program {
  os::UniqueFd in;      // what it reads; does not block
  os::UniqueFd out;     // what it writes; does not block
  os::UniqueFd err;     // likewise
  os::UniqueFd status;  // an abi::ExecFailure, or end of file once it runs
};

struct Rlimit {
  int resource = 0;  // RLIMIT_*
  uint64_t soft = 0;
  uint64_t hard = 0;
};
// Of a program with these limits. CPU time and memory of the tree are bounded otherwise.
std::vector<Rlimit> RlimitsOf(const v1::FnLimits& limits);
// Of an interpreter whose call is not known yet: as high as those of any call.
std::vector<Rlimit> OpenRlimits();

// Both ends of what connects the daemon and a program.
struct Pipes {
  Program ours, theirs;
};
Result<Pipes> MakePipes();

// A sealed abi::ExecPayload: the program runs in the working folder with `id` as user and group.
Result<os::UniqueFd> MakePayload(const std::vector<std::string>& argv,
                                 const std::vector<std::pair<std::string, std::string>>& env,
                                 const std::vector<Rlimit>& rlimits, uint32_t id);

// Asks the init of a cell to start a program in the working folder as the call's user. Its
// start is told over the channel (abi::InitStarted) and the status
// pipe. kUnavailable "fn.worker_died" when init is gone.
Result<Program> StartProgram(int channel, int group, const std::vector<std::string>& argv,
                             const std::vector<std::pair<std::string, std::string>>& env,
                             const std::vector<Rlimit>& rlimits);
inline constexpr uint64_t kExecId = 1;  // of that program in the messages of init

}  // namespace dsec::sandbox

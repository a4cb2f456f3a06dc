// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aether/identity.h"
#include "aether/loop.h"
#include "base/result.h"
#include "os/unique_fd.h"
#include "spawn/agent_abi.h"

namespace dsec::aether {

// One program to start in the sandbox. Strings hold no NUL; InitClient::Start checks nothing.
struct Program {
  std::vector<std::string> argv;
  std::vector<std::string> env;  // KEY=value
  std::string cwd;               // absolute
  Identity identity;
  uint64_t open_files = 0;  // RLIMIT_NOFILE; 0 leaves what init has
  bool controlling_tty = false;
};

// Descriptors of a program; the caller keeps its own copies and may close them after Start.
struct ProgramFds {
  int stdin_fd = -1;
  int stdout_fd = -1;
  int stderr_fd = -1;
  int cgroup = -1;
  std::vector<int> extra;  // 3, 4, ...
};

// The agent's side of the channel to the sandbox's init (spawn/agent_abi.h).
class InitClient {
 public:
  struct Ended {
    int wait_status = 0;
    uint64_t user_usec = 0;
    uint64_t system_usec = 0;
    uint64_t max_rss_bytes = 0;
  };
  // Exactly one of `started` and `failed` is called, from the loop, never from within Start; after
  // `started`, `ended` once.
  struct Callbacks {
    std::function<void(int pid, os::UniqueFd pidfd)> started;
    std::function<void(spawn::abi::ExecFailure)> failed;
    std::function<void(const Ended&)> ended;
  };

  // `ready` is called with the descriptor of the sandbox's root once init has set it up; `lost`
  // when init or its channel is gone, which ends the sandbox.
  InitClient(Loop& loop, os::UniqueFd channel, std::function<void(os::UniqueFd root)> ready,
             std::function<void(std::string why)> lost);

  // kResourceExhausted "exec.init_busy" when init takes no more now. The id is for Forget.
  Result<uint64_t> Start(const Program& program, const ProgramFds& fds, Callbacks callbacks);
  // Nothing of this id is of interest any more.
  void Forget(uint64_t id) { running_.erase(id); }
  Result<void> SignalAll(int signal);
  // A new private tmpfs. One request at a time.
  Result<void> MakeFs(uint64_t max_bytes, uint32_t max_inodes,
                      std::function<void(Result<os::UniqueFd>)> done);

 private:
  struct Running {
    Callbacks callbacks;
    os::UniqueFd status;
    FdWatch status_watch;
    bool executed = false;
    int pid = 0;
    os::UniqueFd pidfd;
    std::unique_ptr<Ended> ended;  // came before the other two
  };

  void OnMessage();
  void OnStatus(uint64_t id);
  void Advance(uint64_t id);

  Loop& loop_;
  os::UniqueFd channel_;
  FdWatch watch_;
  std::function<void(os::UniqueFd)> ready_;
  std::function<void(std::string)> lost_;
  std::function<void(Result<os::UniqueFd>)> fs_done_;
  std::map<uint64_t, Running> running_;
  uint64_t next_id_ = 1;
};

}  // namespace dsec::aether

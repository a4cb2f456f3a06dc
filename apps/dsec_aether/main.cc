// SPDX-License-Identifier: Apache-2.0
// dsec-aether: the agent of one sandbox, started by the spawner as pid 1 of pid namespace A. See
// src/spawn/agent_abi.h.
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "aether/agent.h"

namespace {

// One line on the log, dropped rather than waited for when its reader is slow.
void Log(const char* event, const std::string& text) {
  pollfd log = {STDERR_FILENO, POLLOUT, 0};
  if (::poll(&log, 1, 0) == 1 && (log.revents & POLLOUT) != 0)
    std::fprintf(stderr, "%s %s\n", event, text.c_str());
}

}  // namespace

int main() {
  ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
  ::signal(SIGPIPE, SIG_IGN);
  ::umask(0);  // modes are given exactly
  // Large blocks come from and go back to the kernel one by one, small ones stay few; one arena for
  // all threads.
  ::mallopt(M_MMAP_THRESHOLD, 64 << 10);
  ::mallopt(M_TRIM_THRESHOLD, 128 << 10);
  ::mallopt(M_TOP_PAD, 16 << 10);
  ::mallopt(M_ARENA_MAX, 1);
  auto agent = dsec::aether::Agent::Create();
  if (!agent.ok()) {
    Log("agent.start_failed", agent.error().ToString());
    return 1;
  }
  Log("agent.ended", (*agent)->Run());
  // A worker may hang in a dead file system: nothing is waited for, and everything of the sandbox
  // dies with this process.
  ::_exit(0);
}

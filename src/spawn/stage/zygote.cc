// SPDX-License-Identifier: Apache-2.0
// The zygote of a worker of FnCall: an interpreter of the layer that has imported its modules and
// of which each call is a fork. It is the layer's code and no call's. To bring a fork into the cell
// of its call it has to enter namespaces of A, so it keeps the two rights for that and the one
// system call; mounting, making namespaces and all else is refused to it as to any code. Its forks
// give up all of it, and the daemon looks from outside whether they have before they get anything
// of a call.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/fd_passing.h"
#include "os/syscalls.h"
#include "os/unique_fd.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {

using os::UniqueFd;
using wire::Step;

void RunZygote(const ZygoteStart& start) {
  wire::Reply reply;
  StepClock clock(&reply);
  const CellRoot parts = {start.views, start.fds[0], start.fds[1], -1};
  const int error = BuildCellRoot(parts, clock);
  if (os::SendPacketRaw(start.launch, &reply, sizeof(reply), nullptr, 0, 0) != 0 || error != 0)
    ::_exit(1);
  ExecPlan plan;
  plan.shared = start.shared;
  plan.fds = start.fds + wire::kZygoteMounts;
  plan.fd_count = wire::kZygoteFds - wire::kZygoteMounts;
  plan.extra_fds = wire::kZygoteExtraFds;
  plan.zygote = true;
  RunExecChild(plan);
}

int OpenCgroupNamespace(int group, UniqueFd* ns) {
  int sync[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sync) != 0) return -errno;
  UniqueFd here(sync[0]), there(sync[1]);
  const pid_t keeper = os::Clone3(0, nullptr, group, SIGCHLD);
  if (keeper < 0) return -errno;
  if (keeper == 0) {
    int fd =
        ::unshare(CLONE_NEWCGROUP) == 0 ? ::open("/proc/self/ns/cgroup", O_RDONLY | O_CLOEXEC) : -1;
    const int error = fd >= 0 ? 0 : errno;
    os::SendPacketRaw(there.get(), &error, sizeof(error), &fd, fd >= 0 ? 1 : 0, 0);
    ::_exit(0);
  }
  there.Reset();
  int failed = 0;
  int fd = -1;
  size_t count = 1;
  const ssize_t size = os::ReceivePacketRaw(here.get(), &failed, sizeof(failed), &fd, &count, 0);
  if (count == 1 && size > 0) ns->Reset(fd);
  ::waitpid(keeper, nullptr, 0);
  if (size != sizeof(failed)) return size < 0 ? static_cast<int>(size) : -EPIPE;
  return ns->valid() ? 0 : -failed;
}

}  // namespace dsec::spawn::stage

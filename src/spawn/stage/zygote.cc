// SPDX-License-Identifier: Apache-2.0
// The zygote of a worker of FnCall: an interpreter of the layer that has imported its modules and
// of which each call is a fork. It is the layer's code and no call's. To bring a fork into the cell
// of its call it has to enter namespaces of A, so it keeps the two rights for that and the one
// system call; mounting, making namespaces and all else is refused to it as to any code. Its forks
// give up all of it, and the daemon looks from outside whether they have before they get anything
// of a call.
#include <unistd.h>

#include "os/fd_passing.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {

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

}  // namespace dsec::spawn::stage

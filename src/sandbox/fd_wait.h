// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "rpc/channel.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::sandbox {

enum class FdEvent {
  kReadable,
  kPriority,  // POLLPRI: a kernfs file has changed since it was last read
};

// Waits on the caller's shard. `fd` is borrowed and must stay open. kDeadlineExceeded, kCancelled.
runtime::Task<void> WaitFd(int fd, FdEvent event, runtime::Deadline deadline);

// Whichever comes first: `fd` is readable (true) or the channel has ended (false).
runtime::Task<bool> WaitReadableOrClosed(int fd, std::shared_ptr<rpc::Channel> channel);

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "rpc/socket.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::rpc {

// Connected sockets of `executor`; errors as Channel::ConnectUnix and ConnectTcp tell them.
runtime::Task<FrameSocket::Socket> DialUnix(runtime::Executor executor, std::string path,
                                            runtime::Deadline deadline);
runtime::Task<FrameSocket::Socket> DialTcp(runtime::Executor executor, std::string host,
                                           uint16_t port, runtime::Deadline deadline);

}  // namespace dsec::rpc

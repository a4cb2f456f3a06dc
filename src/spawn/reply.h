// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "os/unique_fd.h"
#include "runtime/deadline.h"
#include "spawn/spawner.h"
#include "spawn/wire.h"

namespace dsec::spawn {

// The daemon's side of requests and replies over the sockets of spawner, init and runner.

template <typename T>
std::span<const uint8_t> BytesOf(const T& value) {
  return {reinterpret_cast<const uint8_t*>(&value), sizeof(value)};
}

struct Answer {
  wire::Reply reply;
  std::vector<os::UniqueFd> fds;
};

// kDeadlineExceeded "spawn.timeout".
Error Late(const char* what);
// "os.peer_closed" when the other side has gone.
Result<Answer> AwaitReply(int socket, runtime::Deadline deadline, const char* what);
Result<void> CheckReply(const wire::Reply& reply, std::string_view reason, const char* what);
std::vector<StepTime> StepsOf(const wire::Reply& reply);
inline bool PeerGone(const Error& error) { return error.reason() == "os.peer_closed"; }

}  // namespace dsec::spawn

// SPDX-License-Identifier: Apache-2.0
#include "spawn/reply.h"

#include <cstring>

#include "os/fd_passing.h"
#include "os/file.h"

namespace dsec::spawn {

Error Late(const char* what) {
  return Error(Code::kDeadlineExceeded, "spawn.timeout", fmt::format("{} took too long", what));
}

Result<Answer> AwaitReply(int socket, runtime::Deadline deadline, const char* what) {
  DSEC_TRY(bool ready, os::WaitReadable(socket, deadline.at()));
  if (!ready) return Late(what);
  DSEC_TRY(auto packet, os::ReceivePacket(socket, sizeof(wire::Reply)));
  Answer answer;
  if (packet.data.size() != sizeof(wire::Reply)) {
    return Error(Code::kInternal, "spawn.bad_reply",
                 fmt::format("{}: {} bytes", what, packet.data.size()));
  }
  std::memcpy(&answer.reply, packet.data.data(), sizeof(wire::Reply));
  if (answer.reply.magic != wire::kReplyMagic || answer.reply.version != wire::kVersion ||
      answer.reply.step_count > wire::kMaxSteps) {
    return Error(Code::kInternal, "spawn.bad_reply",
                 fmt::format("{}: another version of dsec-spawner", what));
  }
  answer.fds = std::move(packet.fds);
  return answer;
}

Result<void> CheckReply(const wire::Reply& reply, std::string_view reason, const char* what) {
  if (reply.failed == wire::Step::kNone) return Ok();
  return Error::FromErrno(reply.sys_errno, reason,
                          fmt::format("{} failed at step {}", what, wire::StepName(reply.failed)));
}

std::vector<StepTime> StepsOf(const wire::Reply& reply) {
  std::vector<StepTime> steps;
  for (uint32_t i = 0; i < reply.step_count; ++i)
    steps.push_back({wire::StepName(reply.steps[i].step), reply.steps[i].usec});
  return steps;
}

}  // namespace dsec::spawn

// SPDX-License-Identifier: Apache-2.0
#include "spawn/worker.h"

#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>

#include "os/fd_passing.h"
#include "os/file.h"
#include "spawn/plan.h"
#include "spawn/reply.h"

namespace dsec::spawn {
namespace {

static_assert(sizeof(wire::OrphanEnd) != sizeof(wire::CellEnd));

uint32_t LeftMs(runtime::Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.Remaining()).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(left, 1, 60'000));
}

Error Gone(const Error& error) {
  if (!PeerGone(error) && error.sys_errno() != EPIPE && error.sys_errno() != ECONNRESET)
    return error;
  return Error(Code::kUnavailable, "spawn.worker_gone", "the runner has ended").WithErrno(EPIPE);
}

template <typename Request>
Result<Answer> Ask(int control, const Request& request, std::span<const int> fds,
                   runtime::Deadline deadline, const char* what) {
  auto sent = os::SendPacket(control, BytesOf(request), fds);
  if (!sent.ok()) return Gone(sent.error());
  auto answer = AwaitReply(control, deadline, what);
  if (!answer.ok()) return Gone(answer.error());
  DSEC_TRY_VOID(CheckReply(answer->reply, "spawn.cell_failed", what));
  return answer;
}

}  // namespace

Result<void> FurnishWorker(int control, const std::vector<std::string>& targets,
                           std::span<const int> mounts, runtime::Deadline deadline) {
  if (targets.size() > wire::kMaxViews || targets.size() != mounts.size()) {
    return Error(Code::kInvalidArgument, "spawn.bad_plan",
                 fmt::format("{} views with {} mounts", targets.size(), mounts.size()));
  }
  auto views = std::make_unique<wire::Views>();
  views->view_count = static_cast<uint32_t>(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    DSEC_TRY_VOID(CheckViewTarget(targets[i]));
    std::memcpy(views->views[i], targets[i].data(), targets[i].size());
  }
  DSEC_TRY_VOID(Ask(control, *views, mounts, deadline, "furnishing a worker"));
  return Ok();
}

Result<os::PidFd> MakeZygote(int control, int root, int shm, std::span<const int> exec,
                             runtime::Deadline deadline) {
  wire::Zygote zygote;
  zygote.timeout_ms = LeftMs(deadline);
  std::vector<int> fds = {root, shm};
  fds.insert(fds.end(), exec.begin(), exec.end());
  DSEC_TRY(auto answer, Ask(control, zygote, fds, deadline, "making a zygote"));
  if (answer.fds.size() != wire::kZygoteReplyFds)
    return Error(Code::kInternal, "spawn.bad_reply", "no zygote came with the answer");
  auto process = os::PidFd::Adopt(std::move(answer.fds[0]));
  if (process.ok()) return process;
  return Error(Code::kUnavailable, "spawn.cell_failed", "the zygote ended as soon as it was made");
}

Result<CellProcess> MakeCell(int control, const CellOrder& order, const CellMounts& mounts,
                             runtime::Deadline deadline) {
  wire::Cell cell;
  cell.fresh_group = order.fresh_group ? 1 : 0;
  cell.has_fork = order.for_fork ? 1 : 0;
  cell.serial = order.serial;
  cell.has_dev = mounts.dev >= 0 ? 1 : 0;
  cell.timeout_ms = LeftMs(deadline);
  DSEC_TRY(auto channel, os::PacketPair());
  const int fds[] = {channel.second.get(), mounts.root, mounts.shm, mounts.dev};
  DSEC_TRY(auto answer, Ask(control, cell, std::span(fds, wire::kCellFixedFds + cell.has_dev),
                            deadline, "making a cell"));
  const size_t namespaces = order.for_fork ? wire::kCellNamespaces : 0;
  if (answer.fds.size() != wire::kCellReplyFds + namespaces) {
    return Error(Code::kInternal, "spawn.bad_reply",
                 fmt::format("{} descriptors", answer.fds.size()));
  }
  CellProcess made{std::move(channel.first),
                   std::move(answer.fds[0]),
                   std::move(answer.fds[1]),
                   {},
                   StepsOf(answer.reply)};
  for (size_t i = 0; i < namespaces; ++i)
    made.namespaces.push_back(std::move(answer.fds[wire::kCellReplyFds + i]));
  return made;
}

Result<std::optional<OrphanReport>> TakeOrphan(int control) {
  wire::OrphanEnd end;
  size_t none = 0;
  const ssize_t size =
      os::ReceivePacketRaw(control, &end, sizeof(end), nullptr, &none, MSG_DONTWAIT);
  if (size == -EAGAIN) return std::optional<OrphanReport>();
  if (size <= 0) return Error(Code::kUnavailable, "spawn.worker_gone", "the runner has ended");
  if (size != static_cast<ssize_t>(sizeof(end)) || end.magic != wire::kOrphanMagic)
    return Error(Code::kInternal, "spawn.bad_reply", "another message than the end of a process");
  return std::optional(OrphanReport{end.pid, end.wait_status});
}

Result<CellReport> AwaitCellEnd(int control, uint64_t serial, runtime::Deadline deadline) {
  auto packet = Result<os::Packet>(os::Packet());
  do {
    DSEC_TRY(const bool ready, os::WaitReadable(control, deadline.at()));
    if (!ready) return Late("the end of a cell");
    packet = os::ReceivePacket(control, sizeof(wire::CellEnd));
    if (!packet.ok()) return Gone(packet.error());
  } while (packet->data.size() == sizeof(wire::OrphanEnd));
  wire::CellEnd end;
  if (packet->data.size() != sizeof(end)) {
    return Error(Code::kInternal, "spawn.bad_reply",
                 fmt::format("the end of a cell: {} bytes", packet->data.size()));
  }
  std::memcpy(&end, packet->data.data(), sizeof(end));
  if (end.magic != wire::kCellEndMagic || end.version != wire::kVersion || end.serial != serial) {
    return Error(Code::kInternal, "spawn.bad_reply", "the end of another cell");
  }
  CellReport report;
  report.init_killed = !WIFEXITED(end.init_status);
  report.network_renewed = end.network_renewed != 0;
  if (end.cgroup_errno != 0) {
    report.dirt = fmt::format("its cgroup does not get empty: {}", std::strerror(end.cgroup_errno));
  } else if (end.network_errno != 0) {
    report.dirt = fmt::format("its network is unknown: {}", std::strerror(end.network_errno));
  }
  return report;
}

}  // namespace dsec::spawn

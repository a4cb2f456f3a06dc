// SPDX-License-Identifier: Apache-2.0
#include "aether/init_client.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "os/fd_passing.h"
#include "os/memfd.h"

namespace dsec::aether {
namespace {

namespace abi = spawn::abi;

// A core dump is never written, not even to a pipe handler: fs/coredump.c takes a limit of 1 as
// "dump nothing" for pipes and anything below a page as "dump nothing" for files. See core(5) for
// why 0 would not do.
constexpr uint64_t kNoCore = 1;

void AppendString(std::vector<uint8_t>& payload, std::string_view text) {
  payload.insert(payload.end(), text.begin(), text.end());
  payload.push_back(0);
}

Result<os::UniqueFd> MakePayload(const Program& program) {
  abi::ExecPayload header;
  size_t strings = program.cwd.size() + 1;
  for (const std::string& text : program.argv) strings += text.size() + 1;
  for (const std::string& text : program.env) strings += text.size() + 1;
  header.strings_bytes = static_cast<uint32_t>(strings);
  header.argc = static_cast<uint32_t>(program.argv.size());
  header.envc = static_cast<uint32_t>(program.env.size());
  header.flags = program.controlling_tty ? abi::kControllingTty : 0u;
  header.uid = program.identity.uid;
  header.gid = program.identity.gid;
  for (uint32_t group : program.identity.groups) {
    if (header.group_count < abi::kMaxGroups) header.groups[header.group_count++] = group;
  }
  header.rlimits[header.rlimit_count++] = {RLIMIT_CORE, 0, kNoCore, kNoCore};
  if (program.open_files > 0) {
    header.rlimits[header.rlimit_count++] = {RLIMIT_NOFILE, 0, program.open_files,
                                             program.open_files};
  }
  std::vector<uint8_t> payload;
  payload.reserve(sizeof(header) + strings);
  payload.resize(sizeof(header));
  std::memcpy(payload.data(), &header, sizeof(header));
  for (const std::string& text : program.argv) AppendString(payload, text);
  for (const std::string& text : program.env) AppendString(payload, text);
  AppendString(payload, program.cwd);
  return os::SealedMemfd("exec", payload);
}

Error SendError(int failure, const char* what) {
  if (failure == -EAGAIN) {
    return Error(Code::kResourceExhausted, "exec.init_busy",
                 "init does not take requests fast enough");
  }
  return Error::FromErrno(-failure, "exec.init_gone", what);
}

}  // namespace

InitClient::InitClient(Loop& loop, os::UniqueFd channel, std::function<void(os::UniqueFd)> ready,
                       std::function<void(std::string)> lost)
    : loop_(loop),
      channel_(std::move(channel)),
      watch_(loop, channel_.get(), EPOLLIN, [this](uint32_t) { OnMessage(); }),
      ready_(std::move(ready)),
      lost_(std::move(lost)) {}

Result<uint64_t> InitClient::Start(const Program& program, const ProgramFds& fds,
                                   Callbacks callbacks) {
  DSEC_TRY(os::UniqueFd payload, MakePayload(program));
  int status[2];
  if (::pipe2(status, O_CLOEXEC | O_NONBLOCK) != 0) {
    return Error::FromErrno(errno, "exec.pipe", "make the status pipe");
  }
  os::UniqueFd status_read(status[0]);
  os::UniqueFd status_write(status[1]);
  abi::ExecRequest request;
  request.id = next_id_++;
  std::vector<int> passed = {payload.get(), status_write.get(), fds.stdin_fd, fds.stdout_fd,
                             fds.stderr_fd};
  if (fds.cgroup >= 0) {
    request.flags |= abi::kHasCgroup;
    passed.push_back(fds.cgroup);
  }
  request.extra_fds = static_cast<uint32_t>(fds.extra.size());
  passed.insert(passed.end(), fds.extra.begin(), fds.extra.end());
  int failure = os::SendPacketRaw(channel_.get(), &request, sizeof(request), passed.data(),
                                  passed.size(), MSG_DONTWAIT);
  if (failure != 0) return SendError(failure, "ask init for an exec");
  Running& running = running_[request.id];
  running.callbacks = std::move(callbacks);
  running.status = std::move(status_read);
  running.status_watch = FdWatch(loop_, running.status.get(), EPOLLIN,
                                 [this, id = request.id](uint32_t) { OnStatus(id); });
  return request.id;
}

Result<void> InitClient::SignalAll(int signal) {
  abi::SignalAllRequest request;
  request.signal = signal;
  int failure =
      os::SendPacketRaw(channel_.get(), &request, sizeof(request), nullptr, 0, MSG_DONTWAIT);
  if (failure != 0) return SendError(failure, "ask init to signal all");
  return Ok();
}

Result<void> InitClient::MakeFs(uint64_t max_bytes, uint32_t max_inodes,
                                std::function<void(Result<os::UniqueFd>)> done) {
  abi::MakeFsRequest request;
  request.max_bytes = max_bytes;
  request.max_inodes = max_inodes;
  int failure =
      os::SendPacketRaw(channel_.get(), &request, sizeof(request), nullptr, 0, MSG_DONTWAIT);
  if (failure != 0) return SendError(failure, "ask init for a file system");
  fs_done_ = std::move(done);
  return Ok();
}

void InitClient::OnStatus(uint64_t id) {
  auto found = running_.find(id);
  if (found == running_.end()) return;
  Running& running = found->second;
  abi::ExecFailure failure;
  ssize_t size = ::read(running.status.get(), &failure, sizeof(failure));
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  running.status_watch.Reset();
  running.status.Reset();
  if (size == sizeof(failure)) {
    auto failed = std::move(running.callbacks.failed);
    running_.erase(found);
    failed(failure);
    return;
  }
  running.executed = true;
  Advance(id);
}

void InitClient::OnMessage() {
  // At most as many messages as a busy turn should spend on this.
  for (int i = 0; i < 64; ++i) {
    alignas(8) char data[256];
    int fds[4];
    size_t fd_count = std::size(fds);
    ssize_t size =
        os::ReceivePacketRaw(channel_.get(), data, sizeof(data), fds, &fd_count, MSG_DONTWAIT);
    if (size == -EAGAIN) return;
    if (size <= 0) {
      watch_.Reset();
      lost_(size == 0
                ? "init closed its channel"
                : fmt::format("channel to init: {}", strerrordesc_np(static_cast<int>(-size))));
      return;
    }
    os::UniqueFd fd(fd_count > 0 ? fds[0] : -1);
    for (size_t extra = 1; extra < fd_count; ++extra) ::close(fds[extra]);
    uint32_t type = 0;
    if (static_cast<size_t>(size) >= sizeof(type)) std::memcpy(&type, data, sizeof(type));
    if (type == abi::kReady && size == sizeof(abi::InitReady)) {
      abi::InitReady message;
      std::memcpy(&message, data, sizeof(message));
      if (message.version != abi::kVersion || !fd.valid()) {
        lost_(fmt::format("init speaks version {}, the agent {}", message.version, abi::kVersion));
        return;
      }
      ready_(std::move(fd));
    } else if (type == abi::kStarted && size == sizeof(abi::InitStarted)) {
      abi::InitStarted message;
      std::memcpy(&message, data, sizeof(message));
      auto found = running_.find(message.id);
      if (found == running_.end() || !fd.valid()) continue;
      found->second.pid = message.pid;
      found->second.pidfd = std::move(fd);
      Advance(message.id);
    } else if (type == abi::kEnded && size == sizeof(abi::InitEnded)) {
      abi::InitEnded message;
      std::memcpy(&message, data, sizeof(message));
      auto found = running_.find(message.id);
      if (found == running_.end()) continue;
      found->second.ended = std::make_unique<Ended>(Ended{
          message.wait_status, message.user_usec, message.system_usec, message.max_rss_bytes});
      Advance(message.id);
    } else if (type == abi::kFs && size == sizeof(abi::InitFs)) {
      abi::InitFs message;
      std::memcpy(&message, data, sizeof(message));
      auto done = std::exchange(fs_done_, nullptr);
      if (done == nullptr) continue;
      if (message.sys_errno == 0 && fd.valid()) {
        done(std::move(fd));
      } else {
        done(Error::FromErrno(message.sys_errno, "session.no_private_fs",
                              "init cannot make a private file system"));
      }
    }
  }
}

void InitClient::Advance(uint64_t id) {
  auto found = running_.find(id);
  Running* running = &found->second;
  // Started is told only once the program runs and its process is known; a failure comes by the
  // status pipe alone.
  if (!running->executed || running->pid == 0) return;
  if (auto started = std::exchange(running->callbacks.started, nullptr); started != nullptr) {
    started(running->pid, std::move(running->pidfd));
    found = running_.find(id);
    if (found == running_.end()) return;
    running = &found->second;
  }
  if (running->ended == nullptr) return;
  auto ended = std::move(running->callbacks.ended);
  std::unique_ptr<Ended> end = std::move(running->ended);
  running_.erase(found);
  ended(*end);
}

}  // namespace dsec::aether

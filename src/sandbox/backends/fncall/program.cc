// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/program.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "os/fd_passing.h"
#include "os/file.h"
#include "os/memfd.h"
#include "sandbox/backends/fncall/call_files.h"
#include "sandbox/backends/fncall/worker_host.h"
#include "spawn/agent_abi.h"

namespace dsec::sandbox {
namespace {

namespace abi = spawn::abi;

constexpr uint64_t kOpenFiles = 4096;
constexpr uint64_t kMinStack = 8ull << 20;
constexpr uint64_t kStackBeyond = 16ull << 20;
constexpr uint64_t kMaxStack = 1ull << 30;

struct Pipe {
  os::UniqueFd read, write;
};
// Our end does not block; the program's does, as it expects.
Result<Pipe> MakePipe(bool we_read) {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) return os::ErrnoError("fn.pipe", "make a pipe");
  Pipe pipe{os::UniqueFd(fds[0]), os::UniqueFd(fds[1])};
  if (::fcntl(we_read ? fds[0] : fds[1], F_SETFL, O_NONBLOCK) != 0)
    return os::ErrnoError("fn.pipe", "set up a pipe");
  return pipe;
}

void AppendString(std::vector<uint8_t>& payload, std::string_view text) {
  payload.insert(payload.end(), text.begin(), text.end());
  payload.push_back(0);
}

}  // namespace

std::vector<Rlimit> RlimitsOf(const v1::FnLimits& limits) {
  // For one process alone, should nobody look: the tree's time is watched from outside.
  const uint64_t seconds = limits.cpu_ms() / 1000 + 2;
  return {{RLIMIT_FSIZE, limits.file_bytes(), limits.file_bytes()},
          {RLIMIT_NOFILE, kOpenFiles, kOpenFiles},
          // The stack may take what memory there is; what bounds it is the memory limit.
          {RLIMIT_STACK, std::clamp(limits.memory_bytes() + kStackBeyond, kMinStack, kMaxStack),
           RLIM_INFINITY},
          {RLIMIT_CPU, seconds, seconds + 1}};
}

std::vector<Rlimit> OpenRlimits() {
  return {{RLIMIT_FSIZE, RLIM_INFINITY, RLIM_INFINITY},
          {RLIMIT_NOFILE, kOpenFiles, kOpenFiles},
          {RLIMIT_STACK, kMaxStack, RLIM_INFINITY},
          {RLIMIT_CPU, RLIM_INFINITY, RLIM_INFINITY}};
}

Result<Pipes> MakePipes() {
  DSEC_TRY(auto in, MakePipe(false));
  DSEC_TRY(auto out, MakePipe(true));
  DSEC_TRY(auto err, MakePipe(true));
  DSEC_TRY(auto status, MakePipe(true));
  // So that the code can open /dev/stdin and its sisters; nobody else can reach them.
  for (const int fd : {in.read.get(), out.write.get(), err.write.get()}) {
    if (::fchmod(fd, 0666) != 0) return os::ErrnoError("fn.pipe", "set up a pipe");
  }
  return Pipes{
      {std::move(in.write), std::move(out.read), std::move(err.read), std::move(status.read)},
      {std::move(in.read), std::move(out.write), std::move(err.write), std::move(status.write)}};
}

Result<os::UniqueFd> MakePayload(const std::vector<std::string>& argv,
                                 const std::vector<std::pair<std::string, std::string>>& env,
                                 const std::vector<Rlimit>& rlimits, uint32_t id) {
  abi::ExecPayload header;
  std::vector<uint8_t> payload(sizeof(header));
  for (const std::string& word : argv) AppendString(payload, word);
  for (const auto& [key, value] : env) AppendString(payload, key + "=" + value);
  AppendString(payload, fmt::format("/{}", kWorkFolder));
  header.strings_bytes = static_cast<uint32_t>(payload.size() - sizeof(header));
  header.argc = static_cast<uint32_t>(argv.size());
  header.envc = static_cast<uint32_t>(env.size());
  header.uid = id;
  header.gid = id;
  for (const Rlimit& limit : rlimits) {
    header.rlimits[header.rlimit_count++] = {static_cast<uint32_t>(limit.resource), 0, limit.soft,
                                             limit.hard};
  }
  std::memcpy(payload.data(), &header, sizeof(header));
  return os::SealedMemfd("call", payload);
}

Result<Program> StartProgram(int channel, int group, const std::vector<std::string>& argv,
                             const std::vector<std::pair<std::string, std::string>>& env,
                             const std::vector<Rlimit>& rlimits) {
  DSEC_TRY(auto pipes, MakePipes());
  DSEC_TRY(const auto payload, MakePayload(argv, env, rlimits, kCallUser));
  abi::ExecRequest request;
  request.flags = abi::kHasCgroup;
  request.id = kExecId;
  const int fds[] = {payload.get(),          pipes.theirs.status.get(), pipes.theirs.in.get(),
                     pipes.theirs.out.get(), pipes.theirs.err.get(),    group};
  const int error = os::SendPacketRaw(channel, &request, sizeof(request), fds, std::size(fds), 0);
  if (error != 0) {
    return Error(Code::kUnavailable, "fn.worker_died", "the cell's init has ended before the call")
        .WithErrno(-error);
  }
  return std::move(pipes.ours);
}

}  // namespace dsec::sandbox

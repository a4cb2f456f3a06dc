// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <grp.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstring>

#include "os/memfd.h"
#include "spawn/agent_abi.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

using abi::ExecStep;

// Descriptors of the child while it prepares: 0, 1, 2, the extra ones from 3 on, then these, all
// with close-on-exec.
constexpr int kStatus = 3 + static_cast<int>(abi::kMaxExtraFds);
constexpr int kPayload = kStatus + 1;
constexpr int kProgram = kStatus + 2;

[[noreturn]] void Fail(int status, ExecStep step, int error) {
  abi::ExecFailure failure = {step, -error};
  ssize_t ignored = ::write(status, &failure, sizeof(failure));
  static_cast<void>(ignored);
  ::_exit(127);
}

struct Command {
  const abi::ExecPayload* payload = nullptr;
  char** argv = nullptr;
  char** envp = nullptr;
  const char* cwd = nullptr;
};

// Maps the payload and finds its strings. It is sealed, so what has been checked stays true.
int ParsePayload(int fd, Command* command) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return -errno;
  if (!os::IsSealed(fd)) return -EPERM;
  auto size = static_cast<uint64_t>(info.st_size);
  if (size < sizeof(abi::ExecPayload) || size > abi::kMaxPayloadBytes) return -EINVAL;
  void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  if (mapped == MAP_FAILED) return -errno;
  const auto* payload = static_cast<const abi::ExecPayload*>(mapped);
  if (payload->magic != abi::kPayloadMagic || payload->version != abi::kVersion ||
      payload->strings_bytes != size - sizeof(abi::ExecPayload) || payload->argc == 0 ||
      payload->argc > abi::kMaxStrings || payload->envc > abi::kMaxStrings ||
      payload->group_count > abi::kMaxGroups || payload->rlimit_count > abi::kMaxRlimits) {
    return -EINVAL;
  }
  size_t pointers = static_cast<size_t>(payload->argc) + payload->envc + 2;
  void* table = ::mmap(nullptr, pointers * sizeof(char*), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (table == MAP_FAILED) return -errno;
  auto** out = static_cast<char**>(table);
  char* next = static_cast<char*>(mapped) + sizeof(abi::ExecPayload);
  char* end = next + payload->strings_bytes;
  auto take = [&next, end]() -> char* {
    char* start = next;
    void* nul = next < end ? std::memchr(next, '\0', static_cast<size_t>(end - next)) : nullptr;
    if (nul == nullptr) return nullptr;
    next = static_cast<char*>(nul) + 1;
    return start;
  };
  command->payload = payload;
  command->argv = out;
  for (uint32_t i = 0; i < payload->argc; ++i) {
    if ((*out++ = take()) == nullptr) return -EINVAL;
  }
  *out++ = nullptr;
  command->envp = out;
  for (uint32_t i = 0; i < payload->envc; ++i) {
    if ((*out++ = take()) == nullptr) return -EINVAL;
  }
  *out = nullptr;
  command->cwd = take();
  return command->cwd != nullptr && command->cwd[0] == '/' && next == end ? 0 : -EINVAL;
}

int ApplyRlimits(const abi::ExecPayload& payload) {
  for (uint32_t i = 0; i < payload.rlimit_count; ++i) {
    rlimit limit = {payload.rlimits[i].soft, payload.rlimits[i].hard};
    if (::setrlimit(static_cast<__rlimit_resource>(payload.rlimits[i].resource), &limit) != 0)
      return -errno;
  }
  // A core would go where kernel.core_pattern of the host says. 1, because 0 still starts the
  // handler of a pipe; see core(5).
  rlimit none = {1, 1};
  return ::setrlimit(RLIMIT_CORE, &none) == 0 ? 0 : -errno;
}

int ApplyAffinity(const abi::ExecPayload& payload) {
  bool pinned = false;
  for (uint64_t word : payload.cpu_mask) pinned |= word != 0;
  if (!pinned) return 0;
  return ::sched_setaffinity(0, sizeof(payload.cpu_mask),
                             reinterpret_cast<const cpu_set_t*>(payload.cpu_mask)) == 0
             ? 0
             : -errno;
}

int InstallFilter(const sock_fprog& program) {
  return ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0 ? 0 : -errno;
}

int BecomeUser(const abi::ExecPayload& payload, uint64_t capabilities) {
  if (::setgroups(payload.group_count, payload.groups) != 0 ||
      ::setresgid(payload.gid, payload.gid, payload.gid) != 0 ||
      ::setresuid(payload.uid, payload.uid, payload.uid) != 0) {
    return -errno;
  }
  // init had no root uid of B to lose, so the kernel has dropped nothing by itself.
  int error = SetCapabilities(payload.uid == 0 ? capabilities : 0);
  if (error != 0) return error;
  return ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0 ? 0 : -errno;
}

// Of a zygote, from root of A. An exec keeps what is in the ambient set, and nothing gives it more.
int BecomeZygote(const abi::ExecPayload& payload) {
  int error = LimitBoundingSet(kZygoteCapabilities);
  if (error != 0) return error;
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) != 0 ||
      ::setgroups(0, nullptr) != 0 || ::setresgid(payload.gid, payload.gid, payload.gid) != 0 ||
      ::setresuid(payload.uid, payload.uid, payload.uid) != 0) {
    return -errno;
  }
  error = SetCapabilities(kZygoteCapabilities, kZygoteCapabilities);
  if (error != 0) return error;
  for (int capability = 0; capability < 64; ++capability) {
    if ((kZygoteCapabilities >> capability & 1) != 0 &&
        ::prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0) != 0) {
      return -errno;
    }
  }
  return 0;
}

const char* FindPath(char* const* envp) {
  for (; *envp != nullptr; ++envp) {
    if (std::strncmp(*envp, "PATH=", 5) == 0) return *envp + 5;
  }
  return abi::kDefaultPath;
}

// Returns -errno. As execvpe(3), without its fall back to a shell: a directory entry that cannot be
// executed is passed over, and EACCES wins over ENOENT in the end.
int Execute(const Command& command) {
  const char* name = command.argv[0];
  if (std::strchr(name, '/') != nullptr || name[0] == '\0') {
    ::execve(name, command.argv, command.envp);
    return -errno;
  }
  size_t name_length = std::strlen(name);
  if (name_length > NAME_MAX) return -ENAMETOOLONG;
  bool denied = false;
  for (const char* dir = FindPath(command.envp);;) {
    const char* colon = std::strchr(dir, ':');
    size_t length = colon != nullptr ? static_cast<size_t>(colon - dir) : std::strlen(dir);
    char path[PATH_MAX];
    if (length + 1 + name_length < sizeof(path)) {
      std::memcpy(path, dir, length);
      size_t at = length;
      if (length > 0) path[at++] = '/';
      std::memcpy(path + at, name, name_length + 1);
      ::execve(path, command.argv, command.envp);
      switch (errno) {
        case EACCES:
          denied = true;
          break;
        case ENOENT:
        case ENOTDIR:
        case ELOOP:
        case ENAMETOOLONG:
          break;
        default:
          return -errno;
      }
    }
    if (colon == nullptr) return denied ? -EACCES : -ENOENT;
    dir = colon + 1;
  }
}

}  // namespace

void RunExecChild(const ExecPlan& plan) {
  int status = plan.fds[1];
  ::setsid();
  const bool has_program = (plan.flags & abi::kHasProgram) != 0;
  const uint32_t first_extra = plan.fd_count - plan.extra_fds;
  int src[abi::kMaxRequestFds];
  int dst[abi::kMaxRequestFds];
  size_t count = 0;
  auto place = [&](int from, int to) {
    src[count] = from;
    dst[count++] = to;
  };
  for (int i = 0; i < 3; ++i) place(plan.fds[2 + i], i);
  for (uint32_t i = 0; i < plan.extra_fds; ++i)
    place(plan.fds[first_extra + i], 3 + static_cast<int>(i));
  place(status, kStatus);
  place(plan.fds[0], kPayload);
  if (has_program) place(plan.fds[first_extra - 1], kProgram);
  int error = PlaceFds(src, dst, count, false);
  if (error != 0) Fail(status, ExecStep::kFds, error);
  status = kStatus;
  // What init had there before: its sockets.
  for (int fd = 3 + static_cast<int>(plan.extra_fds); fd < kStatus; ++fd) ::close(fd);
  if (!has_program) ::close(kProgram);
  if (::close_range(kProgram + 1, ~0u, 0) != 0) Fail(status, ExecStep::kFds, -errno);
  for (int fd : {kStatus, kPayload, kProgram}) ::fcntl(fd, F_SETFD, FD_CLOEXEC);

  Command command;
  error = ParsePayload(kPayload, &command);
  if (error != 0) Fail(status, ExecStep::kRequest, error);
  const abi::ExecPayload& payload = *command.payload;
  if ((payload.flags & abi::kControllingTty) != 0 && ::ioctl(0, TIOCSCTTY, 0) != 0) {
    Fail(status, ExecStep::kTty, -errno);
  }
  error = ApplyAffinity(payload);
  if (error != 0) Fail(status, ExecStep::kAffinity, error);
  // Makes the cgroups that this process is in the roots of what it and its children see.
  if (::unshare(CLONE_NEWCGROUP) != 0) Fail(status, ExecStep::kNamespace, -errno);
  // Needs CAP_SYS_ADMIN of B, as no_new_privs would break setuid programs inside.
  error = InstallFilter(plan.zygote ? plan.shared->zygote_filter : plan.shared->code_filter);
  if (error != 0) Fail(status, ExecStep::kSeccomp, error);
  error = ApplyRlimits(payload);
  if (error != 0) Fail(status, ExecStep::kLimits, error);
  error = plan.zygote ? BecomeZygote(payload) : BecomeUser(payload, plan.capabilities);
  if (error != 0) Fail(status, ExecStep::kUser, error);
  // As the user, so that a directory closed to it is an error here and not a surprise later.
  if (::chdir(command.cwd) != 0) Fail(status, ExecStep::kCwd, -errno);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (has_program) {
    ::execveat(kProgram, "", command.argv, command.envp, AT_EMPTY_PATH);
    error = -errno;
  } else {
    error = Execute(command);
  }
  Fail(status, ExecStep::kExec, error);
}

}  // namespace dsec::spawn::stage

// SPDX-License-Identifier: Apache-2.0
#include "blobfs/supervise.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <thread>
#include <vector>

#include "blobfs/settings.h"
#include "image/root_calls.h"
#include "os/file.h"

namespace dsec::blobfs {
namespace {

constexpr std::chrono::milliseconds kRetryPause{50};

Result<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    return Error(Code::kInvalidArgument, "layer.source", path + " is too long for a socket");
  path.copy(address.sun_path, path.size());
  return address;
}

Result<os::UniqueFd> OpenLock(const std::string& dir) {
  return os::OpenAt(AT_FDCWD, (dir + "/" + kLockName).c_str(), O_RDWR | O_CREAT, 0600);
}

Result<os::UniqueFd> MakeSocket() {
  os::UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return os::ErrnoError("layer.io", "make a socket");
  return fd;
}

}  // namespace

os::PidFd ProcessOf(const std::string& dir, const char* name) {
  const auto text = os::ReadFile(AT_FDCWD, (dir + "/" + name).c_str(), 64);
  if (!text.ok()) return {};
  pid_t pid = 0;
  uint64_t start = 0;
  const char* end = text->data() + text->size();
  const auto read = std::from_chars(text->data(), end, pid);
  if (read.ec != std::errc() || read.ptr == end) return {};
  std::from_chars(read.ptr + 1, end, start);
  auto process = os::PidFd::Verify(pid, start);
  return process.ok() ? *std::move(process) : os::PidFd();
}

// A process that has just been started writes its number before it does anything else.
Result<os::UniqueFd> TakeLock(const std::string& dir, MonoTime deadline, bool* killed) {
  DSEC_TRY(auto lock, OpenLock(dir));
  while (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return os::ErrnoError("layer.io", "lock " + dir);
    for (const char* name : {kKeeperName, kWorkerName}) {  // the first would start the second anew
      const auto process = ProcessOf(dir, name);
      if (!process.valid()) continue;
      DSEC_TRY_VOID(process.Signal(SIGKILL));
      // Of a child of ours.
      siginfo_t info;
      static_cast<void>(
          ::waitid(P_PIDFD, static_cast<id_t>(process.fd()), &info, WEXITED | WNOHANG));
      DSEC_TRY([[maybe_unused]] const bool ended, process.WaitExit(deadline));
      if (killed != nullptr) *killed = true;
    }
    if (Clock::System().Mono() >= deadline) {
      return Error(Code::kUnavailable, "layer.unreachable",
                   "a process that holds the lock does not end: " + dir);
    }
    std::this_thread::sleep_for(kRetryPause);
  }
  return lock;
}

Result<os::UniqueFd> ListenAt(const std::string& path) {
  static_cast<void>(::unlink(path.c_str()));
  DSEC_TRY(const auto address, AddressOf(path));
  DSEC_TRY(auto listen, MakeSocket());
  if (::bind(listen.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listen.get(), 8) != 0)
    return os::ErrnoError("layer.io", "listen at " + path);
  return listen;
}

Result<os::UniqueFd> ConnectTo(const std::string& path) {
  DSEC_TRY(const auto address, AddressOf(path));
  DSEC_TRY(auto socket, MakeSocket());
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return image::Unreachable(fmt::format("{}: {}", path, ::strerror(errno)));
  return socket;
}

Result<os::PidFd> StartKeeper(const KeeperStart& start) {
  // Out of the way of the numbers that the child gets.
  const int from[] = {start.fuse, start.mount, start.listen, start.lock};
  std::vector<os::UniqueFd> high;
  for (const int fd : from) {
    high.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, kLockFd + 1));
    if (!high.back().valid()) return os::ErrnoError("layer.io", "keep a descriptor");
  }
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  // Whoever reads the daemon's output must see its end; errors go where the daemon's go.
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  constexpr int kTo[] = {kFuseFd, kMountFd, kListenFd, kLockFd};
  for (size_t i = 0; i < high.size(); ++i)
    ::posix_spawn_file_actions_adddup2(&actions, high[i].get(), kTo[i]);
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  // A session of its own: an interrupt from the daemon's terminal is not for it.
  ::posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID);
  std::string name = start.name, config = start.config, number = start.session;
  char role[] = "keeper";
  char* argv[] = {name.data(), role, config.data(), number.data(), nullptr};
  pid_t pid = 0;
  const int error =
      ::posix_spawn(&pid, start.program.c_str(), &actions, &attributes, argv, environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error != 0)
    return Error::FromErrno(error, "layer.io", fmt::format("start {}", start.program));
  return os::PidFd::Open(pid).Context("{} just started", start.name);
}

Result<void> DropRights() {
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
    return os::ErrnoError("layer.io", "no_new_privs");
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct none[2] = {};
  if (::syscall(SYS_capset, &header, none) != 0) return os::ErrnoError("layer.io", "capset");
  return Ok();
}

}  // namespace dsec::blobfs

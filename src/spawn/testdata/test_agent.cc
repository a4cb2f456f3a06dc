// SPDX-License-Identifier: Apache-2.0
// Stands where dsec-aether will: takes every descriptor of agent_abi.h, hands the ones to init to
// the test that connects and then does, with the agent's own identity, what one-letter requests ask
// for. Answers are text, descriptors alongside.

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "os/fd_passing.h"
#include "os/syscalls.h"
#include "spawn/agent_abi.h"

namespace {

using namespace dsec::spawn;

char answer[65536];
size_t answer_size = 0;
int answer_fds[4];
size_t answer_fd_count = 0;
int root_fd = -1;

void Say(const char* format, ...) __attribute__((format(printf, 1, 2)));
void Say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int n = std::vsnprintf(answer + answer_size, sizeof(answer) - answer_size, format, arguments);
  va_end(arguments);
  if (n > 0) answer_size += static_cast<size_t>(n);
}

void SayFile(const char* path) {
  int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Say("%s: errno %d\n", path, errno);
  ssize_t n = ::read(fd, answer + answer_size, sizeof(answer) - answer_size - 1);
  if (n > 0) answer_size += static_cast<size_t>(n);
  ::close(fd);
}

void SayFds() {
  for (int fd = 0; fd < 256; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0) Say("%d ", fd);
  }
}

// A cgroup for one exec, as the contract asks.
void MakeCgroup(const char* name) {
  char path[128];
  std::snprintf(path, sizeof(path), "code/%s", name);
  if (::mkdirat(abi::kSlotCgroupFd, path, 0755) != 0) return Say("mkdir errno %d", errno);
  int dir = ::openat(abi::kSlotCgroupFd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) return Say("open errno %d", errno);
  if (::fchownat(dir, "cgroup.procs", 1, 1, 0) != 0) return Say("chown errno %d", errno);
  Say("ok");
  answer_fds[answer_fd_count++] = dir;
}

void WriteInto(const char* path, const char* text) {
  int fd = ::openat(abi::kSlotCgroupFd, path, O_WRONLY | O_CLOEXEC);
  bool ok = fd >= 0 && ::write(fd, text, std::strlen(text)) > 0;
  if (!ok) Say("errno %d", errno);
  if (ok) Say("ok");
  if (fd >= 0) ::close(fd);
}

void OpenTerminal(int owner) {
  ::setfsgid(static_cast<gid_t>(owner));
  ::setfsuid(static_cast<uid_t>(owner));
  int master = dsec::os::OpenAt2(root_fd, "dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC, 0,
                                 0x10 /* IN_ROOT */);
  int error = errno;
  ::setfsuid(0);
  ::setfsgid(0);
  int unlock = 0;
  if (master < 0 || ::ioctl(master, TIOCSPTLCK, &unlock) != 0)
    return Say("ptmx errno %d", master < 0 ? error : errno);
  int slave = ::ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (slave < 0) return Say("peer errno %d", errno);
  struct stat info;
  ::fstat(slave, &info);
  Say("ok owner %u group %u mode %o", info.st_uid, info.st_gid, info.st_mode & 07777u);
  answer_fds[answer_fd_count++] = master;
  answer_fds[answer_fd_count++] = slave;
}

void Handle(const char* request) {
  switch (request[0]) {
    case 'h':  // hand over: init's channel, the root, init's pidfd, the slot directory
      Say("ok");
      answer_fds[0] = abi::kInitFd;
      answer_fds[1] = root_fd;
      answer_fds[2] = abi::kInitPidFd;
      answer_fds[3] = abi::kSlotCgroupFd;
      answer_fd_count = root_fd >= 0 ? 4 : 0;
      return;
    case 'c':
      return MakeCgroup(request + 1);
    case 'k': {
      char path[128];
      std::snprintf(path, sizeof(path), "code/%s/cgroup.kill", request + 1);
      return WriteInto(path, "1");
    }
    case 'd': {
      char path[128];
      std::snprintf(path, sizeof(path), "code/%s", request + 1);
      if (::unlinkat(abi::kSlotCgroupFd, path, AT_REMOVEDIR) != 0) return Say("errno %d", errno);
      return Say("ok");
    }
    case 't':
      return OpenTerminal(std::atoi(request + 1));
    case 'f':
      return SayFile(request + 1);
    case 'n':
      return SayFds();
    case 'm':
      if (::syscall(SYS_umount2, "/proc", 2) != 0) return Say("errno %d", errno);
      return Say("ok");
    case 's': {
      struct stat info;
      if (::fstatat(root_fd, request + 1, &info, AT_SYMLINK_NOFOLLOW) != 0)
        return Say("errno %d", errno);
      return Say("uid %u gid %u mode %o", info.st_uid, info.st_gid, info.st_mode);
    }
    case 'K': {
      unsigned char token[64];
      ssize_t n = ::pread(abi::kTokenFd, token, sizeof(token), 0);
      Say("%zd ", n);
      for (ssize_t i = 0; i < n; ++i) Say("%02x", token[i]);
      return;
    }
    case 'q':
      ::_exit(0);
    default:
      return Say("what?");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 1 || std::strcmp(argv[0], "dsec-aether") != 0) return 2;
  ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
  ::signal(SIGPIPE, SIG_IGN);
  int connection = -1;
  while (true) {
    pollfd items[3] = {{abi::kInitPidFd, POLLIN, 0},
                       {root_fd < 0 ? abi::kInitFd : -1, POLLIN, 0},
                       {connection < 0 ? abi::kListenFd : connection, POLLIN, 0}};
    if (::poll(items, 3, -1) < 0) return 3;
    if (items[0].revents != 0) return 0;  // init has ended
    if (items[1].revents != 0) {
      abi::InitReady ready;
      size_t count = 1;
      ssize_t n =
          dsec::os::ReceivePacketRaw(abi::kInitFd, &ready, sizeof(ready), &root_fd, &count, 0);
      if (n != sizeof(ready) || ready.type != abi::kReady || count != 1) return 4;
    }
    if (items[2].revents == 0) continue;
    if (connection < 0) {
      connection = ::accept4(abi::kListenFd, nullptr, nullptr, SOCK_CLOEXEC);
      continue;
    }
    char request[4096];
    ssize_t n = ::recv(connection, request, sizeof(request) - 1, 0);
    if (n <= 0) {
      ::close(connection);
      connection = -1;
      continue;
    }
    request[n] = '\0';
    answer_size = 0;
    answer_fd_count = 0;
    Handle(request);
    dsec::os::SendPacketRaw(connection, answer, answer_size, answer_fds, answer_fd_count, 0);
    if (request[0] == 'c' || request[0] == 't') {
      for (size_t i = 0; i < answer_fd_count; ++i) ::close(answer_fds[i]);
    }
  }
}

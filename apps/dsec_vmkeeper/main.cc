// SPDX-License-Identifier: Apache-2.0
// Keeps one virtual machine; see src/vmm/keeper.h. Arguments: uid, gid of /dev/kvm or 0, number of
// cgroup.procs files, number of QEMU's descriptors, path of QEMU, QEMU's arguments. Descriptors: 3
// console, 4 exit, 5... cgroup.procs, kFirstQemuFd... those of QEMU. Single-threaded, static, and
// allocates nothing.
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "vmm/keeper.h"

namespace {

constexpr int kConsoleFd = 3;
constexpr int kExitFd = 4;
constexpr int kFirstProcsFd = 5;
constexpr int kStartFailed = 126;

char console[dsec::vmm::kConsoleBytes];
size_t console_size = 0;

[[noreturn]] void Fail(const char* what) {
  char text[256];
  const int size =
      std::snprintf(text, sizeof(text), "dsec-vmkeeper: %s: %s\n", what, strerror(errno));
  (void)!::pwrite(kConsoleFd, text, static_cast<size_t>(size), 0);
  ::_exit(kStartFailed);
}

// The file holds what came last, at most kConsoleBytes of it.
void Keep(const char* data, size_t size) {
  constexpr size_t kRoom = sizeof(console);
  if (size > kRoom) {
    data += size - kRoom;
    size = kRoom;
  }
  if (console_size + size <= kRoom) {
    std::memcpy(console + console_size, data, size);
    (void)!::pwrite(kConsoleFd, data, size, static_cast<off_t>(console_size));
    console_size += size;
    return;
  }
  // Half of it goes, so that this is rare.
  const size_t kept = console_size < kRoom - size ? console_size : (kRoom - size) / 2;
  std::memmove(console, console + console_size - kept, kept);
  std::memcpy(console + kept, data, size);
  console_size = kept + size;
  (void)!::pwrite(kConsoleFd, console, console_size, 0);
  (void)!::ftruncate(kConsoleFd, static_cast<off_t>(console_size));
}

void BecomeNobody(unsigned uid, unsigned kvm_gid) {
  const gid_t groups[] = {kvm_gid};
  if (::setgroups(kvm_gid != 0 ? 1 : 0, groups) != 0) Fail("setgroups");
  if (::setresgid(uid, uid, uid) != 0 || ::setresuid(uid, uid, uid) != 0) Fail("setresuid");
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) Fail("no_new_privs");
}

unsigned Number(const char* text) { return static_cast<unsigned>(std::strtoul(text, nullptr, 10)); }

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) return 2;
  const unsigned uid = Number(argv[1]);
  const unsigned kvm_gid = Number(argv[2]);
  const unsigned procs = Number(argv[3]);
  const unsigned qemu_fds = Number(argv[4]);
  if (uid == 0) return 2;
  for (unsigned i = 0; i < procs; ++i) {
    const int fd = kFirstProcsFd + static_cast<int>(i);
    if (::write(fd, "0", 1) != 1) Fail("join a cgroup");
    ::close(fd);
  }
  if (::unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS) != 0) Fail("unshare");
  const rlimit none = {0, 0};
  if (::setrlimit(RLIMIT_CORE, &none) != 0) Fail("RLIMIT_CORE");
  ::fcntl(kConsoleFd, F_SETFD, FD_CLOEXEC);
  ::fcntl(kExitFd, F_SETFD, FD_CLOEXEC);
  int output[2];
  if (::pipe2(output, O_CLOEXEC) != 0) Fail("pipe");
  BecomeNobody(uid, kvm_gid);

  const pid_t self = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) Fail("fork");
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (::getppid() != self) ::_exit(kStartFailed);
    if (::dup2(output[1], 1) < 0 || ::dup2(output[1], 2) < 0) ::_exit(kStartFailed);
    char* environment[] = {nullptr};
    ::execve(argv[5], argv + 6, environment);
    const char text[] = "dsec-vmkeeper: QEMU cannot be started\n";
    (void)!::write(2, text, sizeof(text) - 1);
    ::_exit(kStartFailed);
  }
  ::close(output[1]);
  for (unsigned i = 0; i < qemu_fds; ++i) ::close(dsec::vmm::kFirstQemuFd + static_cast<int>(i));
  std::signal(SIGTERM, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);

  while (true) {
    char data[4096];
    const ssize_t size = ::read(output[0], data, sizeof(data));
    if (size > 0) Keep(data, static_cast<size_t>(size));
    if (size == 0 || (size < 0 && errno != EINTR)) break;
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  char text[64];
  const int size = WIFSIGNALED(status)
                       ? std::snprintf(text, sizeof(text), "signal %d\n", WTERMSIG(status))
                       : std::snprintf(text, sizeof(text), "exited %d\n", WEXITSTATUS(status));
  (void)!::pwrite(kExitFd, text, static_cast<size_t>(size), 0);
  return 0;
}

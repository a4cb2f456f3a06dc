// SPDX-License-Identifier: Apache-2.0
// Keeps one virtual machine; see src/vmm/keeper.h. Arguments: uid, gid of /dev/kvm or 0, number of
// cgroup.procs files, number of QEMU's descriptors, path of QEMU, QEMU's arguments. Descriptors: 3
// console, 4 exit, 5... cgroup.procs, kFirstQemuFd... those of QEMU. Single-threaded, static, and
// allocates nothing.
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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

void Bind(const char* path, bool directory) {
  char target[128];
  std::snprintf(target, sizeof(target), ".%s", path);
  if (::access(path, F_OK) != 0) return;  // not on this host
  if (directory) {
    for (char* slash = std::strchr(target + 2, '/'); slash != nullptr;
         slash = std::strchr(slash + 1, '/')) {
      *slash = '\0';
      ::mkdir(target, 0755);
      *slash = '/';
    }
    if (::mkdir(target, 0755) != 0 && errno != EEXIST) Fail(path);
  } else {
    const int file = ::open(target, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0) Fail(path);
    ::close(file);
  }
  if (::mount(path, target, nullptr, MS_BIND, nullptr) != 0) Fail(path);
  const unsigned long flags =
      MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | (directory ? MS_NODEV : 0);
  if (::mount(nullptr, target, nullptr, flags, nullptr) != 0) Fail(path);
}

// All that QEMU sees of the host's files: programs and libraries, and a few devices. In its own pid
// namespace, whose /proc it has.
void EnterOwnRoot(bool kvm) {
  constexpr char kPlace[] = "/tmp";  // any folder: the mount over it is in this namespace alone
  if (::unshare(CLONE_NEWNS) != 0) Fail("unshare mounts");
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) Fail("private mounts");
  if (::mount("tmpfs", kPlace, "tmpfs", MS_NOSUID, "mode=0755,size=1m,nr_inodes=256") != 0)
    Fail("root");
  if (::chdir(kPlace) != 0) Fail("root");
  for (const char* folder : {"/usr", "/opt", "/lib", "/lib64", "/lib32", "/bin"}) {
    struct stat info;
    char target[16];
    std::snprintf(target, sizeof(target), ".%s", folder);
    if (::lstat(folder, &info) != 0) continue;
    char link[64] = {};
    if (S_ISLNK(info.st_mode) && ::readlink(folder, link, sizeof(link) - 1) > 0) {
      if (::symlink(link, target) != 0) Fail(folder);
    } else {
      Bind(folder, true);
    }
  }
  for (const char* folder : {"./dev", "./etc", "./proc", "./old"}) {
    if (::mkdir(folder, 0755) != 0) Fail(folder);
  }
  Bind("/etc/ld.so.cache", false);
  for (const char* device : {"/dev/null", "/dev/urandom"}) Bind(device, false);
  if (kvm) Bind("/dev/kvm", false);
  if (::mount("proc", "./proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0)
    Fail("proc");
  if (::syscall(SYS_pivot_root, ".", "./old") != 0) Fail("pivot_root");
  if (::chdir("/") != 0 || ::umount2("/old", MNT_DETACH) != 0) Fail("leave the host's root");
  if (::mount(nullptr, "/", nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID, nullptr) != 0)
    Fail("read-only root");
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
  if (::unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID) != 0) Fail("unshare");
  const rlimit none = {0, 0};
  if (::setrlimit(RLIMIT_CORE, &none) != 0) Fail("RLIMIT_CORE");
  ::fcntl(kConsoleFd, F_SETFD, FD_CLOEXEC);
  ::fcntl(kExitFd, F_SETFD, FD_CLOEXEC);
  int output[2];
  if (::pipe2(output, O_CLOEXEC) != 0) Fail("pipe");
  int alive[2];  // hangs up when this process has ended
  if (::pipe2(alive, O_CLOEXEC) != 0) Fail("pipe");

  const pid_t child = ::fork();
  if (child < 0) Fail("fork");
  if (child == 0) {
    ::close(alive[1]);
    EnterOwnRoot(kvm_gid != 0);
    BecomeNobody(uid, kvm_gid);
    // After the change of ids, which resets it.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    pollfd parent = {alive[0], POLLIN, 0};
    if (::poll(&parent, 1, 0) != 0) ::_exit(kStartFailed);
    if (::dup2(output[1], 1) < 0 || ::dup2(output[1], 2) < 0) ::_exit(kStartFailed);
    char* environment[] = {nullptr};
    ::execve(argv[5], argv + 6, environment);
    const char text[] = "dsec-vmkeeper: QEMU cannot be started\n";
    (void)!::write(2, text, sizeof(text) - 1);
    ::_exit(kStartFailed);
  }
  ::close(alive[0]);
  BecomeNobody(uid, 0);
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

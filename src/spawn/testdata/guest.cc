// SPDX-License-Identifier: Apache-2.0
// The program that tests run inside a sandbox: `guest <mode> [arguments]`, static, prints one fact
// a line.

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

extern char** environ;

namespace {

int Cat(char** argv) {
  for (; *argv != nullptr; ++argv) {
    int fd = ::open(*argv, O_RDONLY);
    if (fd < 0) {
      std::printf("%s: %s\n", *argv, strerrorname_np(errno));
      continue;
    }
    char data[4096];
    ssize_t n;
    while ((n = ::read(fd, data, sizeof(data))) > 0)
      std::fwrite(data, 1, static_cast<size_t>(n), stdout);
    if (n < 0) std::printf("%s: read %s\n", *argv, strerrorname_np(errno));
    ::close(fd);
  }
  return 0;
}

int List(const char* path) {
  DIR* dir = ::opendir(path);
  if (dir == nullptr) {
    std::printf("%s\n", strerrorname_np(errno));
    return 1;
  }
  while (const dirent* entry = ::readdir(dir)) std::printf("%s\n", entry->d_name);
  return 0;
}

// Numbers open in this process, not counting the directory it lists them with.
int Fds() {
  for (int fd = 0; fd < 1024; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0) std::printf("%d\n", fd);
  }
  return 0;
}

int Ids() {
  uid_t r, e, s;
  gid_t gr, ge, gs;
  ::getresuid(&r, &e, &s);
  ::getresgid(&gr, &ge, &gs);
  gid_t groups[64];
  int n = ::getgroups(64, groups);
  std::printf("uid %u %u %u gid %u %u %u groups", r, e, s, gr, ge, gs);
  for (int i = 0; i < n; ++i) std::printf(" %u", groups[i]);
  std::printf("\npid %d ppid %d sid %d pgid %d\n", ::getpid(), ::getppid(), ::getsid(0),
              ::getpgid(0));
  utsname name;
  ::uname(&name);
  std::printf("host %s\n", name.nodename);
  std::printf("dumpable %d no_new_privs %d umask %o\n", ::prctl(PR_GET_DUMPABLE, 0, 0, 0, 0),
              ::prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), ::umask(0));
  sigset_t blocked;
  ::sigprocmask(SIG_BLOCK, nullptr, &blocked);
  int count = 0, changed = 0;
  for (int signal = 1; signal < 65; ++signal) {
    count += ::sigismember(&blocked, signal) == 1;
    struct sigaction action;
    if (::sigaction(signal, nullptr, &action) == 0) changed += action.sa_handler != SIG_DFL;
  }
  std::printf("blocked %d handled %d\n", count, changed);
  rlimit core;
  ::getrlimit(RLIMIT_CORE, &core);
  rlimit files;
  ::getrlimit(RLIMIT_NOFILE, &files);
  std::printf("core %llu files %llu\n", static_cast<unsigned long long>(core.rlim_max),
              static_cast<unsigned long long>(files.rlim_cur));
  cpu_set_t cpus;
  ::sched_getaffinity(0, sizeof(cpus), &cpus);
  std::printf("cores %d\n", CPU_COUNT(&cpus));
  return 0;
}

void Try(const char* what, long result) {
  std::printf("%s %s\n", what, result >= 0 ? "ALLOWED" : strerrorname_np(errno));
}

// What root inside might reach for. Each line must not read ALLOWED.
int Attack() {
  Try("mount", ::mount("none", "/tmp", "tmpfs", 0, nullptr));
  Try("mount_proc", ::mount("none", "/tmp", "proc", 0, nullptr));
  Try("umount_proc_kcore", ::umount2("/proc/kcore", MNT_DETACH));
  Try("umount_proc", ::umount2("/proc", MNT_DETACH));
  Try("remount_sys_rw", ::mount(nullptr, "/proc/sys", nullptr, MS_REMOUNT | MS_BIND, nullptr));
  Try("unshare_user", ::unshare(CLONE_NEWUSER));
  Try("unshare_mount", ::unshare(CLONE_NEWNS));
  Try("clone_user", ::syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, nullptr));
  Try("clone3", ::syscall(SYS_clone3, nullptr, 0));
  Try("setns_init", [] {
    int fd = ::open("/proc/1/ns/mnt", O_RDONLY);
    return fd < 0 ? -1 : ::setns(fd, 0);
  }());
  Try("setns_self", ::setns(::open("/proc/self/ns/uts", O_RDONLY), 0));
  Try("ptrace_init", ::ptrace(PTRACE_ATTACH, 1, nullptr, nullptr));
  Try("ptrace_seize_init", ::ptrace(PTRACE_SEIZE, 1, nullptr, nullptr));
  char byte = 0;
  iovec local = {&byte, 1}, remote = {reinterpret_cast<void*>(0x400000), 1};
  Try("process_vm_readv_init", ::process_vm_readv(1, &local, 1, &remote, 1, 0));
  rlimit limit = {0, 0};
  Try("prlimit_init", ::prlimit(1, RLIMIT_NOFILE, &limit, nullptr));
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(0, &cpus);
  Try("affinity_init", ::sched_setaffinity(1, sizeof(cpus), &cpus));
  Try("priority_init", ::setpriority(PRIO_PROCESS, 1, 19));
  sched_param param = {};
  Try("scheduler_init", ::sched_setscheduler(1, SCHED_IDLE, &param));
  Try("ioprio_init", ::syscall(SYS_ioprio_set, 1, 1, 3 << 13));
  for (const char* file :
       {"mem", "maps", "environ", "auxv", "smaps", "stack", "syscall", "coredump_filter",
        "clear_refs", "oom_score_adj", "uid_map", "setgroups", "fd/0"}) {
    char path[64], what[64];
    std::snprintf(path, sizeof(path), "/proc/1/%s", file);
    std::snprintf(what, sizeof(what), "init_%s", file);
    int fd = ::open(path, O_RDWR);
    Try(what, fd);
    if (fd >= 0) ::close(fd);
  }
  Try("init_timerslack_ns", ::write(::open("/proc/1/timerslack_ns", O_WRONLY), "1", 1));
  for (const char* link : {"root", "cwd", "exe", "ns/mnt", "ns/user"}) {
    char path[64], what[64], target[256];
    std::snprintf(path, sizeof(path), "/proc/1/%s", link);
    std::snprintf(what, sizeof(what), "init_link_%s", link);
    Try(what, ::readlink(path, target, sizeof(target)));
    Try(what, ::open(path, O_RDONLY));
  }
  Try("init_list_fd", ::open("/proc/1/fd/3", O_RDONLY));
  DIR* init_fds = ::opendir("/proc/1/fd");
  Try("init_open_fd_dir", init_fds != nullptr ? 0 : -1);
  for (const char* path :
       {"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger",
        "/proc/sys/kernel/panic", "/proc/sys/vm/drop_caches", "/proc/irq/default_smp_affinity",
        "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/hostname"}) {
    Try(path, ::open(path, O_WRONLY));
  }
  Try("mknod_disk", ::mknod("/tmp/disk", S_IFBLK | 0600, ::makedev(254, 0)));
  Try("mknod_mem", ::mknod("/tmp/mem", S_IFCHR | 0600, ::makedev(1, 1)));
  Try("dev_write", ::open("/dev/planted", O_CREAT | O_WRONLY, 0600));
  Try("reboot", ::syscall(SYS_reboot, 0xfee1dead, 672274793, 0, nullptr));
  Try("sethostname", ::sethostname("x", 1));
  Try("keyctl", ::syscall(SYS_keyctl, 0, -3, 1));
  Try("io_uring", ::syscall(SYS_io_uring_setup, 1, nullptr));
  Try("open_by_handle_at", ::syscall(SYS_open_by_handle_at, AT_FDCWD, nullptr, 0));
  Try("raw_socket", ::socket(AF_INET, SOCK_RAW, 1));
  Try("packet_socket", ::socket(AF_PACKET, SOCK_RAW, 0));
  Try("vsock", ::socket(40, SOCK_STREAM, 0));
  // Signals to pid 1 of one's own namespace without a handler are dropped; the calls themselves may
  // succeed.
  for (int signal = 1; signal < 65; ++signal) ::kill(1, signal);
  Try("chroot_escape", [] {
    if (::mkdir("/tmp/jail", 0700) != 0 && errno != EEXIST) return -1;
    int fd = ::open("/", O_RDONLY | O_DIRECTORY);
    if (::chroot("/tmp/jail") != 0 || ::fchdir(fd) != 0) return -1;
    for (int i = 0; i < 64; ++i) {
      if (::chdir("..") != 0) return -1;
    }
    // Still inside when the guest program is where the sandbox has it.
    if (::access("bin/guest", X_OK) == 0) {
      errno = ENOTSUP;
      return -1;
    }
    return 0;
  }());
  return 0;
}

int Probe(char** argv) {
  for (; *argv != nullptr; ++argv) {
    struct stat info;
    if (::lstat(*argv, &info) != 0) {
      std::printf("%s %s\n", *argv, strerrorname_np(errno));
      continue;
    }
    std::printf("%s mode %o uid %u gid %u size %lld nlink %lu\n", *argv, info.st_mode, info.st_uid,
                info.st_gid, static_cast<long long>(info.st_size),
                static_cast<unsigned long>(info.st_nlink));
  }
  return 0;
}

// Leaves orphans that end at once, and tells when all have gone through init.
int Orphans(int count) {
  for (int i = 0; i < count; ++i) {
    pid_t middle = ::fork();
    if (middle == 0) {
      if (::fork() == 0) ::_exit(0);
      ::_exit(0);
    }
    ::waitpid(middle, nullptr, 0);
  }
  return 0;
}

int ForkBomb() {
  while (true) {
    pid_t child = ::fork();
    if (child < 0) break;
    if (child == 0) ::pause();
  }
  std::printf("full %s\n", strerrorname_np(errno));
  std::fflush(stdout);
  ::pause();
  return 0;
}

int Serve(int port) {
  int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  Try("bind", ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)));
  Try("listen", ::listen(fd, 1));
  int client = ::socket(AF_INET, SOCK_STREAM, 0);
  Try("connect", ::connect(client, reinterpret_cast<sockaddr*>(&address), sizeof(address)));
  return 0;
}

int Terminal() {
  winsize size = {};
  std::printf("tty %d ctty %d", ::isatty(0), ::open("/dev/tty", O_RDWR) >= 0);
  ::ioctl(0, TIOCGWINSZ, &size);
  std::printf(" pgrp %d rows %d\n", ::tcgetpgrp(0) == ::getpgrp(), size.ws_row);
  char name[64] = {};
  ::ttyname_r(0, name, sizeof(name));
  Try("push_back", ::ioctl(0, TIOCSTI, "x"));
  std::printf("name %s\n", name);
  return 0;
}

// How many terminals this sandbox can have.
int Terminals() {
  int count = 0;
  while (::open("/dev/ptmx", O_RDWR | O_NOCTTY) >= 0) ++count;
  std::printf("%d %s\n", count, strerrorname_np(errno));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const char* mode = argc > 1 ? argv[1] : "";
  auto is = [mode](const char* name) { return std::strcmp(mode, name) == 0; };
  auto number = [&](int i) { return argc > i ? std::atoi(argv[i]) : 0; };
  if (is("true")) return 0;
  if (is("exit")) return number(2);
  if (is("kill")) return ::kill(::getpid(), number(2)), 99;
  if (is("cat")) return Cat(argv + 2);
  if (is("ls")) return List(argv[2]);
  if (is("fds")) return Fds();
  if (is("ids")) return Ids();
  if (is("attack")) return Attack();
  if (is("probe")) return Probe(argv + 2);
  if (is("orphans")) return Orphans(number(2));
  if (is("forkbomb")) return ForkBomb();
  if (is("serve")) return Serve(number(2));
  if (is("tty")) return Terminal();
  if (is("terminals")) return Terminals();
  if (is("pause")) {
    std::printf("ready\n");
    std::fflush(stdout);
    ::pause();
  }
  if (is("ignore-term")) {
    ::signal(SIGTERM, SIG_IGN);
    std::printf("ready\n");
    std::fflush(stdout);
    ::pause();
  }
  if (is("env")) {
    for (char** entry = environ; *entry != nullptr; ++entry) std::printf("%s\n", *entry);
    return 0;
  }
  if (is("args")) {
    for (int i = 0; i < argc; ++i) std::printf("%s\n", argv[i]);
    return 0;
  }
  if (is("pwd")) {
    char path[4096];
    std::printf("%s\n", ::getcwd(path, sizeof(path)) != nullptr ? path : strerrorname_np(errno));
    return 0;
  }
  if (is("echo-stdin")) {
    char data[4096];
    ssize_t n;
    while ((n = ::read(0, data, sizeof(data))) > 0)
      std::fwrite(data, 1, static_cast<size_t>(n), stdout);
    return 0;
  }
  if (is("write")) {
    int fd = ::open(argv[2], O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0 || ::write(fd, argv[3], std::strlen(argv[3])) < 0) {
      std::printf("%s\n", strerrorname_np(errno));
      return 1;
    }
    return 0;
  }
  std::fprintf(stderr, "unknown mode '%s'\n", mode);
  return 98;
}

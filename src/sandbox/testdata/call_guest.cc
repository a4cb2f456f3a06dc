// SPDX-License-Identifier: Apache-2.0
// What calls of the tests run: one bad habit each. `plant` leaves everything that it can think of,
// `look` prints what it finds of it.
#include <dirent.h>
#include <fcntl.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr key_t kKey = 0x44534543;
constexpr char kQueue[] = "/dsec-planted";
constexpr char kAbstract[] = "\0dsec-planted";
constexpr uint16_t kPort = 4242;

volatile uint64_t sink = 0;

[[noreturn]] void Burn() {
  while (true) sink = sink + 1;
}

int Threads(int count) {
  for (int i = 1; i < count; ++i) {
    pthread_t thread;
    ::pthread_create(&thread, nullptr, [](void*) -> void* { Burn(); }, nullptr);
  }
  Burn();
}

int Touch(size_t mib) {
  const size_t size = mib << 20;
  char* at = static_cast<char*>(
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (at == MAP_FAILED) return 3;
  for (size_t i = 0; i < size; i += 4096) at[i] = 1;
  return 0;
}

int MapOnly(size_t gib) {
  return ::mmap(nullptr, gib << 30, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED
             ? 3
             : 0;
}

[[gnu::noinline]] uint64_t Recurse(uint64_t depth) {
  volatile char frame[512];
  frame[depth % sizeof(frame)] = static_cast<char>(depth);
  if (depth == ~uint64_t{0}) return 0;
  const uint64_t below = Recurse(depth + 1);
  return below + static_cast<uint64_t>(frame[0]);
}

int Children(int count) {
  int made = 0;
  for (int i = 0; i < count; ++i) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      while (true) ::pause();
    }
    if (pid < 0) break;
    ++made;
  }
  std::printf("%d\n", made);
  std::fflush(stdout);
  return made == count ? 0 : 9;
}

int Write(uint64_t bytes) {
  static char part[65536];
  std::memset(part, 'x', sizeof(part));
  while (bytes > 0) {
    const ssize_t n = ::write(1, part, bytes < sizeof(part) ? bytes : sizeof(part));
    if (n < 0) return 4;
    bytes -= static_cast<uint64_t>(n);
  }
  return 0;
}

// Helpers that outlive the program: they sleep, then change the result and print.
int Late(const char* file) {
  if (::fork() == 0) {
    ::setsid();
    if (::fork() == 0) {
      const uint64_t begin = static_cast<uint64_t>(::clock());
      while (static_cast<uint64_t>(::clock()) - begin < CLOCKS_PER_SEC / 5) sink = sink + 1;
      ::close(::open("/tmp/burnt", O_WRONLY | O_CREAT, 0644));
      ::sleep(20);
      const int fd = ::open(file, O_WRONLY | O_CREAT | O_TRUNC, 0644);
      static_cast<void>(::write(fd, "late", 4));
      static_cast<void>(::write(1, "late", 4));
      while (true) ::pause();
    }
    ::_exit(0);
  }
  ::wait(nullptr);
  while (::access("/tmp/burnt", F_OK) != 0) ::usleep(1000);
  return 0;
}

// Memory that outlives its maker.
int Segment(size_t mib) {
  const int id = ::shmget(kKey, mib << 20, IPC_CREAT | 0600);
  char* at = static_cast<char*>(::shmat(id, nullptr, 0));
  if (at == reinterpret_cast<char*>(-1)) return 3;
  for (size_t i = 0; i < mib << 20; i += 4096) at[i] = 1;
  return 0;
}

int Fds() {
  DIR* dir = ::opendir("/proc/self/fd");
  while (const dirent* entry = ::readdir(dir)) {
    const int fd = std::atoi(entry->d_name);
    if (entry->d_name[0] != '.' && fd != ::dirfd(dir)) std::printf("%d\n", fd);
  }
  return 0;
}

int Listen(int family, bool abstract) {
  const int fd = ::socket(family, SOCK_STREAM, 0);
  if (family == AF_UNIX) {
    sockaddr_un at = {};
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path, abstract ? kAbstract : "/tmp/planted", sizeof(kAbstract));
    const socklen_t size = offsetof(sockaddr_un, sun_path) +
                           (abstract ? sizeof(kAbstract) - 1 : sizeof("/tmp/planted"));
    if (::bind(fd, reinterpret_cast<sockaddr*>(&at), size) != 0) return -1;
  } else {
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    at.sin_port = htons(kPort);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) != 0) return -1;
  }
  return ::listen(fd, 8) == 0 ? fd : -1;
}

bool ConnectTcp() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_port = htons(kPort);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool ok = ::connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0;
  ::close(fd);
  return ok;
}

void PlantFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT, 0666);
  if (fd < 0) return;
  static_cast<void>(::write(fd, "planted", 7));
  ::close(fd);
}

// Files wherever that is allowed, below every folder of the root.
void PlantBelow(const std::string& dir, int depth) {
  PlantFile(dir + "/planted");
  ::chmod(dir.c_str(), 0700);
  DIR* open = ::opendir(dir.c_str());
  if (open == nullptr || depth > 3) return;
  while (const dirent* entry = ::readdir(open)) {
    if (entry->d_name[0] == '.' || entry->d_type != DT_DIR) continue;
    if (depth == 0 && (std::strcmp(entry->d_name, "proc") == 0)) continue;
    PlantBelow(dir + "/" + entry->d_name, depth + 1);
  }
  ::closedir(open);
}

int Plant() {
  PlantBelow("", 0);
  for (const char* path : {"/bin/sh", "/etc/passwd", "/bin/call-guest"}) {
    ::unlink(path);
    const int fd = ::open(path, O_WRONLY | O_TRUNC);
    static_cast<void>(::write(fd, "planted", 7));
  }
  ::shmget(kKey, 4096, IPC_CREAT | 0666);
  ::semget(kKey, 1, IPC_CREAT | 0666);
  const int queue = ::msgget(kKey, IPC_CREAT | 0666);
  const struct {
    long type;
    char text[8];
  } message = {1, "planted"};
  ::msgsnd(queue, &message, sizeof(message.text), IPC_NOWAIT);
  ::mq_open(kQueue, O_CREAT | O_RDWR, 0666, nullptr);
  // A listening socket that is in flight to itself lives until the collector comes round.
  int pair[2];
  const int abstract = Listen(AF_UNIX, true);
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && abstract >= 0) {
    char control[CMSG_SPACE(3 * sizeof(int))] = {};
    char byte = 0;
    iovec data = {&byte, 1};
    msghdr packet = {};
    packet.msg_iov = &data;
    packet.msg_iovlen = 1;
    packet.msg_control = control;
    packet.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&packet);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(3 * sizeof(int));
    const int sent[] = {abstract, pair[0], pair[1]};
    std::memcpy(CMSG_DATA(rights), sent, sizeof(sent));
    ::sendmsg(pair[0], &packet, 0);
  }
  Listen(AF_UNIX, false);
  if (Listen(AF_INET, false) >= 0) ConnectTcp();  // and leaves a TIME_WAIT
  ::setpriority(PRIO_PROCESS, 0, 19);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(0, &one);
  ::sched_setaffinity(0, sizeof(one), &one);
  const rlimit small = {16, 16};
  ::setrlimit(RLIMIT_NOFILE, &small);
  const itimerval timer = {{10, 0}, {10, 0}};
  ::setitimer(ITIMER_REAL, &timer, nullptr);
  ::setenv("PLANTED", "1", 1);
  ::umask(0777);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::syscall(SYS_add_key, "user", "planted", "planted", 7, -3 /* session keyring */);
  ::syscall(SYS_memfd_create, "planted", 0);
  const int watch = ::inotify_init1(0);
  ::inotify_add_watch(watch, "/bin", IN_ALL_EVENTS);
  const int gone = ::open("/tmp/deleted", O_RDWR | O_CREAT, 0666);
  static_cast<void>(::write(gone, "planted", 7));
  ::unlink("/tmp/deleted");
  const int oom = ::open("/proc/self/oom_score_adj", O_WRONLY);
  static_cast<void>(::write(oom, "0", 1));
  for (int i = 0; i < 3; ++i) {
    if (::fork() != 0) continue;
    ::setsid();
    if (::fork() != 0) ::_exit(0);
    for (int signal = 1; signal < 65; ++signal) ::signal(signal, SIG_IGN);
    while (true) ::pause();
  }
  return 0;
}

void Say(bool found, const std::string& what) {
  if (found) std::printf("%s\n", what.c_str());
}

void LookBelow(const std::string& dir, int depth) {
  Say(::access((dir + "/planted").c_str(), F_OK) == 0, dir + "/planted");
  DIR* open = ::opendir(dir.empty() ? "/" : dir.c_str());
  if (open == nullptr || depth > 3) return;
  while (const dirent* entry = ::readdir(open)) {
    if (entry->d_name[0] == '.' || entry->d_type != DT_DIR) continue;
    if (depth == 0 && std::strcmp(entry->d_name, "proc") == 0) continue;
    LookBelow(dir + "/" + entry->d_name, depth + 1);
  }
  ::closedir(open);
}

bool Lines(const char* path, int more_than) {
  FILE* file = std::fopen(path, "r");
  if (file == nullptr) return false;
  char line[4096];
  int count = 0;
  while (std::fgets(line, sizeof(line), file) != nullptr) ++count;
  std::fclose(file);
  return count > more_than;
}

int Look() {
  LookBelow("", 0);
  for (const char* path : {"/bin/sh", "/etc/passwd"}) {
    char text[8] = {};
    const int fd = ::open(path, O_RDONLY);
    Say(fd < 0 || ::read(fd, text, 7) != 7 || std::strncmp(text, "planted", 7) == 0, path);
  }
  struct stat work;
  Say(::stat("/work", &work) != 0 || (work.st_mode & 07777) != 0755, "mode of /work");
  Say(::shmget(kKey, 0, 0) >= 0, "shm");
  Say(::semget(kKey, 0, 0) >= 0, "sem");
  Say(::msgget(kKey, 0) >= 0, "msg");
  Say(::mq_open(kQueue, O_RDONLY) != static_cast<mqd_t>(-1), "mqueue");
  Say(Lines("/proc/net/unix", 1), "unix sockets");
  Say(Lines("/proc/net/tcp", 1), "tcp sockets");
  Say(Lines("/proc/net/sockstat", 0) && ConnectTcp(), "listener");
  const int abstract = Listen(AF_UNIX, true);
  Say(abstract < 0, "abstract name");
  Say(::getpriority(PRIO_PROCESS, 0) != 0, "nice");
  cpu_set_t set;
  ::sched_getaffinity(0, sizeof(set), &set);
  Say(CPU_COUNT(&set) != ::sysconf(_SC_NPROCESSORS_CONF), "affinity");
  rlimit files;
  ::getrlimit(RLIMIT_NOFILE, &files);
  Say(files.rlim_cur < 1024, "rlimit");
  itimerval timer;
  ::getitimer(ITIMER_REAL, &timer);
  Say(timer.it_interval.tv_sec != 0, "timer");
  Say(std::getenv("PLANTED") != nullptr, "environment");
  Say(::umask(022) != 022, "umask");
  int value = 0;
  ::prctl(PR_GET_CHILD_SUBREAPER, &value);
  Say(value != 0, "subreaper");
  Say(::syscall(SYS_keyctl, 10 /* search */, -3, "user", "planted", 0) >= 0, "key");
  DIR* proc = ::opendir("/proc");
  while (const dirent* entry = ::readdir(proc)) {
    const int pid = std::atoi(entry->d_name);
    Say(pid > 1 && pid != ::getpid(), std::string("process ") + entry->d_name);
  }
  ::closedir(proc);
  Say(::getpid() != 2, "process numbers");
  Say(::kill(-1, 0) == 0, "somebody to signal");
  return 0;
}

// What a hostile program tries on those above it; prints what worked.
int Attack() {
  for (const char* name :
       {"environ", "cmdline", "maps", "mem", "fd/3", "cwd", "root", "exe", "auxv"}) {
    const std::string path = std::string("/proc/1/") + name;
    const int fd = ::open(path.c_str(), O_RDONLY);
    char byte = 0;
    // The command line is public; it is a name.
    if (std::strcmp(name, "cmdline") != 0) Say(fd >= 0 && ::read(fd, &byte, 1) >= 0, path);
  }
  for (int pid : {0, 1, static_cast<int>(::getppid())}) {
    if (pid != 0) Say(::kill(pid, SIGKILL) == 0, "signalled " + std::to_string(pid));
    if (pid != 0) {
      const rlimit none = {0, 0};
      Say(::prlimit(pid, RLIMIT_CPU, &none, nullptr) == 0, "limited " + std::to_string(pid));
    }
  }
  char memory[8];
  iovec local = {memory, sizeof(memory)};
  iovec remote = {reinterpret_cast<void*>(0x400000), sizeof(memory)};
  Say(::syscall(SYS_process_vm_readv, 1, &local, 1, &remote, 1, 0) > 0, "read memory");
  Say(::syscall(SYS_ptrace, 16 /* attach */, 1, 0, 0) == 0, "traced");
  Say(::syscall(SYS_unshare, CLONE_NEWUSER) == 0, "new user namespace");
  Say(::syscall(SYS_mount, "none", "/tmp", "tmpfs", 0, nullptr) == 0, "mount");
  Say(::syscall(SYS_umount2, "/proc", 2) == 0, "umount");
  Say(::setuid(0) == 0, "root");
  Say(::syscall(SYS_pidfd_getfd, ::syscall(SYS_pidfd_open, 1, 0), 3, 0) >= 0, "took a descriptor");
  Say(::open("/proc/sys/kernel/hostname", O_WRONLY) >= 0, "sysctl");
  Say(::open("/proc/kcore", O_RDONLY) >= 0 && ::access("/proc/kallsyms", R_OK) == 0 &&
          Lines("/proc/kallsyms", 0),
      "kernel");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const auto number = [&](int at) { return argc > at ? std::strtoull(argv[at], nullptr, 10) : 0; };
  if (what == "burn") return Threads(static_cast<int>(number(2)));
  if (what == "burn-child") {
    if (::fork() == 0) Burn();
    while (true) ::pause();
  }
  if (what == "burn-deaf") {
    for (int signal = 1; signal < 65; ++signal) ::signal(signal, SIG_IGN);
    sigset_t all;
    ::sigfillset(&all);
    ::sigprocmask(SIG_BLOCK, &all, nullptr);
    Burn();
  }
  if (what == "burn-for") {  // milliseconds of CPU time
    while (static_cast<uint64_t>(::clock()) * 1000 / CLOCKS_PER_SEC < number(2)) sink = sink + 1;
    return 0;
  }
  if (what == "touch") return Touch(number(2));
  if (what == "touch-children") {
    for (uint64_t i = 0; i < number(2); ++i) {
      if (::fork() == 0) {
        Touch(number(3));
        while (true) ::pause();
      }
    }
    while (::wait(nullptr) > 0) {
    }
    return 0;
  }
  if (what == "touch-child-ignored") {  // a child dies of it, the program does not mind
    if (::fork() == 0) ::_exit(Touch(number(2)));
    ::wait(nullptr);
    return 0;
  }
  if (what == "map") return MapOnly(number(2));
  if (what == "recurse") return static_cast<int>(Recurse(0));
  if (what == "children") return Children(static_cast<int>(number(2)));
  if (what == "write") return Write(number(2));
  if (what == "write-forever") return Write(~uint64_t{0});
  if (what == "late") return Late(argv[2]);
  if (what == "segment") return Segment(number(2));
  if (what == "fds") return Fds();
  if (what == "plant") return Plant();
  if (what == "look") return Look();
  if (what == "attack") return Attack();
  if (what == "raise") {
    ::raise(static_cast<int>(number(2)));
    ::sleep(1);
    return 5;
  }
  if (what == "small-hog") {  // fills files from a process that is as small as can be
    const int oom = ::open("/proc/self/oom_score_adj", O_WRONLY);
    for (const char* score : {"-1000", "-900", "-1", "0"})
      static_cast<void>(::write(oom, score, std::strlen(score)));
    const int fd = ::open("/work/big", O_WRONLY | O_CREAT, 0644);
    static char part[65536];
    while (::write(fd, part, sizeof(part)) > 0) {
    }
    return 6;
  }
  return 0;
}

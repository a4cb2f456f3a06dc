// SPDX-License-Identifier: Apache-2.0
#include "spawn/seccomp_filter.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fiemap.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/netlink.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <functional>
#include <string>

#include "os/file.h"

namespace dsec::spawn {
namespace {

constexpr int kNotErrno = 0;

bool Install(const std::vector<uint8_t>& program) {
  sock_fprog prog = {static_cast<unsigned short>(program.size() / sizeof(sock_filter)),
                     reinterpret_cast<sock_filter*>(const_cast<uint8_t*>(program.data()))};
  return ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &prog) == 0;
}

const SeccompFilters& Filters() {
  static const SeccompFilters filters = [] {
    auto compiled = CompileSeccompFilters();
    if (!compiled.ok()) ADD_FAILURE() << compiled.error().ToString();
    return std::move(compiled).value();
  }();
  return filters;
}

// Runs one raw system call in a child, with the programs or without, and returns its errno (0 for
// success), or minus the signal that ended the child.
int Probe(bool filtered, const std::function<long()>& call) {
  const SeccompFilters& filters = Filters();
  int pipe_fds[2];
  if (::pipe2(pipe_fds, O_CLOEXEC) != 0) return -1000;
  pid_t child = ::fork();
  if (child == 0) {
    if (filtered && (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || !Install(filters.allow) ||
                     !Install(filters.arguments) || !Install(filters.code))) {
      ::_exit(1);
    }
    errno = 0;
    int result = call() == -1 ? errno : 0;
    ::_exit(::write(pipe_fds[1], &result, sizeof(result)) == sizeof(result) ? 0 : 1);
  }
  ::close(pipe_fds[1]);
  int result = -1000;
  ssize_t n = ::read(pipe_fds[0], &result, sizeof(result));
  ::close(pipe_fds[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) return -WTERMSIG(status);
  return n == sizeof(result) ? result : -1000;
}

struct Call {
  const char* name;
  int expected;
  std::function<long()> run;
};

// Arguments are such that the kernel refuses them with another error, so that the filter's own
// answer shows and nothing happens without it.
const Call refused_calls[] = {
    {"io_uring_setup", EPERM, [] { return ::syscall(SYS_io_uring_setup, 0, nullptr); }},
    {"io_uring_enter", EPERM,
     [] { return ::syscall(SYS_io_uring_enter, -1, 0, 0, 0, nullptr, 0); }},
    {"io_uring_register", EPERM,
     [] { return ::syscall(SYS_io_uring_register, -1, 0, nullptr, 0); }},
    {"bpf", EPERM, [] { return ::syscall(SYS_bpf, 9999, nullptr, 0); }},
    {"perf_event_open", EPERM, [] { return ::syscall(SYS_perf_event_open, nullptr, 0, 0, 0, 0); }},
    {"userfaultfd", EPERM, [] { return ::syscall(SYS_userfaultfd, -1); }},
    {"keyctl", EPERM, [] { return ::syscall(SYS_keyctl, 9999); }},
    {"add_key", EPERM, [] { return ::syscall(SYS_add_key, nullptr, nullptr, nullptr, 0, 0); }},
    {"request_key", EPERM, [] { return ::syscall(SYS_request_key, nullptr, nullptr, nullptr, 0); }},
    {"mount", EPERM, [] { return ::syscall(SYS_mount, nullptr, nullptr, nullptr, 0, nullptr); }},
    {"umount2", EPERM, [] { return ::syscall(SYS_umount2, "", 0); }},
    {"pivot_root", EPERM, [] { return ::syscall(SYS_pivot_root, "", ""); }},
    {"fsopen", EPERM, [] { return ::syscall(SYS_fsopen, nullptr, 0); }},
    {"fsconfig", EPERM, [] { return ::syscall(SYS_fsconfig, -1, 0, nullptr, nullptr, 0); }},
    {"fsmount", EPERM, [] { return ::syscall(SYS_fsmount, -1, 0, 0); }},
    {"fspick", EPERM, [] { return ::syscall(SYS_fspick, -1, "x", 0); }},
    {"open_tree", EPERM, [] { return ::syscall(SYS_open_tree, -1, "x", 0); }},
    {"move_mount", EPERM, [] { return ::syscall(SYS_move_mount, -1, "x", -1, "x", 0); }},
    {"mount_setattr", EPERM, [] { return ::syscall(SYS_mount_setattr, -1, "x", 0, nullptr, 0); }},
    {"open_tree_attr", EPERM, [] { return ::syscall(467, -1, "x", 0, nullptr, 0); }},
    {"file_setattr", EPERM, [] { return ::syscall(469, -1, "x", nullptr, 0, 0); }},
    {"setns", EPERM, [] { return ::syscall(SYS_setns, -1, 0); }},
    {"unshare", EPERM, [] { return ::syscall(SYS_unshare, 0x1); }},
    {"clone3", ENOSYS, [] { return ::syscall(SYS_clone3, nullptr, 0); }},
    {"sethostname", EPERM, [] { return ::syscall(SYS_sethostname, "x", -1); }},
    {"setdomainname", EPERM, [] { return ::syscall(SYS_setdomainname, "x", -1); }},
    {"open_by_handle_at", EPERM, [] { return ::syscall(SYS_open_by_handle_at, -1, nullptr, 0); }},
    {"kexec_load", EPERM, [] { return ::syscall(SYS_kexec_load, 0, 9999, nullptr, 0); }},
    {"init_module", EPERM, [] { return ::syscall(SYS_init_module, nullptr, 0, nullptr); }},
    {"finit_module", EPERM, [] { return ::syscall(SYS_finit_module, -1, nullptr, 0); }},
    {"delete_module", EPERM, [] { return ::syscall(SYS_delete_module, nullptr, 0); }},
    {"swapon", EPERM, [] { return ::syscall(SYS_swapon, nullptr, 0); }},
    {"swapoff", EPERM, [] { return ::syscall(SYS_swapoff, nullptr); }},
    {"reboot", EPERM, [] { return ::syscall(SYS_reboot, 0, 0, 0, nullptr); }},
    {"syslog", EPERM, [] { return ::syscall(SYS_syslog, -1, nullptr, 0); }},
    {"acct", EPERM, [] { return ::syscall(SYS_acct, 1); }},
    {"quotactl", EPERM, [] { return ::syscall(SYS_quotactl, -1, nullptr, 0, nullptr); }},
    {"iopl", EPERM, [] { return ::syscall(SYS_iopl, 9); }},
    {"fanotify_init", EPERM, [] { return ::syscall(SYS_fanotify_init, -1, 0); }},
    {"pidfd_getfd", EPERM, [] { return ::syscall(SYS_pidfd_getfd, -1, 0, 0); }},
    {"process_madvise", EPERM, [] { return ::syscall(SYS_process_madvise, -1, nullptr, 0, 0, 0); }},
    {"move_pages", EPERM,
     [] { return ::syscall(SYS_move_pages, 0, 0, nullptr, nullptr, nullptr, -1); }},
    {"clock_settime", EPERM, [] { return ::syscall(SYS_clock_settime, 9999, nullptr); }},
    {"clone(NEWUSER)", EPERM,
     [] { return ::syscall(SYS_clone, CLONE_NEWUSER | CLONE_FS, nullptr); }},
    {"clone(NEWNS)", EPERM, [] { return ::syscall(SYS_clone, CLONE_NEWNS | CLONE_FS, nullptr); }},
    {"clone(NEWNET|THREAD)", EPERM,
     [] { return ::syscall(SYS_clone, CLONE_NEWNET | CLONE_THREAD, nullptr); }},
    {"personality(ADDR_NO_RANDOMIZE)", EPERM, [] { return ::syscall(SYS_personality, 0x0040000); }},
    {"personality, high half", EPERM, [] { return ::syscall(SYS_personality, 0x100040000); }},
    {"socket(AF_VSOCK)", EAFNOSUPPORT, [] { return ::syscall(SYS_socket, 40, 99, 0); }},
    {"socket(AF_PACKET)", EAFNOSUPPORT, [] { return ::syscall(SYS_socket, 17, SOCK_RAW, 0); }},
    {"socket(AF_ALG)", EAFNOSUPPORT,
     [] { return ::syscall(SYS_socket, 38, SOCK_SEQPACKET | 0xf, 0); }},
    {"socket(NETLINK_NETFILTER)", EPROTONOSUPPORT,
     [] { return ::syscall(SYS_socket, AF_NETLINK, SOCK_RAW, NETLINK_NETFILTER); }},
    {"socket(NETLINK_XFRM)", EPROTONOSUPPORT,
     [] { return ::syscall(SYS_socket, AF_NETLINK, SOCK_RAW, NETLINK_XFRM); }},
    {"socketpair(AF_INET)", EAFNOSUPPORT,
     [] { return ::syscall(SYS_socketpair, AF_INET, SOCK_STREAM, 0, nullptr); }},
};

TEST(SeccompFilter, RefusedCall_FilterAnswersInsteadOfTheKernel) {
  for (const Call& call : refused_calls) {
    EXPECT_EQ(Probe(true, call.run), call.expected) << call.name;
    int bare = Probe(false, call.run);
    // A kernel built without the family, protocol or call answers the same by itself.
    bool ambiguous = call.expected == EAFNOSUPPORT || call.expected == EPROTONOSUPPORT;
    if (!ambiguous && ::geteuid() == 0)
      EXPECT_NE(bare, call.expected) << call.name << ": this row proves nothing";
  }
}

struct Request {
  const char* name;
  uint64_t number;
  bool allowed;
};
constexpr Request kRequests[] = {
    {"XFS_IOC_SWAPEXT", 0xc0c0586d, false},
    {"XFS_IOC_EXCHANGE_RANGE", 0x40285881, false},
    {"XFS_IOC_START_COMMIT", 0x80585882, false},
    {"XFS_IOC_COMMIT_RANGE", 0x40585883, false},
    {"XFS_IOC_GOINGDOWN", 0x8004587d, false},
    {"FIFREEZE", FIFREEZE, false},
    {"FITHAW", FITHAW, false},
    {"FITRIM", FITRIM, false},
    {"FS_IOC_FSSETXATTR", FS_IOC_FSSETXATTR, false},
    {"FS_IOC_FSGETXATTR", FS_IOC_FSGETXATTR, true},
    {"FS_IOC_SETFLAGS", FS_IOC_SETFLAGS, false},
    {"FS_IOC32_SETFLAGS", FS_IOC32_SETFLAGS, false},
    {"FS_IOC_GETFLAGS", FS_IOC_GETFLAGS, true},
    {"FS_IOC_FIEMAP", FS_IOC_FIEMAP, true},
    {"EXT4_IOC_MOVE_EXT", 0xc028660f, false},
    {"EXT4_IOC_SWAP_BOOT", 0x6611, false},
    {"EXT4_IOC_MIGRATE", 0x6609, false},
    {"FS_IOC_ADD_ENCRYPTION_KEY", 0xc0506617, false},
    {"BTRFS_IOC_SNAP_CREATE", 0x50009401, false},
    {"BTRFS_IOC_SUBVOL_CREATE", 0x5000940e, false},
    {"BTRFS_IOC_TREE_SEARCH", 0xd0009411, false},
    {"BTRFS_IOC_QGROUP_LIMIT", 0x8030942b, false},
    {"FIDEDUPERANGE", FIDEDUPERANGE, false},
    {"FICLONE", FICLONE, true},
    {"FICLONERANGE", FICLONERANGE, true},
    {"F2FS_IOC_SHUTDOWN type", 0xf501, false},
    {"TIOCSTI", TIOCSTI, false},
    {"TIOCLINUX", TIOCLINUX, false},
    {"TIOCSETD", TIOCSETD, false},
    {"TIOCGWINSZ", TIOCGWINSZ, true},
    {"TCGETS", TCGETS, true},
    {"FIONREAD", FIONREAD, true},
    {"FIONBIO", FIONBIO, true},
};

TEST(SeccompFilter, Ioctl_JudgedByTheLowHalfOnly) {
  for (const Request& request : kRequests) {
    for (uint64_t high : {0ull, 1ull << 32, 0xdeadbeefull << 32}) {
      auto call = [&] { return ::syscall(SYS_ioctl, -1, request.number | high, 0); };
      EXPECT_EQ(Probe(true, call), request.allowed ? EBADF : EPERM)
          << request.name << " high " << std::hex << high;
    }
  }
}

TEST(SeccompFilter, SocketFamily_HighHalfHidesNothing) {
  EXPECT_EQ(Probe(true, [] { return ::syscall(SYS_socket, 40 | 1ull << 32, SOCK_STREAM, 0); }),
            EAFNOSUPPORT);
  EXPECT_EQ(Probe(true, [] { return ::syscall(SYS_socket, 5 | 1ull << 32, SOCK_STREAM, 0); }),
            EAFNOSUPPORT);
  // The protocol's high half: the kernel would read NETLINK_NETFILTER.
  EXPECT_EQ(
      Probe(true, [] { return ::syscall(SYS_socket, AF_NETLINK, SOCK_RAW, 12 | 1ull << 32); }),
      EPROTONOSUPPORT);
}

TEST(SeccompFilter, CloneFlags_HighHalfHidesNothing) {
  EXPECT_EQ(
      Probe(true,
            [] { return ::syscall(SYS_clone, CLONE_NEWUSER | CLONE_FS | 1ull << 40, nullptr); }),
      EPERM);
}

TEST(SeccompFilter, OrdinaryCall_Allowed) {
  const Call allowed_calls[] = {
      {"socket(AF_INET)", kNotErrno, [] { return ::syscall(SYS_socket, AF_INET, SOCK_STREAM, 0); }},
      {"socket(AF_INET6)", kNotErrno,
       [] { return ::syscall(SYS_socket, AF_INET6, SOCK_DGRAM, 0); }},
      {"socket(AF_UNIX)", kNotErrno, [] { return ::syscall(SYS_socket, AF_UNIX, SOCK_STREAM, 0); }},
      {"socket(NETLINK_ROUTE)", kNotErrno,
       [] { return ::syscall(SYS_socket, AF_NETLINK, SOCK_RAW, NETLINK_ROUTE); }},
      {"personality(query)", kNotErrno, [] { return ::syscall(SYS_personality, 0xffffffff); }},
      {"personality(PER_LINUX)", kNotErrno, [] { return ::syscall(SYS_personality, 0); }},
      {"sync", kNotErrno, [] { return ::syscall(SYS_sync); }},
      {"memfd_create", kNotErrno, [] { return ::syscall(SYS_memfd_create, "x", 0); }},
      {"fchmodat2", EBADF, [] { return ::syscall(452, -1, "x", 0, 0); }},
      {"ptrace", ESRCH, [] { return ::syscall(SYS_ptrace, 16 /* ATTACH */, 0x7fffffff, 0, 0); }},
      {"a call of the future", ENOSYS, [] { return ::syscall(500); }},
      {"listmount", ENOSYS, [] { return ::syscall(458, nullptr, nullptr, 0, 0); }},
  };
  for (const Call& call : allowed_calls)
    EXPECT_EQ(Probe(true, call.run), call.expected) << call.name;
}

TEST(SeccompFilter, ForkThroughLibc_FallsBackToClone) {
  EXPECT_EQ(Probe(true,
                  [] {
                    pid_t child = ::fork();
                    if (child == 0) ::_exit(5);
                    int status = 0;
                    bool ended = child > 0 && ::waitpid(child, &status, 0) == child &&
                                 WEXITSTATUS(status) == 5;
                    return ended ? 0L : -1L;
                  }),
            0);
}

#if defined(__x86_64__)
TEST(SeccompFilter, ForeignAbi_NoSuchCall) {
  EXPECT_EQ(Probe(true, [] { return ::syscall(0x40000000 | SYS_getpid); }), ENOSYS) << "x32";
  auto int80 = []() -> long {
    int result = 20;  // getpid of i386
    asm volatile("int $0x80" : "+a"(result) : : "memory", "r8", "r9", "r10", "r11");
    errno = -result;
    return result < 0 ? -1 : result;
  };
  // A kernel without the 32-bit ABI raises SIGSEGV by itself.
  EXPECT_EQ(Probe(true, int80), Probe(false, int80) == -SIGSEGV ? -SIGSEGV : ENOSYS);
}
#endif

TEST(SeccompFilter, Programs_FitTheSpawner) {
  for (const auto* program : {&Filters().allow, &Filters().arguments, &Filters().code}) {
    EXPECT_GT(program->size(), 0u);
    EXPECT_EQ(program->size() % sizeof(sock_filter), 0u);
    EXPECT_LE(program->size(), 32768u);
  }
  RecordProperty("allow_instructions", static_cast<int>(Filters().allow.size() / 8));
  RecordProperty("arguments_instructions", static_cast<int>(Filters().arguments.size() / 8));
  RecordProperty("code_instructions", static_cast<int>(Filters().code.size() / 8));
  std::printf("instructions: allow %zu, arguments %zu, code %zu\n", Filters().allow.size() / 8,
              Filters().arguments.size() / 8, Filters().code.size() / 8);
}

// A zygote may enter namespaces and nothing else that code may not; its forks take that away.
TEST(SeccompFilter, Zygote_MayEnterNamespacesUntilItGivesItUp) {
  const auto fork_filter = CompileForkFilter();
  ASSERT_TRUE(fork_filter.ok());
  const auto answers = [&](bool give_up) {
    int pipe_fds[2];
    EXPECT_EQ(::pipe2(pipe_fds, O_CLOEXEC), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      const SeccompFilters& filters = Filters();
      if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || !Install(filters.allow) ||
          !Install(filters.arguments) || !Install(filters.zygote) ||
          (give_up && !Install(*fork_filter))) {
        ::_exit(1);
      }
      const auto error = [](long result) { return result == -1 ? errno : 0; };
      const int errors[] = {error(::syscall(SYS_setns, -1, 0)), error(::syscall(SYS_unshare, 0x1)),
                            error(::syscall(SYS_mount, nullptr, nullptr, nullptr, 0, nullptr)),
                            error(::syscall(SYS_clone3, nullptr, 0)),
                            error(::syscall(SYS_clone, CLONE_NEWUSER | CLONE_FS, 0, 0, 0, 0))};
      ::_exit(::write(pipe_fds[1], errors, sizeof(errors)) == sizeof(errors) ? 0 : 1);
    }
    ::close(pipe_fds[1]);
    std::vector<int> errors(5);
    EXPECT_EQ(::read(pipe_fds[0], errors.data(), errors.size() * sizeof(int)),
              static_cast<ssize_t>(errors.size() * sizeof(int)));
    ::close(pipe_fds[0]);
    ::waitpid(child, nullptr, 0);
    return errors;
  };
  EXPECT_EQ(answers(false), (std::vector<int>{EBADF, EPERM, EPERM, ENOSYS, EPERM}));
  EXPECT_EQ(answers(true), (std::vector<int>{EPERM, EPERM, EPERM, ENOSYS, EPERM}));
}

}  // namespace
}  // namespace dsec::spawn

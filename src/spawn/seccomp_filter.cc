// SPDX-License-Identifier: Apache-2.0
#include "spawn/seccomp_filter.h"

#include <linux/netlink.h>
#include <sched.h>
#include <seccomp.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>

#include "os/file.h"

namespace dsec::spawn {
namespace {

using os::UniqueFd;

// Calls of code in a sandbox, alphabetical.
constexpr const char* kAllowed[] = {"accept",
                                    "accept4",
                                    "access",
                                    "adjtimex",
                                    "alarm",
                                    "arch_prctl",
                                    "bind",
                                    "brk",
                                    "capget",
                                    "capset",
                                    "chdir",
                                    "chmod",
                                    "chown",
                                    "chroot",
                                    "clock_adjtime",
                                    "clock_getres",
                                    "clock_gettime",
                                    "clock_nanosleep",
                                    "clone",
                                    "close",
                                    "close_range",
                                    "connect",
                                    "copy_file_range",
                                    "creat",
                                    "dup",
                                    "dup2",
                                    "dup3",
                                    "epoll_create",
                                    "epoll_create1",
                                    "epoll_ctl",
                                    "epoll_pwait",
                                    "epoll_pwait2",
                                    "epoll_wait",
                                    "eventfd",
                                    "eventfd2",
                                    "execve",
                                    "execveat",
                                    "exit",
                                    "exit_group",
                                    "faccessat",
                                    "faccessat2",
                                    "fadvise64",
                                    "fallocate",
                                    "fchdir",
                                    "fchmod",
                                    "fchmodat",
                                    "fchown",
                                    "fchownat",
                                    "fcntl",
                                    "fdatasync",
                                    "fgetxattr",
                                    "flistxattr",
                                    "flock",
                                    "fork",
                                    "fremovexattr",
                                    "fsetxattr",
                                    "fstat",
                                    "fstatfs",
                                    "fsync",
                                    "ftruncate",
                                    "futex",
                                    "futex_waitv",
                                    "futimesat",
                                    "get_robust_list",
                                    "get_thread_area",
                                    "getcpu",
                                    "getcwd",
                                    "getdents",
                                    "getdents64",
                                    "getegid",
                                    "geteuid",
                                    "getgid",
                                    "getgroups",
                                    "getitimer",
                                    "getpeername",
                                    "getpgid",
                                    "getpgrp",
                                    "getpid",
                                    "getppid",
                                    "getpriority",
                                    "getrandom",
                                    "getresgid",
                                    "getresuid",
                                    "getrlimit",
                                    "getrusage",
                                    "getsid",
                                    "getsockname",
                                    "getsockopt",
                                    "gettid",
                                    "gettimeofday",
                                    "getuid",
                                    "getxattr",
                                    "inotify_add_watch",
                                    "inotify_init",
                                    "inotify_init1",
                                    "inotify_rm_watch",
                                    "io_cancel",
                                    "io_destroy",
                                    "io_getevents",
                                    "io_pgetevents",
                                    "io_setup",
                                    "io_submit",
                                    "ioctl",
                                    "ioprio_get",
                                    "ioprio_set",
                                    "kill",
                                    "landlock_add_rule",
                                    "landlock_create_ruleset",
                                    "landlock_restrict_self",
                                    "lchown",
                                    "lgetxattr",
                                    "link",
                                    "linkat",
                                    "listen",
                                    "listxattr",
                                    "llistxattr",
                                    "lremovexattr",
                                    "lseek",
                                    "lsetxattr",
                                    "lstat",
                                    "madvise",
                                    "membarrier",
                                    "memfd_create",
                                    "memfd_secret",
                                    "mincore",
                                    "mkdir",
                                    "mkdirat",
                                    "mknod",
                                    "mknodat",
                                    "mlock",
                                    "mlock2",
                                    "mlockall",
                                    "mmap",
                                    "mprotect",
                                    "mq_getsetattr",
                                    "mq_notify",
                                    "mq_open",
                                    "mq_timedreceive",
                                    "mq_timedsend",
                                    "mq_unlink",
                                    "mremap",
                                    "msgctl",
                                    "msgget",
                                    "msgrcv",
                                    "msgsnd",
                                    "msync",
                                    "munlock",
                                    "munlockall",
                                    "munmap",
                                    "name_to_handle_at",
                                    "nanosleep",
                                    "newfstatat",
                                    "open",
                                    "openat",
                                    "openat2",
                                    "pause",
                                    "pidfd_open",
                                    "pidfd_send_signal",
                                    "pipe",
                                    "pipe2",
                                    "pkey_alloc",
                                    "pkey_free",
                                    "pkey_mprotect",
                                    "poll",
                                    "ppoll",
                                    "prctl",
                                    "pread64",
                                    "preadv",
                                    "preadv2",
                                    "prlimit64",
                                    "process_mrelease",
                                    "process_vm_readv",
                                    "process_vm_writev",
                                    "pselect6",
                                    "ptrace",
                                    "pwrite64",
                                    "pwritev",
                                    "pwritev2",
                                    "read",
                                    "readahead",
                                    "readlink",
                                    "readlinkat",
                                    "readv",
                                    "recvfrom",
                                    "recvmmsg",
                                    "recvmsg",
                                    "remap_file_pages",
                                    "removexattr",
                                    "rename",
                                    "renameat",
                                    "renameat2",
                                    "restart_syscall",
                                    "rmdir",
                                    "rseq",
                                    "rt_sigaction",
                                    "rt_sigpending",
                                    "rt_sigprocmask",
                                    "rt_sigqueueinfo",
                                    "rt_sigreturn",
                                    "rt_sigsuspend",
                                    "rt_sigtimedwait",
                                    "rt_tgsigqueueinfo",
                                    "sched_get_priority_max",
                                    "sched_get_priority_min",
                                    "sched_getaffinity",
                                    "sched_getattr",
                                    "sched_getparam",
                                    "sched_getscheduler",
                                    "sched_rr_get_interval",
                                    "sched_setaffinity",
                                    "sched_setattr",
                                    "sched_setparam",
                                    "sched_setscheduler",
                                    "sched_yield",
                                    "seccomp",
                                    "select",
                                    "semctl",
                                    "semget",
                                    "semop",
                                    "semtimedop",
                                    "sendfile",
                                    "sendmmsg",
                                    "sendmsg",
                                    "sendto",
                                    "set_robust_list",
                                    "set_thread_area",
                                    "set_tid_address",
                                    "setfsgid",
                                    "setfsuid",
                                    "setgid",
                                    "setgroups",
                                    "setitimer",
                                    "setpgid",
                                    "setpriority",
                                    "setregid",
                                    "setresgid",
                                    "setresuid",
                                    "setreuid",
                                    "setrlimit",
                                    "setsid",
                                    "setsockopt",
                                    "setuid",
                                    "setxattr",
                                    "shmat",
                                    "shmctl",
                                    "shmdt",
                                    "shmget",
                                    "shutdown",
                                    "sigaltstack",
                                    "signalfd",
                                    "signalfd4",
                                    "socket",
                                    "socketpair",
                                    "splice",
                                    "stat",
                                    "statfs",
                                    "statx",
                                    "symlink",
                                    "symlinkat",
                                    "sync_file_range",
                                    "syncfs",
                                    "sysinfo",
                                    "tee",
                                    "tgkill",
                                    "time",
                                    "timer_create",
                                    "timer_delete",
                                    "timer_getoverrun",
                                    "timer_gettime",
                                    "timer_settime",
                                    "timerfd_create",
                                    "timerfd_gettime",
                                    "timerfd_settime",
                                    "times",
                                    "tkill",
                                    "truncate",
                                    "umask",
                                    "uname",
                                    "unlink",
                                    "unlinkat",
                                    "utime",
                                    "utimensat",
                                    "utimes",
                                    "vfork",
                                    "vmsplice",
                                    "wait4",
                                    "waitid",
                                    "write",
                                    "writev"};

// Of the spawner, its stages and init; the third program takes them away from the code.
constexpr const char* kPlatformOnly[] = {"clone3",    "fsconfig",   "fsmount",       "fsopen",
                                         "fspick",    "mount",      "mount_setattr", "move_mount",
                                         "open_tree", "pivot_root", "setdomainname", "sethostname",
                                         "setns",     "umount2",    "unshare"};

constexpr const char* kOfForks = "setns";

// arch/x86/entry/syscalls/syscall_64.tbl: numbers that the libseccomp of Debian 12 has no names
// for.
constexpr int kAllowedNumbers[] = {
    451 /* cachestat */,   452 /* fchmodat2 */,     453 /* map_shadow_stack */,
    454 /* futex_wake */,  455 /* futex_wait */,    456 /* futex_requeue */,
    462 /* mseal */,       463 /* setxattrat */,    464 /* getxattrat */,
    465 /* listxattrat */, 466 /* removexattrat */, 468 /* file_getattr */};
// statmount, listmount, lsm_*: new ways to ask what older calls and /proc answer too.
constexpr int kUnknownNumbers[] = {457, 458, 459, 460, 461};
constexpr int kRefusedNumbers[] = {467 /* open_tree_attr */,
                                   469 /* file_setattr: FS_IOC_FSSETXATTR as a call */};
// Calls of kernels to come.
constexpr int kFirstFuture = 470;
constexpr int kLastFuture = 511;

// personality(2) values: PER_LINUX, PER_LINUX32, UNAME26 with either, and the query.
constexpr uint64_t kPersonalities[] = {0x0, 0x8, 0x20000, 0x20008, 0xffffffff};
constexpr uint64_t kLow32 = 0xffffffff;

// Families beyond AF_NETLINK (16) are refused by range. Left: AF_UNSPEC (0, no such socket),
// AF_UNIX, AF_INET, AF_INET6, AF_NETLINK.
constexpr uint64_t kRefusedFamilies[] = {3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15};
// Left: NETLINK_ROUTE, NETLINK_SOCK_DIAG, NETLINK_KOBJECT_UEVENT, NETLINK_GENERIC (15 and 16).
constexpr uint64_t kRefusedNetlink[] = {1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};

class Filter {
 public:
  static Result<Filter> Create(uint32_t default_action) {
    Filter filter;
    filter.context_.reset(seccomp_init(default_action));
    if (filter.context_ == nullptr)
      return Error(Code::kInternal, "seccomp.compile", "seccomp_init failed");
    // 2: a binary tree instead of a chain of comparisons.
    DSEC_TRY_VOID(filter.Check(seccomp_attr_set(filter.context_.get(), SCMP_FLTATR_CTL_OPTIMIZE, 2),
                               "optimize"));
    DSEC_TRY_VOID(filter.Check(
        seccomp_attr_set(filter.context_.get(), SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_ERRNO(ENOSYS)),
        "foreign architectures"));
    return filter;
  }

  Result<void> Add(uint32_t action, const char* name,
                   std::initializer_list<scmp_arg_cmp> arguments = {}) {
    int number = seccomp_syscall_resolve_name(name);
    if (number < 0)
      return Error(Code::kInternal, "seccomp.compile", fmt::format("unknown system call {}", name));
    return AddNumber(action, number, arguments).Context("{}", name);
  }

  Result<void> AddNumber(uint32_t action, int number,
                         std::initializer_list<scmp_arg_cmp> arguments = {}) {
    return Check(seccomp_rule_add_array(context_.get(), action, number,
                                        static_cast<unsigned>(arguments.size()), arguments.begin()),
                 "rule");
  }

  Result<std::vector<uint8_t>> Export() {
    UniqueFd file(::memfd_create("seccomp", MFD_CLOEXEC));
    if (!file.valid()) return os::ErrnoError("seccomp.compile", "make a memfd");
    DSEC_TRY_VOID(Check(seccomp_export_bpf(context_.get(), file.get()), "export"));
    if (::lseek(file.get(), 0, SEEK_SET) != 0) return os::ErrnoError("seccomp.compile", "rewind");
    DSEC_TRY(auto text, os::ReadAll(file.get(), 1 << 20));
    return std::vector<uint8_t>(text.begin(), text.end());
  }

 private:
  static Result<void> Check(int result, const char* what) {
    if (result == 0) return Ok();
    return Error::FromErrno(-result, "seccomp.compile", fmt::format("libseccomp: {}", what));
  }

  struct Release {
    void operator()(void* context) const { seccomp_release(context); }
  };
  std::unique_ptr<void, Release> context_;
};

constexpr uint32_t kDeny = SCMP_ACT_ERRNO(EPERM);

scmp_arg_cmp MaskedEq(unsigned argument, uint64_t mask, uint64_t value) {
  return {argument, SCMP_CMP_MASKED_EQ, mask, value};
}

Result<std::vector<uint8_t>> CompileAllow() {
  DSEC_TRY(auto filter, Filter::Create(kDeny));
  for (const char* name : kAllowed) DSEC_TRY_VOID(filter.Add(SCMP_ACT_ALLOW, name));
  for (const char* name : kPlatformOnly) DSEC_TRY_VOID(filter.Add(SCMP_ACT_ALLOW, name));
  for (int number : kAllowedNumbers) DSEC_TRY_VOID(filter.AddNumber(SCMP_ACT_ALLOW, number));
  for (uint64_t persona : kPersonalities) {
    DSEC_TRY_VOID(filter.Add(SCMP_ACT_ALLOW, "personality", {MaskedEq(0, kLow32, persona)}));
  }
  DSEC_TRY_VOID(filter.Add(SCMP_ACT_ERRNO(0), "sync"));
  for (int number : kUnknownNumbers)
    DSEC_TRY_VOID(filter.AddNumber(SCMP_ACT_ERRNO(ENOSYS), number));
  for (int number = kFirstFuture; number <= kLastFuture; ++number) {
    DSEC_TRY_VOID(filter.AddNumber(SCMP_ACT_ERRNO(ENOSYS), number));
  }
  return filter.Export();
}

// Refuses every ioctl of the type byte `type` whose number differs from `pattern` in one of the
// bits `mask`: all but the few numbers that agree with it in all of them.
Result<void> RefuseTypeExcept(Filter& filter, uint64_t type, uint64_t pattern, uint64_t mask) {
  for (uint64_t bit = 1; bit < 0x100; bit <<= 1) {
    if ((mask & bit) == 0) continue;
    DSEC_TRY_VOID(
        filter.Add(kDeny, "ioctl", {MaskedEq(1, 0xff00 | bit, type << 8 | (~pattern & bit))}));
  }
  return Ok();
}

Result<std::vector<uint8_t>> CompileArguments() {
  DSEC_TRY(auto filter, Filter::Create(SCMP_ACT_ALLOW));
  constexpr uint32_t kNoFamily = SCMP_ACT_ERRNO(EAFNOSUPPORT);
  // A family with high bits set is beyond the range as well, so nothing hides there.
  DSEC_TRY_VOID(filter.Add(kNoFamily, "socket", {{0, SCMP_CMP_GT, AF_NETLINK, 0}}));
  for (uint64_t family : kRefusedFamilies) {
    DSEC_TRY_VOID(filter.Add(kNoFamily, "socket", {{0, SCMP_CMP_EQ, family, 0}}));
  }
  constexpr uint32_t kNoProtocol = SCMP_ACT_ERRNO(EPROTONOSUPPORT);
  DSEC_TRY_VOID(
      filter.Add(kNoProtocol, "socket",
                 {{0, SCMP_CMP_EQ, AF_NETLINK, 0}, {2, SCMP_CMP_GT, NETLINK_GENERIC, 0}}));
  for (uint64_t protocol : kRefusedNetlink) {
    DSEC_TRY_VOID(filter.Add(kNoProtocol, "socket",
                             {{0, SCMP_CMP_EQ, AF_NETLINK, 0}, {2, SCMP_CMP_EQ, protocol, 0}}));
  }
  DSEC_TRY_VOID(filter.Add(kNoFamily, "socketpair", {{0, SCMP_CMP_NE, AF_UNIX, 0}}));

  // Type 'X': XFS's own (SWAPEXT 109, EXCHANGE_RANGE 129, COMMIT_RANGE 131, GOINGDOWN 125, ...),
  // FIFREEZE 119, FITRIM 121, FS_IOC_FSSETXATTR 32. Kept: FS_IOC_FSGETXATTR 31.
  DSEC_TRY_VOID(RefuseTypeExcept(filter, 'X', 31, 0xff));
  // Type 'f': FS_IOC_SETFLAGS 2, EXT4_IOC_MOVE_EXT 15, SWAP_BOOT 17, encryption keys, verity. Kept:
  // FS_IOC_GETFLAGS 1, EXT4_IOC_GETVERSION 3, FS_IOC_FIEMAP 11; 9, which agrees with them, is
  // EXT4_IOC_MIGRATE.
  DSEC_TRY_VOID(RefuseTypeExcept(filter, 'f', 0x01, 0xf5));
  DSEC_TRY_VOID(filter.Add(kDeny, "ioctl", {MaskedEq(1, 0xffff, 'f' << 8 | 9)}));
  // Type 0x94: btrfs. Kept: FICLONE 9 and FICLONERANGE 13, which do what a copy does: the kernel
  // checks both descriptors and the quota of the scratch volume holds. FIDEDUPERANGE 54 is not: all
  // it gives is kernel time.
  DSEC_TRY_VOID(RefuseTypeExcept(filter, 0x94, 0x09, 0xfb));
  // Type 0xf5: f2fs (moves, atomic writes, garbage collection, shutdown).
  DSEC_TRY_VOID(filter.Add(kDeny, "ioctl", {MaskedEq(1, 0xff00, 0xf5 << 8)}));
  for (uint64_t request : {TIOCSTI, TIOCLINUX, TIOCSETD}) {
    DSEC_TRY_VOID(filter.Add(kDeny, "ioctl", {MaskedEq(1, kLow32, request)}));
  }
  for (int number : kRefusedNumbers) DSEC_TRY_VOID(filter.AddNumber(kDeny, number));
  return filter.Export();
}

Result<std::vector<uint8_t>> CompileCode(std::string_view but = {}) {
  DSEC_TRY(auto filter, Filter::Create(SCMP_ACT_ALLOW));
  for (const char* name : kPlatformOnly) {
    if (name == but) continue;
    bool is_clone3 = std::string_view(name) == "clone3";
    DSEC_TRY_VOID(filter.Add(is_clone3 ? SCMP_ACT_ERRNO(ENOSYS) : kDeny, name));
  }
  for (uint64_t flag : {CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER,
                        CLONE_NEWPID, CLONE_NEWNET}) {
    DSEC_TRY_VOID(filter.Add(kDeny, "clone", {MaskedEq(0, flag, flag)}));
  }
  // Who may enter namespaces must not find others than those it is given (ioctl_nsfs(2), type
  // 0xb7).
  if (!but.empty()) DSEC_TRY_VOID(filter.Add(kDeny, "ioctl", {MaskedEq(1, 0xff00, 0xb7 << 8)}));
  return filter.Export();
}

}  // namespace

Result<SeccompFilters> CompileSeccompFilters() {
  SeccompFilters filters;
  DSEC_TRY(filters.allow, CompileAllow());
  DSEC_TRY(filters.arguments, CompileArguments());
  DSEC_TRY(filters.code, CompileCode());
  DSEC_TRY(filters.zygote, CompileCode(kOfForks));
  return filters;
}

Result<std::vector<uint8_t>> CompileForkFilter() {
  DSEC_TRY(auto filter, Filter::Create(SCMP_ACT_ALLOW));
  DSEC_TRY_VOID(filter.Add(kDeny, kOfForks));
  return filter.Export();
}

}  // namespace dsec::spawn

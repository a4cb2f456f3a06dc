// SPDX-License-Identifier: Apache-2.0
#pragma once

// The contract between the spawner, the agent (dsec-aether) and the sandbox's init. Plain structs,
// native byte order: all three are built together and run on one machine; a version mismatch ends
// the slot. No allocation, no dependency.
//
// How the agent starts
//   It is pid 1 of pid namespace A and root of user namespace A (an otherwise unused uid on the
//   host), argv {"dsec-aether"}, empty environment, cwd "/", umask 022, all signals default and
//   unblocked, in a session without a terminal. Its root is a small read-only tmpfs with a /dev of
//   the usual nodes and the /proc of A. It is in the network namespace of the sandbox (loopback is
//   up, any port may be bound). Capabilities: kAgentCapabilities of A, nothing else; the node's
//   seccomp programs apply. Descriptors: 0 and 1 are /dev/null, 2 is the log (its reader may be
//   gone: ignore SIGPIPE), then AgentFd. Its only child is init; when kInitPidFd becomes readable
//   the sandbox is over and the agent must reap it and exit.
//
// Identities
//   The agent numbers ids in A: 0 is itself, u + 1 is uid u of the sandbox, for u in 0..65535; so
//   also what stat() shows it and what chown() takes. setfsuid(u + 1)/setfsgid(g + 1) before
//   creating files makes the sandbox's user their owner; open the sandbox's /dev/pts/ptmx that way
//   too, otherwise the terminal belongs to nobody inside.
//
// Cgroups
//   kSlotCgroupFd is the slot's v2 directory: `agent/` holds the agent, `code/init/` holds init.
//   The agent makes one directory code/<name> for each exec, chowns its cgroup.procs to 1:1 (init
//   acts with the identity of the sandbox's root when it clones the child into it) and passes the
//   directory. Of the rest the agent, as the maker, is the owner: cgroup.kill, cgroup.freeze,
//   cpu.stat. The code sees its own directory as the root of all cgroups.
//
// Channel to init: kInitFd, SOCK_SEQPACKET, one struct a packet, descriptors by SCM_RIGHTS.
//   InitReady          from init once after launch, with O_PATH of the sandbox's root directory.
//   ExecRequest        to init; answered by InitStarted with the pidfd of the process and, after
//                      its end, always later, by InitEnded. A request that fails before there is a
//                      process gets an ExecFailure on its status pipe and no message.
//   SignalAllRequest   to init: a signal to every process of the sandbox but init. No answer.
//   MakeFsRequest      to init; answered by InitFs.
//   init never blocks on this socket. Answers that do not fit are kept and no further request is
//   taken until they are delivered; at most kMaxExecs runs or undelivered ends are kept.

#include <cstdint>

namespace dsec::spawn::abi {

inline constexpr uint32_t kVersion = 1;

enum AgentFd : int {
  kListenFd = 3,        // AF_UNIX SOCK_STREAM, listening: the channel to the edge
  kInitFd = 4,          // SOCK_SEQPACKET to init
  kSlotCgroupFd = 5,    // v2 directory of the slot, O_RDONLY
  kMemoryCgroupFd = 6,  // v1 memory directory of the code, O_RDONLY; not open where memory is on v2
  kPidsCgroupFd = 7,    // v1 pids directory of the code, O_RDONLY; not open where pids is on v2
  kTokenFd = 8,         // sealed memfd, exactly kTokenBytes: what Hello must carry
  kInitPidFd = 9,       // pidfd of init
  kCpuCgroupFd = 10,    // v1 cpu directory of the code, O_RDONLY; not open where cpu is on v2
};
inline constexpr int kTokenBytes = 32;

// capabilities(7) numbers: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, KILL, SETGID,
// SETUID, NET_BIND_SERVICE, SYS_CHROOT, SETFCAP.
inline constexpr uint64_t kAgentCapabilities =
    (1ull << 0) | (1ull << 1) | (1ull << 2) | (1ull << 3) | (1ull << 4) | (1ull << 5) |
    (1ull << 6) | (1ull << 7) | (1ull << 10) | (1ull << 18) | (1ull << 31);

enum MessageType : uint32_t {
  kExec = 1,       // agent -> init: ExecRequest
  kSignalAll = 2,  // agent -> init: SignalAllRequest
  kMakeFs = 3,     // agent -> init: MakeFsRequest
  kReady = 16,     // init -> agent: InitReady
  kStarted = 17,   // init -> agent: InitStarted
  kEnded = 18,     // init -> agent: InitEnded
  kFs = 19,        // init -> agent: InitFs
};

// How many execs may be running or ended and not yet delivered.
inline constexpr uint32_t kMaxExecs = 4096;

// Descriptors of an ExecRequest: payload, status, stdin, stdout, stderr, [cgroup], [program],
// extra... in this order.
//
// - payload: memfd with seals F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW, holding an ExecPayload
//   and its strings.
// - status: write end of a pipe made by the agent, which closes its own copy after sending. Nothing
//   written and EOF: the program runs. One ExecFailure and EOF: it does not; if InitStarted came as
//   well, the InitEnded that follows has no meaning.
// - stdin, stdout, stderr: become 0, 1, 2 of the program. For a terminal all three are the slave.
// - cgroup (kHasCgroup): v2 directory to start in; without it the child starts in code/init.
// - program (kHasProgram): the file to execute, whatever argv[0] says. An ELF binary: a `#!` file
//   cannot be run by descriptor. Give the shell this way, opened in the pristine lower layer, so
//   that an overwritten /bin/sh changes nothing. Without it argv[0] is executed: as a path if it
//   holds a slash, else searched in PATH of the payload's environment (kDefaultPath when it has
//   none).
// - extra (extra_fds of them): become 3, 4, ... of the program, inherited by its children unless it
//   closes them.
//
// A script: write `exec 3<&-;` followed by the script's bytes into a sealed memfd, pass it (opened
// O_RDONLY through /proc/self/fd so that its offset is its own) as the only extra fd, and run
// {"sh", "/proc/self/fd/3"} with the shell as program. The shell opens the path at a descriptor of
// its own with close-on-exec, its first command closes 3, line numbers stay right, and neither argv
// nor any child shows the text. Code inside sees 0, 1 and 2 only.
struct ExecRequest {
  uint32_t type = kExec;
  uint32_t flags = 0;  // RequestFlag
  uint64_t id = 0;     // chosen by the agent, echoed in every answer
  uint32_t extra_fds = 0;
  uint32_t reserved = 0;
};
enum RequestFlag : uint32_t { kHasCgroup = 1, kHasProgram = 2 };
inline constexpr uint32_t kMaxExtraFds = 4;
inline constexpr uint32_t kMaxRequestFds = 7 + kMaxExtraFds;

inline constexpr uint32_t kPayloadMagic = 0x50584544;  // "DEXP"
// The kernel's own limit on argv and environment together is lower.
inline constexpr uint32_t kMaxPayloadBytes = 8u << 20;
inline constexpr uint32_t kMaxStrings = 1u << 16;  // argc, and envc
inline constexpr uint32_t kMaxGroups = 64;
inline constexpr uint32_t kMaxRlimits = 16;
inline constexpr uint32_t kCpuMaskWords = 16;  // 1,024 cores
inline constexpr char kDefaultPath[] =
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

struct ExecRlimit {
  uint32_t resource = 0;
  uint32_t reserved = 0;
  uint64_t soft = 0;
  uint64_t hard = 0;
};

// Followed by strings_bytes of NUL-terminated strings: argc of argv, envc of "KEY=value", one cwd
// (absolute).
struct ExecPayload {
  uint32_t magic = kPayloadMagic;
  uint32_t version = kVersion;
  uint32_t strings_bytes = 0;
  uint32_t argc = 0;  // at least 1
  uint32_t envc = 0;
  uint32_t flags = 0;  // PayloadFlag
  uint32_t uid = 0;    // ids as the sandbox numbers them
  uint32_t gid = 0;
  uint32_t group_count = 0;
  uint32_t rlimit_count = 0;
  uint32_t groups[kMaxGroups] = {};
  ExecRlimit rlimits[kMaxRlimits] = {};
  uint64_t cpu_mask[kCpuMaskWords] = {};  // all zero: init's own affinity, that of the launch plan
};
enum PayloadFlag : uint32_t {
  kControllingTty = 1,  // stdin is a terminal: make it the controlling one
};

// Where a start failed. Values are stable; names by ExecStepName.
enum class ExecStep : uint32_t {
  kRequest = 1,  // malformed request or payload, missing seals
  kTable = 2,    // kMaxExecs reached
  kClone = 3,    // pids limit, memory, or cgroup refused (EAGAIN, ENOMEM, EACCES, ENOENT)
  kFds = 4,
  kTty = 5,
  kLimits = 6,
  kAffinity = 7,
  kNamespace = 8,
  kSeccomp = 9,
  kUser = 10,  // groups, gid, uid, capabilities
  kCwd = 11,
  kExec = 12,  // execve itself: ENOENT, EACCES, ENOEXEC, E2BIG, ...
};
constexpr const char* ExecStepName(ExecStep step) {
  switch (step) {
    case ExecStep::kRequest:
      return "request";
    case ExecStep::kTable:
      return "table";
    case ExecStep::kClone:
      return "clone";
    case ExecStep::kFds:
      return "fds";
    case ExecStep::kTty:
      return "tty";
    case ExecStep::kLimits:
      return "limits";
    case ExecStep::kAffinity:
      return "affinity";
    case ExecStep::kNamespace:
      return "namespace";
    case ExecStep::kSeccomp:
      return "seccomp";
    case ExecStep::kUser:
      return "user";
    case ExecStep::kCwd:
      return "cwd";
    case ExecStep::kExec:
      return "exec";
  }
  return "unknown";
}

struct ExecFailure {
  ExecStep step = ExecStep::kRequest;
  int32_t sys_errno = 0;
};

struct SignalAllRequest {
  uint32_t type = kSignalAll;
  int32_t signal = 0;
};

// A tmpfs for the agent's own use, mounted nowhere: its memory is the sandbox's, its files belong
// to the sandbox's ids (root's mode 0700; the agent takes setfsuid(1)/setfsgid(1) to make files),
// its size is bounded. It lives as long as somebody holds a descriptor in it. Neither bound may be
// 0.
struct MakeFsRequest {
  uint32_t type = kMakeFs;
  uint32_t max_inodes = 0;
  uint64_t max_bytes = 0;
};

struct InitReady {
  uint32_t type = kReady;
  uint32_t version = kVersion;
};

struct InitStarted {
  uint32_t type = kStarted;
  int32_t pid = 0;  // inside the sandbox
  uint64_t id = 0;
};

struct InitEnded {
  uint32_t type = kEnded;
  int32_t pid = 0;
  uint64_t id = 0;
  int32_t wait_status = 0;  // as wait4 gives it
  uint32_t reserved = 0;
  uint64_t user_usec = 0;  // of the process and the children it waited for
  uint64_t system_usec = 0;
  uint64_t max_rss_bytes = 0;
};

// The detached mount comes along, or the errno. Answers come in the order of the requests.
struct InitFs {
  uint32_t type = kFs;
  int32_t sys_errno = 0;  // 0: one fd comes with it
};

}  // namespace dsec::spawn::abi

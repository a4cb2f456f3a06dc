// SPDX-License-Identifier: Apache-2.0
#pragma once

// The code of dsec-spawner: one single-threaded process and the two stages it forks for a slot.
// After the first packet nothing here allocates: requests, plans and replies live in static
// buffers, which every fork has its own copy of. Functions return 0 or -errno.

#include <linux/filter.h>
#include <sys/mount.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <span>

#include "os/unique_fd.h"
#include "spawn/wire.h"

namespace dsec::spawn::stage {

// What the spawner has made once and every slot uses.
struct Shared {
  int control = -1;      // SEQPACKET to the daemon
  int agent_image = -1;  // sealed memfd
  int log = -1;
  int dev_null = -1;
  sock_fprog code_filter = {};
  sock_fprog zygote_filter = {};
  char* argv0 = nullptr;  // rewritten in init
  size_t argv0_size = 0;
};

// Collects the time of each step.
class StepClock {
 public:
  explicit StepClock(wire::Reply* reply) : reply_(reply), last_(Now()) {}
  void Done(wire::Step step) {
    uint64_t now = Now();
    Add({step, static_cast<uint32_t>(now - last_)});
    last_ = now;
  }
  void Restart() { last_ = Now(); }
  // Appends what another process has measured meanwhile.
  void Append(const wire::Reply& other) {
    for (uint32_t i = 0; i < other.step_count && i < wire::kMaxSteps; ++i) Add(other.steps[i]);
    Restart();
  }
  int Fail(wire::Step step, int error) {
    reply_->failed = step;
    reply_->sys_errno = -error;
    return error;
  }
  wire::Reply* reply() { return reply_; }

 private:
  static uint64_t Now() {
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000u +
           static_cast<uint64_t>(now.tv_nsec) / 1000u;
  }
  void Add(wire::StepTime time) {
    if (reply_->step_count < wire::kMaxSteps) reply_->steps[reply_->step_count++] = time;
  }
  wire::Reply* reply_;
  uint64_t last_;
};

// Layout of the spawner's root, which both stages inherit. All of it is empty or made of device
// nodes.
// What init makes its root when the slot is made, so that the launch needs no pivot_root: that
// looks at every task of the host (chroot_fs_refs in fs/fs_struct.c), 0.35 ms for each 1,000 of
// them.
inline constexpr char kStage[] = "/stage";
// Below it, as init sees it from then on.
inline constexpr char kNewRoot[] = "/root";   // where the sandbox's root is attached
inline constexpr char kInitProc[] = "/proc";  // where init's /proc waits for it, masked
inline constexpr char kInitDev[] = "/dev";    // where its /dev waits
inline constexpr char kDevTemplate[] = "/dev";
inline constexpr char kEmptyDir[] = "/empty";

// template.cc: leaves the host's mounts for a private namespace with only that root and a /proc.
int EnterPrivateRoot(StepClock& clock);

// files.cc
struct FsOption {
  const char* key;
  const char* value;
};
// For file systems that hold neither programs nor devices.
inline constexpr uint64_t kDataAttributes =
    MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
// A new file system as a detached mount.
int NewFileSystem(const char* type, std::span<const FsOption> options, uint64_t attributes,
                  os::UniqueFd* mount);
// All signals to their default action, the ones that libc keeps for itself included.
void ResetSignals();
// One write into an existing file.
int WriteExisting(int dirfd, const char* path, const char* data, size_t size);
// Makes `dst` refer to what `src` does and all of src[0..count) to dst[0..count), whatever numbers
// they have now.
int PlaceFds(const int* src, const int* dst, size_t count, bool close_on_exec);
// 1 when readable or hung up, 0 on timeout.
int WaitReadable(int fd, uint64_t deadline_usec);
uint64_t MonotonicUsec();

// steps.cc: what the making of a slot and of a worker have in common.
int WriteIdMaps(pid_t pid, const char* map);
// A byte each way keeps the two sides in step; end of file means that the other one is gone.
bool SendGo(int socket);
void AwaitGo(int socket);
// Waits for a stage's report. A stage that dies without one is EPIPE, one that is late ETIMEDOUT.
int AwaitReply(int socket, uint64_t deadline, wire::Reply* reply, int* fds, size_t* fd_count);
int BecomeRootOfA();
// A /proc of the caller's own pid namespace over the one that is there.
int CoverProc();
int ConfigureNetwork();
// Descriptor of the user namespace of the process of `pidfd`.
int OpenUserNamespace(int pidfd, pid_t pid);
// The device template with root of B as the owner of its nodes.
int MapDevTemplate(int user_ns, os::UniqueFd* mount);
// Of an init, in B.
int TakeIdentity();
void Rename(const Shared& shared, const char* name);

// network.cc: the network namespace of a worker, which its calls share one after another.
class NetworkWatch {
 public:
  static constexpr size_t kFiles = 4;
  // Sets up the namespace of the caller, which is as new, and remembers how it looks.
  int Begin();
  // Whether it still looks like that; if not, the caller enters a new one.
  int Check(bool* renewed);

 private:
  os::UniqueFd files_[kFiles];
  uint64_t digests_[kFiles] = {};
};

// runner.cc: makes one worker of FnCall, as MakeSlot.
int MakeWorker(const Shared& shared, const wire::Worker& worker, const int* fds, wire::Reply* reply,
               int out[wire::kWorkerReplyFds]);

// cell.cc: what the root of a cell, and of a zygote, is made of. Detached mounts; `dev` < 0: the
// /dev of the worker.
struct CellRoot {
  const wire::Views* views = nullptr;  // attached below the stage, see RunnerViewPath
  int root = -1;
  int shm = -1;
  int dev = -1;
};
// In a mount namespace that is a copy of the runner's: makes it the root.
int BuildCellRoot(const CellRoot& parts, StepClock& clock);

// cell.cc: life of the init of a cell from its clone on.
struct CellStart {
  const Shared* shared = nullptr;
  const wire::Views* views = nullptr;  // attached below the stage, see RunnerViewPath
  int launch = -1;                     // SEQPACKET to the runner, for one report
  int channel = -1;                    // SEQPACKET to the daemon
  int user_ns = -1;                    // B
  const int* mounts = nullptr;         // as wire::Cell lists them
  bool has_dev = false;
  bool has_fork = false;  // the report carries its namespaces
};
// Of a cell, from its init: oom_score_adj, then its namespaces.
inline constexpr size_t kCellReportFds = 1 + wire::kCellNamespaces;
[[noreturn]] void RunCell(const CellStart& start);
inline constexpr size_t kViewPathBytes = 16;
void RunnerViewPath(uint32_t index, char path[kViewPathBytes]);

// zygote.cc: from a fresh clone in the runner to the interpreter. Never returns.
struct ZygoteStart {
  const Shared* shared = nullptr;
  const wire::Views* views = nullptr;
  int launch = -1;           // SEQPACKET to the runner, for one report
  const int* fds = nullptr;  // as wire::Zygote lists them
};
[[noreturn]] void RunZygote(const ZygoteStart& start);
// What a zygote may do in A: enter the namespaces of a cell.
inline constexpr uint64_t kZygoteCapabilities =
    (1ull << 18) | (1ull << 21);  // SYS_CHROOT, SYS_ADMIN

// slot.cc: makes one slot; on failure all of its processes are gone. `out` receives pidfd, launch
// socket, user namespace.
int MakeSlot(const Shared& shared, const wire::Slot& slot, const int* fds, wire::Reply* reply,
             int out[wire::kSlotReplyFds]);

// init.cc: life of a sandbox's init from its clone on.
struct InitStart {
  const Shared* shared = nullptr;
  int launch = -1;   // SEQPACKET: first the spawner, then the daemon
  int channel = -1;  // SEQPACKET to the agent
};
[[noreturn]] void RunInit(const InitStart& start);

// launch.cc: attaches everything of a launch plan and enters the new root. Returns in *root the
// O_PATH descriptor of it.
int ExecuteLaunch(const wire::Launch& plan, const int* fds, StepClock& clock, int* root);
// The stage of a sandbox's init: a masked /proc and a /dev.
int PrepareProc();
int PrepareDev(int dev_mount);
// Looks at /proc once, for all that the caller forks.
void LearnProc();
// Mounts the /proc of the caller's pid namespace at `place`, which becomes the working directory,
// and masks it.
int MountProc(const char* place);
// A devpts of its own at `place`; `gid` owns its terminals.
int MountPts(const char* place, const char* gid);
// Makes `stage`, a mount, the root, and lets go of everything else.
int EnterStage(const char* stage);
// Attaches `mount` at kNewRoot and opens it.
int AttachRoot(int mount, os::UniqueFd* root);
// A detached mount over what is at `target` below `root`, read-only.
int AttachView(int root, int view, const char* target);
// Over the stage and into it.
int EnterRoot(int root);

// serve.cc: the second half of init's life, after a successful launch.
struct ServeState {
  const Shared* shared = nullptr;
  int channel = -1;
  int oom_score = -1;  // own oom_score_adj, open for writing
  uint64_t capabilities = 0;
};
[[noreturn]] void Serve(const ServeState& state);

// child.cc: from a fresh clone to the user's program. Never returns.
struct ExecPlan {
  const Shared* shared = nullptr;
  uint64_t capabilities = 0;
  const int* fds = nullptr;  // as abi::ExecRequest lists them
  uint32_t fd_count = 0;
  uint32_t flags = 0;
  uint32_t extra_fds = 0;
  bool zygote = false;  // as a process of A that keeps kZygoteCapabilities
};
[[noreturn]] void RunExecChild(const ExecPlan& plan);

// Sets capabilities of the calling thread: permitted = effective = mask.
int SetCapabilities(uint64_t mask, uint64_t inheritable = 0);
// Removes from the bounding set all that is not in `keep`.
int LimitBoundingSet(uint64_t keep);

}  // namespace dsec::spawn::stage

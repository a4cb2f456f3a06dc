// SPDX-License-Identifier: Apache-2.0
// The runner of a worker of FnCall: root of A, pid 1 of its pid namespace, above everything that
// runs in the worker. It makes one cell after another and sees to it that nothing of one is left
// for the next. What a call does is between the daemon and the init of its cell; the runner sees
// none of it. It ends at end of file of its control socket, and with it all that is in A.
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "os/fd_passing.h"
#include "os/process.h"
#include "os/syscalls.h"
#include "os/unique_fd.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

using os::UniqueFd;
using wire::Step;

constexpr uint64_t kReapUsec = 5'000'000;
// How long the processes of a cell whose init has ended may take to leave its cgroup.
constexpr uint64_t kEmptyUsec = 2'000'000;
// The runner is charged to the worker's groups, but should not be their OOM victim. The init of
// each cell gets the ordinary score back from the daemon, together with the right to go no lower.
constexpr char kRunnerOomScore[] = "-900";
constexpr char kHostname[] = "sandbox";
constexpr size_t kGroupNameBytes = 32;
constexpr char kZygoteGroup[] = "code/zygote";

struct WorkerFds {
  int slot_dir, agent_dir, init_dir;
  const int* v1_procs;
};

wire::Views worker_views;  // one packet, received in place

class Runner {
 public:
  Runner(const Shared& shared, const WorkerFds& fds, int control)
      : shared_(shared), fds_(fds), control_(control) {}

  // The part of the making that belongs to A: its root, network and user namespace B.
  int Prepare(StepClock& clock, UniqueFd* user_ns);
  int BuildStage(int dev_mount);
  [[noreturn]] void Loop();

 private:
  int WatchChildren();
  int MakeB(UniqueFd* user_ns);
  void ReceiveViews();
  int AttachViews(const int* fds);
  void Serve(const wire::Cell& cell, const int* fds);
  int PrepareGroup(const wire::Cell& cell);
  int StartCell(const wire::Cell& cell, const int* fds, StepClock& clock);
  void ServeZygote(const wire::Zygote& request, const int* fds);
  int StartZygote(const wire::Zygote& request, const int* fds, StepClock& clock);
  void AwaitEnd(const wire::Cell& cell);
  bool Reap(int* init_status);
  int CheckGroup();
  int EmptyGroup();

  const Shared& shared_;
  const WorkerFds fds_;
  const int control_;
  UniqueFd user_ns_;
  NetworkWatch network_;
  UniqueFd group_;   // v2 directory of the cell
  UniqueFd events_;  // its cgroup.events
  uint64_t group_serial_ = 0;
  bool group_killed_ = false;
  UniqueFd signals_;  // SIGCHLD
  pid_t init_pid_ = 0;
  UniqueFd report_[kCellReportFds];  // of the cell that is made
  UniqueFd zygote_;                  // its pidfd
  pid_t zygote_pid_ = 0;             // 0: none, or it has ended
  UniqueFd zygote_group_;            // its v2 directory
};

void GroupName(uint64_t serial, char name[kGroupNameBytes]) {
  std::snprintf(name, kGroupNameBytes, "code/c%llu", static_cast<unsigned long long>(serial));
}

int Runner::WatchChildren() {
  sigset_t children;
  ::sigemptyset(&children);
  ::sigaddset(&children, SIGCHLD);
  ::sigprocmask(SIG_BLOCK, &children, nullptr);
  signals_.Reset(::signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK));
  return signals_.valid() ? 0 : -errno;
}

int Runner::MakeB(UniqueFd* user_ns) {
  int pidfd = -1;
  pid_t keeper = os::Clone3(CLONE_NEWUSER, &pidfd, -1, SIGCHLD);
  if (keeper < 0) return -errno;
  if (keeper == 0) {
    while (true) ::pause();
  }
  UniqueFd held(pidfd);
  char map[32];
  std::snprintf(map, sizeof(map), "0 1 %u", wire::kIdCount);
  int error = WriteIdMaps(keeper, map);
  if (error == 0) {
    int fd = OpenUserNamespace(pidfd, keeper);
    if (fd < 0) error = fd;
    user_ns->Reset(fd);
  }
  os::PidFdSendSignal(pidfd, SIGKILL);
  ::waitpid(keeper, nullptr, 0);
  return error;
}

int Runner::Prepare(StepClock& clock, UniqueFd* user_ns) {
  int error = BecomeRootOfA();
  if (error == 0) error = WatchChildren();
  if (error == 0) error = CoverProc();
  if (error == 0 &&
      (::sethostname(kHostname, sizeof(kHostname) - 1) != 0 || ::setdomainname("(none)", 6) != 0)) {
    error = -errno;
  }
  if (error != 0) return clock.Fail(Step::kAgentProc, error);
  clock.Done(Step::kAgentProc);
  error = network_.Begin();
  if (error != 0) return clock.Fail(Step::kNetwork, error);
  clock.Done(Step::kNetwork);
  error = MakeB(user_ns);
  if (error != 0) return clock.Fail(Step::kMapInit, error);
  clock.Done(Step::kMapInit);
  user_ns_.Reset(::fcntl(user_ns->get(), F_DUPFD_CLOEXEC, 3));
  return user_ns_.valid() ? 0 : clock.Fail(Step::kMapInit, -errno);
}

// A small root of its own with what cells start from. Each cell's mount namespace is a copy.
int Runner::BuildStage(int dev_mount) {
  constexpr FsOption kOptions[] = {
      {"source", "none"}, {"size", "64k"}, {"nr_inodes", "64"}, {"mode", "0755"}};
  UniqueFd stage;
  int error = NewFileSystem("tmpfs", kOptions, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, &stage);
  if (error != 0) return error;
  for (const char* dir : {kNewRoot, kInitProc, kInitDev, kEmptyDir}) {
    if (::mkdirat(stage.get(), dir + 1, 0755) != 0) return -errno;
  }
  if (::move_mount(stage.get(), "", AT_FDCWD, kStage, MOVE_MOUNT_F_EMPTY_PATH) != 0 ||
      ::move_mount(AT_FDCWD, "/proc", stage.get(), kInitProc + 1, 0) != 0 ||
      ::move_mount(dev_mount, "", stage.get(), kInitDev + 1, MOVE_MOUNT_F_EMPTY_PATH) != 0) {
    return -errno;
  }
  return EnterStage(kStage);
}

int Runner::AttachViews(const int* fds) {
  for (uint32_t i = 0; i < worker_views.view_count; ++i) {
    char path[kViewPathBytes];
    RunnerViewPath(i, path);
    struct stat info;
    if (::fstat(fds[i], &info) != 0) return -errno;
    if (S_ISDIR(info.st_mode)) {
      if (::mkdir(path, 0755) != 0) return -errno;
    } else {
      UniqueFd file(::open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
      if (!file.valid()) return -errno;
    }
    int error = AttachView(AT_FDCWD, fds[i], path);
    if (error != 0) return error;
  }
  return 0;
}

void Runner::ReceiveViews() {
  int fds[wire::kMaxViews];
  size_t count = wire::kMaxViews;
  ssize_t size =
      os::ReceivePacketRaw(control_, &worker_views, sizeof(worker_views), fds, &count, 0);
  if (size == 0 || size == -ECONNRESET) ::_exit(0);
  wire::Reply reply;
  StepClock clock(&reply);
  int error = size > 0 && wire::WellFormed(worker_views, static_cast<size_t>(size), count)
                  ? AttachViews(fds)
                  : -EINVAL;
  for (size_t i = 0; i < count; ++i) ::close(fds[i]);
  if (error != 0) clock.Fail(Step::kViews, error);
  clock.Done(Step::kViews);
  if (os::SendPacketRaw(control_, &reply, sizeof(reply), nullptr, 0, 0) != 0 || error != 0)
    ::_exit(1);
}

void Runner::Loop() {
  ReceiveViews();
  while (true) {
    constexpr size_t kMaxFds = std::max(wire::kCellFixedFds + 1, wire::kZygoteFds);
    union {
      wire::Cell cell = {};
      wire::Zygote zygote;
    } request;
    int fds[kMaxFds];
    size_t count = kMaxFds;
    const ssize_t size = os::ReceivePacketRaw(control_, &request, sizeof(request), fds, &count, 0);
    // Nothing of a cell lives at this point; what else could be in A goes with this process.
    if (size == 0 || size == -ECONNRESET) ::_exit(0);
    const bool is_cell =
        size > 0 && wire::WellFormed(request.cell, static_cast<size_t>(size), count);
    if (is_cell) {
      Serve(request.cell, fds);
    } else if (size > 0 && wire::WellFormed(request.zygote, static_cast<size_t>(size), count)) {
      ServeZygote(request.zygote, fds);
    } else {
      ::_exit(1);
    }
    for (size_t i = 0; i < count; ++i) ::close(fds[i]);
    if (is_cell) AwaitEnd(request.cell);
  }
}

int Runner::PrepareGroup(const wire::Cell& cell) {
  if (cell.has_fork != 0) return zygote_group_.valid() ? 0 : -ENOENT;
  char name[kGroupNameBytes];
  if (group_.valid()) {
    if (cell.fresh_group == 0 && !group_killed_) return 0;
    GroupName(group_serial_, name);
    group_.Reset();
    if (::unlinkat(fds_.slot_dir, name, AT_REMOVEDIR) != 0) return -errno;
  }
  group_serial_ = cell.serial;
  group_killed_ = false;
  GroupName(group_serial_, name);
  if (::mkdirat(fds_.slot_dir, name, 0755) != 0) return -errno;
  group_.Reset(::openat(fds_.slot_dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!group_.valid()) return -errno;
  events_.Reset(::openat(group_.get(), "cgroup.events", O_RDONLY | O_CLOEXEC));
  if (!events_.valid()) return -errno;
  // The init of the cell clones into it with the identity of B's root.
  return ::fchownat(group_.get(), "cgroup.procs", 1, 1, 0) == 0 ? 0 : -errno;
}

int Runner::StartCell(const wire::Cell& cell, const int* fds, StepClock& clock) {
  int launch[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, launch) != 0)
    return clock.Fail(Step::kCloneCell, -errno);
  UniqueFd launch_here(launch[0]), launch_init(launch[1]);
  const pid_t pid =
      os::Clone3(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC, nullptr, fds_.init_dir, SIGCHLD);
  if (pid < 0) return clock.Fail(Step::kCloneCell, -errno);
  if (pid == 0) {
    RunCell({&shared_, &worker_views, launch_init.get(), fds[0], user_ns_.get(), fds + 1,
             cell.has_dev != 0, cell.has_fork != 0});
  }
  init_pid_ = pid;
  clock.Done(Step::kCloneCell);
  launch_init.Reset();
  wire::Reply made;
  int report[kCellReportFds];
  size_t count = kCellReportFds;
  int error = AwaitReply(launch_here.get(),
                         MonotonicUsec() + static_cast<uint64_t>(cell.timeout_ms) * 1000u, &made,
                         report, &count);
  if (error != 0) return clock.Fail(Step::kMounts, error);
  for (size_t i = 0; i < count; ++i) report_[i].Reset(report[i]);
  clock.Append(made);
  if (made.failed != Step::kNone) return clock.Fail(made.failed, -made.sys_errno);
  const size_t expected = cell.has_fork != 0 ? kCellReportFds : 1;
  return count == expected ? 0 : clock.Fail(Step::kMounts, -EBADMSG);
}

void Runner::Serve(const wire::Cell& cell, const int* fds) {
  wire::Reply reply;
  StepClock clock(&reply);
  int error = PrepareGroup(cell);
  if (error != 0) {
    clock.Fail(Step::kCgroups, error);
  } else {
    clock.Done(Step::kCgroups);
    error = StartCell(cell, fds, clock);
  }
  int out[1 + kCellReportFds] = {cell.has_fork != 0 ? zygote_group_.get() : group_.get()};
  size_t count = 1;
  for (UniqueFd& fd : report_) {
    if (fd.valid()) out[count++] = fd.get();
  }
  // After a failure the worker is over: the daemon sees it by the answer.
  if (os::SendPacketRaw(control_, &reply, sizeof(reply), out, error == 0 ? count : 0, 0) != 0 ||
      error != 0) {
    ::_exit(1);
  }
  for (UniqueFd& fd : report_) fd.Reset();
}

int Runner::StartZygote(const wire::Zygote& request, const int* fds, StepClock& clock) {
  if (zygote_pid_ != 0) {
    os::PidFdSendSignal(zygote_.get(), SIGKILL);
    ::waitpid(zygote_pid_, nullptr, 0);
    zygote_pid_ = 0;
  }
  if (!zygote_group_.valid()) {
    if (::mkdirat(fds_.slot_dir, kZygoteGroup, 0755) != 0)
      return clock.Fail(Step::kCgroups, -errno);
    zygote_group_.Reset(::openat(fds_.slot_dir, kZygoteGroup, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!zygote_group_.valid()) return clock.Fail(Step::kCgroups, -errno);
  }
  int launch[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, launch) != 0)
    return clock.Fail(Step::kCloneZygote, -errno);
  UniqueFd launch_here(launch[0]), launch_there(launch[1]);
  int pidfd = -1;
  const pid_t pid =
      os::Clone3(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET, &pidfd, zygote_group_.get(), SIGCHLD);
  if (pid < 0) return clock.Fail(Step::kCloneZygote, -errno);
  if (pid == 0) RunZygote({&shared_, &worker_views, launch_there.get(), fds});
  zygote_.Reset(pidfd);
  zygote_pid_ = pid;
  clock.Done(Step::kCloneZygote);
  launch_there.Reset();
  wire::Reply made;
  size_t none = 0;
  const int error = AwaitReply(launch_here.get(),
                               MonotonicUsec() + static_cast<uint64_t>(request.timeout_ms) * 1000u,
                               &made, nullptr, &none);
  if (error != 0) return clock.Fail(Step::kMounts, error);
  clock.Append(made);
  return made.failed == Step::kNone ? 0 : clock.Fail(made.failed, -made.sys_errno);
}

// As Serve.
void Runner::ServeZygote(const wire::Zygote& request, const int* fds) {
  wire::Reply reply;
  StepClock clock(&reply);
  const int error = StartZygote(request, fds, clock);
  const int out[wire::kZygoteReplyFds] = {zygote_.get()};
  if (os::SendPacketRaw(control_, &reply, sizeof(reply), out,
                        error == 0 ? wire::kZygoteReplyFds : 0, 0) != 0 ||
      error != 0) {
    ::_exit(1);
  }
}

// -EBUSY while something is in the group.
int Runner::CheckGroup() {
  char text[128];
  const ssize_t size = ::pread(events_.get(), text, sizeof(text) - 1, 0);
  if (size < 0) return -errno;
  text[size] = '\0';
  return std::strstr(text, "populated 0") != nullptr ? 0 : -EBUSY;
}

// The group is empty once the init has been reaped: that waits for all of its pid namespace. What
// has got into it otherwise is killed.
int Runner::EmptyGroup() {
  int error = CheckGroup();
  if (error != -EBUSY) return error;
  group_killed_ = true;
  error = WriteExisting(group_.get(), "cgroup.kill", "1", 1);
  if (error != 0) return error;
  const uint64_t deadline = MonotonicUsec() + kEmptyUsec;
  while (true) {
    error = CheckGroup();
    const uint64_t now = MonotonicUsec();
    if (error != -EBUSY || now >= deadline) return error;
    pollfd item = {events_.get(), POLLPRI, 0};
    ::poll(&item, 1, static_cast<int>((deadline - now) / 1000u + 1));
  }
}

// Takes what has ended. True when the init of the cell was among it. It ends last of the cell, as
// the kernel lets it wait for all that is in its pid namespace, and a fork of the zygote is in
// there until it is taken here.
bool Runner::Reap(int* init_status) {
  bool cell_ended = false;
  while (true) {
    int status = 0;
    const pid_t pid = ::waitpid(-1, &status, WNOHANG);
    if (pid <= 0) return cell_ended;
    if (!WIFEXITED(status) && !WIFSIGNALED(status)) continue;  // stopped: it asked to be traced
    if (pid == init_pid_) {
      *init_status = status;
      cell_ended = true;
    } else if (pid == zygote_pid_) {
      zygote_pid_ = 0;  // the daemon notices when it wants the next fork
    } else {
      wire::OrphanEnd end;
      end.pid = pid;
      end.wait_status = status;
      if (os::SendPacketRaw(control_, &end, sizeof(end), nullptr, 0, 0) != 0) ::_exit(0);
    }
  }
}

void Runner::AwaitEnd(const wire::Cell& cell) {
  wire::CellEnd end;
  end.serial = cell.serial;
  int status = 0;
  while (!Reap(&status)) {
    pollfd items[2] = {{signals_.get(), POLLIN, 0}, {control_, POLLIN, 0}};
    if (::poll(items, 2, -1) < 0 && errno != EINTR) ::_exit(1);
    // While a cell lives there is nothing to be said here: this is end of file, or a mistake.
    if (items[1].revents != 0) ::_exit(0);
    signalfd_siginfo info[4];
    while (::read(signals_.get(), info, sizeof(info)) > 0) {
    }
  }
  end.init_status = status;
  // A group with a zygote is never empty; what a fork may have left there is counted by the daemon.
  if (cell.has_fork == 0) end.cgroup_errno = -EmptyGroup();
  bool renewed = false;
  end.network_errno = -network_.Check(&renewed);
  end.network_renewed = renewed ? 1 : 0;
  if (os::SendPacketRaw(control_, &end, sizeof(end), nullptr, 0, 0) != 0) ::_exit(0);
}

// ---- The runner's start, and the spawner's side of it.

[[noreturn]] void RunRunner(const Shared& shared, const WorkerFds& fds, int sync, int control) {
  wire::Reply reply;
  StepClock clock(&reply);
  ResetSignals();
  AwaitGo(sync);
  clock.Restart();
  Rename(shared, "runner");
  static Runner runner(shared, fds, control);
  UniqueFd user_ns;
  int error = runner.Prepare(clock, &user_ns);
  const int ns = user_ns.get();
  if (os::SendPacketRaw(sync, &reply, sizeof(reply), &ns, error == 0 ? 1 : 0, 0) != 0 ||
      error != 0) {
    ::_exit(1);
  }
  user_ns.Reset();
  char go = 0;
  int dev_mount = -1;
  size_t count = 1;
  if (os::ReceivePacketRaw(sync, &go, 1, &dev_mount, &count, 0) != 1 || count != 1) ::_exit(1);
  reply = {};
  clock.Restart();
  error = runner.BuildStage(dev_mount);
  ::close(dev_mount);
  if (error != 0) clock.Fail(Step::kStage, error);
  clock.Done(Step::kStage);
  if (os::SendPacketRaw(sync, &reply, sizeof(reply), nullptr, 0, 0) != 0 || error != 0) ::_exit(1);
  ::close(sync);
  runner.Loop();
}

int JoinGroups(const wire::Worker& worker, const WorkerFds& fds, pid_t pid) {
  char path[48];
  std::snprintf(path, sizeof(path), "/proc/%d/oom_score_adj", pid);
  int error = WriteExisting(AT_FDCWD, path, kRunnerOomScore, sizeof(kRunnerOomScore) - 1);
  // A host whose root may not lower scores (CAP_SYS_RESOURCE): the runner is still the least of the
  // processes that could be chosen, and its death for want of memory is told as what it is.
  if (error == -EACCES) error = 0;
  char text[16];
  int length = std::snprintf(text, sizeof(text), "%d", pid);
  for (uint32_t i = 0; i < worker.v1_count && error == 0; ++i) {
    if (::write(fds.v1_procs[i], text, static_cast<size_t>(length)) < 0) error = -errno;
  }
  return error;
}

struct WorkerInProgress {
  UniqueFd runner;  // pidfd
  UniqueFd sync;
  UniqueFd control;
  UniqueFd user_ns;
};

int Fork(const Shared& shared, const wire::Worker& worker, const WorkerFds& fds, StepClock& clock,
         WorkerInProgress& made) {
  int sync[2], control[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sync) != 0)
    return clock.Fail(Step::kCloneRunner, -errno);
  made.sync.Reset(sync[0]);
  UniqueFd sync_runner(sync[1]);
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control) != 0)
    return clock.Fail(Step::kCloneRunner, -errno);
  made.control.Reset(control[0]);
  UniqueFd control_runner(control[1]);
  int pidfd = -1;
  pid_t pid = os::Clone3(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS,
                         &pidfd, fds.agent_dir, SIGCHLD);
  if (pid < 0) return clock.Fail(Step::kCloneRunner, -errno);
  if (pid == 0) {
    made.sync.Reset();
    made.control.Reset();
    ::close(shared.control);
    RunRunner(shared, fds, sync_runner.Release(), control_runner.Release());
  }
  made.runner.Reset(pidfd);
  clock.Done(Step::kCloneRunner);
  char map[64];
  std::snprintf(map, sizeof(map), "0 %u 1\n1 %u %u", worker.agent_uid, worker.id_base,
                wire::kIdCount);
  int error = WriteIdMaps(pid, map);
  if (error != 0) return clock.Fail(Step::kMapAgent, error);
  error = JoinGroups(worker, fds, pid);
  if (error != 0) return clock.Fail(Step::kCgroups, error);
  clock.Done(Step::kCgroups);
  return 0;
}

int Conduct(uint64_t deadline, StepClock& clock, WorkerInProgress& made) {
  wire::Reply stage;
  int user_ns = -1;
  size_t count = 1;
  if (!SendGo(made.sync.get())) return clock.Fail(Step::kAgentProc, -EPIPE);
  int error = AwaitReply(made.sync.get(), deadline, &stage, &user_ns, &count);
  if (error == 0 && stage.failed == Step::kNone && count != 1) error = -EBADMSG;
  if (count == 1) made.user_ns.Reset(user_ns);
  if (error != 0) return clock.Fail(Step::kAgentProc, error);
  clock.Append(stage);
  if (stage.failed != Step::kNone) return clock.Fail(stage.failed, -stage.sys_errno);
  UniqueFd dev;
  error = MapDevTemplate(made.user_ns.get(), &dev);
  if (error != 0) return clock.Fail(Step::kInitDev, error);
  const int dev_fd = dev.get();
  if (os::SendPacketRaw(made.sync.get(), "g", 1, &dev_fd, 1, 0) != 0)
    return clock.Fail(Step::kStage, -EPIPE);
  count = 0;
  error = AwaitReply(made.sync.get(), deadline, &stage, nullptr, &count);
  if (error != 0) return clock.Fail(Step::kStage, error);
  clock.Append(stage);
  return stage.failed == Step::kNone ? 0 : clock.Fail(stage.failed, -stage.sys_errno);
}

}  // namespace

void RunnerViewPath(uint32_t index, char path[kViewPathBytes]) {
  std::snprintf(path, kViewPathBytes, "/v%u", index);
}

int MakeWorker(const Shared& shared, const wire::Worker& worker, const int* fds, wire::Reply* reply,
               int out[wire::kWorkerReplyFds]) {
  StepClock clock(reply);
  const WorkerFds named = {fds[0], fds[1], fds[2], fds + wire::kWorkerFixedFds};
  WorkerInProgress made;
  const uint64_t deadline = MonotonicUsec() + static_cast<uint64_t>(worker.timeout_ms) * 1000u;
  int error = Fork(shared, worker, named, clock, made);
  if (error == 0) error = Conduct(deadline, clock, made);
  if (error != 0) {
    if (made.runner.valid()) {
      os::PidFdSendSignal(made.runner.get(), SIGKILL);
      WaitReadable(made.runner.get(), MonotonicUsec() + kReapUsec);
    }
    return error;
  }
  out[0] = made.runner.Release();
  out[1] = made.control.Release();
  out[2] = made.user_ns.Release();
  return 0;
}

}  // namespace dsec::spawn::stage

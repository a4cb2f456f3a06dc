// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "os/fd_passing.h"
#include "os/syscalls.h"
#include "spawn/agent_abi.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

// One exec, from its clone until its end has been delivered.
struct Run {
  uint64_t id = 0;
  pid_t pid = 0;  // 0: free
  int pidfd = 0;  // 0 once InitStarted has been sent
  bool ended = false;
  int wait_status = 0;
  uint64_t user_usec = 0;
  uint64_t system_usec = 0;
  uint64_t max_rss_bytes = 0;
};
Run runs[abi::kMaxExecs];
uint32_t runs_top = 0;  // all at or above are free

// Execs are likelier victims of the host's out-of-memory killer than init, whose death would end
// the sandbox.
constexpr int kOomDistance = 200;
constexpr int kOomMax = 1000;
constexpr int kStarvedRetryMs = 20;

void CloseAll(const int* fds, size_t count) {
  for (size_t i = 0; i < count; ++i) ::close(fds[i]);
}

void ReportFailure(int status, abi::ExecStep step, int error) {
  abi::ExecFailure failure = {step, -error};
  // A full or closed pipe is the agent's own doing.
  if (::write(status, &failure, sizeof(failure)) < 0) return;
}

class Server {
 public:
  explicit Server(const ServeState& state) : state_(state) {}

  [[noreturn]] void Loop() {
    ReadOomScore();
    sigset_t children;
    ::sigemptyset(&children);
    ::sigaddset(&children, SIGCHLD);
    int signals = ::signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals < 0) ::_exit(1);
    while (true) {
      // A full queue tells when there is room again; a lack of memory or of descriptors in flight
      // does not.
      short wanted = !backlog_ ? POLLIN : starved_ ? 0 : POLLOUT;
      pollfd items[2] = {{state_.channel, wanted, 0}, {signals, POLLIN, 0}};
      if (::poll(items, 2, starved_ ? kStarvedRetryMs : -1) < 0 && errno != EINTR) ::_exit(1);
      if (items[1].revents != 0) {
        signalfd_siginfo info[16];
        while (::read(signals, info, sizeof(info)) > 0) {
        }
        Reap();
      }
      if (backlog_) Deliver();
      if (!backlog_ && (items[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) Receive();
    }
  }

 private:
  void ReadOomScore() {
    char text[16] = {};
    if (::pread(state_.oom_score, text, sizeof(text) - 1, 0) <= 0) return;
    int own = std::atoi(text);
    own_length_ = static_cast<size_t>(std::snprintf(own_score_, sizeof(own_score_), "%d", own));
    child_length_ = static_cast<size_t>(std::snprintf(child_score_, sizeof(child_score_), "%d",
                                                      std::min(own + kOomDistance, kOomMax)));
  }

  // A child inherits the score, and init, whose /proc files are closed to everybody in B, can reach
  // only its own. So it takes the children's score for the moment of the clone. Lowering it again
  // to where it began needs no right.
  void SetOomScore(const char* text, size_t length) {
    if (length > 0 && ::pwrite(state_.oom_score, text, length, 0) < 0) return;
  }

  void Receive() {
    union {
      uint32_t type = 0;
      abi::ExecRequest exec;
      abi::SignalAllRequest signal_all;
      abi::MakeFsRequest make_fs;
    } request;
    int fds[abi::kMaxRequestFds];
    size_t count = abi::kMaxRequestFds;
    ssize_t size =
        os::ReceivePacketRaw(state_.channel, &request, sizeof(request), fds, &count, MSG_DONTWAIT);
    if (size == 0 || size == -ECONNRESET) ::_exit(0);  // the agent is gone
    if (size < 0) return;                              // nothing there, or refused as malformed
    auto bytes = static_cast<size_t>(size);
    if (bytes == sizeof(request.exec) && request.type == abi::kExec) {
      Exec(request.exec, fds, count);
    } else if (bytes == sizeof(request.signal_all) && request.type == abi::kSignalAll) {
      if (request.signal_all.signal > 0) ::kill(-1, request.signal_all.signal);
    } else if (bytes == sizeof(request.make_fs) && request.type == abi::kMakeFs) {
      MakeFs(request.make_fs);
    }
    CloseAll(fds, count);
  }

  void Exec(const abi::ExecRequest& request, const int* fds, size_t count) {
    if (count < 2) return;  // no status pipe to answer on
    bool has_cgroup = (request.flags & abi::kHasCgroup) != 0;
    bool has_program = (request.flags & abi::kHasProgram) != 0;
    size_t expected = 5 + (has_cgroup ? 1 : 0) + (has_program ? 1 : 0);
    if (request.extra_fds > abi::kMaxExtraFds || count != expected + request.extra_fds) {
      return ReportFailure(fds[1], abi::ExecStep::kRequest, -EINVAL);
    }
    Run* run = FreeRun();
    if (run == nullptr) return ReportFailure(fds[1], abi::ExecStep::kTable, -EAGAIN);

    SetOomScore(child_score_, child_length_);
    int pidfd = -1;
    pid_t pid = os::Clone3(0, &pidfd, has_cgroup ? fds[5] : -1, SIGCHLD);
    int error = -errno;
    if (pid == 0) {
      RunExecChild({state_.shared, state_.capabilities, fds, static_cast<uint32_t>(count),
                    request.flags, request.extra_fds});
    }
    SetOomScore(own_score_, own_length_);
    if (pid < 0) return ReportFailure(fds[1], abi::ExecStep::kClone, error);
    *run = Run();
    run->id = request.id;
    run->pid = pid;
    run->pidfd = pidfd;
    DeliverRun(*run);
  }

  void MakeFs(const abi::MakeFsRequest& request) {
    char size[24], inodes[16];
    std::snprintf(size, sizeof(size), "%llu", static_cast<unsigned long long>(request.max_bytes));
    std::snprintf(inodes, sizeof(inodes), "%u", request.max_inodes);
    const FsOption options[] = {
        {"source", "none"}, {"size", size}, {"nr_inodes", inodes}, {"mode", "0700"}};
    // tmpfs takes 0 for "no limit".
    bool bounded = request.max_bytes > 0 && request.max_inodes > 0;
    fs_error_ = bounded ? NewFileSystem("tmpfs", options, kDataAttributes, &fs_) : -EINVAL;
    fs_waits_ = true;
    DeliverFs();
  }

  void DeliverFs() {
    abi::InitFs message;
    message.sys_errno = -fs_error_;
    int fd = fs_.get();
    if (!Send(&message, sizeof(message), &fd, fs_error_ == 0 ? 1 : 0)) return;
    fs_.Reset();
    fs_waits_ = false;
  }

  Run* FreeRun() {
    for (uint32_t i = 0; i < runs_top; ++i) {
      if (runs[i].pid == 0) return &runs[i];
    }
    return runs_top < abi::kMaxExecs ? &runs[runs_top++] : nullptr;
  }

  void Reap() {
    while (true) {
      int status;
      rusage usage;
      pid_t pid = ::wait4(-1, &status, WNOHANG, &usage);
      if (pid <= 0) return;
      if (!WIFEXITED(status) && !WIFSIGNALED(status)) continue;  // stopped: it asked to be traced
      for (uint32_t i = 0; i < runs_top; ++i) {
        Run& run = runs[i];
        if (run.pid != pid || run.ended) continue;
        run.ended = true;
        run.wait_status = status;
        run.user_usec = Microseconds(usage.ru_utime);
        run.system_usec = Microseconds(usage.ru_stime);
        run.max_rss_bytes = static_cast<uint64_t>(usage.ru_maxrss) * 1024u;
        DeliverRun(run);
        break;
      }
    }
  }

  static uint64_t Microseconds(const timeval& time) {
    return static_cast<uint64_t>(time.tv_sec) * 1000000u + static_cast<uint64_t>(time.tv_usec);
  }

  // Sends what this run has to say; sets the backlog when the agent's queue is full.
  void DeliverRun(Run& run) {
    if (run.pidfd > 0) {
      abi::InitStarted started;
      started.pid = run.pid;
      started.id = run.id;
      if (!Send(&started, sizeof(started), &run.pidfd, 1)) return;
      ::close(run.pidfd);
      run.pidfd = 0;
    }
    if (run.ended) {
      abi::InitEnded ended;
      ended.pid = run.pid;
      ended.id = run.id;
      ended.wait_status = run.wait_status;
      ended.user_usec = run.user_usec;
      ended.system_usec = run.system_usec;
      ended.max_rss_bytes = run.max_rss_bytes;
      if (!Send(&ended, sizeof(ended), nullptr, 0)) return;
      run.pid = 0;
    }
    while (runs_top > 0 && runs[runs_top - 1].pid == 0) --runs_top;
  }

  void Deliver() {
    backlog_ = starved_ = false;
    for (uint32_t i = 0; i < runs_top && !backlog_; ++i) {
      if (runs[i].pid != 0 && (runs[i].ended || runs[i].pidfd > 0)) DeliverRun(runs[i]);
    }
    if (fs_waits_ && !backlog_) DeliverFs();
  }

  bool Send(const void* data, size_t size, const int* fds, size_t count) {
    int error = os::SendPacketRaw(state_.channel, data, size, fds, count, MSG_DONTWAIT);
    if (error == 0) return true;
    if (error == -EPIPE || error == -ECONNRESET) ::_exit(0);
    backlog_ = true;
    starved_ = error != -EAGAIN;
    return false;
  }

  ServeState state_;
  bool backlog_ = false;  // something waits to be sent
  bool starved_ = false;  // and what it waits for is not room in the queue
  // The one answer to a MakeFsRequest that may be waiting: while something waits no request is
  // taken.
  os::UniqueFd fs_;
  int fs_error_ = 0;
  bool fs_waits_ = false;
  char own_score_[16] = {};
  char child_score_[16] = {};
  size_t own_length_ = 0;
  size_t child_length_ = 0;
};

}  // namespace

void Serve(const ServeState& state) { Server(state).Loop(); }

}  // namespace dsec::spawn::stage

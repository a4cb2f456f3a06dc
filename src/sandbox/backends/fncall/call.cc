// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/call.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "os/fd_passing.h"
#include "os/file.h"
#include "sandbox/backends/fncall/call_files.h"
#include "sandbox/backends/fncall/program.h"
#include "sandbox/backends/fncall/verdict.h"
#include "sandbox/backends/fncall/warm.h"
#include "sandbox/isolators/cgroup_tree.h"
#include "spawn/agent_abi.h"

namespace dsec::sandbox {
namespace {

namespace abi = spawn::abi;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// From SIGKILL to all until nothing is left.
constexpr auto kKillGrace = std::chrono::seconds(5);
// CPU time is looked at no later than it can be used up by all cores, and not more often than this.
constexpr auto kMinLook = milliseconds(5);
// A killed process of the tree may leave the rest waiting for it for ever.
constexpr auto kMaxLook = milliseconds(250);
constexpr size_t kPipeRead = 65536;

// One stream of the program: keeps the first `cap` bytes, counts all.
class Output {
 public:
  Output(os::UniqueFd fd, uint64_t cap) : fd_(std::move(fd)), cap_(cap) {}
  int fd() const { return fd_.get(); }
  bool over() const { return total_ > cap_; }
  // What is there now. False at the end of the stream, or when it is over its cap.
  bool Read() {
    char part[kPipeRead];
    while (fd_.valid() && !over()) {
      const ssize_t n = ::read(fd_.get(), part, sizeof(part));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return true;
      if (n <= 0) {
        fd_.Reset();
        return false;
      }
      total_ += static_cast<uint64_t>(n);
      data_.append(part, std::min<uint64_t>(static_cast<uint64_t>(n), cap_ - data_.size()));
    }
    return false;
  }
  void Give(v1::FnOutput& out) {
    out.set_total(total_);
    out.set_data(std::move(data_));
  }
  uint64_t total() const { return total_; }

 private:
  os::UniqueFd fd_;
  const uint64_t cap_;
  uint64_t total_ = 0;
  std::string data_;
};

class Call {
 public:
  Call(WorkerHost& worker, Cell& cell, const FnRun& run, int cancel)
      : worker_(worker),
        cell_(cell),
        run_(run),
        cancel_(cancel),
        files_(cell.disk.root.get(), cell.disk.upper.get(), worker.owner()) {}

  Result<FnReport> Run();

 private:
  Result<void> Start();
  Result<void> Watch();
  void Feed();
  Result<void> OnChannel();
  Result<void> OnControl();
  Result<void> OnStatus();
  Result<void> OnTime();
  void Ended(int wait_status);
  Result<void> Stop(StoppedBy why);
  Result<void> KillTree();
  Result<bool> EndTree();
  Result<bool> EndForks();
  Result<uint64_t> CpuUsed();
  FnReport TooLarge(const Error& error) const;

  int group() const { return cell_.process.group.get(); }

  WorkerHost& worker_;
  Cell& cell_;
  const FnRun& run_;
  const int cancel_;
  CallFiles files_;
  os::UniqueFd stdin_, status_;
  std::string_view stdin_left_;
  std::optional<Output> stdout_, stderr_;
  MonoTime started_, wall_end_, next_look_, kill_end_;
  uint64_t cpu_before_ = 0;
  uint64_t cpu_used_ = 0;
  bool ended_ = false;
  bool init_gone_ = false;
  std::optional<Error> exec_failure_;
  Evidence evidence_;
  uint64_t wall_usec_ = 0;
};

MonoTime Now() { return Clock::System().Mono(); }

// When all cores together could have used up what is left.
MonoTime::duration UntilLook(microseconds cpu_left) {
  return std::clamp<MonoTime::duration>(
      cpu_left / std::max(std::thread::hardware_concurrency(), 1u), kMinLook, kMaxLook);
}

Result<void> Call::Start() {
  const v1::FnLimits& limits = run_.limits;
  DSEC_TRY_VOID(worker_.groups().Begin(group()));
  DSEC_TRY(cpu_before_, CallGroups::CpuUsec(group()));
  started_ = Now();
  Program program;
  if (cell_.warm.has_value()) {
    DSEC_TRY_VOID(HandOver(*cell_.warm, run_));
    program = std::move(cell_.warm->program);
  } else {
    DSEC_TRY(program, StartProgram(cell_.process.channel.get(), group(), run_.argv, run_.env,
                                   RlimitsOf(limits)));
  }
  wall_end_ = started_ + milliseconds(limits.wall_ms());
  next_look_ = started_ + UntilLook(milliseconds(limits.cpu_ms()));
  status_ = std::move(program.status);
  stdout_.emplace(std::move(program.out), limits.output_bytes());
  stderr_.emplace(std::move(program.err), limits.output_bytes());
  stdin_left_ = run_.stdin_bytes;
  if (!stdin_left_.empty()) stdin_ = std::move(program.in);
  return Ok();
}

void Call::Feed() {
  while (!stdin_left_.empty()) {
    const ssize_t n = ::write(stdin_.get(), stdin_left_.data(), stdin_left_.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) break;  // the program has closed it
    stdin_left_.remove_prefix(static_cast<size_t>(n));
  }
  stdin_.Reset();
}

Result<void> Call::OnChannel() {
  union {
    uint32_t type = 0;
    abi::InitStarted started;
    abi::InitEnded ended;
  } message;
  int fd = -1;
  size_t count = 1;
  const ssize_t size = os::ReceivePacketRaw(cell_.process.channel.get(), &message, sizeof(message),
                                            &fd, &count, MSG_DONTWAIT);
  if (count == 1) ::close(fd);
  if (size == -EAGAIN) return Ok();
  if (size <= 0) {
    // Nothing inside can end init but the kernel for want of memory; with it all of the cell ends.
    init_gone_ = true;
    ended_ = true;
    return Ok();
  }
  if (static_cast<size_t>(size) == sizeof(message.ended) && message.type == abi::kEnded &&
      message.ended.id == kExecId) {
    Ended(message.ended.wait_status);
  }
  return Ok();
}

void Call::Ended(int wait_status) {
  evidence_.wait_status = wait_status;
  ended_ = true;
  wall_usec_ =
      static_cast<uint64_t>(std::chrono::duration_cast<microseconds>(Now() - started_).count());
}

// A fork of the zygote is the runner's child when it ends.
Result<void> Call::OnControl() {
  const auto status = worker_.TakeEnd(*cell_.warm);
  if (!status.ok() && status.error().reason() == "spawn.worker_gone") {
    init_gone_ = ended_ = true;
    return Ok();
  }
  if (!status.ok()) return status.error();
  if (status->has_value()) Ended(**status);
  return Ok();
}

Result<void> Call::OnStatus() {
  abi::ExecFailure failure;
  const ssize_t n = ::read(status_.get(), &failure, sizeof(failure));
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return Ok();
  status_.Reset();
  if (n != static_cast<ssize_t>(sizeof(failure))) return Ok();  // it runs, or was killed before
  ended_ = ended_ || failure.step == abi::ExecStep::kRequest ||
           failure.step == abi::ExecStep::kTable || failure.step == abi::ExecStep::kClone;
  exec_failure_ =
      failure.step == abi::ExecStep::kExec
          ? Error::FromErrno(failure.sys_errno, "fn.exec_failed",
                             fmt::format("execute {}", run_.argv.front()))
          : Error(Code::kUnavailable, "fn.worker_broken",
                  fmt::format("starting a program failed at step {}: {}",
                              abi::ExecStepName(failure.step), std::strerror(failure.sys_errno)))
                .WithErrno(failure.sys_errno);
  return Ok();
}

Result<void> Call::Stop(StoppedBy why) {
  if (evidence_.stopped_by != StoppedBy::kNothing) return Ok();
  evidence_.stopped_by = why;
  kill_end_ = Now() + kKillGrace;
  return KillTree();
}

// The init of the cell kills what a zygote is beside, the kernel all that is in a group otherwise.
// Either way whatever would fork at that moment is killed before it has.
Result<void> Call::KillTree() {
  if (!cell_.warm.has_value()) return worker_.groups().Kill(group());
  abi::SignalAllRequest request;
  request.signal = SIGKILL;
  const int error = os::SendPacketRaw(cell_.process.channel.get(), &request, sizeof(request),
                                      nullptr, 0, MSG_DONTWAIT);
  if (error == 0 || error == -EPIPE || error == -ECONNRESET) return Ok();  // it is all gone then
  return Error(Code::kUnavailable, "fn.worker_broken", "the cell's init takes no request")
      .WithErrno(-error);
}

// When the init of the cell has died, the runner has removed the group: what was read last holds.
Result<uint64_t> Call::CpuUsed() {
  auto now = CallGroups::CpuUsec(group());
  if (now.ok()) {
    cpu_used_ = *now - std::min(*now, cpu_before_);
  } else if (now.error().sys_errno() != ENOENT && now.error().sys_errno() != ENODEV) {
    return std::move(now).error();
  }
  return cpu_used_;
}

Result<void> Call::OnTime() {
  const MonoTime now = Now();
  if (now >= next_look_) {
    DSEC_TRY(const uint64_t used, CpuUsed());
    const uint64_t allowed = run_.limits.cpu_ms() * 1000;
    if (used > allowed) return Stop(StoppedBy::kCpu);
    if (worker_.groups().OomKills() > 0 || worker_.groups().Thrashes())
      return Stop(StoppedBy::kMemory);
    next_look_ = now + UntilLook(microseconds(allowed - used));
  }
  if (now >= wall_end_) return Stop(StoppedBy::kWall);
  return Ok();
}

Result<void> Call::Watch() {
  enum { kChannel, kControl, kStatus, kOut, kErr, kIn, kCancel, kRunner, kItems };
  while (!ended_) {
    const bool stopping = evidence_.stopped_by != StoppedBy::kNothing;
    pollfd items[kItems] = {{cell_.process.channel.get(), POLLIN, 0},
                            {cell_.warm.has_value() ? worker_.control() : -1, POLLIN, 0},
                            {status_.get(), POLLIN, 0},
                            {stdout_->fd(), POLLIN, 0},
                            {stderr_->fd(), POLLIN, 0},
                            {stdin_.get(), POLLOUT, 0},
                            {cancel_, POLLIN, 0},
                            {worker_.runner().fd(), POLLIN, 0}};
    if (stdout_->over()) items[kOut].fd = -1;
    if (stderr_->over()) items[kErr].fd = -1;
    const MonoTime until = stopping ? kill_end_ : std::min(next_look_, wall_end_);
    const auto left = std::max(until - Now(), MonoTime::duration::zero());
    const timespec timeout = {std::chrono::duration_cast<std::chrono::seconds>(left).count(),
                              (left % std::chrono::seconds(1)).count()};
    if (::ppoll(items, kItems, &timeout, nullptr) < 0 && errno != EINTR)
      return os::ErrnoError("fn.poll", "wait for a call");
    // The end first: what the program did before counts, a timer that was late does not.
    if (items[kStatus].revents != 0) DSEC_TRY_VOID(OnStatus());
    if (items[kControl].revents != 0) DSEC_TRY_VOID(OnControl());
    if (!ended_ && items[kChannel].revents != 0) DSEC_TRY_VOID(OnChannel());
    if (ended_) break;
    if (items[kRunner].revents != 0) {
      init_gone_ = ended_ = true;
      break;
    }
    if (items[kCancel].revents != 0)
      return Error(Code::kCancelled, "task.cancelled", "the call was cancelled");
    if (items[kOut].revents != 0) stdout_->Read();
    if (items[kErr].revents != 0) stderr_->Read();
    if (items[kIn].revents != 0) Feed();
    if (stopping) {
      if (Now() < kill_end_) continue;
      return Error(Code::kUnavailable, "fn.worker_broken", "a killed program does not end");
    }
    if (stdout_->over() || stderr_->over()) {
      DSEC_TRY_VOID(Stop(StoppedBy::kOutput));
    } else {
      DSEC_TRY_VOID(OnTime());
    }
  }
  return Ok();
}

// As EndTree, beside a zygote: what is there is counted.
Result<bool> Call::EndForks() {
  constexpr auto kPause = milliseconds(1);
  const MonoTime until = Now() + kKillGrace;
  for (bool killed = false;; std::this_thread::sleep_for(kPause)) {
    // The runner waits for who reads what it says of children that were made its own.
    while (!init_gone_) {
      const auto taken = worker_.TakeAnyEnd();
      if (!taken.ok()) {
        if (taken.error().reason() != "spawn.worker_gone") return taken.error();
        init_gone_ = true;
      } else if (!*taken) {
        break;
      }
    }
    DSEC_TRY(const uint64_t processes, worker_.groups().Processes());
    if (init_gone_ || processes <= worker_.groups().own_processes()) return true;
    if (!killed) DSEC_TRY_VOID(KillTree());
    killed = true;
    if (Now() >= until) return false;
  }
}

// Kills what the program has left running and waits until it is gone. False: it does not go.
Result<bool> Call::EndTree() {
  if (cell_.warm.has_value()) return EndForks();
  auto opened = os::OpenAt(group(), "cgroup.events", O_RDONLY);
  if (!opened.ok() && opened.error().sys_errno() == ENOENT) return true;
  DSEC_TRY(auto events, std::move(opened));
  DSEC_TRY(const bool empty, CgroupTree::IsEmpty(events.get()));
  if (empty) return true;
  DSEC_TRY_VOID(worker_.groups().Kill(group()));
  DyingSlot dying;
  dying.events = std::move(events);
  return CgroupTree::WaitGone(dying, Now() + kKillGrace);
}

// The call's own files are more than its disk limit: the call's fault, told as a program would.
FnReport Call::TooLarge(const Error& error) const {
  constexpr int kExitStatus = 1;
  FnReport report;
  report.step.set_verdict(v1::FN_WRONG_EXIT);
  report.step.set_exit_code(kExitStatus);
  report.step.set_limit("disk");
  report.step.mutable_stderr()->set_data(fmt::format("dsec: {}\n", error.message()));
  report.step.mutable_stderr()->set_total(report.step.stderr().data().size());
  report.missing = run_.fetch;
  return report;
}

Result<FnReport> Call::Run() {
  const v1::FnLimits& limits = run_.limits;
  DSEC_TRY_VOID(cell_.disk.Resize(limits.disk_bytes(), limits.disk_inodes()));
  DSEC_TRY_VOID(
      worker_.groups().SetLimits(limits.memory_bytes(), limits.processes(), cell_.warm_bytes));
  auto written = files_.Write(run_);
  if (!written.ok()) {
    if (written.error().reason() == "fn.files_too_large") return TooLarge(written.error());
    return std::move(written).error();
  }
  DSEC_TRY_VOID(Start());
  DSEC_TRY_VOID(Watch());
  FnReport report;
  DSEC_TRY(const bool gone, EndTree());
  if (!gone) {
    report.dirty = true;
    report.dirt = "processes of a call do not end";
  }
  if (status_.valid()) DSEC_TRY_VOID(OnStatus());
  if (exec_failure_.has_value()) return std::move(*exec_failure_);
  stdout_->Read();
  stderr_->Read();
  DSEC_TRY(evidence_.cpu_usec, CpuUsed());
  DSEC_TRY(const auto counters, worker_.groups().Read(group()));
  if (counters.oom_kills > 0 && !counters.memory_full) {
    return Error(Code::kUnavailable, "fn.worker_broken",
                 "the host was out of memory and killed a process of the call");
  }
  evidence_.oom_kills = counters.oom_kills;
  evidence_.forks_denied = counters.forks_denied;
  evidence_.stdout_total = stdout_->total();
  evidence_.stderr_total = stderr_->total();
  evidence_.disk_full = cell_.disk.Full();
  if (init_gone_) {
    if (counters.oom_kills == 0)
      return Error(Code::kUnavailable, "fn.worker_died", "the call's container has ended");
    evidence_.wait_status = SIGKILL;
    report.dirty = true;
    report.dirt = "its init or runner was killed for memory";
  }
  Judge(evidence_, limits, report.step);
  stdout_->Give(*report.step.mutable_stdout());
  stderr_->Give(*report.step.mutable_stderr());
  report.step.set_wall_usec(wall_usec_);
  report.step.set_cpu_usec(evidence_.cpu_usec);
  report.step.set_memory_peak_bytes(counters.memory_peak);
  if (gone) files_.Fetch(run_, report);
  return report;
}

}  // namespace

Result<FnReport> RunCall(WorkerHost& worker, Cell& cell, const FnRun& run, int cancel) {
  return Call(worker, cell, run, cancel).Run();
}

}  // namespace dsec::sandbox

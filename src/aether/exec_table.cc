// SPDX-License-Identifier: Apache-2.0
#include "aether/exec_table.h"

#include <fcntl.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <charconv>

#include "aether/cgroup.h"
#include "os/file.h"

namespace dsec::aether {
namespace {

constexpr std::chrono::seconds kShutdownKillGrace{2};
constexpr size_t kMaxScanned = 4096;

// Resident pages and name of a process, from the agent's own /proc.
uint64_t ResidentPages(int pid) {
  Result<std::string> text =
      os::ReadFile(AT_FDCWD, fmt::format("/proc/{}/statm", pid).c_str(), 256);
  if (!text.ok()) return 0;
  size_t space = text->find(' ');
  uint64_t pages = 0;
  if (space != std::string::npos) {
    std::from_chars(text->data() + space + 1, text->data() + text->size(), pages);
  }
  return pages;
}

// The pid that the process has inside: the last of NSpid in /proc/<pid>/status.
int InnerPid(int pid) {
  Result<std::string> text =
      os::ReadFile(AT_FDCWD, fmt::format("/proc/{}/status", pid).c_str(), 16384);
  if (!text.ok()) return 0;
  size_t start = text->find("\nNSpid:");
  if (start == std::string::npos) return 0;
  size_t end = text->find('\n', start + 1);
  size_t tab = text->rfind('\t', end);
  int inner = 0;
  if (tab != std::string::npos)
    std::from_chars(text->data() + tab + 1, text->data() + text->size(), inner);
  return inner;
}

}  // namespace

ExecTable::ExecTable(Loop& loop, InitClient& init, WorkerPool& workers, const Options& options)
    : loop_(loop),
      budget_(kOutputBudget),
      counters_(options.code_cgroup, options.memory_cgroup, options.pids_cgroup,
                options.cpu_cgroup),
      leftovers_(loop),
      context_{.loop = loop,
               .init = init,
               .workers = workers,
               .counters = counters_,
               .budget = budget_,
               .leftovers = leftovers_,
               .slot_cgroup = options.slot_cgroup,
               .gate = {},
               .defaults = {},
               .root = {},
               .oom_suspect = {},
               .on_session_quiet = {}},
      sessions_(context_) {
  budget_.set_reclaim([this](size_t bytes) { return Reclaim(bytes); });
  context_.on_session_quiet = [this] {
    if (shutdown_done_) CheckShutdown();
  };
  counters_.WatchOom(loop, [this] { OnMemoryPressure(); }, [this] { OnOomKill(); });
}

Result<Exec*> ExecTable::Find(const std::string& op_id) const {
  auto found = execs_.find(op_id);
  if (found == execs_.end()) {
    return Error(Code::kNotFound, "exec.not_found", "there is no exec with this op_id")
        .WithField("op_id");
  }
  return found->second.get();
}

void ExecTable::Start(v1::ExecRequest request, uint64_t caller, ExecReplyFn reply) {
  v1::PollRequest poll;
  poll.set_wait_ms(request.wait_ms());
  poll.set_max_bytes(request.max_bytes());
  if (auto found = execs_.find(request.op_id()); found != execs_.end()) {
    if (found->second->digest() != request.request_digest()) {
      reply(
          Error(Code::kAlreadyExists, "exec.op_id_reused", "this op_id belongs to another request")
              .WithField("op_id"));
      return;
    }
    found->second->Wait(caller, poll, true, std::move(reply));
    return;
  }
  auto check = [&]() -> Result<void> {
    if (stopping_)
      return Error(Code::kConflict, "sandbox.stopping", "the sandbox is being stopped");
    if (!context_.root.valid()) {
      return Error(Code::kUnavailable, "agent.not_ready", "the sandbox is still being set up");
    }
    if (running_ >= kMaxRunning) {
      return Error(Code::kResourceExhausted, "exec.too_many",
                   fmt::format("{} commands are running already", kMaxRunning));
    }
    DSEC_TRY_VOID(CheckExecRequest(request, context_.defaults));
    if (!request.session().empty()) DSEC_TRY_VOID(sessions_.Check(request));
    return Ok();
  };
  if (Result<void> fit = check(); !fit.ok()) {
    reply(std::move(fit).error());
    return;
  }
  auto made =
      std::make_unique<Exec>(context_, std::move(request), [this](Exec& exec) { OnDone(exec); });
  Exec& exec = *made;
  execs_.emplace(exec.op_id(), std::move(made));
  ++running_;
  if (exec.session_name().empty()) {
    exec.Run();
  } else {
    sessions_.Run(exec);
  }
  exec.Wait(caller, poll, false, std::move(reply));
}

void ExecTable::Poll(const v1::PollRequest& request, uint64_t caller, ExecReplyFn reply) {
  Result<Exec*> exec = Find(request.op_id());
  if (!exec.ok()) return reply(exec.error());
  (*exec)->Wait(caller, request, true, std::move(reply));
}

void ExecTable::WriteStdin(const v1::StdinRequest& request, uint64_t caller,
                           std::function<void(Result<v1::StdinReply>)> reply) {
  Result<Exec*> exec = Find(request.op_id());
  if (!exec.ok()) return reply(exec.error());
  (*exec)->WriteStdin(caller, request, std::move(reply));
}

Result<void> ExecTable::Signal(const v1::SignalRequest& request) {
  DSEC_TRY(Exec * exec, Find(request.op_id()));
  return exec->Signal(request);
}

Result<void> ExecTable::Resize(const v1::ResizeRequest& request) {
  DSEC_TRY(Exec * exec, Find(request.op_id()));
  return exec->Resize(request.tty());
}

Result<void> ExecTable::Ack(const std::string& op_id) {
  auto found = execs_.find(op_id);
  if (found == execs_.end()) return Ok();
  Exec* exec = found->second.get();
  if (!exec->done()) return Error(Code::kConflict, "exec.running", "the command is still running");
  finished_.remove(exec);
  execs_.erase(found);
  return Ok();
}

v1::ListExecsReply ExecTable::List() const {
  v1::ListExecsReply reply;
  for (const auto& [op_id, exec] : execs_) *reply.add_execs() = exec->Summary();
  return reply;
}

v1::ListSessionsReply ExecTable::ListSessions() const {
  v1::ListSessionsReply reply;
  for (v1::SessionInfo& info : sessions_.List()) *reply.add_sessions() = std::move(info);
  return reply;
}

void ExecTable::CloseSession(const std::string& name, std::function<void(Result<void>)> done) {
  sessions_.Close(name, std::move(done));
}

void ExecTable::DropCaller(uint64_t caller) {
  for (const auto& [op_id, exec] : execs_) exec->DropCaller(caller);
}

void ExecTable::OnDone(Exec& exec) {
  if (!exec.session_name().empty()) sessions_.Remove(exec);
  --running_;
  finished_.push_back(&exec);
  if (finished_.size() > kMaxFinished) {
    Exec* oldest = finished_.front();
    finished_.pop_front();
    execs_.erase(execs_.find(oldest->op_id()));
  }
  if (shutdown_done_) CheckShutdown();
}

bool ExecTable::Reclaim(size_t bytes) {
  size_t before = budget_.used();
  for (Exec* exec : finished_) {
    if (before - budget_.used() >= bytes) return true;
    exec->FreeOutput();
  }
  return before - budget_.used() >= bytes;
}

// The kernel will choose the largest process of the sandbox; it does not say which that was, so the
// one that looks so now is remembered, and named if it has died when an exec reports the kill.
void ExecTable::OnMemoryPressure() {
  uint64_t largest = 0;
  int suspect = 0;
  oom_suspect_ = nullptr;
  size_t scanned = 0;
  for (const auto& [op_id, exec] : execs_) {
    for (int pid : exec->Processes()) {
      if (++scanned > kMaxScanned) return;
      uint64_t pages = ResidentPages(pid);
      if (pages <= largest) continue;
      largest = pages;
      suspect = pid;
      oom_suspect_ = exec.get();
    }
  }
  if (suspect == 0) return;
  Result<std::string> comm =
      os::ReadFile(AT_FDCWD, fmt::format("/proc/{}/comm", suspect).c_str(), 64);
  if (!comm.ok()) return;
  std::string name(comm->substr(0, comm->find('\n')));
  context_.oom_suspect = fmt::format("pid {} ({})", InnerPid(suspect), name);
}

void ExecTable::OnOomKill() {
  std::vector<Exec*> candidates;
  for (const auto& [op_id, exec] : execs_) {
    if (exec->group_kill() && exec->state() == Exec::State::kRunning)
      candidates.push_back(exec.get());
  }
  // One counter for the sandbox: where several could be meant, the suspect's exec is, if it is
  // among them.
  bool known = std::ranges::find(candidates, oom_suspect_) != candidates.end();
  for (Exec* exec : candidates) {
    if (!known || exec == oom_suspect_) exec->OnOomKill();
  }
}

void ExecTable::Shutdown(std::chrono::milliseconds grace, std::function<void(Result<void>)> done) {
  if (shutdown_done_) {
    done(Error(Code::kConflict, "sandbox.stopping", "the sandbox is being stopped already"));
    return;
  }
  stopping_ = true;
  shutdown_done_ = std::move(done);
  std::vector<Exec*> running;
  for (const auto& [op_id, exec] : execs_) {
    if (!exec->done()) running.push_back(exec.get());
  }
  for (Exec* exec : running) {
    if (exec->state() == Exec::State::kPending) {
      exec->End("stop", std::chrono::milliseconds(0), SIGKILL);
    } else {
      exec->MarkKilled("stop");
    }
  }
  Result<void> asked = context_.init.SignalAll(grace.count() > 0 ? SIGTERM : SIGKILL);
  auto kill = [this] {
    // Failing means that init is gone, and with it everything else.
    if (!context_.init.SignalAll(SIGKILL).ok()) return CheckShutdown();
    shutdown_timer_ = Timer(loop_, loop_.now() + kShutdownKillGrace, [this] {
      auto call = std::exchange(shutdown_done_, nullptr);
      call(Error(Code::kDeadlineExceeded, "sandbox.stuck",
                 fmt::format("{} commands did not die within {} s of SIGKILL", running_,
                             kShutdownKillGrace.count())));
    });
  };
  shutdown_timer_ =
      Timer(loop_, loop_.now() + (asked.ok() ? grace : std::chrono::milliseconds(0)), kill);
  CheckShutdown();
}

void ExecTable::CheckShutdown() {
  if (running_ > 0 || !sessions_.Quiet()) return;
  leftovers_.WhenGone([this] {
    if (!shutdown_done_ || running_ > 0 || !sessions_.Quiet()) return;
    shutdown_timer_.Reset();
    auto call = std::exchange(shutdown_done_, nullptr);
    call(Ok());
  });
}

void ExecTable::SandboxEnded() {
  stopping_ = true;
  std::vector<Exec*> running;
  for (const auto& [op_id, exec] : execs_) {
    if (!exec->done()) running.push_back(exec.get());
  }
  for (Exec* exec : running) exec->EndWithSandbox();
  if (shutdown_done_) {
    auto call = std::exchange(shutdown_done_, nullptr);
    call(Ok());
  }
}

}  // namespace dsec::aether

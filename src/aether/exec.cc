// SPDX-License-Identifier: Apache-2.0
#include "aether/exec.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "aether/files.h"
#include "aether/pty.h"
#include "os/file.h"
#include "os/memfd.h"
#include "os/syscalls.h"

namespace dsec::aether {
namespace {

constexpr char kBash[] = "/bin/bash";
constexpr char kSh[] = "/bin/sh";
constexpr size_t kSummaryBytes = 256;

v1::ExecSummary Summarize(const v1::ExecRequest& request) {
  v1::ExecSummary summary;
  size_t left = kSummaryBytes;
  for (const std::string& argument : request.argv()) {
    if (left == 0) break;
    std::string_view shown = std::string_view(argument).substr(0, left);
    summary.add_argv(std::string(shown));
    left -= shown.size();
  }
  return summary;
}

Result<std::pair<os::UniqueFd, os::UniqueFd>> MakePipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return Error::FromErrno(errno, "exec.pipe", "make a pipe");
  return std::make_pair(os::UniqueFd(ends[0]), os::UniqueFd(ends[1]));
}

Result<void> SetNonBlocking(int fd) {
  int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    return Error::FromErrno(errno, "exec.pipe", "make a pipe non-blocking");
  }
  return Ok();
}

Result<os::UniqueFd> Duplicate(int fd) {
  os::UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return Error::FromErrno(errno, "exec.pipe", "duplicate a descriptor");
  return copy;
}

}  // namespace

Exec::Exec(ExecContext& context, v1::ExecRequest request, std::function<void(Exec&)> on_done)
    : context_(context),
      request_(std::make_unique<v1::ExecRequest>(std::move(request))),
      on_done_(std::move(on_done)),
      op_id_(request_->op_id()),
      digest_(request_->request_digest()),
      session_name_(request_->session()),
      detached_(request_->detached()),
      group_kill_(request_->group_kill()),
      terminal_(request_->has_tty()),
      timeout_ms_(request_->timeout_ms()),
      summary_(Summarize(*request_)),
      out_(request_->output_bytes() > 0 ? request_->output_bytes() : context.defaults.output_bytes,
           context.budget),
      err_(request_->output_bytes() > 0 ? request_->output_bytes() : context.defaults.output_bytes,
           context.budget) {}

Exec::~Exec() {
  *self_ = nullptr;
  if (init_id_ != 0) context_.init.Forget(init_id_);
}

void Exec::Run() {
  std::string user = request_->user().empty() ? context_.defaults.user : request_->user();
  if (IsPlainRoot(user)) {
    Launch(Identity());
    return;
  }
  Result<void> asked = context_.workers.Run<Result<Identity>>(
      [root = context_.root.get(), user] { return LookUpIdentity(root, user); },
      [self = self_](Result<Identity> identity) {
        Exec* exec = *self;
        if (exec == nullptr || exec->done()) return;
        if (!identity.ok()) {
          exec->SpawnFailed("user", identity.error().sys_errno(), identity.error().message());
        } else {
          exec->Launch(*identity);
        }
      });
  if (!asked.ok()) SpawnFailed("user", EAGAIN, asked.error().message());
}

void Exec::Launch(const Identity& identity) {
  auto fail = [this](const char* step, const Error& error) {
    SpawnFailed(step, error.sys_errno(), error.ToString());
  };
  auto cgroup =
      ExecCgroup::Create(context_.slot_cgroup, fmt::format("x{}", context_.next_cgroup++));
  if (!cgroup.ok()) return fail("cgroup", cgroup.error());
  cgroup_ = std::move(cgroup).value();
  if (group_kill_ && cgroup_->Has("memory.oom.group")) {
    Result<void> set = os::WriteExisting(cgroup_->fd(), "memory.oom.group", "1");
    if (!set.ok()) return fail("cgroup", set.error());
  }
  std::vector<os::UniqueFd> child;
  Result<ProgramFds> fds = terminal_ ? MakeTerminal(identity, child) : MakePipes(child);
  if (!fds.ok()) return fail(terminal_ ? "tty" : "fds", fds.error());
  os::UniqueFd script;
  Result<Program> program = MakeProgram(identity, script);
  if (!program.ok()) return fail("script", program.error());
  fds->cgroup = cgroup_->fd();
  if (script.valid()) fds->extra.push_back(script.get());
  state_ = State::kStarting;
  MarkStart();
  Result<uint64_t> id = context_.init.Start(
      *program, *fds,
      {[this](int pid, os::UniqueFd pidfd) { OnStarted(pid, std::move(pidfd)); },
       [this](spawn::abi::ExecFailure failure) { OnFailed(failure); },
       [this](const InitClient::Ended& end) { OnMainEnded(end); }});
  if (!id.ok()) return fail("init", id.error());
  init_id_ = *id;
}

Result<Program> Exec::MakeProgram(const Identity& identity, os::UniqueFd& script) const {
  Program program;
  program.identity = identity;
  program.env = BuildEnvironment(*request_, context_.defaults, identity);
  program.cwd = request_->cwd().empty() ? context_.defaults.workdir : request_->cwd();
  program.open_files = context_.defaults.open_files;
  program.controlling_tty = terminal_;
  if (!request_->has_script()) {
    program.argv.assign(request_->argv().begin(), request_->argv().end());
    return program;
  }
  // The first command closes the descriptor that the text came by; see spawn/agent_abi.h.
  std::string text = "exec 3<&-;" + request_->script();
  DSEC_TRY(script,
           os::SealedMemfd("script", {reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
  std::string shell = request_->shell();
  if (shell.empty()) shell = tried_sh_ ? kSh : kBash;
  program.argv = {shell, "/proc/self/fd/3"};
  return program;
}

Result<ProgramFds> Exec::MakePipes(std::vector<os::UniqueFd>& child) {
  ProgramFds fds;
  fds.stdin_fd = STDIN_FILENO;  // /dev/null
  if (!request_->stdin().empty() || request_->stdin_open()) {
    DSEC_TRY(auto in, MakePipe());
    fds.stdin_fd = in.first.get();
    child.push_back(std::move(in.first));
    DSEC_TRY_VOID(SetNonBlocking(in.second.get()));
    StartStdin(std::move(in.second), false);
  }
  DSEC_TRY(auto out, MakePipe());
  DSEC_TRY_VOID(SetNonBlocking(out.first.get()));
  fds.stdout_fd = fds.stderr_fd = out.second.get();
  child.push_back(std::move(out.second));
  os::UniqueFd err_end;
  if (!request_->merged()) {
    DSEC_TRY(auto err, MakePipe());
    DSEC_TRY_VOID(SetNonBlocking(err.first.get()));
    fds.stderr_fd = err.second.get();
    child.push_back(std::move(err.second));
    err_end = std::move(err.first);
  }
  StartReaders(std::move(out.first), std::move(err_end));
  return fds;
}

Result<ProgramFds> Exec::MakeTerminal(const Identity& identity, std::vector<os::UniqueFd>& child) {
  DSEC_TRY(Pty pty,
           OpenPty(context_.root.get(), identity, request_->tty().rows(), request_->tty().cols()));
  DSEC_TRY(master_, Duplicate(pty.master.get()));
  DSEC_TRY(os::UniqueFd in, Duplicate(pty.master.get()));
  ProgramFds fds;
  fds.stdin_fd = fds.stdout_fd = fds.stderr_fd = pty.slave.get();
  child.push_back(std::move(pty.slave));
  StartReaders(std::move(pty.master), os::UniqueFd());
  StartStdin(std::move(in), true);
  return fds;
}

void Exec::StartStdin(os::UniqueFd fd, bool terminal) {
  stdin_ = std::make_unique<StdinWriter>(context_.loop, std::move(fd), terminal,
                                         [this] { AnswerStdin(); });
  stdin_->Prime(request_->stdin());
  if (!request_->stdin_open()) stdin_->End();
}

void Exec::StartReaders(os::UniqueFd out, os::UniqueFd err) {
  auto make = [this](os::UniqueFd fd, OutputStream* store) {
    return std::make_unique<StreamReader>(
        context_.loop, context_.gate, std::move(fd), store, [this] { OnData(); },
        [this] {
          OnData();
          TryFinish();
        });
  };
  out_reader_ = make(std::move(out), &out_);
  err_reader_ = err.valid() ? make(std::move(err), &err_) : nullptr;
}

void Exec::MarkStart() {
  started_ = context_.loop.now();
  started_wall_ = Clock::System().Wall();
  counts_at_start_ = context_.counters.Read();
}

void Exec::OnStarted(int pid, os::UniqueFd pidfd) {
  pid_ = pid;
  pidfd_ = std::move(pidfd);
  state_ = State::kRunning;
  request_.reset();
  if (timeout_ms_ > 0) {
    timeout_ = Timer(context_.loop, started_ + std::chrono::milliseconds(timeout_ms_),
                     [this] { StartKill(KillReason::kTimeout, std::chrono::milliseconds(0), 0); });
  }
  AnswerStdin();
  AnswerWaiters(false);
  if (kill_ != KillReason::kNone) KillNow();
}

void Exec::OnFailed(spawn::abi::ExecFailure failure) {
  init_id_ = 0;
  bool no_bash = request_->has_script() && request_->shell().empty() && !tried_sh_ &&
                 failure.step == spawn::abi::ExecStep::kExec && failure.sys_errno == ENOENT;
  if (no_bash && kill_ == KillReason::kNone) {
    tried_sh_ = true;
    stdin_.reset();
    cgroup_.reset();
    Run();
    return;
  }
  if (failure.step == spawn::abi::ExecStep::kClone && failure.sys_errno == EAGAIN) {
    result_.set_pids_limit_hit(true);
  }
  SpawnFailed(spawn::abi::ExecStepName(failure.step), failure.sys_errno, "");
}

void Exec::SpawnFailed(std::string step, int sys_errno, std::string message) {
  if (kill_ == KillReason::kWord) {
    Finish(v1::END_KILLED);
    return;
  }
  const char* text = strerrordesc_np(sys_errno);
  if (message.empty()) message = fmt::format("{}: {}", step, text != nullptr ? text : "failed");
  result_.set_spawn_step(std::move(step));
  result_.set_sys_errno(sys_errno);
  result_.set_message(std::move(message));
  Finish(v1::END_SPAWN_ERROR);
}

void Exec::StartInSession(SessionStart start) {
  MarkStart();
  session_ = std::move(start);
  StartReaders(std::move(session_.out), std::move(session_.err));
  if (session_.in.valid()) StartStdin(std::move(session_.in), false);
  OnStarted(session_.pid, os::UniqueFd());
}

void Exec::EndInSession(const InitClient::Ended& end, std::string note) {
  if (state_ != State::kRunning) return;
  if (!note.empty()) note_ = note_.empty() ? std::move(note) : note_ + "; " + note;
  tree_gone_ = true;
  OnMainEnded(end);
}

void Exec::FailInSession(const char* step, int sys_errno, std::string message) {
  if (!done()) SpawnFailed(step, sys_errno, std::move(message));
}

void Exec::OnMainEnded(const InitClient::Ended& end) {
  init_id_ = 0;
  main_end_ = end;
  state_ = State::kDraining;
  timeout_.Reset();
  // Where the kernel has not told of it before (v1 without an event): the OOM that ends a group
  // ends it now.
  if (group_kill_ && kill_ == KillReason::kNone && OomKills(context_.counters.Read()) > 0) {
    kill_ = KillReason::kOom;
    KillNow();
  }
  if (kill_ != KillReason::kNone && cgroup_ != nullptr) {
    cgroup_->WhenEmpty(context_.loop, [this] { OnTreeGone(); });
  }
  drain_timer_ = Timer(context_.loop, context_.loop.now() + kDrainGrace, [this] {
    drained_ = true;
    TryFinish();
  });
  TryFinish();
}

void Exec::OnTreeGone() {
  tree_gone_ = true;
  kill_timer_.Reset();
  TryFinish();
}

void Exec::End(const std::string& word, std::chrono::milliseconds grace, int first_signal) {
  if (done() || kill_ != KillReason::kNone) return;
  killed_by_ = word;
  StartKill(KillReason::kWord, grace, first_signal);
}

void Exec::OnOomKill() {
  if (group_kill_ && kill_ == KillReason::kNone && !done()) {
    StartKill(KillReason::kOom, std::chrono::milliseconds(0), 0);
  }
}

void Exec::StartKill(KillReason reason, std::chrono::milliseconds grace, int first_signal) {
  if (kill_ != KillReason::kNone || state_ == State::kDraining || done()) return;
  kill_ = reason;
  if (state_ == State::kPending) {
    Finish(v1::END_KILLED);
    return;
  }
  if (state_ == State::kStarting) return;  // OnStarted goes on
  if (grace.count() <= 0) {
    KillNow();
    return;
  }
  SignalTree(first_signal);
  kill_timer_ = Timer(context_.loop, context_.loop.now() + grace, [this] { KillNow(); });
}

std::vector<int> Exec::Processes() const {
  if (session_.processes) return session_.processes();
  return cgroup_ != nullptr ? cgroup_->Processes() : std::vector<int>();
}

// What is forked meanwhile may be missed, and a number may in theory have changed hands within the
// sandbox; SIGKILL goes through the cgroup.
void Exec::SignalTree(int signal) {
  for (int pid : Processes()) ::kill(pid, signal);
}

void Exec::EndWithSandbox() {
  if (done()) return;
  if (out_reader_ != nullptr) out_reader_->ReadWhatIsThere();
  if (err_reader_ != nullptr) err_reader_->ReadWhatIsThere();
  if (init_id_ != 0) context_.init.Forget(std::exchange(init_id_, 0));
  Finish(v1::END_SANDBOX_ENDED);
}

void Exec::KillNow() {
  kill_timer_ = Timer(context_.loop, context_.loop.now() + kKillGrace, [this] { OnKillOverdue(); });
  if (session_.interrupt) {
    session_.interrupt();
    return;
  }
  // Fails only when the directory is gone, which needs it to be empty.
  if (!cgroup_->Kill().ok()) return;
}

void Exec::OnKillOverdue() {
  if (session_.interrupt) return;  // the session has a bound of its own
  note_ = fmt::format("killed, but not dead after {} s", kKillGrace.count());
  tree_gone_ = true;
  if (state_ == State::kRunning) {
    context_.init.Forget(init_id_);
    main_end_.wait_status = SIGKILL;
    state_ = State::kDraining;
    init_id_ = 0;
  }
  drained_ = true;
  TryFinish();
}

void Exec::TryFinish() {
  if (state_ != State::kDraining) return;
  if (kill_ != KillReason::kNone && !tree_gone_) return;
  bool ended = out_reader_->ended() && (err_reader_ == nullptr || err_reader_->ended());
  if (!ended && !drained_) return;
  if (!ended) {
    out_reader_->ReadWhatIsThere();
    if (err_reader_ != nullptr) err_reader_->ReadWhatIsThere();
  }
  Finish(KindOfEnd());
}

bool Exec::CountsOwnOoms() const { return cgroup_ != nullptr && cgroup_->Has("memory.events"); }

uint64_t Exec::OomKills(const Counts& counts) const {
  if (CountsOwnOoms()) return cgroup_->Value("memory.events", "oom_kill");
  return counts.oom_kills - counts_at_start_.oom_kills;
}

v1::EndKind Exec::KindOfEnd() {
  Counts counts = context_.counters.Read();
  uint64_t ooms = OomKills(counts);
  result_.set_oom_events(ooms);
  if (ooms > 0) result_.set_oom_victim(context_.oom_suspect);
  result_.set_pids_limit_hit(counts.forks_denied > counts_at_start_.forks_denied);
  result_.set_throttled_usec(counts.throttled_usec - counts_at_start_.throttled_usec);
  int status = main_end_.wait_status;
  if (WIFEXITED(status)) result_.set_exit_code(WEXITSTATUS(status));
  if (WIFSIGNALED(status)) result_.set_signal(WTERMSIG(status));
  switch (kill_) {
    case KillReason::kTimeout:
      result_.set_limit(timeout_ms_);
      return v1::END_TIMEOUT;
    case KillReason::kWord:
      return v1::END_KILLED;
    case KillReason::kOom:
      result_.set_limit(context_.defaults.memory_limit_bytes);
      return v1::END_OOM_KILLED;
    case KillReason::kNone:
      break;
  }
  if (WIFEXITED(status)) return v1::END_EXITED;
  // On v1 the counter is the sandbox's: each kill explains the end of one main process at most.
  bool unexplained = CountsOwnOoms() || counts.oom_kills > context_.claimed_ooms;
  if (WTERMSIG(status) == SIGKILL && ooms > 0 && unexplained) {
    ++context_.claimed_ooms;
    std::string name = summary_.argv_size() > 0 ? summary_.argv(0) : std::string("shell");
    result_.set_oom_victim(fmt::format("pid {} ({})", pid_, name.substr(0, 64)));
    result_.set_limit(context_.defaults.memory_limit_bytes);
    return v1::END_OOM_KILLED;
  }
  return v1::END_SIGNALED;
}

void Exec::FillUsage() {
  MonoTime now = context_.loop.now();
  CpuTimes cpu;
  if (cgroup_ != nullptr) cpu = cgroup_->Cpu();
  result_.set_user_usec(std::max(cpu.user_usec, main_end_.user_usec));
  result_.set_system_usec(std::max(cpu.system_usec, main_end_.system_usec));
  // Without a v2 memory controller only the largest single process of the tree is known.
  uint64_t peak = cgroup_ != nullptr ? cgroup_->Value("memory.peak", "") : 0;
  result_.set_peak_memory_bytes(peak > 0 ? peak : main_end_.max_rss_bytes);
  result_.set_wall_usec(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(now - started_).count()));
  result_.set_started_unix_ms(static_cast<uint64_t>(UnixMillis(started_wall_)));
}

void Exec::Finish(v1::EndKind kind) {
  result_.set_kind(kind);
  if (kind == v1::END_KILLED) result_.set_killed_by(killed_by_);
  if (!note_.empty() && result_.message().empty()) result_.set_message(note_);
  if (started_ != MonoTime()) FillUsage();
  result_.set_ended_unix_ms(static_cast<uint64_t>(UnixMillis(Clock::System().Wall())));
  bool left = cgroup_ != nullptr && kind != v1::END_SPAWN_ERROR && cgroup_->Populated();
  if (session_.left_processes) left = session_.left_processes();
  result_.set_left_processes(left);
  state_ = State::kDone;
  request_.reset();
  for (Timer* timer : {&timeout_, &kill_timer_, &drain_timer_, &flush_}) timer->Reset();
  if (stdin_ != nullptr) {
    stdin_accepted_ = stdin_->accepted();
    stdin_.reset();
  }
  AnswerStdin();
  AnswerWaiters(true);
  // A terminal is hung up; what still holds a pipe is read on without keeping anything.
  if (terminal_) out_reader_.reset();
  master_.Reset();
  pidfd_.Reset();
  session_ = {};
  context_.leftovers.Add(std::move(cgroup_), std::move(out_reader_), std::move(err_reader_));
  on_done_(*this);
}

Result<void> Exec::Signal(const v1::SignalRequest& request) {
  if (!request.killed_by().empty()) {
    End(request.killed_by(),
        std::chrono::milliseconds(std::min<uint64_t>(request.grace_ms(), 3600000)),
        request.signal() > 0 && request.signal() <= SIGRTMAX ? request.signal() : SIGTERM);
    return Ok();
  }
  if (request.signal() < 1 || request.signal() > SIGRTMAX) {
    return Error(Code::kInvalidArgument, "exec.bad_signal",
                 fmt::format("signal {} is not one of 1 to {}", request.signal(), SIGRTMAX))
        .WithField("signal");
  }
  if (done()) return Error(Code::kConflict, "exec.ended", "the command has ended");
  if (state_ == State::kPending || state_ == State::kStarting) {
    return Error(Code::kConflict, "exec.not_started", "the command has not started yet");
  }
  if (request.tree() || session_.processes) {
    SignalTree(request.signal());
  } else if (os::PidFdSendSignal(pidfd_.get(), request.signal()) != 0 && errno != ESRCH) {
    return Error::FromErrno(errno, "exec.signal", "send the signal");
  }
  return Ok();
}

Result<void> Exec::Resize(const v1::Tty& size) {
  if (!terminal_) return Error(Code::kConflict, "exec.no_tty", "the command has no terminal");
  if (size.rows() == 0 || size.cols() == 0 || size.rows() > 65535 || size.cols() > 65535) {
    return Error(Code::kInvalidArgument, "exec.invalid", "rows and cols must be 1 to 65535")
        .WithField("tty");
  }
  if (!master_.valid()) {
    if (done()) return Error(Code::kConflict, "exec.ended", "the command has ended");
    return Error(Code::kConflict, "exec.not_started", "the command has not started yet");
  }
  return ResizePty(master_.get(), size.rows(), size.cols());
}

void Exec::FreeOutput() {
  out_.Free();
  err_.Free();
}

}  // namespace dsec::aether

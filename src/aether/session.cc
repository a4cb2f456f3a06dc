// SPDX-License-Identifier: Apache-2.0
#include "aether/session.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>

#include "aether/files.h"
#include "aether/fs_identity.h"
#include "os/file.h"
#include "os/process.h"
#include "os/syscalls.h"

namespace dsec::aether {
namespace {

constexpr char kBash[] = "/bin/bash";
constexpr char kSh[] = "/bin/sh";
constexpr size_t kLastWords = 512;

// The first lines of every shell. It comes with the session's directory as descriptor 3. bash moves
// it out of the way of scripts, to 99; a POSIX shell can name only 0 to 9, but saves what a
// redirection hides at 10 and up with close-on-exec: 10 is its script, so 11 is the directory, for
// as long as the redirected group runs.
constexpr char kBoot[] =
    "case ${BASH_VERSION-} in '') { >|/proc/self/fd/11/posix; command . /proc/self/fd/11/in2; } "
    "3<&-; exit;; esac\n"
    "exec 99<&3 3<&-\n"
    "shopt -s expand_aliases\n"
    "trap 'set -T; trap \"return 124\" DEBUG' 60\n"
    ">|/proc/self/fd/99/bash\n";
constexpr char kBashDirectory[] = "/proc/self/fd/99";
constexpr char kPosixDirectory[] = "/proc/self/fd/11";
// After an interrupt: what the trap has set up is taken back.
constexpr char kBashCleanup[] = "\\trap - DEBUG\n\\set +T\n";

std::string Quoted(std::string_view text) {
  std::string quoted = "'";
  for (char byte : text) {
    if (byte == '\'') {
      quoted += "'\\''";
    } else {
      quoted += byte;
    }
  }
  return quoted + "'";
}

std::string ScriptOf(const v1::ExecRequest& request) {
  if (request.has_script()) return request.script();
  std::string script;
  for (const std::string& argument : request.argv()) {
    if (!script.empty()) script += ' ';
    script += Quoted(argument);
  }
  return script;
}

std::string Ending(int wait_status) {
  if (WIFSIGNALED(wait_status))
    return fmt::format("was killed by signal {}", WTERMSIG(wait_status));
  return fmt::format("exited with status {}", WEXITSTATUS(wait_status));
}

CpuTimes Minus(const CpuTimes& a, const CpuTimes& b) {
  return {a.user_usec - b.user_usec, a.system_usec - b.system_usec,
          a.throttled_usec - b.throttled_usec};
}

}  // namespace

Session::Settings Session::Settings::Of(const v1::ExecRequest& request) {
  Settings settings;
  settings.user = request.user();
  settings.cwd = request.cwd();
  settings.shell = request.shell();
  settings.env.assign(request.env().begin(), request.env().end());
  return settings;
}

Session::Session(ExecContext& context, std::string name, int fs, int number, int inotify,
                 std::function<void()> read_events)
    : context_(context),
      name_(std::move(name)),
      fs_(fs),
      inotify_(inotify),
      read_events_(std::move(read_events)),
      dir_name_(fmt::format("s{}", number)),
      made_(Clock::System().Wall()) {}

Session::~Session() {
  if (init_id_ != 0) context_.init.Forget(init_id_);
  DropDirectory();
}

void Session::DropDirectory() {
  if (watch_ >= 0) ::inotify_rm_watch(inotify_, watch_);
  watch_ = -1;
  dir_.Reset();
  // Memory of a private tmpfs, bounded by its size: what cannot be removed is only lost room.
  if (!os::RemoveTree(fs_, dir_name_.c_str()).ok()) return;
}

Result<void> Session::Check(const v1::ExecRequest& request) const {
  if (queue_.size() >= kMaxQueued) {
    return Error(Code::kResourceExhausted, "session.queue_full",
                 fmt::format("{} commands wait for this session already", kMaxQueued));
  }
  if (closed_) return Error(Code::kConflict, "session.closing", "the session is being closed");
  if (state_ == State::kNoShell && queue_.empty()) return Ok();
  Settings wanted = Settings::Of(request);
  const char* changed = nullptr;
  if (!wanted.user.empty() && wanted.user != settings_.user) changed = "user";
  if (!wanted.cwd.empty() && wanted.cwd != settings_.cwd) changed = "cwd";
  if (!wanted.shell.empty() && wanted.shell != settings_.shell) changed = "shell";
  auto same = [](const v1::KeyValue& a, const v1::KeyValue& b) {
    return a.key() == b.key() && a.value() == b.value();
  };
  if (!wanted.env.empty() && !std::ranges::equal(wanted.env, settings_.env, same)) changed = "env";
  if (changed == nullptr) return Ok();
  return Error(Code::kConflict, "session.settings_differ",
               "user, cwd, env and shell are set by the command that starts the session's shell")
      .WithField(changed);
}

void Session::Add(Exec& exec) {
  if (state_ == State::kNoShell && queue_.empty()) {
    Settings wanted = Settings::Of(exec.request());
    bool given =
        !wanted.user.empty() || !wanted.cwd.empty() || !wanted.shell.empty() || !wanted.env.empty();
    if (given || commands_ == 0) settings_ = std::move(wanted);
  }
  queue_.push_back(&exec);
  Next();
}

void Session::Remove(Exec& exec) {
  std::erase(queue_, &exec);
  if (current_ == &exec) current_ = nullptr;
}

v1::SessionInfo Session::Info() const {
  v1::SessionInfo info;
  info.set_name(name_);
  info.set_started_unix_ms(static_cast<uint64_t>(UnixMillis(made_)));
  info.set_execs(commands_);
  info.set_busy(current_ != nullptr || !queue_.empty());
  return info;
}

void Session::Next() {
  if (queue_.empty() || current_ != nullptr || closed_) return;
  if (state_ == State::kNoShell) {
    StartShell();
  } else if (state_ == State::kReady) {
    StartCommand();
  }
}

void Session::StartShell() {
  state_ = State::kStarting;
  std::string user = settings_.user.empty() ? context_.defaults.user : settings_.user;
  if (IsPlainRoot(user)) {
    LaunchShell(Identity());
    return;
  }
  // A session lives until it is closed, and closing waits for this.
  Result<void> asked = context_.workers.Run<Result<Identity>>(
      [root = context_.root.get(), user] { return LookUpIdentity(root, user); },
      [this](Result<Identity> identity) {
        if (closed_) return FailStart("session", ECANCELED, "the session was closed");
        if (!identity.ok())
          return FailStart("user", identity.error().sys_errno(), identity.error().message());
        LaunchShell(*identity);
      });
  if (!asked.ok()) FailStart("user", EAGAIN, asked.error().message());
}

Result<os::UniqueFd> Session::MakeFifo(const char* name, int mode) {
  if (::mkfifoat(dir_.get(), name, 0600) != 0) {
    return Error::FromErrno(errno, "session.channel", fmt::format("make {}", name));
  }
  return os::OpenAt(dir_.get(), name, mode | O_NONBLOCK | O_NOFOLLOW);
}

Result<void> Session::PrepareShell(const Identity& identity) {
  DropDirectory();
  ScopedFsIdentity as(identity.uid, identity.gid);
  DSEC_TRY_VOID(os::MakeDir(fs_, dir_name_.c_str(), 0700));
  DSEC_TRY(dir_, os::OpenAt(fs_, dir_name_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  watch_ = ::inotify_add_watch(inotify_, fmt::format("/proc/self/fd/{}", dir_.get()).c_str(),
                               IN_CREATE | IN_OPEN | IN_ONLYDIR);
  if (watch_ < 0)
    return Error::FromErrno(errno, "session.channel", "watch the session's directory");
  DSEC_TRY(driver_, MakeFifo("in", O_RDWR));
  DSEC_TRY(posix_driver_, MakeFifo("in2", O_RDWR));
  // One page: what is in it is a line that has not been taken yet.
  for (const os::UniqueFd* fifo : {&driver_, &posix_driver_}) {
    if (::fcntl(fifo->get(), F_SETPIPE_SZ, ::getpagesize()) < 0) {
      return Error::FromErrno(errno, "session.channel", "size the driver's pipe");
    }
  }
  if (::write(driver_.get(), kBoot, sizeof(kBoot) - 1) != sizeof(kBoot) - 1) {
    return Error::FromErrno(errno, "session.channel", "write the shell's first lines");
  }
  return Ok();
}

void Session::LaunchShell(const Identity& identity) {
  identity_ = identity;
  kind_ = Kind::kUnknown;
  last_status_ = 0;
  cleanup_due_ = false;
  kill_note_.clear();
  shell_output_ = std::make_unique<OutputStream>(kLastWords, context_.budget);
  auto fail = [this](const char* step, const Error& error) {
    FailStart(step, error.sys_errno(), error.ToString());
  };
  if (Result<void> prepared = PrepareShell(identity); !prepared.ok())
    return fail("session", prepared.error());
  auto cgroup =
      ExecCgroup::Create(context_.slot_cgroup, fmt::format("x{}", context_.next_cgroup++));
  if (!cgroup.ok()) return fail("cgroup", cgroup.error());
  cgroup_ = std::move(cgroup).value();
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return FailStart("fds", errno, "make a pipe");
  os::UniqueFd read_end(ends[0]);
  os::UniqueFd write_end(ends[1]);
  ::fcntl(read_end.get(), F_SETFL, O_NONBLOCK);
  shell_reader_ = std::make_unique<StreamReader>(context_.loop, context_.gate, std::move(read_end),
                                                 shell_output_.get(), nullptr, nullptr);
  v1::ExecRequest environment;
  environment.mutable_env()->Assign(settings_.env.begin(), settings_.env.end());
  Program program;
  program.identity = identity;
  program.env = BuildEnvironment(environment, context_.defaults, identity);
  program.cwd = settings_.cwd.empty() ? context_.defaults.workdir : settings_.cwd;
  program.open_files = context_.defaults.open_files;
  std::string shell = settings_.shell.empty() ? (tried_sh_ ? kSh : kBash) : settings_.shell;
  program.argv = {shell, "/proc/self/fd/3/in"};
  ProgramFds fds;
  fds.stdin_fd = STDIN_FILENO;
  fds.stdout_fd = fds.stderr_fd = write_end.get();
  fds.cgroup = cgroup_->fd();
  fds.extra = {dir_.get()};
  Result<uint64_t> id = context_.init.Start(
      program, fds,
      {[this](int pid, os::UniqueFd pidfd) {
         pid_ = pid;
         pidfd_ = std::move(pidfd);
         agent_pid_ = os::PidOfPidFd(pidfd_.get());
         if (closed_ || !kill_note_.empty()) return KillShell("the session was closed");
         CheckReady();
       },
       [this](spawn::abi::ExecFailure failure) {
         init_id_ = 0;
         bool no_bash = settings_.shell.empty() && !tried_sh_ &&
                        failure.step == spawn::abi::ExecStep::kExec && failure.sys_errno == ENOENT;
         cgroup_.reset();
         if (no_bash) {
           tried_sh_ = true;
           LaunchShell(identity_);
         } else {
           FailStart(spawn::abi::ExecStepName(failure.step), failure.sys_errno, "");
         }
       },
       [this](const InitClient::Ended& end) { OnShellEnded(end); }});
  if (!id.ok()) return fail("init", id.error());
  init_id_ = *id;
  start_timer_ = Timer(context_.loop, context_.loop.now() + kStartLimit, [this] {
    KillShell("the shell did not answer; is it bash or a POSIX shell?");
  });
}

// Ready once both the process and its first sign of life are known, in whatever order they come.
void Session::CheckReady() {
  if (state_ != State::kStarting || pid_ == 0 || kind_ == Kind::kUnknown) return;
  start_timer_.Reset();
  if (kind_ == Kind::kPosix) driver_ = std::move(posix_driver_);
  posix_driver_.Reset();
  state_ = State::kReady;
  next_ = Timer(context_.loop, context_.loop.now(), [this] { Next(); });
}

void Session::FailStart(const char* step, int sys_errno, const std::string& message) {
  state_ = State::kNoShell;
  start_timer_.Reset();
  shell_reader_.reset();
  cgroup_.reset();
  tried_sh_ = false;
  // Each waiting command meets the same failure; a later one tries again.
  std::deque<Exec*> failed = std::exchange(queue_, {});
  for (Exec* exec : failed) exec->FailInSession(step, sys_errno, message);
  CheckClosed();
}

void Session::OnShellEnded(const InitClient::Ended& end) {
  init_id_ = 0;
  pid_ = agent_pid_ = 0;
  pidfd_.Reset();
  start_timer_.Reset();
  interrupt_timer_.Reset();
  driver_watch_.Reset();
  driver_.Reset();
  posix_driver_.Reset();
  shell_reader_->ReadWhatIsThere();
  shell_reader_.reset();
  State was = std::exchange(state_, State::kNoShell);
  // What the shell has left running goes on, as it would on leaving any shell, until the session is
  // closed.
  if (cgroup_ != nullptr) background_.push_back(std::move(cgroup_));
  if (was == State::kStarting) {
    std::string words;
    for (const OutputStream::Piece& piece : shell_output_->Read(0, kLastWords).pieces)
      words += piece.data;
    std::string why = kill_note_.empty()
                          ? "the shell " + Ending(end.wait_status) + " before it could be used"
                          : std::exchange(kill_note_, {});
    return FailStart("session", 0, fmt::format("{}: {}", why, words));
  }
  notice_ = kill_note_.empty()
                ? fmt::format("started a fresh shell: the last one {}", Ending(end.wait_status))
                : fmt::format("started a fresh shell: {}", kill_note_);
  std::string note =
      kill_note_.empty() ? "the session's shell ended with this command" : kill_note_;
  kill_note_.clear();
  if (current_ != nullptr) FinishCommand(end, note);
  for (auto& cgroup : background_) cgroup->WhenEmpty(context_.loop, [this] { CheckClosed(); });
  CheckClosed();
  Next();
}

void Session::StartCommand() {
  Exec* exec = queue_.front();
  queue_.pop_front();
  current_ = exec;
  std::string lines;
  Result<Exec::SessionStart> start = PrepareCommand(exec->request(), lines);
  if (!start.ok()) {
    current_ = nullptr;
    RemoveCommandFiles();
    exec->FailInSession("session", start.error().sys_errno(), start.error().ToString());
    return Next();
  }
  ++commands_;
  state_ = State::kBusy;
  interrupted_ = false;
  marker_sent_ = false;
  left_ = std::make_shared<bool>(false);
  cpu_at_start_ = cgroup_->Cpu();
  start->pid = pid_;
  start->interrupt = [this] { Interrupt(); };
  start->processes = [this] {
    std::vector<int> pids = cgroup_ != nullptr ? cgroup_->Processes() : std::vector<int>();
    std::erase(pids, agent_pid_);
    return pids;
  };
  start->left_processes = [left = left_] { return *left; };
  if (!notice_.empty()) exec->set_note(std::exchange(notice_, {}));
  exec->StartInSession(std::move(*start));
  if (::write(driver_.get(), lines.data(), lines.size()) != static_cast<ssize_t>(lines.size())) {
    return KillShell("the session's shell does not read its commands");
  }
  driver_watch_ =
      FdWatch(context_.loop, driver_.get(), EPOLLOUT, [this](uint32_t) { OnDriverReadable(); });
}

Result<Exec::SessionStart> Session::PrepareCommand(const v1::ExecRequest& request,
                                                   std::string& lines) {
  RemoveCommandFiles();
  ScopedFsIdentity as(identity_.uid, identity_.gid);
  DSEC_TRY_VOID(os::CreateFile(dir_.get(), "cmd", ScriptOf(request), 0600));
  Exec::SessionStart start;
  // Opened before any writer: a reader that has seen none is not told of an end (fifo_open and
  // pipe_poll in fs/pipe.c), and the shell may be slow to come.
  DSEC_TRY(start.out, MakeFifo("o", O_RDONLY));
  if (!request.merged()) {
    DSEC_TRY(start.err, MakeFifo("e", O_RDONLY));
  }
  bool input = request.stdin_open() || !request.stdin().empty();
  os::UniqueFd hold;
  if (request.stdin_open()) {
    DSEC_TRY(start.in, MakeFifo("i", O_RDWR));
    DSEC_TRY(hold, os::OpenAt(dir_.get(), "i", O_RDWR | O_NONBLOCK | O_NOFOLLOW));
  } else if (input) {
    DSEC_TRY_VOID(os::CreateFile(dir_.get(), "i", request.stdin(), 0600));
  }
  const char* directory = kind_ == Kind::kBash ? kBashDirectory : kPosixDirectory;
  if (cleanup_due_) lines += kBashCleanup;
  cleanup_due_ = false;
  if (last_status_ != 0) lines += fmt::format("(\\exit {})\n", last_status_);
  lines +=
      fmt::format("{} {}/cmd >{}/o {}", kind_ == Kind::kBash ? "\\." : "\\command .", directory,
                  directory, request.merged() ? "2>&1" : fmt::format("2>{}/e", directory));
  if (input) lines += fmt::format(" <{}/i", directory);
  lines += fmt::format("\n{{ __dsec() {{ :; }}; }} >|\"{}/s{}.$?\"\n", directory, commands_ + 1);
  // The shell's own opening of `cmd` is told from ours by coming after this.
  read_events_();
  input_hold_ = std::move(hold);
  return start;
}

// The driver's pipe is empty: first the shell has taken the command's second line, so a marker goes
// in; once that is taken too, the shell is back, and the status file, made before, has its event in
// the queue.
void Session::OnDriverReadable() {
  if (!marker_sent_) {
    marker_sent_ = true;
    if (::write(driver_.get(), "\n", 1) != 1)
      KillShell("the session's shell does not read its commands");
    return;
  }
  driver_watch_.Reset();
  read_events_();
  if (state_ == State::kBusy) {
    KillShell("the session's shell took the command but gave no status");
  } else if (state_ == State::kReturning) {
    LeaveBackgroundBehind();
    state_ = State::kReady;
    Next();
  }
}

void Session::OnFileEvent(uint32_t mask, std::string_view name) {
  if ((mask & IN_Q_OVERFLOW) != 0) return KillShell("the session's channel overflowed");
  if ((mask & IN_OPEN) != 0 && name == "cmd") input_hold_.Reset();
  if ((mask & IN_CREATE) == 0) return;
  if (state_ == State::kStarting) {
    if (name == "bash") kind_ = Kind::kBash;
    if (name == "posix") kind_ = Kind::kPosix;
    return CheckReady();
  }
  if (state_ != State::kBusy || !name.starts_with('s')) return;
  uint64_t command = 0;
  int status = 0;
  const char* end = name.data() + name.size();
  auto [dot, failure] = std::from_chars(name.data() + 1, end, command);
  if (failure != std::errc() || dot == end || *dot != '.' || command != commands_) return;
  auto [stop, bad] = std::from_chars(dot + 1, end, status);
  if (bad != std::errc() || stop != end || status < 0 || status > 255) return;
  ::unlinkat(dir_.get(), std::string(name).c_str(), 0);
  OnStatus(status);
}

void Session::OnStatus(int status) {
  state_ = State::kReturning;
  last_status_ = status;
  interrupt_timer_.Reset();
  RemoveCommandFiles();
  InitClient::Ended end;
  end.wait_status = status << 8;  // as an exit with it, wait(2)
  if (!interrupted_ || interrupted_group_ == nullptr) return FinishCommand(end, "");
  cleanup_due_ = true;
  last_status_ = 0;
  // The command's processes are in the cgroup that the shell has left.
  ExecCgroup* cgroup = interrupted_group_;
  cgroup->WhenEmpty(context_.loop, [this, end, cgroup] {
    interrupt_timer_.Reset();
    used_ = Minus(cgroup->Cpu(), cpu_at_start_);
    if (current_ != nullptr) FinishCommand(end, "");
    CheckClosed();
    Next();
  });
  interrupt_timer_ = Timer(context_.loop, context_.loop.now() + kKillGrace, [this, end] {
    if (current_ != nullptr) FinishCommand(end, "killed, but not dead yet");
    Next();
  });
}

void Session::FinishCommand(const InitClient::Ended& end, std::string note) {
  Exec* exec = std::exchange(current_, nullptr);
  interrupted_group_ = nullptr;
  input_hold_.Reset();
  InitClient::Ended full = end;
  CpuTimes used = used_;
  if (!interrupted_) {
    // After the shell's own end its cgroup is the last of the background.
    ExecCgroup& cgroup = cgroup_ != nullptr ? *cgroup_ : *background_.back();
    used = Minus(cgroup.Cpu(), cpu_at_start_);
    *left_ = cgroup.Processes().size() > (cgroup_ != nullptr ? 1u : 0u);
  }
  full.user_usec = used.user_usec;
  full.system_usec = used.system_usec;
  exec->EndInSession(full, std::move(note));
}

// But for that of an interrupted command, which its end is read from.
void Session::RemoveEmptyGroups() {
  std::erase_if(background_, [this](auto& cgroup) {
    return cgroup.get() != interrupted_group_ && !cgroup->Populated() && cgroup->Remove();
  });
}

// Processes that a command has left go on in its cgroup; the shell takes a new one along, so that
// they cannot be hit by what is done to a later command.
void Session::LeaveBackgroundBehind() {
  RemoveEmptyGroups();
  if (cgroup_->Processes().size() <= 1) return;
  auto fresh = ExecCgroup::Create(context_.slot_cgroup, fmt::format("x{}", context_.next_cgroup++));
  if (!fresh.ok() || !(*fresh)->Enter(agent_pid_).ok())
    return;  // then they share one, and a kill hits both
  cgroup_->WhenEmpty(context_.loop, [this] { CheckClosed(); });
  background_.push_back(std::move(cgroup_));
  cgroup_ = std::move(fresh).value();
}

void Session::Interrupt() {
  if (state_ != State::kBusy) return;
  if (kind_ != Kind::kBash) {
    return KillShell(
        "the command was killed and the session's shell with it: only bash can be interrupted");
  }
  auto fresh = ExecCgroup::Create(context_.slot_cgroup, fmt::format("x{}", context_.next_cgroup++));
  if (!fresh.ok() || !(*fresh)->Enter(agent_pid_).ok()) {
    return KillShell("the command could not be killed without the session's shell");
  }
  interrupted_ = true;
  used_ = Minus(cgroup_->Cpu(), cpu_at_start_);
  if (os::PidFdSendSignal(pidfd_.get(), kInterruptSignal) != 0)
    return KillShell("the session's shell is gone");
  background_.push_back(std::move(cgroup_));
  interrupted_group_ = background_.back().get();
  cgroup_ = std::move(fresh).value();
  if (!background_.back()->Kill().ok()) return KillShell("the command could not be killed alone");
  interrupt_timer_ = Timer(context_.loop, context_.loop.now() + kInterruptGrace, [this] {
    KillShell(
        "the session's shell did not stop and was killed with the command; its state is lost");
  });
}

void Session::KillShell(std::string note) {
  if (kill_note_.empty()) kill_note_ = std::move(note);
  if (current_ != nullptr) current_->MarkKilled("session_lost");
  interrupt_timer_.Reset();
  if (cgroup_ != nullptr && !cgroup_->Kill().ok()) return;  // empty: its end is on the way
}

void Session::RemoveCommandFiles() {
  for (const char* name : {"cmd", "o", "e", "i"}) ::unlinkat(dir_.get(), name, 0);
}

void Session::Close(std::function<void()> done) {
  closed_ = std::move(done);
  std::deque<Exec*> waiting = queue_;
  if (current_ != nullptr) waiting.push_back(current_);
  for (Exec* exec : waiting) exec->End("session_closed", std::chrono::milliseconds(0), SIGKILL);
  for (auto& cgroup : background_) {
    if (!cgroup->Kill().ok()) continue;
    cgroup->WhenEmpty(context_.loop, [this] { CheckClosed(); });
  }
  KillShell("the session was closed");
  CheckClosed();
}

void Session::CheckClosed() {
  RemoveEmptyGroups();
  if (!Quiet()) return;
  context_.on_session_quiet();
  if (!closed_ || current_ != nullptr) return;
  auto done = std::exchange(closed_, nullptr);
  done();
}

}  // namespace dsec::aether

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>

#include "aether/exec.h"

namespace dsec::aether {

// chronus: one named shell whose working directory, variables, functions, options and open files
// persist from command to command. How it works, and what a command cannot break:
//
// - The shell reads its script from a FIFO `in` in a directory of a private tmpfs that only the
//   session's processes and the agent can reach (by descriptor: it is mounted nowhere). For
//   each command the agent writes the text to `cmd` and two lines to `in`: one that sources
//   `cmd` with its own output FIFOs, one that makes an empty file named after `$?`, by a
//   redirection of a function definition, which is no simple command: no name is looked up that
//   a function or alias could replace, and no DEBUG or ERR trap runs. The agent sees the file
//   by inotify. Nothing that is printed is ever looked at.
// - `cmd` is sourced, not pasted: unfinished quotes, heredocs and blocks end with it as a
//   syntax error.
// - That the shell has come back for more is seen from the FIFO itself (one page long: it turns
//   writable when all is read). A shell that comes back without a status has lost its way (`set
//   -n`, a closed descriptor) and is replaced, with notice.
// - Each command runs in a cgroup that holds the shell and that command's processes only. To
//   interrupt it the shell is moved out, the cgroup killed, and bash made to return from `cmd`
//   by a trap on kInterruptSignal that turns every further command of it into `return`. Other
//   shells are killed with their command; so is a bash that does not come back in
//   kInterruptGrace. The next command starts a fresh shell, and its result says so.
// - `exit`, `exec program` and errors under `set -e` end the shell as they would anywhere; the
//   result is the shell's end.
//
// Limits: `$?` survives from command to command, `$_` and LINENO do not; a trap on DEBUG does not
// reach into `cmd` unless functrace is set; `set -x` shows commands one level deeper; an RETURN or
// ERR trap also sees the end of `cmd` itself.
class Session {
 public:
  static constexpr int kInterruptSignal = 60;
  static constexpr std::chrono::seconds kInterruptGrace{1};
  static constexpr std::chrono::seconds kStartLimit{10};
  static constexpr size_t kMaxQueued = 32;

  // `read_events` reads all that is there from `inotify` and hands it to OnFileEvent of the
  // sessions.
  Session(ExecContext& context, std::string name, int fs, int number, int inotify,
          std::function<void()> read_events);
  ~Session();

  const std::string& name() const { return name_; }
  int watch() const { return watch_; }
  bool closing() const { return closed_ != nullptr; }
  // No process of it is left.
  bool Quiet() const { return state_ == State::kNoShell && init_id_ == 0 && background_.empty(); }
  // Whether `request` fits this session: settings of the shell cannot change while it lives.
  Result<void> Check(const v1::ExecRequest& request) const;
  // Queues it. `exec` is Removed before it dies.
  void Add(Exec& exec);
  void Remove(Exec& exec);
  v1::SessionInfo Info() const;
  // Kills everything of the session; calls back when nothing is left.
  void Close(std::function<void()> done);
  void OnFileEvent(uint32_t mask, std::string_view name);

 private:
  enum class State {
    kNoShell,
    kStarting,
    kReady,
    kBusy,       // runs a command
    kReturning,  // its status is known, the shell is not back at `in` yet
  };
  enum class Kind { kUnknown, kBash, kPosix };
  // What the shell was started with.
  struct Settings {
    std::string user;
    std::string cwd;
    std::string shell;
    std::vector<v1::KeyValue> env;
    static Settings Of(const v1::ExecRequest& request);
  };

  void Next();
  void StartShell();
  void LaunchShell(const Identity& identity);
  Result<void> PrepareShell(const Identity& identity);
  void CheckReady();
  void OnShellEnded(const InitClient::Ended& end);
  void FailStart(const char* step, int sys_errno, const std::string& message);
  void StartCommand();
  Result<Exec::SessionStart> PrepareCommand(const v1::ExecRequest& request, std::string& lines);
  void OnDriverReadable();
  void OnStatus(int status);
  void FinishCommand(const InitClient::Ended& end, std::string note);
  void RemoveEmptyGroups();
  void LeaveBackgroundBehind();
  void Interrupt();
  void KillShell(std::string note);
  void RemoveCommandFiles();
  void CheckClosed();
  Result<os::UniqueFd> MakeFifo(const char* name, int mode);
  void DropDirectory();

  ExecContext& context_;
  const std::string name_;
  const int fs_;
  const int inotify_;
  const std::function<void()> read_events_;
  const std::string dir_name_;
  os::UniqueFd dir_;
  int watch_ = -1;
  const WallTime made_;
  Identity identity_;
  Settings settings_;
  State state_ = State::kNoShell;
  Kind kind_ = Kind::kUnknown;

  uint64_t init_id_ = 0;
  int pid_ = 0;        // of the shell, inside the sandbox
  int agent_pid_ = 0;  // the same as the agent numbers it
  os::UniqueFd pidfd_;
  std::unique_ptr<ExecCgroup> cgroup_;                 // of the shell and the present command
  std::list<std::unique_ptr<ExecCgroup>> background_;  // of earlier commands
  ExecCgroup* interrupted_group_ = nullptr;  // one of them: of current_, from its interruption on
  os::UniqueFd driver_;  // `in`, or `in2` of a POSIX shell; read-write, so that it never ends
  os::UniqueFd posix_driver_;
  FdWatch driver_watch_;
  bool marker_sent_ = false;
  std::unique_ptr<OutputStream> shell_output_;  // the last words of a shell that cannot work
  std::unique_ptr<StreamReader> shell_reader_;
  Timer start_timer_;
  Timer next_;
  bool tried_sh_ = false;

  std::deque<Exec*> queue_;
  Exec* current_ = nullptr;
  uint64_t commands_ = 0;
  int last_status_ = 0;
  os::UniqueFd input_hold_;  // keeps the input FIFO open until the shell has opened it
  CpuTimes cpu_at_start_;
  CpuTimes used_;               // of an interrupted command
  std::shared_ptr<bool> left_;  // whether the present command has left processes
  bool interrupted_ = false;
  bool cleanup_due_ = false;
  Timer interrupt_timer_;
  std::string notice_;  // for the next result
  std::string kill_note_;
  std::function<void()> closed_;
};

// All sessions of the sandbox, and their private file system.
class Sessions {
 public:
  static constexpr size_t kMaxSessions = 64;

  explicit Sessions(ExecContext& context) : context_(context) {}

  // Whether an exec with this request can be taken.
  Result<void> Check(const v1::ExecRequest& request) const;
  void Run(Exec& exec);
  void Remove(Exec& exec);
  std::vector<v1::SessionInfo> List() const;
  bool Quiet() const {
    return std::ranges::all_of(sessions_, [](const auto& item) { return item.second->Quiet(); });
  }
  // kNotFound "session.not_found".
  void Close(const std::string& name, std::function<void(Result<void>)> done);

 private:
  void Make(const std::string& name);
  void FailWaiting(const Error& error);
  void OnInotify();

  ExecContext& context_;
  os::UniqueFd fs_;
  bool fs_asked_ = false;
  os::UniqueFd inotify_;
  FdWatch inotify_watch_;
  std::deque<Exec*> waiting_;  // for the file system
  std::map<std::string, std::unique_ptr<Session>> sessions_;
  int next_number_ = 1;
};

}  // namespace dsec::aether

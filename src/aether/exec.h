// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "aether/cgroup.h"
#include "aether/counters.h"
#include "aether/exec_request.h"
#include "aether/init_client.h"
#include "aether/leftovers.h"
#include "aether/loop.h"
#include "aether/output_store.h"
#include "aether/pipes.h"
#include "aether/worker_pool.h"
#include "dsec/v1/aether.pb.h"

namespace dsec::aether {

// After the main process has ended, its children may keep the pipes open: output that comes within
// this time still belongs to the exec, then the result stands.
inline constexpr std::chrono::milliseconds kDrainGrace{200};
// Output is answered in one reply with what follows it within this time, so that a short command
// takes one round trip.
inline constexpr std::chrono::milliseconds kCoalesce{5};
// A killed tree that does not die within this time (uninterruptible sleep) is reported as left
// behind.
inline constexpr std::chrono::seconds kKillGrace{3};

using ExecReplyFn = std::function<void(Result<v1::ExecReply>)>;

// What all execs of the sandbox share. Lives as long as the agent.
struct ExecContext {
  Loop& loop;
  InitClient& init;
  WorkerPool& workers;
  Counters& counters;
  MemoryBudget& budget;
  Leftovers& leftovers;
  int slot_cgroup = -1;
  FloodGate gate;
  ExecDefaults defaults;
  os::UniqueFd root;  // the sandbox's root directory; invalid until init is ready
  uint64_t next_cgroup = 1;
  uint64_t claimed_ooms = 0;  // OOM kills that were the end of a main process
  std::string oom_suspect;    // largest process when memory last ran out: "pid 17 (python3)", host
                              // side of the kernel's choice
  std::function<void()> on_session_quiet;  // a session has no process any more
};

class Session;

// One command from its request to the acknowledgement of its result: its output, its input, its
// limits, who waits for it. Either a process tree of its own in a cgroup of its own, or a command
// of a session, whose Session then drives it.
class Exec {
 public:
  enum class State {
    kPending,   // looks up its user, or waits for its turn in a session
    kStarting,  // init has been asked
    kRunning,
    kDraining,  // its main process has ended; output may follow
    kDone,
  };

  // `request` has passed CheckExecRequest. `on_done` is called once, from the loop, when the result
  // stands.
  Exec(ExecContext& context, v1::ExecRequest request, std::function<void(Exec&)> on_done);
  ~Exec();
  Exec(const Exec&) = delete;
  Exec& operator=(const Exec&) = delete;

  // Starts it as a process tree of its own.
  void Run();

  const std::string& op_id() const { return op_id_; }
  const std::string& digest() const { return digest_; }
  const std::string& session_name() const { return session_name_; }
  State state() const { return state_; }
  bool done() const { return state_ == State::kDone; }
  uint64_t kept_bytes() const { return out_.kept() + err_.kept(); }

  // Answers at once if there is something to tell, else when there is or after wait_ms. `caller`
  // names the connection.
  void Wait(uint64_t caller, const v1::PollRequest& poll, bool known, ExecReplyFn reply);
  void DropCaller(uint64_t caller);
  v1::ExecSummary Summary() const;
  // Takes what there is room for, at once or as soon as there is any.
  void WriteStdin(uint64_t caller, const v1::StdinRequest& request,
                  std::function<void(Result<v1::StdinReply>)> reply);
  Result<void> Signal(const v1::SignalRequest& request);
  Result<void> Resize(const v1::Tty& size);
  // Ends it as killed by `word`: SIGTERM to its tree, SIGKILL after the grace, or at once.
  void End(const std::string& word, std::chrono::milliseconds grace, int first_signal);
  // Something of the sandbox was killed for lack of memory, and this exec wants to end then.
  void OnOomKill();
  bool group_kill() const { return group_kill_; }
  std::vector<int> Processes() const;
  // Init is gone, and with it everything in the sandbox.
  void EndWithSandbox();
  // Drops the output to make room; the result stays.
  void FreeOutput();

  // For its Session.
  const v1::ExecRequest& request() const { return *request_; }
  OutputStream& out() { return out_; }
  OutputStream& err() { return err_; }
  struct SessionStart {
    int pid = 0;                      // the shell's
    os::UniqueFd out, err, in;        // reading ends and, if input is open, its writing end
    std::function<void()> interrupt;  // kill the command, keep the shell
    std::function<std::vector<int>()>
        processes;  // the command's, as the agent numbers them, without the shell
    std::function<bool()> left_processes;
  };
  void StartInSession(SessionStart start);
  // Exited by itself or, after an interrupt, given up. `note` goes into the result's message.
  void EndInSession(const InitClient::Ended& end, std::string note);
  // The session cannot run it.
  void FailInSession(const char* step, int sys_errno, std::string message);
  // Its end, which is on the way, is the doing of `word` unless something else has been before.
  void MarkKilled(const std::string& word) {
    if (kill_ != KillReason::kNone) return;
    kill_ = KillReason::kWord;
    killed_by_ = word;
  }
  void set_note(std::string note) { note_ = std::move(note); }

 private:
  enum class KillReason { kNone, kTimeout, kWord, kOom };
  struct Waiter {
    uint64_t caller = 0;
    uint64_t stdout_offset = 0;
    uint64_t stderr_offset = 0;
    uint64_t max_bytes = 0;
    bool known = false;
    bool for_start = false;  // answered once there is a process
    Timer limit;
    ExecReplyFn reply;
  };
  struct StdinWaiter {
    uint64_t caller = 0;
    std::string data;
    bool eof = false;
    Timer limit;
    std::function<void(Result<v1::StdinReply>)> reply;
  };

  void Resolve();
  void Launch(const Identity& identity);
  Result<Program> MakeProgram(const Identity& identity, os::UniqueFd& script) const;
  // The child's ends are left in `child`.
  Result<ProgramFds> MakePipes(std::vector<os::UniqueFd>& child);
  Result<ProgramFds> MakeTerminal(const Identity& identity, std::vector<os::UniqueFd>& child);
  void StartStdin(os::UniqueFd fd, bool terminal);
  void StartReaders(os::UniqueFd out, os::UniqueFd err);
  void MarkStart();
  void OnStarted(int pid, os::UniqueFd pidfd);
  void OnFailed(spawn::abi::ExecFailure failure);
  void OnMainEnded(const InitClient::Ended& end);
  void SpawnFailed(std::string step, int sys_errno, std::string message);
  void StartKill(KillReason reason, std::chrono::milliseconds grace, int first_signal);
  void SignalTree(int signal);
  void KillNow();
  void OnKillOverdue();
  void OnTreeGone();
  void TryFinish();
  void Finish(v1::EndKind kind);
  void FillUsage();
  // Processes killed for lack of memory since the start: of its own cgroup on v2, of the whole
  // sandbox on v1.
  uint64_t OomKills(const Counts& counts) const;
  bool CountsOwnOoms() const;
  v1::EndKind KindOfEnd();
  void OnData();
  void AnswerWaiters(bool all);
  void AnswerStdin();
  v1::ExecReply Reply(const Waiter& waiter) const;
  bool HasNews(const Waiter& waiter) const;

  ExecContext& context_;
  std::unique_ptr<v1::ExecRequest> request_;  // until it has started
  std::function<void(Exec&)> on_done_;
  const std::string op_id_;
  const std::string digest_;
  const std::string session_name_;
  const bool detached_;
  const bool group_kill_;
  const bool terminal_;
  const uint64_t timeout_ms_;
  v1::ExecSummary summary_;  // argv only
  State state_ = State::kPending;

  uint64_t init_id_ = 0;
  int pid_ = 0;
  os::UniqueFd pidfd_;
  os::UniqueFd master_;  // of the terminal
  std::unique_ptr<ExecCgroup> cgroup_;
  SessionStart session_;
  bool tried_sh_ = false;

  OutputStream out_;
  OutputStream err_;
  std::unique_ptr<StreamReader> out_reader_;
  std::unique_ptr<StreamReader> err_reader_;
  std::unique_ptr<StdinWriter> stdin_;
  bool stdin_closed_ = false;
  uint64_t stdin_accepted_ = 0;

  MonoTime started_;
  WallTime started_wall_;
  Counts counts_at_start_;
  Timer timeout_;
  Timer kill_timer_;  // grace between the first signal and SIGKILL, then kKillGrace
  Timer drain_timer_;
  Timer flush_;
  KillReason kill_ = KillReason::kNone;
  std::string killed_by_;
  bool tree_gone_ = false;  // after a kill nothing is left
  bool drained_ = false;
  InitClient::Ended main_end_;
  std::string note_;
  v1::ExecResult result_;
  std::list<Waiter> waiters_;
  std::unique_ptr<StdinWaiter> stdin_waiter_;
  std::shared_ptr<Exec*> self_ =
      std::make_shared<Exec*>(this);  // for callbacks that may come after the end
};

}  // namespace dsec::aether

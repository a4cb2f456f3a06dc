// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>

#include "aether/exec.h"
#include "aether/session.h"

namespace dsec::aether {

// All execs of the sandbox by op_id, from the request to the acknowledgement. The same op_id never
// runs twice while it is known: its result is kept until Ack, or until kMaxFinished later ones have
// ended. The output of unacknowledged execs lives within one memory budget, from which the oldest
// finished output is dropped first, counted as dropped.
class ExecTable {
 public:
  static constexpr size_t kMaxRunning = 512;
  static constexpr size_t kMaxFinished = 2048;
  static constexpr size_t kOutputBudget = 64u << 20;

  struct Options {
    int slot_cgroup = -1;
    int code_cgroup = -1;    // v2 directory slot/code
    int memory_cgroup = -1;  // v1, or -1
    int pids_cgroup = -1;
    int cpu_cgroup = -1;
  };
  ExecTable(Loop& loop, InitClient& init, WorkerPool& workers, const Options& options);

  void SetRoot(os::UniqueFd root) { context_.root = std::move(root); }
  int root() const { return context_.root.get(); }
  void SetDefaults(ExecDefaults defaults) { context_.defaults = std::move(defaults); }
  const ExecDefaults& defaults() const { return context_.defaults; }

  // `caller` names the connection that asks, for DropCaller.
  void Start(v1::ExecRequest request, uint64_t caller, ExecReplyFn reply);
  void Poll(const v1::PollRequest& request, uint64_t caller, ExecReplyFn reply);
  void WriteStdin(const v1::StdinRequest& request, uint64_t caller,
                  std::function<void(Result<v1::StdinReply>)> reply);
  Result<void> Signal(const v1::SignalRequest& request);
  Result<void> Resize(const v1::ResizeRequest& request);
  // Unknown: ok, it has been acknowledged before.
  Result<void> Ack(const std::string& op_id);
  v1::ListExecsReply List() const;
  v1::ListSessionsReply ListSessions() const;
  void CloseSession(const std::string& name, std::function<void(Result<void>)> done);
  void DropCaller(uint64_t caller);

  // SIGTERM to everything in the sandbox, SIGKILL after the grace; calls back when nothing is left,
  // or 2 s after SIGKILL with kDeadlineExceeded "sandbox.stuck". No exec starts from then on.
  void Shutdown(std::chrono::milliseconds grace, std::function<void(Result<void>)> done);
  // The sandbox is over: running execs end as such, and who waits is told.
  void SandboxEnded();

  size_t running() const { return running_; }
  size_t output_bytes() const { return budget_.used(); }

 private:
  void OnDone(Exec& exec);
  bool Reclaim(size_t bytes);
  void OnMemoryPressure();
  void OnOomKill();
  void CheckShutdown();
  Result<Exec*> Find(const std::string& op_id) const;

  Loop& loop_;
  MemoryBudget budget_;
  Counters counters_;
  Leftovers leftovers_;
  ExecContext context_;
  Sessions sessions_;
  std::map<std::string, std::unique_ptr<Exec>, std::less<>> execs_;
  std::list<Exec*> finished_;  // by their end
  size_t running_ = 0;
  const Exec* oom_suspect_ = nullptr;  // only compared
  bool stopping_ = false;
  std::function<void(Result<void>)> shutdown_done_;
  Timer shutdown_timer_;
};

}  // namespace dsec::aether

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/result.h"
#include "os/unique_fd.h"
#include "runtime/async_event.h"
#include "runtime/deadline.h"
#include "runtime/task.h"
#include "sandbox/backends/fncall/worker_host.h"
#include "sandbox/fn_backend.h"

namespace dsec::sandbox {

// One worker with the thread that its life runs on: made, a cell made ahead, a call, the cell
// ended, the next one made, ..., removed. A call is a plain sequence of system calls and waits,
// some of which block; a thread of its own keeps them off the shards without a change of thread at
// each step. Methods may be called from any thread.
class WorkerCore {
 public:
  struct Options {
    NodeParts parts;
    SlotName name;
    HeldLayers layers;
    v1::FnWarm warm;
    v1::FnLimits prepared;  // of cells that are made ahead
  };
  explicit WorkerCore(Options options);
  // Join() has returned.
  ~WorkerCore();

  // Waits until the worker is ready for its first call, or could not be made.
  runtime::Task<void> AwaitReady(runtime::Deadline deadline);
  runtime::Task<FnReport> Run(FnRun run, runtime::Deadline deadline);
  // Kills whatever runs in it and lets the thread remove the worker. Does not wait.
  void Stop();
  // The daemon ends: what would not go is left to the next sweep.
  void Close();
  // A copy of the runner's pidfd; invalid before AwaitReady has succeeded.
  Result<os::UniqueFd> RunnerFd() const;
  const std::string& name() const { return text_; }
  bool finished() const;
  // Until the thread has removed the worker, or after a Close given up.
  void Join();

 private:
  // What somebody waits for on a shard.
  template <typename T>
  struct Delivery {
    explicit Delivery(runtime::Executor home) : executor(std::move(home)) {}
    const runtime::Executor executor;
    runtime::AsyncEvent done;  // of that shard
    std::optional<Result<T>> result;
  };
  struct Job {
    FnRun run;
    runtime::Deadline deadline;
    std::shared_ptr<Delivery<FnReport>> delivery;
  };
  template <typename T>
  static void Deliver(std::shared_ptr<Delivery<T>> to, Result<T> result);

  // Takes back a job that the thread has not begun.
  bool Withdraw(const Delivery<FnReport>& of);
  void Main();
  Result<void> Make();
  Result<void> Prepare(const std::vector<std::string>& devices);
  Result<void> EndCell();
  std::optional<Job> NextJob();
  Result<FnReport> Do(Job& job);
  void Finish(const Error& why);
  void RemoveAll();
  bool stopping() const;

  const Options options_;
  const std::string text_;
  WorkerHost host_;           // of the thread
  std::optional<Cell> cell_;  // of the thread
  os::UniqueFd stop_;         // eventfd: Stop was called
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  bool closing_ = false;
  bool finished_ = false;
  bool ready_ = false;
  std::optional<Error> over_;  // why there will be no further call
  std::shared_ptr<Delivery<void>> waits_ready_;
  std::optional<Job> job_;
  os::UniqueFd runner_fd_;
  std::thread thread_;
};

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "dsec/v1/fncall.pb.h"
#include "fn/fn_metrics.h"
#include "runtime/async_event.h"
#include "runtime/gate.h"
#include "runtime/task.h"
#include "sandbox/fn_backend.h"

namespace dsec::fn {

// What all workers of a pool have in common.
struct PoolSpec {
  v1::FnEnvironment environment;  // in canonical form
  v1::FnWarm warm;
  std::string gpu;  // kind of the devices that its calls hold; empty: none
  std::string Key() const;
};

struct PoolsOptions {
  uint32_t workers_max = 8;    // over all pools
  uint32_t makes_at_once = 4;  // workers being made
  uint32_t queue_max = 4096;   // calls that wait
  uint32_t make_attempts = 6;  // failures in a row until those who wait are told: after 3 s or more
  std::chrono::milliseconds idle{60'000};
  std::chrono::milliseconds make_timeout{30'000};
  std::chrono::milliseconds make_backoff_min{100};
  std::chrono::milliseconds make_backoff_max{10'000};
  // How long calls of a pool without room wait until they may have a worker that another pool
  // still has use for.
  std::chrono::milliseconds patience{250};
  // A worker prepares its next call when one has ended: those that were idle for so long are ready.
  std::chrono::milliseconds settle{20};
};

// Workers and the line in front of them. Every pool has a line of its own; its order is fair
// between principals: as in start-time fair queueing, a call's place is one after the last of its
// principal, so that who sends many stands behind who sends few. A line's head gets an idle worker;
// pools grow while calls wait, up to their maximum and the node's. When the node has no room, the
// worker that was idle longest in another pool gives way, and after `patience` one that its own
// pool would have given to a later call.
//
// All of it happens on one shard, but for Infos.
class Pools {
 public:
  class Pool;
  // Why a worker is ended; the label of the metric.
  enum class Cause { kDirty, kDied, kBroken, kFailed, kIdle, kStolen, kStopped };
  class Lease;

  // `background` counts the coroutines that make and watch workers.
  Pools(PoolsOptions options, const Clock& clock, sandbox::FnBackend& backend,
        runtime::Executor home, runtime::Gate& background, FnMetrics& metrics);
  ~Pools();
  Pools(const Pools&) = delete;
  Pools& operator=(const Pools&) = delete;

  // The pool of `spec`, made if need be; `size` widens what it may be.
  std::shared_ptr<Pool> Find(PoolSpec spec, const v1::FnPoolSize& size);
  // Forgets all sizes that Find was told: the task types have changed.
  void ForgetSizes();

  struct Request {
    std::string principal;
    bool begun = false;  // of a call that has had a worker: goes first and is never refused
  };
  // A worker for one step. kResourceExhausted fn.queue_full; kUnavailable edge.stopping; kNotFound
  // and kInvalidArgument of the environment; kUnavailable fn.no_worker: none can be made now.
  // `held`, the worker of the call's step before or none, goes back as soon as the call is in line,
  // so that no other comes between.
  runtime::Task<Lease> Acquire(std::shared_ptr<Pool> pool, Request request, Lease held,
                               runtime::Deadline deadline);

  // Ends workers that were idle for too long, makes those that a pool's minimum asks for, drops
  // pools without use. To be called now and then.
  void Tick();
  // From now on no call begins: kUnavailable edge.stopping. Those that have begun go on.
  void Refuse();
  // Nobody gets a worker any more; idle ones end, busy ones with their step.
  void Drain();
  // Does nothing more: what lives on the shard is about to be destroyed.
  void LetGo();

  std::vector<v1::FnPoolInfo> Infos() const;  // any thread

 private:
  struct Worker;
  struct Waiter;
  struct Place;
  // What Infos reads.
  struct Figures {
    std::string key;
    v1::FnEnvironment environment;
    std::string warm;
    std::atomic<uint32_t> workers = 0, idle = 0, queued = 0, min = 0, max = 0;
    std::atomic<uint64_t> calls = 0, replaced = 0;
  };
  struct Principal {
    size_t queued = 0;
    uint64_t last_tag = 0;
  };

  MonoTime Now() const { return clock_.Mono(); }
  Result<void> Enter(Pool& pool, Waiter& waiter);
  void Leave(Waiter& waiter);
  void RefuseWaiters(Pool& pool, const Error& error);
  std::shared_ptr<Worker> TakeIdle(Pool& pool);
  void GiveBack(std::shared_ptr<Worker> worker);
  // Takes a worker out of its pool; Retire also lets others use the room.
  void Remove(std::shared_ptr<Worker> worker, Cause cause);
  void Retire(const std::shared_ptr<Worker>& worker, Cause cause);
  // Hands idle workers of the pool to its line, then lets pools grow.
  void Dispatch(Pool& pool);
  void Grow();
  bool WantsWorker(const Pool& pool) const;
  bool MayGrow(const Pool& pool) const;
  std::shared_ptr<Worker> LongestIdleBeside(const Pool& pool) const;
  // True when another pool has waited so long that it gets this worker of `pool`.
  bool GivesWay(const Pool& pool) const;
  // Makes what the minimum of a pool asks for.
  void Refill(const std::shared_ptr<Pool>& pool);
  void StartMake(const std::shared_ptr<Pool>& pool);
  boost::asio::awaitable<void> Make(std::shared_ptr<Pool> pool);
  void MakeFailed(const std::shared_ptr<Pool>& pool, const Error& error);
  boost::asio::awaitable<void> RetryLater(std::shared_ptr<Pool> pool,
                                          std::chrono::milliseconds backoff);
  boost::asio::awaitable<void> Watch(std::shared_ptr<Worker> worker);
  void Show(Pool& pool);

  const PoolsOptions options_;
  const Clock& clock_;
  sandbox::FnBackend& backend_;
  const runtime::Executor home_;
  runtime::Gate& background_;
  FnMetrics& metrics_;
  std::map<std::string, std::shared_ptr<Pool>> pools_;
  std::map<std::string, Principal> principals_;
  size_t queued_ = 0;
  size_t total_ = 0;  // workers, those being made included
  size_t making_ = 0;
  uint64_t next_sequence_ = 0;
  uint64_t served_tag_ = 0;  // of the last who got a worker: the virtual time of the line
  bool refusing_ = false;
  bool draining_ = false;
  bool let_go_ = false;
  runtime::AsyncEvent stopping_;
  mutable std::mutex figures_mutex_;
  std::map<std::string, std::shared_ptr<Figures>> figures_;
};

// A worker for one step. When it is released or dropped the worker goes back to its pool if it is
// clean, else it is ended: a step may still be on it.
class Pools::Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { Release(); }

  explicit operator bool() const { return worker_ != nullptr; }
  sandbox::FnWorker& worker() const;
  bool used_before() const;
  // A step begins, and has ended well.
  void SetUsed();
  void SetClean() { clean_ = true; }
  void Release();
  void Discard(Cause cause);

 private:
  friend class Pools;
  Lease(Pools* pools, std::shared_ptr<Worker> worker);
  Pools* pools_ = nullptr;
  std::shared_ptr<Worker> worker_;
  bool clean_ = true;
};

}  // namespace dsec::fn

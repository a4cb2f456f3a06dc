// SPDX-License-Identifier: Apache-2.0
#include "fn/pools.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/log.h"
#include "fn/digest.h"
#include "fn/environments.h"

namespace dsec::fn {
namespace {

using runtime::Deadline;

// One principal alone may fill four fifths of the line: a share of what is left, so that there is
// always a place for another (dynamic thresholds, as switches share a buffer).
constexpr size_t kShareOfFree = 4;

std::string_view CauseName(Pools::Cause cause) {
  constexpr std::array<std::string_view, 7> kNames = {"dirty", "died",   "broken", "failed",
                                                      "idle",  "stolen", "stopped"};
  return kNames[static_cast<size_t>(cause)];
}

Error Stopping() {
  return Error(Code::kUnavailable, "edge.stopping", "the node is stopping; send the call again");
}

}  // namespace

struct Pools::Worker {
  std::shared_ptr<Pool> pool;
  std::unique_ptr<sandbox::FnWorker> worker;
  runtime::Running watch;
  MonoTime idle_since{};
  uint64_t steps = 0;
  bool ended = false;  // its process is gone
  bool gone = false;   // counted no more
};

// Lives in the frame of Acquire.
struct Pools::Waiter {
  Pool* pool = nullptr;
  std::string principal;
  std::tuple<bool, uint64_t, uint64_t> place;  // not begun, tag, sequence
  MonoTime since{};
  bool in_line = false;
  std::shared_ptr<Worker> given;
  std::optional<Error> refused;
  runtime::AsyncEvent done;
};

class Pools::Pool {
 public:
  PoolSpec spec;
  v1::FnPoolSize size;                       // the widest that Find was told
  std::deque<std::shared_ptr<Worker>> idle;  // longest idle first
  std::map<std::tuple<bool, uint64_t, uint64_t>, Waiter*> line;
  size_t total = 0;  // those being made included
  size_t making = 0;
  uint32_t failures = 0;  // of makes, in a row
  bool backing_off = false;
  std::shared_ptr<Figures> figures;

  size_t Max(const PoolsOptions& options) const {
    return size.max() == 0 ? options.workers_max
                           : std::min<size_t>(size.max(), options.workers_max);
  }
};

// A waiter's place in line, left on destruction (the coroutine may be dropped while it waits).
struct Pools::Place {
  ~Place() { owner.Leave(waiter); }
  Pools& owner;
  Waiter& waiter;
};

std::string PoolSpec::Key() const {
  FieldDigest digest;
  digest.Add(environment.SerializeAsString());
  digest.Add(warm.SerializeAsString());
  digest.Add(gpu);
  return digest.Finish();
}

Pools::Pools(PoolsOptions options, const Clock& clock, sandbox::FnBackend& backend,
             runtime::Executor home, runtime::Gate& background, FnMetrics& metrics)
    : options_(options),
      clock_(clock),
      backend_(backend),
      home_(std::move(home)),
      background_(background),
      metrics_(metrics) {}

Pools::~Pools() = default;

std::shared_ptr<Pools::Pool> Pools::Find(PoolSpec spec, const v1::FnPoolSize& size) {
  std::string key = spec.Key();
  auto& pool = pools_[key];
  if (pool == nullptr) {
    pool = std::make_shared<Pool>();
    pool->figures = std::make_shared<Figures>();
    pool->figures->key = key;
    pool->figures->environment = spec.environment;
    pool->figures->warm = spec.warm.kind();
    pool->spec = std::move(spec);
    pool->size = size;
    const std::lock_guard lock(figures_mutex_);
    figures_.emplace(std::move(key), pool->figures);
  } else {
    // Types that share a pool: what one of them needs holds.
    v1::FnPoolSize& has = pool->size;
    has.set_min(std::max(has.min(), size.min()));
    has.set_max(has.max() == 0 || size.max() == 0 ? 0 : std::max(has.max(), size.max()));
    has.set_idle_ms(std::max(has.idle_ms(), size.idle_ms()));
  }
  Show(*pool);
  return pool;
}

void Pools::ForgetSizes() {
  for (auto& [key, pool] : pools_) {
    // The smallest that there is: the next Find says what is wanted.
    pool->size.Clear();
    pool->size.set_max(1);
    Show(*pool);
  }
}

Result<void> Pools::Enter(Pool& pool, Waiter& waiter) {
  Principal& principal = principals_[waiter.principal];
  const bool begun = !std::get<0>(waiter.place);
  if (!begun) {
    const size_t left = options_.queue_max - std::min<size_t>(queued_, options_.queue_max);
    if (left == 0 || principal.queued >= std::max<size_t>(1, left * kShareOfFree)) {
      if (principal.queued == 0 && principal.last_tag <= served_tag_) {
        principals_.erase(waiter.principal);
      }
      return Error(Code::kResourceExhausted, "fn.queue_full",
                   fmt::format("{} calls wait already, {} of them of this principal", queued_,
                               principal.queued));
    }
  }
  const uint64_t tag = std::max(served_tag_, principal.last_tag) + 1;
  principal.last_tag = tag;
  ++principal.queued;
  ++queued_;
  waiter.pool = &pool;
  waiter.place = {!begun, tag, ++next_sequence_};
  waiter.since = Now();
  waiter.in_line = true;
  pool.line.emplace(waiter.place, &waiter);
  Show(pool);
  return Ok();
}

void Pools::Leave(Waiter& waiter) {
  if (!waiter.in_line) return;
  waiter.in_line = false;
  waiter.pool->line.erase(waiter.place);
  --queued_;
  const auto principal = principals_.find(waiter.principal);
  if (--principal->second.queued == 0 && principal->second.last_tag <= served_tag_) {
    principals_.erase(principal);
  }
  Show(*waiter.pool);
}

runtime::Task<Pools::Lease> Pools::Acquire(std::shared_ptr<Pool> pool, Request request, Lease held,
                                           Deadline deadline) {
  if (draining_ || (refusing_ && !request.begun)) co_return Stopping();
  if (pool->line.empty()) {
    if (auto worker = TakeIdle(*pool)) co_return Lease(this, std::move(worker));
  }
  Waiter waiter;
  waiter.principal = std::move(request.principal);
  std::get<0>(waiter.place) = !request.begun;
  const Place place{*this, waiter};
  DSEC_CO_TRY_VOID(Enter(*pool, waiter));
  held.Release();
  Dispatch(*pool);
  auto woken = co_await waiter.done.Wait(deadline);
  if (!woken.ok()) {
    if (waiter.given != nullptr) GiveBack(std::move(waiter.given));
    co_return std::move(woken).error();
  }
  if (waiter.refused) co_return std::move(*waiter.refused);
  co_return Lease(this, std::move(waiter.given));
}

std::shared_ptr<Pools::Worker> Pools::TakeIdle(Pool& pool) {
  if (pool.idle.empty()) return nullptr;
  // The one used last of those that have settled, so that what is not needed grows old; else the
  // one that had most time to prepare.
  const MonoTime settled = Now() - options_.settle;
  const auto end = std::find_if(pool.idle.begin(), pool.idle.end(),
                                [&](const auto& worker) { return worker->idle_since > settled; });
  const auto chosen = end == pool.idle.begin() ? end : end - 1;
  auto worker = *chosen;
  pool.idle.erase(chosen);
  pool.figures->calls.fetch_add(1, std::memory_order_relaxed);
  Show(pool);
  return worker;
}

void Pools::GiveBack(std::shared_ptr<Worker> worker) {
  if (let_go_ || worker->gone) return;
  Pool& pool = *worker->pool;
  if (worker->ended) return Retire(worker, Cause::kDied);
  if (draining_) return Retire(worker, Cause::kStopped);
  if (GivesWay(pool)) return Retire(worker, Cause::kStolen);
  worker->idle_since = Now();
  pool.idle.push_back(std::move(worker));
  Show(pool);
  Dispatch(pool);
}

void Pools::Remove(std::shared_ptr<Worker> worker, Cause cause) {
  if (std::exchange(worker->gone, true)) return;
  Pool& pool = *worker->pool;
  std::erase(pool.idle, worker);
  --pool.total;
  --total_;
  metrics_.WorkersEnded(CauseName(cause)).Add();
  if (cause <= Cause::kFailed) pool.figures->replaced.fetch_add(1, std::memory_order_relaxed);
  // Watch holds the last reference, or the step that is on it.
  worker->watch.Cancel();
  Show(pool);
}

void Pools::Retire(const std::shared_ptr<Worker>& worker, Cause cause) {
  if (let_go_ || worker->gone) return;
  const std::shared_ptr<Pool> pool = worker->pool;
  Remove(worker, cause);
  Dispatch(*pool);
  Refill(pool);
}

void Pools::Dispatch(Pool& pool) {
  if (let_go_) return;
  while (!pool.line.empty()) {
    auto worker = TakeIdle(pool);
    if (worker == nullptr) break;
    Waiter& waiter = *pool.line.begin()->second;
    if (std::get<0>(waiter.place)) {
      served_tag_ = std::max(served_tag_, std::get<1>(waiter.place));
    }
    Leave(waiter);
    waiter.given = std::move(worker);
    waiter.done.Set();
  }
  Grow();
}

bool Pools::WantsWorker(const Pool& pool) const { return pool.line.size() > pool.making; }

bool Pools::MayGrow(const Pool& pool) const {
  return pool.total < pool.Max(options_) && !pool.backing_off;
}

void Pools::Grow() {
  if (draining_ || let_go_) return;
  while (making_ < options_.makes_at_once) {
    // Of the pools that could use one, that whose head comes first.
    std::shared_ptr<Pool> next;
    for (const auto& [key, pool] : pools_) {
      if (!WantsWorker(*pool) || !MayGrow(*pool)) continue;
      if (total_ >= options_.workers_max && LongestIdleBeside(*pool) == nullptr) continue;
      if (next == nullptr || pool->line.begin()->first < next->line.begin()->first) next = pool;
    }
    if (next == nullptr) return;
    if (total_ >= options_.workers_max) Remove(LongestIdleBeside(*next), Cause::kStolen);
    StartMake(next);
  }
}

std::shared_ptr<Pools::Worker> Pools::LongestIdleBeside(const Pool& pool) const {
  // Of a pool at its minimum only for one that has none at all.
  for (const bool any : {false, true}) {
    if (any && pool.total > 0) break;
    std::shared_ptr<Worker> oldest;
    for (const auto& [key, other] : pools_) {
      if (other.get() == &pool || other->idle.empty()) continue;
      if (!any && other->total <= other->size.min()) continue;
      const auto& candidate = other->idle.front();
      if (oldest == nullptr || candidate->idle_since < oldest->idle_since) oldest = candidate;
    }
    if (oldest != nullptr) return oldest;
  }
  return nullptr;
}

bool Pools::GivesWay(const Pool& pool) const {
  if (total_ < options_.workers_max) return false;
  const MonoTime since = Now() - options_.patience;
  for (const auto& [key, other] : pools_) {
    if (other.get() == &pool || other->making > 0 || !WantsWorker(*other) || !MayGrow(*other)) {
      continue;
    }
    const auto& [place, head] = *other->line.begin();
    const bool first = pool.line.empty() || place < pool.line.begin()->first;
    if (first && head->since <= since) return true;
  }
  return false;
}

void Pools::Refill(const std::shared_ptr<Pool>& pool) {
  if (refusing_ || draining_ || let_go_) return;
  while (pool->total < pool->size.min() && MayGrow(*pool) && total_ < options_.workers_max &&
         making_ < options_.makes_at_once) {
    StartMake(pool);
  }
}

void Pools::StartMake(const std::shared_ptr<Pool>& pool) {
  ++pool->making;
  ++pool->total;
  ++making_;
  ++total_;
  Show(*pool);
  if (runtime::Spawn(background_, home_, Make(pool))) return;
  --pool->making;
  --pool->total;
  --making_;
  --total_;
  draining_ = true;  // the gate is closed
}

boost::asio::awaitable<void> Pools::Make(std::shared_ptr<Pool> pool) {
  const MonoTime start = std::chrono::steady_clock::now();
  sandbox::FnWorkerSpec spec{pool->spec.environment, pool->spec.warm};
  auto made = co_await backend_.MakeWorker(std::move(spec), Deadline::After(options_.make_timeout));
  --pool->making;
  --making_;
  if (!made.ok()) {
    --pool->total;
    --total_;
    Show(*pool);
    MakeFailed(pool, made.error());
    Grow();
    co_return;
  }
  metrics_.workers_made.Add();
  metrics_.worker_make_seconds.Observe(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  pool->failures = 0;
  auto worker = std::make_shared<Worker>();
  worker->pool = pool;
  worker->worker = std::move(made).value();
  worker->watch = runtime::SpawnCancellable(background_, home_, Watch(worker));
  if (!worker->watch) draining_ = true;  // the gate is closed
  GiveBack(std::move(worker));
  Refill(pool);
}

void Pools::MakeFailed(const std::shared_ptr<Pool>& pool, const Error& error) {
  metrics_.make_failures.Add();
  log::Warn(
      "fn.worker_not_made",
      {{"base", pool->spec.environment.base()}, {"failures", pool->failures}, {"error", error}});
  // What is missing will not appear by waiting.
  if (IsLayerError(error)) return RefuseWaiters(*pool, error);
  // Those that fail at the same time count as one.
  if (!std::exchange(pool->backing_off, true)) {
    const auto backoff = std::min<std::chrono::milliseconds>(
        options_.make_backoff_max,
        options_.make_backoff_min * (1ll << std::min(pool->failures, 20u)));
    ++pool->failures;
    (void)runtime::Spawn(background_, home_, RetryLater(pool, backoff));
  }
  // Workers that live, or may come to, will take those who wait.
  if (pool->failures < options_.make_attempts || pool->total > 0) return;
  RefuseWaiters(*pool, Error(Code::kUnavailable, "fn.no_worker",
                             fmt::format("no worker can be made: {}", error.ToString())));
}

boost::asio::awaitable<void> Pools::RetryLater(std::shared_ptr<Pool> pool,
                                               std::chrono::milliseconds backoff) {
  auto stopped = co_await stopping_.Wait(Deadline::After(backoff));
  if (stopped.ok() || let_go_) co_return;
  pool->backing_off = false;
  Grow();
  Refill(pool);
}

boost::asio::awaitable<void> Pools::Watch(std::shared_ptr<Worker> worker) {
  (void)co_await worker->worker->WaitEnd();
  if (let_go_ || worker->gone) co_return;
  worker->ended = true;
  auto& idle = worker->pool->idle;
  if (std::find(idle.begin(), idle.end(), worker) != idle.end()) Retire(worker, Cause::kDied);
}

void Pools::RefuseWaiters(Pool& pool, const Error& error) {
  while (!pool.line.empty()) {
    Waiter& waiter = *pool.line.begin()->second;
    Leave(waiter);
    waiter.refused = error;
    waiter.done.Set();
  }
}

void Pools::Tick() {
  if (draining_ || let_go_) return;
  const MonoTime now = Now();
  for (auto it = pools_.begin(); it != pools_.end();) {
    const std::shared_ptr<Pool> pool = it->second;
    const auto idle =
        pool->size.idle_ms() == 0 ? options_.idle : std::chrono::milliseconds(pool->size.idle_ms());
    while (!pool->idle.empty() && pool->total > pool->size.min() &&
           pool->idle.front()->idle_since + idle <= now) {
      Remove(pool->idle.front(), Cause::kIdle);
    }
    Refill(pool);
    // Held by the map and here alone: nobody can wait for it.
    if (pool->total == 0 && pool->size.min() == 0 && pool.use_count() == 2) {
      const std::lock_guard lock(figures_mutex_);
      figures_.erase(it->first);
      it = pools_.erase(it);
    } else {
      ++it;
    }
  }
  Grow();
}

void Pools::Refuse() {
  refusing_ = true;
  for (const auto& [key, pool] : pools_) {
    // Calls that have begun go on: they are first in line.
    while (!pool->line.empty() && std::get<0>(pool->line.rbegin()->first)) {
      Waiter& waiter = *pool->line.rbegin()->second;
      Leave(waiter);
      waiter.refused = Stopping();
      waiter.done.Set();
    }
  }
}

void Pools::Drain() {
  Refuse();
  draining_ = true;
  stopping_.Set();
  for (const auto& [key, pool] : pools_) {
    RefuseWaiters(*pool, Stopping());
    while (!pool->idle.empty()) Remove(pool->idle.front(), Cause::kStopped);
  }
}

void Pools::LetGo() {
  let_go_ = true;
  for (const auto& [key, pool] : pools_) pool->idle.clear();
}

void Pools::Show(Pool& pool) {
  Figures& figures = *pool.figures;
  const auto idle = static_cast<uint32_t>(pool.idle.size());
  metrics_.idle_workers.Add(static_cast<double>(idle) - figures.idle.exchange(idle));
  figures.workers = static_cast<uint32_t>(pool.total);
  figures.queued = static_cast<uint32_t>(pool.line.size());
  figures.min = pool.size.min();
  figures.max = static_cast<uint32_t>(pool.Max(options_));
  metrics_.queued.Set(static_cast<double>(queued_));
  metrics_.workers.Set(static_cast<double>(total_));
}

std::vector<v1::FnPoolInfo> Pools::Infos() const {
  std::vector<v1::FnPoolInfo> infos;
  const std::lock_guard lock(figures_mutex_);
  for (const auto& [key, figures] : figures_) {
    v1::FnPoolInfo& info = infos.emplace_back();
    info.set_key(figures->key);
    *info.mutable_environment() = figures->environment;
    info.set_warm(figures->warm);
    info.set_workers(figures->workers);
    info.set_idle(figures->idle);
    info.set_queued(figures->queued);
    info.set_min(figures->min);
    info.set_max(figures->max);
    info.set_calls(figures->calls);
    info.set_replaced(figures->replaced);
  }
  return infos;
}

Pools::Lease::Lease(Pools* pools, std::shared_ptr<Worker> worker)
    : pools_(pools), worker_(std::move(worker)) {}

Pools::Lease::Lease(Lease&& other) noexcept
    : pools_(other.pools_), worker_(std::move(other.worker_)), clean_(other.clean_) {}

Pools::Lease& Pools::Lease::operator=(Lease&& other) noexcept {
  std::swap(pools_, other.pools_);
  std::swap(worker_, other.worker_);
  std::swap(clean_, other.clean_);
  return *this;
}

void Pools::Lease::Release() {
  if (worker_ == nullptr) return;
  if (clean_) {
    pools_->GiveBack(std::exchange(worker_, nullptr));
  } else {
    Discard(Cause::kFailed);
  }
}

sandbox::FnWorker& Pools::Lease::worker() const { return *worker_->worker; }

bool Pools::Lease::used_before() const { return worker_->steps > 0; }

void Pools::Lease::SetUsed() {
  ++worker_->steps;
  clean_ = false;
}

void Pools::Lease::Discard(Cause cause) {
  pools_->Retire(worker_, worker_->ended ? Cause::kDied : cause);
  worker_.reset();
}

}  // namespace dsec::fn

// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/container/slot_pool.h"

#include <poll.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "base/log.h"
#include "base/metrics.h"
#include "runtime/async_event.h"

namespace dsec::sandbox {
namespace {

// After a slot could not be made and nobody waits for one.
constexpr auto kBackoff = std::chrono::seconds(1);

bool Alive(const ReadySlot& slot) {
  pollfd item = {slot.process.agent.fd(), POLLIN, 0};
  return ::poll(&item, 1, 0) == 0;
}

}  // namespace

// One Take that found nothing. `event` and `result` belong to the shard of the Take, the rest to
// the pool's mutex.
struct SlotPool::Waiter {
  explicit Waiter(runtime::Executor home) : executor(std::move(home)) {}
  const runtime::Executor executor;
  runtime::AsyncEvent event;
  std::optional<Result<ReadySlot>> result;
  bool gone = false;
};

struct SlotPool::State : std::enable_shared_from_this<State> {
  State(const SlotPoolOptions& opts, Hooks h) : options(opts), hooks(std::move(h)) {}

  // All below: with `mutex` held.
  bool HasWork() { return !dead.empty() || (Wanted() && !free.empty()); }
  bool Wanted() {
    const size_t coming = ready.size() + making;
    if (coming >= options.ready) filling = false;
    if (coming <= options.ready / 2) filling = true;
    return waiters.size() > coming || (filling && waiters.size() + options.ready > coming);
  }
  SlotName NewName(SlotKind kind) {
    const uint32_t index = free.front();
    free.pop_front();
    const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(
        options.clock->Wall().time_since_epoch());
    generation = std::max(generation + 1, static_cast<uint64_t>(micros.count()));
    const SlotName name{index, generation, kind};
    owner[index] = name;
    return name;
  }
  void Free(const SlotName& name) {
    const auto it = owner.find(name.index);
    if (it != owner.end() && it->second == name) {
      owner.erase(it);
    } else if (foreign.erase(name) == 0) {
      return;
    }
    const auto other = foreign.lower_bound({name.index, 0});
    if (owner.contains(name.index) || (other != foreign.end() && other->index == name.index))
      return;
    // The one that has been free for longest is used next.
    if (name.index < options.indices) free.push_back(name.index);
    wake.notify_all();
  }
  void Give(Result<ReadySlot> slot);
  std::optional<ReadySlot> TakeReady();
  Error Full() const {
    return Error(Code::kResourceExhausted, "capacity.slots",
                 fmt::format("all {} slots of this node are taken", options.indices));
  }
  void RefuseIfFull() {
    if (!free.empty() || making > 0 || !dead.empty()) return;
    while (!waiters.empty() && ready.empty()) {
      Give(Full());
    }
  }

  const SlotPoolOptions options;
  const Hooks hooks;
  mutable std::mutex mutex;
  std::condition_variable wake;
  bool closing = false;
  std::deque<uint32_t> free;
  std::map<uint32_t, SlotName> owner;
  std::set<SlotName> foreign;
  uint64_t generation = 0;
  std::deque<ReadySlot> ready;
  std::deque<ReadySlot> dead;  // ended while they waited
  std::deque<std::shared_ptr<Waiter>> waiters;
  size_t making = 0;
  bool filling = true;  // from half full or less until full
  std::vector<std::thread> threads;
};

// To the oldest Take; a slot that nobody waits for goes into the pool.
void SlotPool::State::Give(Result<ReadySlot> slot) {
  if (waiters.empty()) {
    if (slot.ok()) ready.push_back(std::move(*slot));
    return;
  }
  const std::shared_ptr<Waiter> waiter = std::move(waiters.front());
  waiters.pop_front();
  boost::asio::post(waiter->executor,
                    [self = shared_from_this(), waiter, slot = std::move(slot)]() mutable {
                      std::unique_lock lock(self->mutex);
                      if (waiter->gone) {
                        if (slot.ok()) self->Give(std::move(slot));
                        return;
                      }
                      lock.unlock();
                      waiter->result.emplace(std::move(slot));
                      waiter->event.Set();
                    });
}

SlotPool::SlotPool(const SlotPoolOptions& options, Hooks hooks, const std::vector<SlotName>& found)
    : state_(std::make_shared<State>(options, std::move(hooks))) {
  std::set<uint32_t> taken;
  for (const SlotName& name : found) {
    state_->foreign.insert(name);
    state_->generation = std::max(state_->generation, name.generation);
    taken.insert(name.index);
  }
  for (uint32_t index = 0; index < options.indices; ++index) {
    if (!taken.contains(index)) state_->free.push_back(index);
  }
  for (uint32_t i = 0; i < std::max(options.threads, 1u); ++i) {
    state_->threads.emplace_back([state = state_] { RunMaker(state); });
  }
}

SlotPool::~SlotPool() {
  std::deque<ReadySlot> left;
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  left.swap(state_->ready);
  left.insert(left.end(), std::move_iterator(state_->dead.begin()),
              std::move_iterator(state_->dead.end()));
  state_->dead.clear();
  for (const ReadySlot& slot : left) {
    const auto removed = state_->hooks.remove(slot.name);
    if (!removed.ok())
      log::Warn("slot.remove_failed", {{"slot", slot.name.str()}, {"error", removed.error()}});
  }
}

void SlotPool::RunMaker(const std::shared_ptr<State>& state) {
  metrics::Registry& registry = metrics::Registry::Global();
  metrics::Histogram& seconds = registry.GetHistogram(
      "dsec_slot_make_seconds", "Time to make one slot", metrics::LatencyBounds());
  metrics::Counter& failures =
      registry.GetCounter("dsec_slot_failures_total", "Slots that could not be made");
  metrics::Gauge& ready = registry.GetGauge("dsec_slots_ready", "Slots made ahead of use");
  // Frees the index when nothing is left; else it stays taken, as a foreign one that a sweep looks
  // after.
  const auto discard = [&](std::unique_lock<std::mutex>& lock, const SlotName& name) {
    lock.unlock();
    const auto removed = state->hooks.remove(name);
    lock.lock();
    if (removed.ok()) {
      state->Free(name);
      return;
    }
    log::Warn("slot.remove_failed", {{"slot", name.str()}, {"error", removed.error()}});
    state->owner.erase(name.index);
    state->foreign.insert(name);
  };

  std::unique_lock lock(state->mutex);
  while (true) {
    state->RefuseIfFull();
    ready.Set(static_cast<double>(state->ready.size()));
    state->wake.wait(lock, [&] { return state->closing || state->HasWork(); });
    if (state->closing) return;
    if (!state->dead.empty()) {
      ReadySlot slot = std::move(state->dead.front());
      state->dead.pop_front();
      discard(lock, slot.name);
      continue;
    }
    const SlotName name = state->NewName(SlotKind::kSandbox);
    ++state->making;
    lock.unlock();
    const MonoTime start = Clock::System().Mono();
    auto made = state->hooks.make(name);
    if (!made.ok() && made.error().code() == Code::kUnavailable) {
      // The spawner has died, and starts anew with the next request.
      log::Warn("slot.make_failed", {{"slot", name.str()}, {"error", made.error()}});
      if (state->hooks.remove(name).ok()) made = state->hooks.make(name);
    }
    lock.lock();
    if (made.ok()) {
      --state->making;
      seconds.Observe(std::chrono::duration<double>(Clock::System().Mono() - start).count());
      state->Give(std::move(made));
      continue;
    }
    failures.Add();
    log::Warn("slot.make_failed", {{"slot", name.str()}, {"error", made.error()}});
    discard(lock, name);
    --state->making;  // only now: until its index is free again the node is not full
    if (!state->waiters.empty()) {
      state->Give(std::move(made));
    } else {
      state->wake.wait_for(lock, kBackoff,
                           [&] { return state->closing || !state->waiters.empty(); });
    }
  }
}

std::optional<ReadySlot> SlotPool::State::TakeReady() {
  std::optional<ReadySlot> slot;
  while (!ready.empty() && !slot.has_value()) {
    if (Alive(ready.front())) {
      slot = std::move(ready.front());
    } else {
      dead.push_back(std::move(ready.front()));
    }
    ready.pop_front();
  }
  wake.notify_all();
  return slot;
}

std::optional<ReadySlot> SlotPool::TryTake() {
  const std::lock_guard lock(state_->mutex);
  return state_->TakeReady();
}

runtime::Task<ReadySlot> SlotPool::Take(runtime::Deadline deadline) {
  const auto waiter = std::make_shared<Waiter>(co_await boost::asio::this_coro::executor);
  {
    const std::lock_guard lock(state_->mutex);
    if (auto slot = state_->TakeReady(); slot.has_value()) co_return std::move(*slot);
    state_->waiters.push_back(waiter);
    state_->RefuseIfFull();
  }
  auto waited = co_await waiter->event.Wait(deadline);
  if (waiter->result.has_value()) co_return std::move(*waiter->result);
  const std::lock_guard lock(state_->mutex);
  waiter->gone = true;
  std::erase(state_->waiters, waiter);
  co_return std::move(waited).error();
}

bool SlotPool::Adopt(const SlotName& name) {
  const std::lock_guard lock(state_->mutex);
  if (state_->owner.contains(name.index)) return state_->owner.at(name.index) == name;
  if (state_->foreign.erase(name) == 0) return false;
  state_->owner[name.index] = name;
  return true;
}

Result<SlotName> SlotPool::Reserve(SlotKind kind) {
  const std::lock_guard lock(state_->mutex);
  if (state_->free.empty()) return state_->Full();
  const SlotName name = state_->NewName(kind);
  state_->RefuseIfFull();
  return name;
}

void SlotPool::Release(const SlotName& name) {
  const std::lock_guard lock(state_->mutex);
  state_->Free(name);
}

std::set<SlotName> SlotPool::Owned() const {
  const std::lock_guard lock(state_->mutex);
  std::set<SlotName> names;
  for (const auto& [index, name] : state_->owner) names.insert(name);
  return names;
}

std::set<SlotName> SlotPool::Foreign() const {
  const std::lock_guard lock(state_->mutex);
  return state_->foreign;
}

size_t SlotPool::ready() const {
  const std::lock_guard lock(state_->mutex);
  return state_->ready.size();
}

}  // namespace dsec::sandbox

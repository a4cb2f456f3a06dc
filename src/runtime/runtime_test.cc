// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <latch>
#include <stdexcept>
#include <thread>

#include "base/log.h"
#include "base/metrics.h"
#include "runtime/async_event.h"
#include "runtime/blocking_pool.h"
#include "runtime/gate.h"
#include "runtime/periodic.h"
#include "runtime/shards.h"

namespace dsec::runtime {
namespace {

using boost::asio::awaitable;
using std::chrono::hours;
using std::chrono::milliseconds;

Deadline Soon() { return Deadline::After(milliseconds(5)); }
Deadline Late() { return Deadline::After(std::chrono::seconds(60)); }

// Sets a promise when it goes, to see when a coroutine's frame goes.
class Tracer {
 public:
  explicit Tracer(std::promise<std::thread::id>* gone) : gone_(gone) {}
  Tracer(Tracer&& other) noexcept : gone_(std::exchange(other.gone_, nullptr)) {}
  Tracer& operator=(Tracer&&) = delete;
  ~Tracer() {
    if (gone_ != nullptr) gone_->set_value(std::this_thread::get_id());
  }

 private:
  std::promise<std::thread::id>* gone_;
};

Task<std::thread::id> ThreadId() { co_return std::this_thread::get_id(); }

TEST(Deadline, Arithmetic_Saturates) {
  EXPECT_TRUE(Deadline::After(std::chrono::nanoseconds::max()).never());
  EXPECT_TRUE(Deadline::After(-hours(1)).Expired());
  EXPECT_EQ(Deadline::After(-hours(1)).Remaining().count(), 0);
  EXPECT_FALSE(Deadline::Never().Expired());
  EXPECT_EQ(Deadline::Never().Sooner(Deadline::At(MonoTime())).at(), MonoTime());
  EXPECT_EQ(Deadline::At(MonoTime()).Sooner(Deadline::Never()).at(), MonoTime());
}

TEST(Shards, SameKey_SameShard) {
  Shards shards(3);
  EXPECT_EQ(shards.For("sb-1"), shards.For("sb-1"));
}

Task<bool> HopAndReturn(Executor other) {
  const auto before = std::this_thread::get_id();
  auto there = co_await On(other, ThreadId());
  co_return *there != before&& std::this_thread::get_id() == before;
}

TEST(On, AnotherShard_RunsThereAndResumesHere) {
  Shards shards(2);
  for (int i = 0; i < 1000; ++i) {
    auto good = BlockOn(shards.at(0), HopAndReturn(shards.at(1)));
    ASSERT_TRUE(good.ok() && *good);
  }
}

TEST(On, OwnShard_RunsInPlace) {
  Shards shards(1);
  auto there = BlockOn(shards.at(0), HopAndReturn(shards.at(0)));
  EXPECT_FALSE(*there);
}

Task<int> Throws() {
  throw std::runtime_error("boom");
  co_return 1;
}

TEST(On, Exception_BecomesAnError) {
  log::Configure({.sink = [](std::string_view) {}});
  Shards shards(2);
  auto result = BlockOn(shards.at(0), On(shards.at(1), Throws()));
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().reason(), "internal.exception");
  EXPECT_EQ(result.error().message(), "boom");
  log::Configure({});
}

struct Shared {
  std::promise<std::thread::id> gone;
  std::latch started{1};
  AsyncEvent event;
};

Task<void> WaitTraced(Shared& shared, Deadline deadline) {
  const Tracer tracer(&shared.gone);
  shared.started.count_down();
  co_return co_await shared.event.Wait(deadline);
}

// Runs WaitTraced on another shard and writes down what On said.
awaitable<void> HopToWait(Executor other, Shared& shared, std::promise<Result<void>>& result) {
  auto waited = co_await On(other, WaitTraced(shared, Late()));
  auto again = co_await SleepUntil(Late());
  EXPECT_EQ(again.error().reason(), "task.cancelled");
  result.set_value(std::move(waited));
}

TEST(On, CallerCancelled_EndsBothSides) {
  Shared shared;
  std::promise<Result<void>> result;
  {
    Shards shards(2);
    auto remote = internal::StartRemote(shards.at(0), HopToWait(shards.at(1), shared, result));
    shared.started.wait();
    internal::CancelRemote(remote);
    auto outcome = result.get_future().get();
    ASSERT_FALSE(outcome.ok());
    EXPECT_EQ(outcome.error().code(), Code::kCancelled);
    shared.gone.get_future().wait();
  }
}

TEST(Shards, Destroyed_DropsSuspendedCoroutinesOfEveryShard) {
  Shared shared;
  std::promise<Result<void>> result;
  auto gone = shared.gone.get_future();
  {
    Shards shards(2);
    internal::StartDetached(shards.at(0), HopToWait(shards.at(1), shared, result));
    shared.started.wait();
  }
  EXPECT_EQ(gone.wait_for(std::chrono::seconds(0)), std::future_status::ready);
}

TEST(BlockOn, ShardsDestroyed_IsCancelled) {
  Shared shared;
  auto shards = std::make_unique<Shards>(1);
  std::promise<Result<void>> result;
  std::thread waiter([&, executor = shards->at(0)] {
    result.set_value(BlockOn(executor, WaitTraced(shared, Late())));
  });
  shared.started.wait();
  shards.reset();
  waiter.join();
  EXPECT_EQ(result.get_future().get().error().code(), Code::kCancelled);
}

Task<std::string> SetWakesAll() {
  AsyncEvent event;
  AsyncEvent all_done;
  Gate gate;
  std::string order;
  const Executor executor = co_await boost::asio::this_coro::executor;
  auto wait = [](AsyncEvent& wanted, std::string& out, char name) -> awaitable<void> {
    auto waited = co_await wanted.Wait(Late());
    out += waited.ok() ? name : '!';
  };
  for (char name : {'a', 'b', 'c'}) Spawn(gate, executor, wait(event, order, name));
  auto set = [](AsyncEvent& wanted) -> awaitable<void> {
    wanted.Set();
    wanted.Reset();
    co_return;
  };
  Spawn(gate, executor, set(event));
  co_await gate.Close();
  order += event.is_set() ? 's' : 'r';
  co_return order;
}

TEST(AsyncEvent, SetThenReset_WakesEveryWaiter) {
  Shards shards(1);
  std::string order = *BlockOn(shards.at(0), SetWakesAll());
  std::sort(order.begin(), order.end() - 1);
  EXPECT_EQ(order, "abcr");
}

Task<void> WaitOn(AsyncEvent& event, Deadline deadline) { co_return co_await event.Wait(deadline); }

TEST(AsyncEvent, Deadline_IsAnError) {
  Shards shards(1);
  AsyncEvent event;
  EXPECT_EQ(BlockOn(shards.at(0), WaitOn(event, Soon())).error().code(), Code::kDeadlineExceeded);
  event.Set();
  EXPECT_TRUE(BlockOn(shards.at(0), WaitOn(event, Soon())).ok());
}

Task<Code> DestroyUnderWaiter() {
  auto event = std::make_unique<AsyncEvent>();
  Gate gate;
  Code seen = Code::kInternal;
  auto wait = [](AsyncEvent& wanted, Code& out) -> awaitable<void> {
    auto waited = co_await wanted.Wait(Late());
    out = waited.error().code();
  };
  const Executor executor = co_await boost::asio::this_coro::executor;
  Spawn(gate, executor, wait(*event, seen));
  auto drop = [](std::unique_ptr<AsyncEvent>& owned) -> awaitable<void> {
    owned.reset();
    co_return;
  };
  Spawn(gate, executor, drop(event));
  co_await gate.Close();
  co_return seen;
}

TEST(AsyncEvent, Destroyed_WakesItsWaiters) {
  Shards shards(1);
  EXPECT_EQ(*BlockOn(shards.at(0), DestroyUnderWaiter()), Code::kCancelled);
}

TEST(SleepUntil, Deadline_IsSuccess) {
  Shards shards(1);
  EXPECT_TRUE(BlockOn(shards.at(0), SleepUntil(Soon())).ok());
  EXPECT_TRUE(BlockOn(shards.at(0), SleepUntil(Deadline::After(-hours(1)))).ok());
}

Task<bool> CloseGate(Gate& gate, const std::atomic<bool>& inside_ended) {
  co_await gate.Close();
  co_return inside_ended.load();
}

awaitable<void> HoldGate(AsyncEvent& release, std::atomic<bool>& ended) {
  (void)co_await release.Wait(Late());
  ended = true;
}

TEST(Gate, Close_WaitsForWorkOnEveryShardAndRefusesMore) {
  Shards shards(2);
  Gate gate;
  AsyncEvent release;
  std::atomic<bool> ended = false;
  ASSERT_TRUE(Spawn(gate, shards.at(1), HoldGate(release, ended)));
  EXPECT_EQ(gate.count(), 1u);
  std::promise<Result<bool>> closed;
  std::thread closer([&] { closed.set_value(BlockOn(shards.at(0), CloseGate(gate, ended))); });
  while (!gate.closed()) std::this_thread::yield();
  EXPECT_FALSE(gate.Enter());
  EXPECT_FALSE(ended);
  boost::asio::post(shards.at(1), [&] { release.Set(); });
  auto outcome = closed.get_future().get();
  closer.join();
  EXPECT_TRUE(*outcome);
  EXPECT_EQ(gate.count(), 0u);
}

awaitable<void> Traced([[maybe_unused]] Tracer tracer) { co_return; }

TEST(Spawn, ClosedGate_DestroysTheWorkUnstarted) {
  Shards shards(1);
  Gate gate;
  std::atomic<bool> ended = false;
  ASSERT_TRUE(BlockOn(shards.at(0), CloseGate(gate, ended)).ok());
  std::promise<std::thread::id> gone;
  EXPECT_FALSE(Spawn(gate, shards.at(0), Traced(Tracer(&gone))));
  EXPECT_EQ(gone.get_future().get(), std::this_thread::get_id());
}

awaitable<void> ThrowsDetached() {
  throw std::runtime_error("boom");
  co_return;
}

TEST(Spawn, Exception_IsLoggedAndLeavesTheGate) {
  std::atomic<int> lines = 0;
  log::Configure({.sink = [&](std::string_view line) {
    if (line.find("runtime.exception") != std::string_view::npos) ++lines;
  }});
  Shards shards(1);
  Gate gate;
  std::atomic<bool> ended = true;
  Spawn(gate, shards.at(0), ThrowsDetached());
  EXPECT_TRUE(*BlockOn(shards.at(0), CloseGate(gate, ended)));
  EXPECT_EQ(lines, 1);
  log::Configure({});
}

awaitable<void> WaitInto(Shared& shared, Code& seen) {
  auto waited = co_await WaitTraced(shared, Late());
  seen = waited.error().code();
}

TEST(SpawnCancellable, Cancel_EndsTheWaitAndLeavesTheGate) {
  Shared shared;
  Shards shards(1);
  Gate gate;
  Code seen = Code::kInternal;
  const Running running = SpawnCancellable(gate, shards.at(0), WaitInto(shared, seen));
  ASSERT_TRUE(running);
  shared.started.wait();
  EXPECT_EQ(gate.count(), 1u);
  running.Cancel();
  std::atomic<bool> ended = true;
  ASSERT_TRUE(BlockOn(shards.at(0), CloseGate(gate, ended)).ok());
  EXPECT_EQ(seen, Code::kCancelled);
  running.Cancel();
  EXPECT_FALSE(SpawnCancellable(gate, shards.at(0), WaitInto(shared, seen)));
}

// A blocking call that lasts until it is released.
struct Plug {
  std::latch running{1};
  std::latch release{1};
  Result<int> operator()() {
    running.count_down();
    release.wait();
    return 5;
  }
};

Task<int> RunPlug(BlockingPool& pool, Plug& plug, Deadline deadline) {
  auto call = [&plug] { return plug(); };
  auto result = co_await pool.Run(call, deadline);
  co_return std::move(result);
}

Task<std::thread::id> RunThreadId(BlockingPool& pool) {
  const auto home = std::this_thread::get_id();
  auto call = []() -> Result<std::thread::id> { return std::this_thread::get_id(); };
  auto result = co_await pool.Run(call, Late());
  EXPECT_EQ(home, std::this_thread::get_id());
  EXPECT_NE(home, *result);
  co_return std::move(result);
}

TEST(BlockingPool, Run_HappensOffTheShardAndResumesOnIt) {
  Shards shards(1);
  BlockingPool pool("test", 1, 1);
  EXPECT_TRUE(BlockOn(shards.at(0), RunThreadId(pool)).ok());
}

Task<int> RunThrowing(BlockingPool& pool) {
  auto call = []() -> Result<int> { throw std::runtime_error("boom"); };
  co_return co_await pool.Run(call, Late());
}

TEST(BlockingPool, Exception_BecomesAnError) {
  log::Configure({.sink = [](std::string_view) {}});
  Shards shards(1);
  BlockingPool pool("test", 1, 1);
  EXPECT_EQ(BlockOn(shards.at(0), RunThrowing(pool)).error().reason(), "internal.exception");
  log::Configure({});
}

TEST(BlockingPool, Full_RefusesAtOnce) {
  Plug running;
  Plug queued;
  Shards shards(1);
  BlockingPool pool("test", 1, 1);
  std::promise<Result<int>> first;
  std::promise<Result<int>> second;
  std::thread one([&] { first.set_value(BlockOn(shards.at(0), RunPlug(pool, running, Late()))); });
  running.running.wait();
  // Its deadline passes while it waits for the thread, which shows that it has been queued.
  EXPECT_EQ(BlockOn(shards.at(0), RunPlug(pool, queued, Soon())).error().code(),
            Code::kDeadlineExceeded);
  Plug refused;
  auto full = BlockOn(shards.at(0), RunPlug(pool, refused, Late()));
  EXPECT_EQ(full.error().reason(), "pool.full");
  running.release.count_down();
  one.join();
  EXPECT_EQ(*first.get_future().get(), 5);
  queued.running.wait();  // accepted, so it runs though nobody waits
  queued.release.count_down();
}

struct DestroyedResult {
  std::shared_ptr<Tracer> tracer;
};

Task<DestroyedResult> RunTraced(BlockingPool& pool, std::latch& release,
                                std::promise<std::thread::id>& gone, Deadline deadline) {
  auto call = [&release, &gone]() -> Result<DestroyedResult> {
    release.wait();
    return DestroyedResult{std::make_shared<Tracer>(&gone)};
  };
  auto result = co_await pool.Run(call, deadline);
  co_return std::move(result);
}

TEST(BlockingPool, DeadlineWhileRunning_DestroysTheLateResult) {
  std::latch release(1);
  std::promise<std::thread::id> gone;
  Shards shards(1);
  BlockingPool pool("test", 1, 1);
  auto result = BlockOn(shards.at(0), RunTraced(pool, release, gone, Soon()));
  EXPECT_EQ(result.error().code(), Code::kDeadlineExceeded);
  release.count_down();
  gone.get_future().wait();
}

TEST(BlockingPool, ExpiredDeadline_NeverRuns) {
  Shards shards(1);
  BlockingPool pool("test", 1, 1);
  Plug plug;
  auto result = BlockOn(shards.at(0), RunPlug(pool, plug, Deadline::After(-hours(1))));
  EXPECT_EQ(result.error().code(), Code::kDeadlineExceeded);
  EXPECT_FALSE(plug.running.try_wait());
}

TEST(BlockingPool, Destroyed_RefusesTheQueuedAndAwaitsTheRunning) {
  Plug running;
  Plug queued;
  Plug probe;
  Shards shards(1);
  auto pool = std::make_unique<BlockingPool>("closing", 1, 1);
  BlockingPool& alive = *pool;  // until its thread has been joined
  std::promise<Result<int>> first;
  std::promise<Result<int>> second;
  std::thread one([&] { first.set_value(BlockOn(shards.at(0), RunPlug(alive, running, Late()))); });
  running.running.wait();
  std::thread two([&] { second.set_value(BlockOn(shards.at(0), RunPlug(alive, queued, Late()))); });
  const metrics::Gauge& waiting = metrics::Registry::Global().GetGauge(
      "dsec_pool_queued", "Calls waiting for a thread of a blocking pool.", {{"pool", "closing"}});
  while (waiting.value() < 1) std::this_thread::yield();
  std::thread destroyer([&] { pool.reset(); });
  std::string_view reason;
  do {
    reason = BlockOn(shards.at(0), RunPlug(alive, probe, Late())).error().reason();
  } while (reason != "pool.closed");
  running.release.count_down();
  destroyer.join();
  one.join();
  two.join();
  EXPECT_EQ(*first.get_future().get(), 5);
  EXPECT_EQ(second.get_future().get().error().reason(), "pool.closed");
  EXPECT_FALSE(queued.running.try_wait());
}

Task<void> JoinPeriodic(Periodic& periodic) {
  co_await periodic.Join();
  co_return Ok();
}

TEST(Periodic, Runs_UntilJoined) {
  Shards shards(2);
  std::latch three(3);
  std::atomic<int> runs = 0;
  std::atomic<bool> inside = false;
  auto run = [&]() -> awaitable<void> {
    EXPECT_FALSE(inside.exchange(true));
    (void)co_await SleepUntil(Soon());
    if (++runs <= 3) three.count_down();
    inside = false;
  };
  Periodic periodic(shards.at(0), "test", milliseconds(1), run);
  three.wait();
  ASSERT_TRUE(BlockOn(shards.at(1), JoinPeriodic(periodic)).ok());
  EXPECT_FALSE(inside);
  const int after = runs;
  ASSERT_TRUE(BlockOn(shards.at(1), JoinPeriodic(periodic)).ok());
  EXPECT_EQ(runs, after);
}

TEST(Periodic, FailingRun_GoesOn) {
  log::Configure({.sink = [](std::string_view) {}});
  Shards shards(1);
  std::latch three(3);
  std::atomic<int> runs = 0;
  auto run = [&]() -> awaitable<void> {
    if (++runs <= 3) three.count_down();
    throw std::runtime_error("boom");
    co_return;
  };
  Periodic periodic(shards.at(0), "test", milliseconds(1), run);
  three.wait();
  ASSERT_TRUE(BlockOn(shards.at(0), JoinPeriodic(periodic)).ok());
  log::Configure({});
}

}  // namespace
}  // namespace dsec::runtime

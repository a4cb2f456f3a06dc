// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "edge/due_queue.h"
#include "edge/event_hub.h"
#include "edge/semaphore.h"
#include "runtime/gate.h"
#include "runtime/shards.h"

namespace dsec::edge {
namespace {

using boost::asio::awaitable;
using runtime::BlockOn;
using runtime::Deadline;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;

std::shared_ptr<FairQueue::Ticket> TicketOn(const runtime::Executor& executor) {
  return std::make_shared<FairQueue::Ticket>(executor);
}

// Takes a permit and holds it until `release`, telling when it has it.
awaitable<void> Hold(Semaphore& semaphore, runtime::Executor executor, std::promise<int>* got,
                     int value, std::shared_future<void> release, std::atomic<int>* holders) {
  auto permit = co_await semaphore.Acquire(TicketOn(executor), Deadline::After(seconds(30)));
  if (!permit.ok()) co_return;
  ++*holders;
  got->set_value(value);
  release.wait();
  --*holders;
}

runtime::Task<void> Try(Semaphore& semaphore, std::shared_ptr<FairQueue::Ticket> ticket,
                        Deadline deadline) {
  auto permit = co_await semaphore.Acquire(std::move(ticket), deadline);
  if (!permit.ok()) co_return std::move(permit).error();
  co_return Ok();
}

void Start(runtime::Gate& gate, const runtime::Executor& executor, awaitable<void> work) {
  ASSERT_TRUE(runtime::Spawn(gate, executor, std::move(work)));
}

TEST(Semaphore, NoPermit_RefusesAtOnceOrAtTheDeadline) {
  runtime::Shards shards(1);
  Semaphore semaphore("capacity.creations", 0, 1);
  auto now = BlockOn(shards.at(0),
                     Try(semaphore, TicketOn(shards.at(0)), Deadline::After(milliseconds(-1))));
  ASSERT_FALSE(now.ok());
  EXPECT_EQ(now.error().reason(), "capacity.creations");
  auto later = BlockOn(shards.at(0),
                       Try(semaphore, TicketOn(shards.at(0)), Deadline::After(milliseconds(5))));
  EXPECT_EQ(later.error().code(), Code::kResourceExhausted);
  EXPECT_EQ(semaphore.waiting(), 0u);
}

TEST(Semaphore, Waiters_AreServedInOrderOverShards) {
  runtime::Gate gate;
  runtime::Shards shards(3);
  Semaphore semaphore("capacity.creations", 1, 10);
  std::vector<std::promise<int>> got(3);
  std::vector<std::promise<void>> release(3);
  std::atomic<int> holders = 0;
  for (size_t i = 0; i < 3; ++i) {
    Start(gate, shards.at(i),
          Hold(semaphore, shards.at(i), &got[i], static_cast<int>(i),
               release[i].get_future().share(), &holders));
    // The next one starts when this one has its place in the line.
    while (i > 0 && semaphore.waiting() < i) std::this_thread::yield();
    if (i == 0) got[0].get_future().wait();
  }
  EXPECT_EQ(holders, 1);
  release[0].set_value();
  EXPECT_EQ(got[1].get_future().get(), 1);
  EXPECT_EQ(semaphore.waiting(), 1u);
  release[1].set_value();
  EXPECT_EQ(got[2].get_future().get(), 2);
  release[2].set_value();
  BlockOn(shards.at(0), Try(semaphore, TicketOn(shards.at(0)), Deadline::After(seconds(30))))
      .value();
  shards.Stop();
}

TEST(Semaphore, FullLine_IsRefusedByName) {
  runtime::Gate gate;
  runtime::Shards shards(1);
  Semaphore semaphore("capacity.creations", 1, 0);
  std::promise<int> got;
  std::promise<void> release;
  std::atomic<int> holders = 0;
  runtime::Shards other(1);
  Start(gate, other.at(0),
        Hold(semaphore, other.at(0), &got, 1, release.get_future().share(), &holders));
  got.get_future().wait();
  const auto full =
      BlockOn(shards.at(0), Try(semaphore, TicketOn(shards.at(0)), Deadline::After(seconds(30))));
  EXPECT_EQ(full.error().reason(), "capacity.creations");
  release.set_value();
  other.Stop();
}

// Many of one project wait, then one of another: it is served second, not last.
TEST(FairQueue, Lanes_AreServedInTurn) {
  runtime::Gate gate;
  runtime::Shards shards(1);
  FairQueue queue("capacity.queue", 10, seconds(30));
  std::vector<std::string> served;
  int room = 0;
  std::promise<void> all;
  const auto enter = [&](std::string lane) -> awaitable<void> {
    auto ticket = std::make_shared<FairQueue::Ticket>(shards.at(0), lane);
    FairQueue::Take take = [&]() -> Result<void> {
      if (room == 0) return Error(Code::kResourceExhausted, "capacity.count", "full");
      --room;
      return Ok();
    };
    auto entered = co_await queue.Enter(ticket, std::move(take), Deadline::After(seconds(30)));
    if (entered.ok()) served.push_back(lane);
    if (served.size() == 5) all.set_value();
  };
  size_t waiting = 0;
  for (const char* lane : {"a", "a", "a", "b", "c"}) {
    Start(gate, shards.at(0), enter(lane));
    ++waiting;
    while (queue.waiting() < waiting) std::this_thread::yield();
  }
  boost::asio::post(shards.at(0), [&] { room = 5; });
  queue.Poke();
  all.get_future().wait();
  shards.Stop();
  EXPECT_THAT(served, ElementsAre("a", "b", "c", "a", "a"));
}

runtime::Task<void> CancelledWait(Semaphore& semaphore, runtime::Executor executor,
                                  runtime::Gate& gate) {
  auto ticket = TicketOn(executor);
  boost::asio::post(executor, [ticket] { ticket->Cancel(); });
  auto result = co_await Try(semaphore, ticket, Deadline::After(seconds(30)));
  (void)gate;
  co_return result;
}

TEST(Semaphore, CancelledTicket_LeavesTheLine) {
  runtime::Gate gate;
  runtime::Shards shards(1);
  Semaphore semaphore("capacity.creations", 0, 10);
  const auto result = BlockOn(shards.at(0), CancelledWait(semaphore, shards.at(0), gate));
  EXPECT_EQ(result.error().reason(), "queue.cancelled");
  EXPECT_EQ(semaphore.waiting(), 0u);
}

runtime::Task<void> EnterQueue(FairQueue& queue, runtime::Executor executor, FairQueue::Take take) {
  co_return co_await queue.Enter(TicketOn(executor), std::move(take), Deadline::After(seconds(30)));
}

TEST(FairQueue, HeadTriesAgainByItselfAndOtherErrorsEndTheWait) {
  runtime::Shards shards(1);
  FairQueue queue("capacity.queue", 10, milliseconds(1));
  int tries = 0;
  const auto result =
      BlockOn(shards.at(0), EnterQueue(queue, shards.at(0), [&tries]() -> Result<void> {
                if (++tries < 4) return Error(Code::kResourceExhausted, "capacity.memory", "no");
                return Error(Code::kUnavailable, "capacity.unknown", "broken");
              }));
  EXPECT_EQ(result.error().reason(), "capacity.unknown");
  EXPECT_EQ(tries, 4);
}

runtime::Task<void> Listen(EventHub& hub, runtime::Executor executor, std::promise<void>* ready) {
  EventHub::Subscription subscription(hub, "sb-1", executor);
  EventHub::Subscription node(hub, "", executor);
  ready->set_value();
  auto one = co_await subscription.Wait(Deadline::After(seconds(30)));
  if (!one.ok()) co_return one;
  auto all = co_await node.Wait(Deadline::After(seconds(30)));
  if (!all.ok()) co_return all;
  auto none = co_await subscription.Wait(Deadline::After(milliseconds(5)));
  if (none.ok()) co_return Error(Code::kInternal, "test", "woken twice by one announcement");
  co_return Ok();
}

TEST(EventHub, Announcement_WakesTheSandboxAndTheNodeOnce) {
  runtime::Shards shards(1);
  EventHub hub;
  std::promise<void> ready;
  std::thread announcer([&] {
    ready.get_future().wait();
    hub.Announce("sb-other");
    hub.Announce("sb-1");
  });
  EXPECT_TRUE(BlockOn(shards.at(0), Listen(hub, shards.at(0), &ready)).ok());
  announcer.join();
}

TEST(DueQueue, GivesWhatIsDueInOrderAndForgetsTheDead) {
  DueQueue<int> queue;
  auto a = std::make_shared<int>(1);
  auto b = std::make_shared<int>(2);
  auto c = std::make_shared<int>(3);
  EXPECT_TRUE(queue.Push(30, a));
  EXPECT_TRUE(queue.Push(10, b));
  EXPECT_FALSE(queue.Push(20, c));
  c.reset();
  EXPECT_EQ(queue.Next(), 10);
  EXPECT_TRUE(queue.PopDue(9).empty());
  EXPECT_THAT(queue.PopDue(30), ElementsAre(b, a));
  EXPECT_EQ(queue.Next(), std::nullopt);
}

}  // namespace
}  // namespace dsec::edge

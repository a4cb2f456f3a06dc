// SPDX-License-Identifier: Apache-2.0
// Many calls at once while workers die, are dirty or broken, and callers go away: each call ends
// once, with what is its own.
#include <atomic>
#include <map>

#include "base/log.h"
#include "base/rng.h"
#include "fn/testing/fn_fixture.h"

namespace dsec::fn {
namespace {

class FnStormTest : public testing::FnFixture {
 protected:
  struct Tally {
    std::mutex mutex;
    std::map<std::string, size_t> ends;
    std::atomic<size_t> ended = 0;
    std::atomic<size_t> wrong = 0;
  };

  // One client: a call after another until its share is done.
  boost::asio::awaitable<void> Client(uint64_t seed, size_t calls, Tally* tally) {
    Rng rng(seed);
    for (size_t i = 0; i < calls; ++i) {
      const std::string token = std::to_string(seed) + "-" + std::to_string(i);
      const uint64_t kind = rng.Below(100);
      std::string code = "yield\n";
      if (kind < 2) code += "die\n";
      if (kind >= 2 && kind < 5) code += "break\n";
      if (kind >= 5 && kind < 10) code += "dirty\n";
      if (kind >= 10 && kind < 12) code += "nothing\n";
      code += "yield\nargs";
      v1::FnCall call = CallOf(rng.Below(4) == 0 ? "compiled" : "plain", code);
      call.add_args(token);
      call.set_principal("p" + std::to_string(seed % 5));
      if (rng.Below(5) == 0) call.mutable_environment()->set_base("other:1");
      if (rng.Below(3) == 0) call.set_op_id("op-" + token);
      const bool leaves = rng.Below(20) == 0;
      auto result = co_await service_->Call(
          call,
          leaves ? runtime::Deadline::After(std::chrono::microseconds(rng.Below(500))) : Soon());
      std::string end = result.ok()
                            ? std::string(VerdictName(result->verdict())) + " " + result->reason()
                            : std::string(result.error().reason());
      if (result.ok() && result->verdict() == v1::FN_OK &&
          !result->run().stdout().data().ends_with("[" + token + "]")) {
        ++tally->wrong;
      }
      if (!result.ok() && !leaves) ++tally->wrong;
      const std::lock_guard lock(tally->mutex);
      ++tally->ends[end];
      ++tally->ended;
    }
  }
};

TEST_F(FnStormTest, TenThousandCalls_EachEndsOnce) {
  constexpr size_t kClients = 64;
  constexpr size_t kCalls = 10'000;
  options_.pools.workers_max = 8;
  Start();
  log::Options quiet;
  quiet.level = log::Level::kError;
  log::Configure(quiet);
  Tally tally;
  for (size_t i = 0; i < kClients; ++i) {
    const size_t share = kCalls / kClients + (i < kCalls % kClients ? 1 : 0);
    ASSERT_TRUE(
        runtime::Spawn(gate_, shards_->at(i % shards_->size()), Client(i + 1, share, &tally)));
  }
  // From outside, processes are killed at random.
  Rng rng(7);
  while (tally.ended < kCalls) {
    const auto alive = backend_.Alive();
    if (!alive.empty()) (void)backend_.Kill(alive[rng.Below(alive.size())]);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (HasFailure()) break;
  }
  Await([&] { return tally.ended == kCalls; });
  EXPECT_EQ(tally.wrong, 0);
  size_t told = 0;
  for (const auto& [end, count] : tally.ends) {
    told += count;
    EXPECT_TRUE(end == "OK " || end.starts_with("INFRASTRUCTURE fn.") || end == "deadline.exceeded")
        << end << ": " << count;
  }
  EXPECT_EQ(told, kCalls);
  EXPECT_GT(tally.ends["OK "], kCalls / 2);
  // Nothing is left: no call in line, no worker that the engine does not know.
  Await([&] { return Gauge("dsec_fn_running") == 0 && Gauge("dsec_fn_queued") == 0; });
  Await([&] { return static_cast<double>(backend_.Alive().size()) == Gauge("dsec_fn_workers"); });
  EXPECT_LE(Gauge("dsec_fn_workers"), 8);
  log::Configure({});
}

}  // namespace
}  // namespace dsec::fn

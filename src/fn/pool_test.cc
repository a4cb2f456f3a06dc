// SPDX-License-Identifier: Apache-2.0
// Workers, lines and who gets what.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>

#include "fn/testing/fn_fixture.h"

namespace dsec::fn {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;

class FnPoolTest : public testing::FnFixture {
 protected:
  static v1::FnCall From(const std::string& principal, const std::string& code,
                         const std::string& type = "plain") {
    v1::FnCall call = CallOf(type, code);
    call.set_principal(principal);
    return call;
  }
  // Puts a call in line and waits until it is there.
  std::future<Result<v1::FnResult>> Queue(v1::FnCall call, const std::string& base = "base:1") {
    const uint32_t before = PoolOf(base).queued();
    auto future = Begin(std::move(call));
    Await([&] { return PoolOf(base).queued() > before; });
    return future;
  }
};

TEST_F(FnPoolTest, Pool_GrowsWhileCallsWaitAndShrinksWhenIdle) {
  Start();
  std::vector<std::future<Result<v1::FnResult>>> calls;
  for (int i = 0; i < 6; ++i) calls.push_back(Begin(CallOf("plain", "wait go")));
  backend_.AwaitWaiting("go", 4);
  EXPECT_EQ(PoolOf("base:1").workers(), 4);
  Await([&] { return PoolOf("base:1").queued() == 2; });
  backend_.Release("go");
  for (auto& call : calls) EXPECT_TRUE(call.get().ok());
  EXPECT_EQ(backend_.made(), 4);
  EXPECT_EQ(PoolOf("base:1").calls(), 6);
  Advance(milliseconds(59'000));
  EXPECT_EQ(PoolOf("base:1").workers(), 4);
  Advance(milliseconds(1'001));
  Await([&] { return backend_.Alive().empty(); });
  Tick();
  EXPECT_TRUE(service_->Pools().empty()) << "nothing is left of it";
  EXPECT_EQ(Count("dsec_fn_workers_ended_total", "cause=\"idle\""), 4);
}

TEST_F(FnPoolTest, OneCallAfterAnother_NeedsOneWorker) {
  Start();
  for (int i = 0; i < 5; ++i) Run("plain", "echo a");
  EXPECT_EQ(backend_.made(), 1);
  EXPECT_EQ(Count("dsec_fn_reuses_total"), 4);
}

TEST_F(FnPoolTest, Minimum_IsKeptWarm) {
  WriteType("kept", R"({"name": "kept", "environment": {"base": "third:1"}, "source": "a",
    "run": {"argv": ["/bin/run"]}, "pool": {"min": 2, "max": 3, "idle_ms": 500}})");
  Start();
  Await([&] { return PoolOf("third:1").idle() == 2; });
  Advance(seconds(3600));
  EXPECT_EQ(PoolOf("third:1").workers(), 2);
  ASSERT_TRUE(backend_.Kill("w1"));
  Await([&] { return backend_.made() == 3 && PoolOf("third:1").idle() == 2; });
  std::vector<std::future<Result<v1::FnResult>>> calls;
  for (int i = 0; i < 4; ++i) calls.push_back(Begin(CallOf("kept", "wait go")));
  backend_.AwaitWaiting("go", 3);
  EXPECT_EQ(PoolOf("third:1").workers(), 3) << "its maximum";
  backend_.Release("go");
  for (auto& call : calls) EXPECT_TRUE(call.get().ok());
  Advance(milliseconds(501));
  EXPECT_EQ(PoolOf("third:1").workers(), 2);
}

TEST_F(FnPoolTest, TypesThatChange_ChangeTheirPools) {
  Start();
  v1::FnTaskType type;
  type.set_name("kept");
  type.mutable_environment()->set_base("third:1");
  type.mutable_run()->add_argv("/bin/run");
  type.mutable_pool()->set_min(1);
  ASSERT_TRUE(Wait(service_->PutType(type, Soon())).ok());
  Await([&] { return PoolOf("third:1").idle() == 1; });
  ASSERT_TRUE(Wait(service_->RemoveType("kept", Soon())).ok());
  Await([&] { return PoolOf("third:1").min() == 0; });
  Advance(seconds(61));
  EXPECT_EQ(PoolOf("third:1").workers(), 0);
}

TEST_F(FnPoolTest, FullNode_TheLongestIdleOfAnotherPoolGivesWay) {
  options_.pools.workers_max = 2;
  Start();
  Run("plain", "echo a");
  clock_.Advance(seconds(1));
  auto busy = Begin(CallOf("plain", "wait go"));
  backend_.AwaitWaiting("go", 1);
  clock_.Advance(seconds(1));
  EXPECT_EQ(Run("other", "echo b").verdict(), v1::FN_OK);
  EXPECT_EQ(backend_.made(), 2);
  v1::FnCall third = CallOf("plain", "echo c");
  third.mutable_environment()->set_base("third:1");
  EXPECT_EQ(Call(third)->verdict(), v1::FN_OK);
  EXPECT_EQ(PoolOf("other:1").workers(), 0) << "idle";
  EXPECT_EQ(PoolOf("base:1").workers(), 1) << "busy";
  EXPECT_EQ(Count("dsec_fn_workers_ended_total", "cause=\"stolen\""), 1);
  backend_.Release("go");
  EXPECT_TRUE(busy.get().ok());
  EXPECT_LE(backend_.most_alive(), 3) << "the one that gave way may still be on its way out";
}

TEST_F(FnPoolTest, Line_IsFairBetweenPrincipals) {
  options_.pools.workers_max = 1;
  Start();
  auto busy = Begin(From("many", "wait go"));
  backend_.AwaitWaiting("go", 1);
  std::vector<std::future<Result<v1::FnResult>>> calls;
  for (int i = 0; i < 4; ++i) {
    v1::FnCall call = From("many", "args");
    call.add_args("many" + std::to_string(i));
    calls.push_back(Queue(call));
  }
  for (const char* few : {"few", "other"}) {
    v1::FnCall call = From(few, "args");
    call.add_args(few);
    calls.push_back(Queue(call));
  }
  backend_.Release("go");
  for (auto& call : calls) EXPECT_TRUE(call.get().ok());
  std::vector<std::string> order;
  for (const auto& ran : backend_.runs()) {
    if (ran.argv.size() > 2) order.push_back(ran.argv[2]);
  }
  EXPECT_THAT(order, ElementsAre("many0", "few", "other", "many1", "many2", "many3"));
}

TEST_F(FnPoolTest, Line_IsBoundedAndAlwaysHasAPlaceForAnother) {
  options_.pools.workers_max = 1;
  options_.pools.queue_max = 10;
  Start();
  auto busy = Begin(From("many", "wait go"));
  backend_.AwaitWaiting("go", 1);
  std::vector<std::future<Result<v1::FnResult>>> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(Queue(From("many", "echo a")));
  const auto full = Call(From("many", "echo a"));
  ASSERT_FALSE(full.ok());
  EXPECT_EQ(full.error().code(), Code::kResourceExhausted);
  EXPECT_EQ(full.error().reason(), "fn.queue_full");
  calls.push_back(Queue(From("few", "echo a")));
  calls.push_back(Queue(From("third", "echo a")));
  EXPECT_EQ(Call(From("fourth", "echo a")).error().reason(), "fn.queue_full");
  EXPECT_EQ(Count("dsec_fn_refusals_total", "reason=\"fn.queue_full\""), 2);
  backend_.Release("go");
  for (auto& call : calls) EXPECT_TRUE(call.get().ok());
  EXPECT_EQ(Call(From("many", "echo a"))->verdict(), v1::FN_OK);
}

TEST_F(FnPoolTest, CallsUnderWay_AreBoundedInBytes) {
  options_.queue_bytes = 100'000;
  Start();
  const std::string large(60'000, '\n');
  auto first = Begin(CallOf("plain", "wait go" + large));
  backend_.AwaitWaiting("go", 1);
  EXPECT_EQ(Call(CallOf("plain", large)).error().reason(), "fn.queue_full");
  EXPECT_EQ(Run("plain", "echo small").verdict(), v1::FN_OK);
  backend_.Release("go");
  EXPECT_TRUE(first.get().ok());
  EXPECT_EQ(Run("plain", large).verdict(), v1::FN_OK);
}

TEST_F(FnPoolTest, EnvironmentOfACall_GetsNoWorkersKept) {
  WriteType("kept", R"({"name": "kept", "environment": {"base": "third:1"}, "source": "a",
    "run": {"argv": ["/bin/run"]}, "pool": {"min": 1}})");
  Start();
  v1::FnCall call = CallOf("kept", "echo a");
  call.mutable_environment()->set_base("other:1");
  EXPECT_TRUE(Call(call).ok());
  Advance(seconds(61));
  EXPECT_EQ(PoolOf("other:1").workers(), 0);
  EXPECT_EQ(PoolOf("third:1").workers(), 1);
}

TEST_F(FnPoolTest, Metrics_AreThoseOfTheirPage) {
  std::filesystem::create_directories(dir_.path() + "/root/dev");
  std::ofstream(dir_.path() + "/root/dev/nvidia0") << "";
  Start();
  Tick();
  Run("plain", "dirty");
  EXPECT_FALSE(Call(CallOf("none", "")).ok());
  std::ifstream file(DSEC_SOURCE_DIR "/docs/metrics.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  const auto names = [](const std::string& text, const std::regex& pattern) {
    std::set<std::string> found;
    for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) {
      found.insert((*it)[1]);
    }
    return found;
  };
  EXPECT_THAT(names(metrics_->RenderPrometheus(), std::regex("# TYPE (dsec_fn_[a-z_]+)")),
              ::testing::ContainerEq(names(page, std::regex("`(dsec_fn_[a-z_]+)"))));
}

TEST_F(FnPoolTest, BusyNode_AnotherPoolGetsItsTurnAfterSomePatience) {
  options_.pools.workers_max = 1;
  Start();
  auto busy = Begin(From("many", "wait go"));
  backend_.AwaitWaiting("go", 1);
  std::vector<std::future<Result<v1::FnResult>>> calls;
  for (int i = 0; i < 6; ++i) calls.push_back(Queue(From("many", "echo a")));
  // The pool of the other environment has no worker and gets none while this one is busy.
  auto other = Queue(From("few", "echo b", "other"), "other:1");
  clock_.Advance(milliseconds(251));
  backend_.Release("go");
  EXPECT_TRUE(other.get().ok());
  for (auto& call : calls) EXPECT_TRUE(call.get().ok());
  const auto runs = backend_.runs();
  size_t at = 0;
  while (runs[at].base != "id-of-other:1") ++at;
  EXPECT_LE(at, 2) << "before what others had put in line earlier";
}

TEST_F(FnPoolTest, CallThatHasBegun_GoesFirst) {
  options_.pools.workers_max = 1;
  Start();
  auto compiled = Begin(CallOf("compiled", "cc wait go\necho a"));
  backend_.AwaitWaiting("go", 1);
  auto later = Queue(CallOf("plain", "echo b"));
  backend_.Release("go");
  EXPECT_TRUE(compiled.get().ok());
  EXPECT_TRUE(later.get().ok());
  const auto runs = backend_.runs();
  EXPECT_EQ(runs.at(1).argv.at(0), "./prog");
}

TEST_F(FnPoolTest, WorkersThatCannotBeMade_AreTriedAgainThenTold) {
  Start();
  const Error error(Code::kResourceExhausted, "os.clone", "no memory");
  backend_.FailMakes(2, error);
  EXPECT_EQ(Run("plain", "echo a").verdict(), v1::FN_OK) << "the third came";
  Advance(seconds(61));
  backend_.FailMakes(3, error);
  const auto result = Call(CallOf("plain", "echo a"));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->verdict(), v1::FN_INFRASTRUCTURE);
  EXPECT_EQ(result->reason(), "fn.no_worker");
  EXPECT_TRUE(result->retriable());
  EXPECT_EQ(Count("dsec_fn_worker_make_failures_total"), 5);
}

TEST_F(FnPoolTest, SomethingElseNotFound_IsThePlatformsFault) {
  Start();
  backend_.FailMakes(3, Error(Code::kNotFound, "os.open", "cpu.stat: no such file"));
  const auto result = Call(CallOf("plain", "echo a"));
  ASSERT_TRUE(result.ok()) << result.error().ToString();
  EXPECT_EQ(result->reason(), "fn.no_worker");
}

TEST_F(FnPoolTest, DeathOfAnIdleWorker_IsNoticed) {
  Start();
  Run("plain", "echo a");
  ASSERT_TRUE(backend_.Kill("w1"));
  Await([&] { return PoolOf("base:1").workers() == 0; });
  EXPECT_EQ(Run("plain", "echo a").attempts(), 1);
  EXPECT_EQ(Count("dsec_fn_workers_ended_total", "cause=\"died\""), 1);
}

TEST_F(FnPoolTest, Warm_IsAPoolOfItsOwn) {
  WriteType("warm", R"({"name": "warm", "environment": {"base": "base:1"}, "source": "a.py",
    "run": {"argv": ["/usr/bin/python3", "{source}"]},
    "warm": {"kind": "python", "argv": ["/usr/bin/python3"], "imports": ["json", "os.path"]}})");
  Start();
  Run("plain", "echo a");
  Run("warm", "echo a");
  EXPECT_EQ(backend_.made(), 2);
  EXPECT_EQ(service_->Pools().size(), 2);
}

}  // namespace
}  // namespace dsec::fn

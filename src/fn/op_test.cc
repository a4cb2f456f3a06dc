// SPDX-License-Identifier: Apache-2.0
// op_ids, cancellation, the compile cache's joins, stopping.
#include <filesystem>

#include "fn/testing/fn_fixture.h"

namespace dsec::fn {
namespace {

using std::chrono::milliseconds;

class FnOpTest : public testing::FnFixture {
 protected:
  static v1::FnCall Named(const std::string& op_id, const std::string& code,
                          const std::string& type = "plain") {
    v1::FnCall call = CallOf(type, code);
    call.set_op_id(op_id);
    return call;
  }
};

TEST_F(FnOpTest, Repeat_IsAnsweredByTheKeptResult) {
  Start();
  const auto first = Call(Named("a", "echo once"));
  ASSERT_TRUE(first.ok());
  EXPECT_FALSE(first->existed());
  const auto again = Call(Named("a", "echo once"));
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->existed());
  EXPECT_EQ(again->run().stdout().data(), "once\n");
  EXPECT_EQ(backend_.runs().size(), 1);
  const auto asked = Wait(service_->Result("", "a", Soon()));
  ASSERT_TRUE(asked.ok());
  EXPECT_EQ(asked->op_id(), "a");
  // Also when its type is gone or another by now.
  EXPECT_EQ(Call(Named("a", "echo other")).error().reason(), "fn.op_id_reused");
  EXPECT_EQ(Call(Named("a", "echo once", "compiled")).error().reason(), "fn.op_id_reused");
  // Of another project it is another call.
  auto other = Named("a", "echo other");
  other.set_project("root/x");
  EXPECT_FALSE(Call(other)->existed());
  EXPECT_TRUE(Call(other)->existed());
  EXPECT_EQ(Wait(service_->Result("root/y", "a", Soon())).error().reason(), "fn.op_not_found");
  EXPECT_EQ(Wait(service_->Result("", "b", Soon())).error().reason(), "fn.op_not_found");
}

TEST_F(FnOpTest, RepeatUnderWay_JoinsIt) {
  Start();
  auto first = Begin(Named("a", "wait go\necho done"));
  backend_.AwaitWaiting("go", 1);
  auto second = Begin(Named("a", "wait go\necho done"));
  const auto early = Wait(service_->Result("", "a", runtime::Deadline::After(milliseconds(5))));
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().reason(), "fn.still_running");
  Await([&] { return Count("dsec_fn_op_joins_total") == 1; });
  backend_.Release("go");
  EXPECT_FALSE(first.get()->existed());
  EXPECT_TRUE(second.get()->existed());
  EXPECT_EQ(backend_.runs().size(), 1);
}

TEST_F(FnOpTest, ChosenOpId_OutlivesItsCaller) {
  Start();
  runtime::Running running;
  auto caller = BeginCancellable(Named("a", "wait go\necho done"), &running);
  backend_.AwaitWaiting("go", 1);
  running.Cancel();
  EXPECT_EQ(caller.get().error().code(), Code::kCancelled);
  backend_.Release("go");
  const auto result = Wait(service_->Result("", "a", Soon()));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->verdict(), v1::FN_OK);
}

TEST_F(FnOpTest, MadeUpOpId_EndsWithItsCaller) {
  Start();
  runtime::Running running;
  auto caller = BeginCancellable(CallOf("plain", "wait go"), &running);
  backend_.AwaitWaiting("go", 1);
  running.Cancel();
  EXPECT_EQ(caller.get().error().code(), Code::kCancelled);
  Await([&] { return backend_.Alive().empty(); });
  EXPECT_EQ(Run("plain", "echo a").verdict(), v1::FN_OK);
}

TEST_F(FnOpTest, CancelledInLine_LeavesIt) {
  options_.pools.workers_max = 1;
  Start();
  auto busy = Begin(CallOf("plain", "wait go"));
  backend_.AwaitWaiting("go", 1);
  runtime::Running running;
  auto caller = BeginCancellable(CallOf("plain", "echo never"), &running);
  Await([&] { return PoolOf("base:1").queued() == 1; });
  running.Cancel();
  EXPECT_EQ(caller.get().error().code(), Code::kCancelled);
  Await([&] { return PoolOf("base:1").queued() == 0; });
  backend_.Release("go");
  ASSERT_TRUE(busy.get().ok());
  EXPECT_EQ(backend_.runs().size(), 1);
}

TEST_F(FnOpTest, DeadlineOfTheCaller_IsAnError) {
  Start();
  auto result = Wait(
      service_->Call(Named("a", "wait go\necho done"), runtime::Deadline::After(milliseconds(5))));
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code(), Code::kDeadlineExceeded);
  backend_.AwaitWaiting("go", 1);
  backend_.Release("go");
  EXPECT_EQ(Call(Named("a", "wait go\necho done"))->run().stdout().data(), "done\n");
  EXPECT_EQ(backend_.runs().size(), 1);
}

TEST_F(FnOpTest, Kept_IsBoundedByCountBytesAndAge) {
  options_.ops.count = 3;
  options_.ops.bytes = 1 << 20;
  options_.ops.age = milliseconds(60'000);
  Start();
  for (const char* name : {"a", "b", "c", "d"}) ASSERT_TRUE(Call(Named(name, "echo x")).ok());
  EXPECT_EQ(Wait(service_->Result("", "a", Soon())).error().reason(), "fn.op_not_found");
  EXPECT_TRUE(Wait(service_->Result("", "b", Soon())).ok());
  clock_.Advance(milliseconds(60'001));
  EXPECT_EQ(Wait(service_->Result("", "d", Soon())).error().reason(), "fn.op_not_found");
  const std::string large(600'000, 'x');
  ASSERT_TRUE(Call(Named("e", "echo " + large)).ok());
  ASSERT_TRUE(Call(Named("f", "echo " + large)).ok());
  EXPECT_EQ(Wait(service_->Result("", "e", Soon())).error().reason(), "fn.op_not_found");
  EXPECT_TRUE(Wait(service_->Result("", "f", Soon())).ok());
}

TEST_F(FnOpTest, Error_IsNotKept) {
  Start();
  backend_.SetLayers({});
  EXPECT_EQ(Call(Named("a", "echo x")).error().reason(), "layer.not_found");
  backend_.SetLayers({"base:1"});
  EXPECT_EQ(Call(Named("a", "echo x"))->verdict(), v1::FN_OK);
}

TEST_F(FnOpTest, InfrastructureResult_IsKeptButARepeatRunsAgain) {
  Start();
  EXPECT_EQ(Call(Named("a", "break"))->reason(), "fn.worker_broken");
  EXPECT_EQ(Wait(service_->Result("", "a", Soon()))->reason(), "fn.worker_broken");
  const auto again = Call(Named("a", "break"));
  EXPECT_FALSE(again->existed());
  EXPECT_EQ(backend_.runs().size(), 6);
  // What would fail the same way each time is not.
  EXPECT_EQ(Call(Named("p", "die"))->reason(), "fn.poison");
  EXPECT_TRUE(Call(Named("p", "die"))->existed());
}

TEST_F(FnOpTest, SameCompiles_RunOnce) {
  Start();
  std::vector<std::future<Result<v1::FnResult>>> calls;
  for (int i = 0; i < 8; ++i) {
    v1::FnCall call = CallOf("compiled", "cc wait go\nargs");
    call.add_args(std::to_string(i));
    calls.push_back(Begin(call));
  }
  Await([&] { return Count("dsec_fn_compile_cache_joins_total") == 7; });
  backend_.Release("go");
  size_t cached = 0;
  for (int i = 0; i < 8; ++i) {
    const auto result = calls[static_cast<size_t>(i)].get();
    ASSERT_TRUE(result.ok()) << result.error().ToString();
    EXPECT_EQ(result->run().stdout().data(), "[" + std::to_string(i) + "]");
    cached += result->compile().cached() ? 1 : 0;
  }
  EXPECT_EQ(cached, 7);
  EXPECT_EQ(Count("dsec_fn_compile_cache_misses_total"), 1);
  Await([&] { return std::filesystem::exists(dir_.path() + "/state/fn_artifacts"); });
}

TEST_F(FnOpTest, LeaderOfACompileGivesUp_AnotherGoesOn) {
  Start();
  runtime::Running running;
  auto leader = BeginCancellable(CallOf("compiled", "cc wait go\necho a"), &running);
  backend_.AwaitWaiting("go", 1);
  auto other = Begin(CallOf("compiled", "cc wait go\necho a"));
  Await([&] { return Count("dsec_fn_compile_cache_joins_total") == 1; });
  running.Cancel();
  EXPECT_EQ(leader.get().error().code(), Code::kCancelled);
  backend_.AwaitWaiting("go", 2);
  backend_.Release("go");
  EXPECT_EQ(other.get()->run().stdout().data(), "a\n");
}

TEST_F(FnOpTest, PoisonousCompile_IsSharedByThoseWhoWait) {
  Start();
  auto leader = Begin(CallOf("compiled", "cc wait go\ncc die"));
  backend_.AwaitWaiting("go", 1);
  auto other = Begin(CallOf("compiled", "cc wait go\ncc die"));
  Await([&] { return Count("dsec_fn_compile_cache_joins_total") == 1; });
  backend_.Release("go");
  EXPECT_EQ(leader.get()->reason(), "fn.poison");
  EXPECT_EQ(other.get()->reason(), "fn.poison");
  EXPECT_EQ(backend_.runs().size(), 3);
}

TEST_F(FnOpTest, Cache_HoldsVerdictsOfTheProgramAlone) {
  Start();
  const auto twice = [&](const std::string& code) {
    Run("compiled", code);
    // What was compiled well is on its way to the disk until then.
    EXPECT_TRUE(Wait(service_->PutArtifact("x", Soon())).ok());
    Settle();
    const size_t before = backend_.runs().size();
    const v1::FnResult result = Run("compiled", code);
    EXPECT_EQ(result.compile().cached(), result.has_compile() && backend_.runs().size() - before <
                                                                     (result.has_run() ? 2u : 1u));
    return result.compile().cached();
  };
  EXPECT_TRUE(twice("echo a"));
  EXPECT_TRUE(twice("cc exit 1"));
  EXPECT_TRUE(twice("cc verdict MEMORY"));
  EXPECT_FALSE(twice("cc verdict WALL"));
  EXPECT_FALSE(twice("cc verdict CPU"));
  EXPECT_FALSE(twice("cc exit 127"));
}

TEST_F(FnOpTest, Cache_KnowsAllThatDecides) {
  Start();
  v1::FnCall call = CallOf("compiled", "echo a");
  ASSERT_TRUE(Call(call).ok());
  v1::FnCall limits = call;
  limits.mutable_compile_limits()->set_cpu_ms(5000);
  v1::FnCall file = call;
  file.add_files()->set_path("x.h");
  v1::FnCall content = file;
  content.mutable_files(0)->set_content("x");
  v1::FnCall mode = file;
  mode.mutable_files(0)->set_mode(0755);
  v1::FnCall environment = call;
  environment.mutable_environment()->set_base("other:1");
  v1::FnCall code = CallOf("compiled", "echo b");
  for (const v1::FnCall& other : {limits, file, content, mode, environment, code}) {
    EXPECT_FALSE(Call(other)->compile().cached());
  }
  v1::FnCall run_limits = call;
  run_limits.mutable_limits()->set_cpu_ms(5000);
  EXPECT_TRUE(Call(run_limits)->compile().cached());
}

TEST_F(FnOpTest, CachedFilesGone_AreCompiledAnew) {
  Start();
  Run("compiled", "echo a");
  Await([&] { return Gauge("dsec_fn_artifact_bytes") > 0; });
  Settle();
  for (const auto& file :
       std::filesystem::directory_iterator(dir_.path() + "/state/fn_artifacts")) {
    std::filesystem::resize_file(file.path(), 1);
  }
  const v1::FnResult result = Run("compiled", "echo a");
  EXPECT_EQ(result.verdict(), v1::FN_OK);
  EXPECT_EQ(result.run().stdout().data(), "a\n");
  EXPECT_EQ(Count("dsec_fn_compile_cache_misses_total"), 2);
}

TEST_F(FnOpTest, Stop_EndsEachCallOnce) {
  options_.pools.workers_max = 1;
  Start();
  auto running = Begin(CallOf("plain", "wait go\necho done"));
  backend_.AwaitWaiting("go", 1);
  auto waiting = Begin(CallOf("plain", "echo never"));
  Await([&] { return PoolOf("base:1").queued() == 1; });
  std::promise<Result<void>> stopped;
  auto stop = [](runtime::Task<void> task,
                 std::promise<Result<void>>* done) -> boost::asio::awaitable<void> {
    done->set_value(co_await std::move(task));
  };
  runtime::Spawn(gate_, shards_->at(0), stop(service_->Stop(Soon()), &stopped));
  const auto refused = waiting.get();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().reason(), "edge.stopping");
  EXPECT_EQ(Call(CallOf("plain", "echo late")).error().reason(), "edge.stopping");
  backend_.Release("go");
  EXPECT_EQ(running.get()->verdict(), v1::FN_OK);
  EXPECT_TRUE(stopped.get_future().get().ok());
  EXPECT_TRUE(backend_.Alive().empty());
  Crash();
}

TEST_F(FnOpTest, StopWithoutPatience_TellsThePlatformsFault) {
  Start();
  auto running = Begin(CallOf("plain", "wait never"));
  backend_.AwaitWaiting("never", 1);
  ASSERT_TRUE(Wait(service_->Stop(runtime::Deadline::After(milliseconds(1)))).ok());
  const auto result = running.get();
  ASSERT_TRUE(result.ok()) << result.error().ToString();
  EXPECT_EQ(result->verdict(), v1::FN_INFRASTRUCTURE);
  EXPECT_EQ(result->reason(), "edge.stopping");
  EXPECT_TRUE(result->retriable());
  EXPECT_TRUE(backend_.Alive().empty());
  Crash();
}

TEST_F(FnOpTest, CompiledCall_RunsOnWhileTheNodeStops) {
  options_.pools.workers_max = 1;
  Start();
  auto call = Begin(CallOf("compiled", "cc wait go\necho ran"));
  backend_.AwaitWaiting("go", 1);
  std::promise<Result<void>> stopped;
  auto stop = [](runtime::Task<void> task,
                 std::promise<Result<void>>* done) -> boost::asio::awaitable<void> {
    done->set_value(co_await std::move(task));
  };
  runtime::Spawn(gate_, shards_->at(0), stop(service_->Stop(Soon()), &stopped));
  Await([&] { return Call(CallOf("plain", "")).error().reason() == "edge.stopping"; });
  backend_.Release("go");
  EXPECT_EQ(call.get()->run().stdout().data(), "ran\n");
  EXPECT_TRUE(stopped.get_future().get().ok());
  Crash();
}

TEST_F(FnOpTest, Crash_LeavesNothingAndArtefactsSurvive) {
  Start();
  auto digest = Wait(service_->PutArtifact("bytes", Soon()));
  ASSERT_TRUE(digest.ok());
  (void)Begin(CallOf("plain", "wait never"));
  backend_.AwaitWaiting("never", 1);
  Crash();
  EXPECT_TRUE(backend_.Alive().empty());
  Start();
  auto bytes = Wait(service_->GetArtifact(*digest, Soon()));
  ASSERT_TRUE(bytes.ok()) << bytes.error().ToString();
  EXPECT_EQ(*bytes, "bytes");
}

}  // namespace
}  // namespace dsec::fn

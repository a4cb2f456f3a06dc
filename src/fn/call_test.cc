// SPDX-License-Identifier: Apache-2.0
// Calls from request to verdict.
#include <filesystem>

#include "fn/testing/fn_fixture.h"

namespace dsec::fn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FnCallTest : public testing::FnFixture {};

TEST_F(FnCallTest, Plain_RunsCodeWithInputArgumentsAndFiles) {
  Start();
  EXPECT_THAT(removed_, ElementsAre("swept"));
  v1::FnCall call = CallOf("p", "stdin\nargs\ncat in.txt\nenv A\nwrite out.txt made\nexit 3");
  call.set_stdin("input");
  call.add_args("a b");
  call.add_args("");
  call.add_fetch("out.txt");
  call.add_fetch("none");
  v1::FnFile& file = *call.add_files();
  file.set_path("in.txt");
  file.set_content("file");
  v1::KeyValue& env = *call.add_env();
  env.set_key("A");
  env.set_value("set");
  const auto result = Call(call);
  ASSERT_TRUE(result.ok()) << result.error().ToString();
  EXPECT_EQ(result->verdict(), v1::FN_WRONG_EXIT);
  EXPECT_EQ(result->run().exit_code(), 3);
  EXPECT_EQ(result->run().stdout().data(), "input[main.txt][a b][]fileset");
  EXPECT_FALSE(result->has_compile());
  ASSERT_EQ(result->files_size(), 1);
  EXPECT_EQ(result->files(0).content(), "made");
  EXPECT_EQ(result->files(0).mode(), 0755);
  EXPECT_THAT(result->missing(), ElementsAre("none"));
  EXPECT_EQ(result->attempts(), 1);
  EXPECT_FALSE(result->op_id().empty());
  EXPECT_FALSE(result->existed());
}

TEST_F(FnCallTest, Compiled_RunsWhatTheCompilerMade) {
  Start();
  v1::FnCall call = CallOf("compiled", "cc echo compiling\necho running\nenv A\nenv B\nenv HOME");
  v1::KeyValue& env = *call.add_env();
  env.set_key("B");
  env.set_value("call");
  const auto result = Call(call);
  ASSERT_TRUE(result.ok()) << result.error().ToString();
  EXPECT_EQ(result->verdict(), v1::FN_OK);
  EXPECT_EQ(result->compile().stdout().data(), "compiling\n");
  EXPECT_EQ(result->run().stdout().data(), "running\ntypecall/tmp");
  const auto runs = backend_.runs();
  ASSERT_EQ(runs.size(), 2);
  EXPECT_THAT(runs[0].argv, ElementsAre("/bin/cc", "main.txt"));
  EXPECT_THAT(runs[1].argv, ElementsAre("./prog"));
  EXPECT_THAT(runs[1].files, ElementsAre("prog"));
}

TEST_F(FnCallTest, Compile_ThatFailsIsACompileErrorWhateverStoppedIt) {
  Start();
  struct Case {
    const char* code;
    const char* limit;
  };
  for (const Case& bad : {Case{"cc exit 1", ""}, Case{"cc verdict WALL", "wall"},
                          Case{"cc verdict MEMORY", "memory"}}) {
    const v1::FnResult result = Run("compiled", bad.code);
    EXPECT_EQ(result.verdict(), v1::FN_COMPILE_ERROR) << bad.code;
    EXPECT_EQ(result.compile().verdict(), v1::FN_COMPILE_ERROR) << bad.code;
    EXPECT_EQ(result.compile().limit(), bad.limit) << bad.code;
    EXPECT_FALSE(result.has_run()) << bad.code;
  }
}

TEST_F(FnCallTest, CompilerGone_IsInfrastructureNotACompileError) {
  WriteType("gone", R"({"name": "gone", "environment": {"base": "base:1"}, "source": "a",
    "compile": {"argv": ["/bin/gone", "{source}"]}, "run": {"argv": ["./prog"]}})");
  WriteType("gone_run", R"({"name": "gone_run", "environment": {"base": "base:1"}, "source": "a",
    "run": {"argv": ["/bin/gone", "{source}"]}})");
  Start();
  for (const auto& [type, code] :
       {std::pair{"gone", ""}, std::pair{"gone_run", ""}, std::pair{"compiled", "cc exit 127"}}) {
    const v1::FnResult result = Run(type, code);
    EXPECT_EQ(result.verdict(), v1::FN_INFRASTRUCTURE) << type;
    EXPECT_EQ(result.reason(), "fn.environment") << type;
    EXPECT_TRUE(result.retriable()) << type;
    EXPECT_EQ(result.attempts(), 1) << type;
    EXPECT_FALSE(result.message().empty()) << type;
  }
  EXPECT_EQ(backend_.made(), 1) << "the worker is none the worse";
}

TEST_F(FnCallTest, ProgramThatIsNone_IsTheCallsFault) {
  WriteType("own", R"({"name": "own", "environment": {"base": "base:1"},
    "run": {"argv": ["./mine"]}})");
  Start();
  const auto result = Call(CallOf("own", ""));
  ASSERT_TRUE(result.ok()) << result.error().ToString();
  EXPECT_EQ(result->verdict(), v1::FN_WRONG_EXIT);
  EXPECT_EQ(result->run().exit_code(), 127);
}

TEST_F(FnCallTest, WorkerDies_AnotherTakesTheCall) {
  Start();
  v1::FnCall call = CallOf("plain", "wait go\necho done");
  auto later = Begin(call);
  backend_.AwaitWaiting("go", 1);
  ASSERT_TRUE(backend_.Kill("w1"));
  backend_.AwaitWaiting("go", 2);
  backend_.Release("go");
  const auto result = later.get();
  ASSERT_TRUE(result.ok()) << result.error().ToString();
  EXPECT_EQ(result->verdict(), v1::FN_OK);
  EXPECT_EQ(result->attempts(), 2);
  EXPECT_EQ(Count("dsec_fn_workers_ended_total", "cause=\"died\""), 1);
  EXPECT_EQ(PoolOf("base:1").replaced(), 1);
}

TEST_F(FnCallTest, Poison_EndsAfterItsAttempts) {
  Start();
  const v1::FnResult result = Run("plain", "die");
  EXPECT_EQ(result.verdict(), v1::FN_INFRASTRUCTURE);
  EXPECT_EQ(result.reason(), "fn.poison");
  EXPECT_FALSE(result.retriable());
  EXPECT_EQ(result.attempts(), 3);
  EXPECT_EQ(backend_.made(), 3);
  EXPECT_EQ(Run("plain", "echo a").verdict(), v1::FN_OK);
}

TEST_F(FnCallTest, BrokenWorkers_EndWithTheLastCause) {
  Start();
  v1::FnResult result = Run("plain", "break");
  EXPECT_EQ(result.verdict(), v1::FN_INFRASTRUCTURE);
  EXPECT_EQ(result.reason(), "fn.worker_broken");
  EXPECT_TRUE(result.retriable());
  result = Run("plain", "nothing");
  EXPECT_EQ(result.reason(), "fn.step_failed");
  EXPECT_EQ(result.attempts(), 3);
}

TEST_F(FnCallTest, PoisonousCompile_KeepsNoStep) {
  Start();
  const v1::FnResult result = Run("compiled", "cc die");
  EXPECT_EQ(result.reason(), "fn.poison");
  EXPECT_FALSE(result.has_compile());
}

TEST_F(FnCallTest, DirtyWorker_IsReplacedAndItsResultCounts) {
  Start();
  EXPECT_EQ(Run("plain", "dirty\necho a").verdict(), v1::FN_OK);
  EXPECT_EQ(Run("plain", "echo b").verdict(), v1::FN_OK);
  EXPECT_EQ(backend_.made(), 2);
  EXPECT_EQ(Count("dsec_fn_workers_ended_total", "cause=\"dirty\""), 1);
}

TEST_F(FnCallTest, Request_ThatIsWrongIsAnErrorWithItsField) {
  Start();
  struct Case {
    std::function<void(v1::FnCall&)> change;
    Code code;
    const char* reason;
    const char* field;
  };
  const auto file = [](const char* path, const char* artifact = "") {
    return [=](v1::FnCall& call) {
      call.add_files()->set_path(path);
      call.mutable_files(0)->set_artifact(artifact);
    };
  };
  const std::string unknown = "sha256:" + std::string(64, 'a');
  const std::vector<Case> cases = {
      {[](auto& c) { c.set_type("none"); }, Code::kNotFound, "fn.type_not_found", "type"},
      {[](auto& c) { c.set_type("../x"); }, Code::kInvalidArgument, "fn.invalid", "type"},
      {[](auto& c) { c.set_op_id("a b"); }, Code::kInvalidArgument, "request.invalid", "op_id"},
      {file("../x"), Code::kInvalidArgument, "fn.invalid", "files[0].path"},
      {file("/x"), Code::kInvalidArgument, "fn.invalid", "files[0].path"},
      {file("a//b"), Code::kInvalidArgument, "fn.invalid", "files[0].path"},
      {file("main.txt"), Code::kInvalidArgument, "fn.invalid", "files[0].path"},
      {file("main.txt/x"), Code::kInvalidArgument, "fn.invalid", "files"},
      {file("x", "sha256:zz"), Code::kInvalidArgument, "fn.invalid", "files[0].artifact"},
      {file("x", unknown.c_str()), Code::kNotFound, "artifact.not_found", "files[0].artifact"},
      {[](auto& c) { c.add_args(std::string("a\0b", 3)); }, Code::kInvalidArgument, "fn.invalid",
       "args[0]"},
      {[](auto& c) { c.set_type("other"), c.add_args("a"); }, Code::kInvalidArgument, "fn.invalid",
       "args"},
      {[](auto& c) { c.add_fetch("../x"); }, Code::kInvalidArgument, "fn.invalid", "fetch[0]"},
      {[](auto& c) { c.add_fetch("*"); }, Code::kInvalidArgument, "fn.invalid", "fetch[0]"},
      {[](auto& c) { c.set_compile_only(true); }, Code::kInvalidArgument, "fn.invalid",
       "compile_only"},
      {[](auto& c) { c.mutable_limits()->set_wall_ms(700'000); }, Code::kInvalidArgument,
       "spec.out_of_range", "limits.wall_ms"},
      {[](auto& c) { c.mutable_environment()->set_base("none:1"); }, Code::kNotFound,
       "layer.not_found", "environment.base"},
      {[](auto& c) { c.mutable_environment()->set_workspace("w:1"); }, Code::kInvalidArgument,
       "fn.invalid", "environment.base"},
      {[](auto& c) { c.mutable_gpu()->set_kind("whole"); }, Code::kInvalidArgument, "fn.invalid",
       "gpu.count"},
      {[](auto& c) { c.mutable_gpu()->set_count(1); }, Code::kFailedPrecondition, "fn.gpu_missing",
       "gpu.kind"},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::FnCall call = CallOf("plain", "echo a");
    cases[i].change(call);
    const auto result = Call(call);
    ASSERT_FALSE(result.ok()) << i;
    EXPECT_EQ(result.error().code(), cases[i].code) << i << result.error().ToString();
    EXPECT_EQ(result.error().reason(), cases[i].reason) << i << result.error().ToString();
    EXPECT_EQ(result.error().field(), cases[i].field) << i << result.error().ToString();
  }
  EXPECT_TRUE(backend_.runs().empty());
}

TEST_F(FnCallTest, Limits_CallBeforeTypeBeforeNode) {
  WriteType("tight", R"({"name": "tight", "environment": {"base": "base:1"}, "source": "a",
    "run": {"argv": ["/bin/run"], "limits": {"wall_ms": 2000, "cpu_ms": 1000}}})");
  Start();
  v1::FnCall call = CallOf("tight", "echo a");
  call.mutable_limits()->set_cpu_ms(500);
  ASSERT_TRUE(Call(call).ok());
  const v1::FnLimits limits = backend_.runs().at(0).limits;
  EXPECT_EQ(limits.cpu_ms(), 500);
  EXPECT_EQ(limits.wall_ms(), 2000);
  EXPECT_EQ(limits.processes(), 64);
}

TEST_F(FnCallTest, Artifacts_OfOneCallFeedAnother) {
  Start();
  v1::FnCall compile = CallOf("compiled", "echo from artifact");
  compile.set_compile_only(true);
  compile.set_keep_artifacts(true);
  auto compiled = Call(compile);
  ASSERT_TRUE(compiled.ok()) << compiled.error().ToString();
  EXPECT_EQ(compiled->verdict(), v1::FN_OK);
  EXPECT_FALSE(compiled->has_run());
  ASSERT_EQ(compiled->files_size(), 1);
  EXPECT_EQ(compiled->files(0).path(), "prog");
  EXPECT_EQ(compiled->files(0).content(), "");
  ASSERT_THAT(compiled->files(0).artifact(), HasSubstr("sha256:"));
  // Again, from the cache, with the bytes this time.
  compile.set_keep_artifacts(false);
  auto again = Call(compile);
  ASSERT_TRUE(again.ok()) << again.error().ToString();
  EXPECT_EQ(again->files(0).content(), "echo from artifact\n");

  v1::FnCall use = CallOf("plain", "cat prog");
  *use.add_files() = compiled->files(0);
  auto used = Call(use);
  ASSERT_TRUE(used.ok()) << used.error().ToString();
  EXPECT_EQ(used->run().stdout().data(), "echo from artifact\n");

  v1::FnCall produce = CallOf("plain", "write out bytes");
  produce.add_fetch("out");
  produce.set_keep_artifacts(true);
  auto produced = Call(produce);
  ASSERT_TRUE(produced.ok());
  auto bytes = Wait(service_->GetArtifact(produced->files(0).artifact(), Soon()));
  ASSERT_TRUE(bytes.ok()) << bytes.error().ToString();
  EXPECT_EQ(*bytes, "bytes");
}

TEST_F(FnCallTest, Artifact_ThatWasDamagedIsGone) {
  Start();
  auto digest = Wait(service_->PutArtifact("bytes", Soon()));
  ASSERT_TRUE(digest.ok());
  std::filesystem::resize_file(dir_.path() + "/state/fn_artifacts/" + digest->substr(7), 2);
  v1::FnCall call = CallOf("plain", "cat a");
  call.add_files()->set_path("a");
  call.mutable_files(0)->set_artifact(*digest);
  auto result = Call(call);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().reason(), "artifact.not_found");
  EXPECT_EQ(result.error().field(), "files[0].artifact");
  EXPECT_EQ(Run("plain", "echo a").verdict(), v1::FN_OK) << "the worker went back";
  EXPECT_EQ(backend_.made(), 1);
}

TEST_F(FnCallTest, Environment_IsAskedForOnceInAFlood) {
  Start();
  for (int i = 0; i < 20; ++i) Run("plain", "echo a");
  EXPECT_EQ(backend_.resolved(), 1);
  clock_.Advance(std::chrono::seconds(2));
  Run("plain", "echo a");
  EXPECT_EQ(backend_.resolved(), 2);
}

TEST_F(FnCallTest, LayerGone_IsARequestErrorAlsoWhenTheWorkerIsMade) {
  Start();
  backend_.FailMakes(1, Error(Code::kNotFound, "layer.not_found", "gone since"));
  auto result = Call(CallOf("plain", "echo a"));
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().reason(), "layer.not_found");
  EXPECT_EQ(Run("plain", "echo a").verdict(), v1::FN_OK);
}

TEST_F(FnCallTest, QueueTime_IsApart) {
  options_.pools.workers_max = 1;
  Start();
  auto first = Begin(CallOf("plain", "wait go"));
  backend_.AwaitWaiting("go", 1);
  auto second = Begin(CallOf("plain", "echo a"));
  Await([&] { return PoolOf("base:1").queued() == 1; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  backend_.Release("go");
  ASSERT_TRUE(first.get().ok());
  const auto result = second.get();
  ASSERT_TRUE(result.ok());
  EXPECT_GE(result->queue_usec(), 20'000);
  EXPECT_LT(result->run().wall_usec(), 20'000);
}

}  // namespace
}  // namespace dsec::fn

// SPDX-License-Identifier: Apache-2.0
#include "apiserver/fn_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "apiserver/fusion_json.h"

namespace dsec::apiserver {
namespace {

using json = nlohmann::json;

constexpr uint64_t kMaxCpu = 3'600'000;

template <typename T>
void ExpectRefused(const Result<T>& result, const std::string& reason, const std::string& field) {
  ASSERT_FALSE(result.ok()) << field;
  EXPECT_EQ(result.error().code(), Code::kInvalidArgument) << field;
  EXPECT_EQ(result.error().reason(), "request." + reason) << field;
  EXPECT_EQ(result.error().field(), field);
}

TEST(FnJson, Call_ReadsEveryField) {
  auto call = ReadFnCall(R"({"op_id":"o","type":"c","code_b64":"/w==","files":[
      {"path":"a","content":"x","mode":"0755"},{"path":"b","artifact":"sha256:0"}],"stdin":"in",
      "args":["1","2"],"limits":{"wall_ms":1,"cpu_ms":2,"memory_bytes":3,"processes":4,
      "output_bytes":5,"file_bytes":6,"disk_bytes":7,"disk_inodes":8},
      "compile_limits":{"wall_ms":9},"fetch":["d/"],"keep_artifacts":true,"compile_only":true,
      "environment":{"base":"b","workspace":"w","toolkits":["t"]},
      "gpu":{"count":2,"kind":"whole","shared":true},"env":{"A":"a"},"env_b64":{"B":"gA=="}})");
  ASSERT_TRUE(call.ok()) << call.error().ToString();
  EXPECT_EQ(call->code(), "\xff");
  EXPECT_EQ(call->files(0).mode(), 0755u);
  EXPECT_EQ(call->files(1).artifact(), "sha256:0");
  EXPECT_EQ(call->limits().disk_inodes(), 8u);
  EXPECT_EQ(call->limits().wall_ms(), 1u);
  EXPECT_EQ(call->compile_limits().wall_ms(), 9u);
  EXPECT_EQ(call->environment().toolkits(0), "t");
  EXPECT_EQ(call->gpu().count(), 2u);
  EXPECT_TRUE(call->gpu().shared() && call->compile_only() && call->keep_artifacts());
  EXPECT_EQ(call->env(1).value(), "\x80");
}

TEST(FnJson, Call_RefusesWithTheFieldNamed) {
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {R"({})", "missing", "type"},
      {R"({"type":"c","codes":""})", "unknown_field", "codes"},
      {R"({"type":"c","code":"a","code_b64":""})", "contradiction", "code_b64"},
      {R"({"type":"c","op_id":"a b"})", "invalid", "op_id"},
      {R"({"type":"c","files":{}})", "wrong_type", "files"},
      {R"({"type":"c","files":[5]})", "wrong_type", "files[0]"},
      {R"({"type":"c","files":[{"path":"a"}]})", "missing", "files[0].content"},
      {R"({"type":"c","files":[{"content":"a"}]})", "missing", "files[0].path"},
      {R"({"type":"c","files":[{"path":"a","content":"","artifact":""}]})", "contradiction",
       "files[0].artifact"},
      {R"({"type":"c","files":[{"path":"a","content":"","mode":"755"}]})", "invalid",
       "files[0].mode"},
      {R"({"type":"c","limits":{"wall_ms":1.5}})", "wrong_type", "limits.wall_ms"},
      {R"({"type":"c","limits":{"wall":1}})", "unknown_field", "limits.wall"},
      {R"({"type":"c","environment":{}})", "missing", "environment.base"},
      {R"({"type":"c","gpu":{"count":4294967296}})", "out_of_range", "gpu.count"},
  };
  for (const auto& [body, reason, field] : cases) ExpectRefused(ReadFnCall(body), reason, field);
}

TEST(FnJson, Calls_AreRefusedAsAWhole) {
  ExpectRefused(ReadFnCalls("{}"), "missing", "calls");
  ExpectRefused(ReadFnCalls(R"({"calls":[]})"), "out_of_range", "calls");
  ExpectRefused(ReadFnCalls(R"({"calls":[{"type":"c"},{"type":5}]})"), "wrong_type",
                "calls[1].type");
  ExpectRefused(ReadFnCalls(R"({"calls":[{"type":"c","files":[{}]}]})"), "missing",
                "calls[0].files[0].path");
  ExpectRefused(ReadFnCalls(R"({"calls":[{"type":"c"}],"concurrency":0})"), "out_of_range",
                "concurrency");
  json many = {{"calls", json::array()}, {"concurrency", 7}};
  for (size_t i = 0; i < kMaxFnCalls; ++i) many["calls"].push_back({{"type", "c"}});
  auto read = ReadFnCalls(many.dump());
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->calls.size(), kMaxFnCalls);
  EXPECT_EQ(read->concurrency, 7u);
  many["calls"].push_back({{"type", "c"}});
  ExpectRefused(ReadFnCalls(many.dump()), "out_of_range", "calls");
}

json Written(const v1::FnResult& result, bool fusion = false) {
  std::string text;
  http::JsonWriter writer(text);
  fusion ? WriteFusionResult(writer, result) : WriteFnResult(writer, result);
  return json::parse(text);
}

v1::FnResult RunOf(v1::FnVerdict verdict, int exit_code = 0, int signal = 0,
                   const std::string& limit = "") {
  v1::FnResult result;
  result.set_op_id("o");
  result.set_verdict(verdict);
  v1::FnStep& run = *result.mutable_run();
  run.set_verdict(verdict);
  run.set_exit_code(exit_code);
  run.set_signal(signal);
  run.set_limit(limit);
  run.set_wall_usec(1'500'000);
  return result;
}

TEST(FnJson, Result_SaysWhatEndedIt) {
  EXPECT_EQ(Written(RunOf(v1::FN_OK))["run"]["exit_code"], 0);
  EXPECT_EQ(Written(RunOf(v1::FN_WRONG_EXIT, 3))["run"]["exit_code"], 3);
  const json killed = Written(RunOf(v1::FN_SIGNALED, 0, 11))["run"];
  EXPECT_EQ(killed["signal"], 11);
  EXPECT_FALSE(killed.contains("exit_code"));
  const json limited = Written(RunOf(v1::FN_TIME_LIMIT, 0, 0, "cpu"));
  EXPECT_EQ(limited["verdict"], "TIME_LIMIT");
  EXPECT_EQ(limited["run"]["limit"], "cpu");
  EXPECT_FALSE(limited.contains("reason") || limited.contains("compile"));
  EXPECT_EQ(limited["run"]["stdout"], json({{"data", ""}, {"total", 0}}));
}

TEST(FnJson, Result_CarriesBytesAndFaults) {
  v1::FnResult result;
  result.set_verdict(v1::FN_INFRASTRUCTURE);
  result.set_reason("fn.poison");
  result.set_retriable(true);
  v1::FnFile& file = *result.add_files();
  file.set_path("f");
  file.set_content("\xff");
  file.set_mode(0755);
  result.add_files()->set_artifact("sha256:1");
  const json written = Written(result);
  EXPECT_EQ(written["files"][0], json({{"path", "f"}, {"content_b64", "/w=="}, {"mode", "0755"}}));
  EXPECT_EQ(written["files"][1]["artifact"], "sha256:1");
  EXPECT_EQ(written["reason"], "fn.poison");
  EXPECT_EQ(written["retriable"], true);
}

// --- SandboxFusion ---

TEST(FusionJson, Run_TakesWhatClientsSend) {
  auto call = ReadFusionRun(
      R"({"compile_timeout":10,"run_timeout":0.5,"code":"x","stdin":null,"memory_limit_MB":64,
          "language":"python","files":{"a/b":"eA==","gone":null},"fetch_files":["out"],"args":["1"],
          "something":"else"})",
      kMaxCpu);
  ASSERT_TRUE(call.ok()) << call.error().ToString();
  EXPECT_EQ(call->type(), "python");
  EXPECT_EQ(call->limits().wall_ms(), 500u);
  EXPECT_GT(call->limits().cpu_ms(), 500u);
  EXPECT_EQ(call->limits().memory_bytes(), 64u << 20);
  EXPECT_EQ(call->compile_limits().wall_ms(), 10'000u);
  ASSERT_EQ(call->files_size(), 1);
  EXPECT_EQ(call->files(0).content(), "x");
  auto plain = ReadFusionRun(R"({"code":"","language":"c","memory_limit_MB":-1})", 5'000);
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->limits().memory_bytes(), 0u);
  EXPECT_EQ(plain->limits().cpu_ms(), 10'000u);  // never below the wall clock
}

TEST(FusionJson, Run_RefusesWhatItCannotMean) {
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {R"({"language":"c"})", "missing", "code"},
      {R"({"code":""})", "missing", "language"},
      {R"({"code":"","language":"c","run_timeout":"1"})", "wrong_type", "run_timeout"},
      {R"({"code":"","language":"c","run_timeout":0})", "out_of_range", "run_timeout"},
      {R"({"code":"","language":"c","compile_timeout":1e9})", "out_of_range", "compile_timeout"},
      {R"({"code":"","language":"c","memory_limit_MB":1e30})", "wrong_type", "memory_limit_MB"},
      {R"({"code":"","language":"c","files":{"a":"?"}})", "invalid", "files.a"},
      {R"({"code":"","language":"c","files":{"a":5}})", "wrong_type", "files.a"},
      {R"([])", "malformed", ""},
  };
  for (const auto& [body, reason, field] : cases)
    ExpectRefused(ReadFusionRun(body, kMaxCpu), reason, field);
}

TEST(FusionJson, Result_HasTheirStatuses) {
  const auto of = [](const v1::FnResult& result) { return Written(result, true); };
  EXPECT_EQ(of(RunOf(v1::FN_OK))["status"], "Success");
  EXPECT_EQ(of(RunOf(v1::FN_OK))["compile_result"], nullptr);
  const json failed = of(RunOf(v1::FN_WRONG_EXIT, 3));
  EXPECT_EQ(failed["status"], "Failed");
  EXPECT_EQ(failed["run_result"]["status"], "Finished");
  EXPECT_EQ(failed["run_result"]["return_code"], 3);
  EXPECT_EQ(failed["run_result"]["execution_time"], 1.5);
  EXPECT_EQ(of(RunOf(v1::FN_SIGNALED, 0, 11))["run_result"]["return_code"], -11);
  EXPECT_EQ(of(RunOf(v1::FN_MEMORY_LIMIT, 0, 0, "memory"))["run_result"]["return_code"], -9);
  const json late = of(RunOf(v1::FN_TIME_LIMIT, 0, 0, "wall"));
  EXPECT_EQ(late["status"], "Failed");
  EXPECT_EQ(late["run_result"]["status"], "TimeLimitExceeded");
  EXPECT_EQ(late["run_result"]["return_code"], nullptr);
  v1::FnResult compile;
  compile.set_verdict(v1::FN_COMPILE_ERROR);
  compile.mutable_compile()->set_verdict(v1::FN_COMPILE_ERROR);
  compile.mutable_compile()->set_exit_code(1);
  EXPECT_EQ(of(compile)["compile_result"]["return_code"], 1);
  EXPECT_EQ(of(compile)["run_result"], nullptr);
  compile.mutable_compile()->set_limit("wall");
  EXPECT_EQ(of(compile)["compile_result"]["status"], "TimeLimitExceeded");
  v1::FnResult broken;
  broken.set_verdict(v1::FN_INFRASTRUCTURE);
  broken.set_reason("fn.poison");
  EXPECT_EQ(of(broken)["status"], "SandboxError");
  EXPECT_THAT(of(broken)["message"].get<std::string>(), ::testing::StartsWith("fn.poison"));
}

Result<FusionSubmission> Submission(const std::string& completion, const json& tests,
                                    const json& more = json::object()) {
  json config = {{"language", "python"}, {"provided_data", {{"id", 1}, {"test", tests}}}};
  config.update(more);
  const json body = {{"dataset", "d"}, {"id", 7}, {"completion", completion}, {"config", config}};
  return ReadFusionSubmission(body.dump(), kMaxCpu);
}
const json kTests = {{{"input", {{"stdin", "1"}, {"data.txt", "d"}}},
                      {"output", {{"stdout", "2"}, {"out.txt", "o"}}}}};

TEST(FusionJson, Submission_FindsTheCode) {
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"text ```python\nA\n``` more", "A\n", "fenced"},
      {"```sh\nls\n```\n```python\nA\n```", "A\n", "fenced"},
      {"```sh\nls\n```\n```c\nA\n```", "ls\n", "fenced"},
      {"```python\nA", "A", "incomplete_fenced"},
      {"A", "A", "heuristic"},
      {"", "", "empty"},
      {"```", "", "incomplete_fenced"},
  };
  for (const auto& [completion, code, taken] : cases) {
    auto read = Submission(completion, kTests);
    ASSERT_TRUE(read.ok()) << read.error().ToString();
    EXPECT_EQ(read->code, code) << completion;
    EXPECT_EQ(read->taken, taken) << completion;
    EXPECT_EQ(read->tests.at(0).call.code(), code);
  }
}

TEST(FusionJson, Submission_ReadsTests) {
  auto read = Submission("A", kTests, {{"extra", {{"run_all_cases", true}}}});
  ASSERT_TRUE(read.ok()) << read.error().ToString();
  EXPECT_EQ(read->id, "7");
  EXPECT_TRUE(read->run_all);
  const FusionTest& test = read->tests.at(0);
  EXPECT_EQ(test.call.stdin(), "1");
  EXPECT_EQ(test.call.files(0).path(), "data.txt");
  EXPECT_EQ(test.call.fetch(0), "out.txt");
  EXPECT_EQ(test.stdout, "2");
  EXPECT_EQ(json::parse(test.info), kTests[0]);
  EXPECT_EQ(Submission("A", kTests, {{"dataset_type", "HumanEvalDataset"}}).error().reason(),
            "fusion.no_dataset");
  ExpectRefused(Submission("A", json::array()), "invalid", "config.provided_data.test");
  ExpectRefused(Submission("A", {{{"input", json::object()}}}), "missing",
                "config.provided_data.test[0].output");
}

TEST(SameText, WhiteSpaceAtEnds_DoesNotCount) {
  EXPECT_TRUE(SameText("1 2\n3\n", "1 2  \r\n3\n\n \n"));
  EXPECT_TRUE(SameText("", "\n"));
  EXPECT_FALSE(SameText("1\n\n2", "1\n2"));
  EXPECT_FALSE(SameText(" 1", "1"));
  EXPECT_FALSE(SameText("1", ""));
}

}  // namespace
}  // namespace dsec::apiserver

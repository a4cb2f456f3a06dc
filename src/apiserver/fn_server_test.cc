// SPDX-License-Identifier: Apache-2.0
// The routes of FnCall and of SandboxFusion over an engine that does as it is told.
#include <atomic>
#include <thread>

#include "apiserver/testing/api_fixture.h"
#include "http/base64.h"
#include "http/testing/raw_socket.h"
#include "runtime/async_event.h"

namespace dsec::apiserver {
namespace {

using testing::Answer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::json;
using testing::kKey;
using testing::kTime;
using testing::Strings;

// What the code of a call makes it do: "echo" prints its stdin, "exit" ends with 1, "hang" runs
// until it is cancelled, "full" finds the queue full twice, "broken" and "poison" are faults, and
// "away" finds the engine stopping.
class FakeFn final : public fn::FnApi {
 public:
  runtime::Task<v1::FnResult> Call(v1::FnCall call, runtime::Deadline deadline) override {
    if (call.type() != "fake")
      co_return Error(Code::kNotFound, "fn.type_not_found", call.type()).WithField("type");
    const std::string code = call.code();
    if (code == "full" && refused++ < 2)
      co_return Error(Code::kResourceExhausted, "fn.queue_full", "the queue is full");
    if (code == "away") co_return Error(Code::kUnavailable, "edge.stopping", "the daemon stops");
    const int now = ++running;
    for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
    }
    if (code == "hang") {
      auto cancelled = co_await runtime::SleepUntil(deadline);
      --running;
      if (!cancelled.ok()) co_return std::move(cancelled).error();
    } else {
      // Others get their turn, as with a real worker.
      auto slept =
          co_await runtime::SleepUntil(runtime::Deadline::After(std::chrono::milliseconds(1)));
      --running;
      if (!slept.ok()) co_return std::move(slept).error();
    }
    v1::FnResult result;
    result.set_op_id(call.op_id().empty() ? "made-up" : call.op_id());
    const bool fault = code == "broken" || code == "poison";
    result.set_verdict(fault            ? v1::FN_INFRASTRUCTURE
                       : code == "exit" ? v1::FN_WRONG_EXIT
                                        : v1::FN_OK);
    result.set_reason(fault ? "fn." + code : "");
    result.set_retriable(code == "broken");
    v1::FnStep& run = *result.mutable_run();
    run.set_verdict(result.verdict());
    run.set_exit_code(code == "exit" ? 1 : 0);
    run.mutable_stdout()->set_data(call.stdin());
    co_return result;
  }
  runtime::Task<v1::FnResult> Result(std::string /*project*/, std::string op_id,
                                     runtime::Deadline) override {
    if (op_id == "running") co_return Error(Code::kUnavailable, "fn.still_running", "it runs");
    if (op_id != "known") co_return Error(Code::kNotFound, "fn.op_not_found", op_id);
    v1::FnResult result;
    result.set_op_id(op_id);
    result.set_verdict(v1::FN_OK);
    result.set_existed(true);
    co_return result;
  }
  std::vector<v1::FnTaskType> Types() const override { return types; }
  runtime::Task<v1::FnTaskType> PutType(v1::FnTaskType type, runtime::Deadline) override {
    types.push_back(type);
    co_return type;
  }
  runtime::Task<void> RemoveType(std::string name, runtime::Deadline) override {
    if (name != "mine") co_return Error(Code::kNotFound, "fn.type_not_found", name);
    co_return Ok();
  }
  runtime::Task<std::string> PutArtifact(std::string bytes, runtime::Deadline) override {
    artifact = std::move(bytes);
    co_return "sha256:" + std::string(64, 'a');
  }
  runtime::Task<std::string> GetArtifact(std::string digest, runtime::Deadline) override {
    if (!digest.starts_with("sha256:a")) {
      co_return Error(Code::kNotFound, "artifact.not_found", digest);
    }
    co_return artifact;
  }
  std::vector<v1::FnPoolInfo> Pools() const override {
    v1::FnPoolInfo pool;
    pool.set_key("k");
    pool.set_workers(3);
    return {pool};
  }

  std::atomic<int> running = 0;
  std::atomic<int> most = 0;
  std::atomic<int> refused = 0;
  std::vector<v1::FnTaskType> types;
  std::string artifact;
};

class FnServerTest : public testing::ApiFixture {
 protected:
  FnServerTest() { fn_ = &fake_; }
  static json CallOf(const std::string& code, const std::string& input = "") {
    return {{"type", "fake"}, {"code", code}, {"stdin", input}};
  }
  static json Batch(size_t count, const std::string& code) {
    json calls = json::array();
    for (size_t i = 0; i < count; ++i) calls.push_back(CallOf(code, std::to_string(i)));
    return {{"calls", calls}};
  }
  FakeFn fake_;
};

TEST_F(FnServerTest, Call_AnswersAResultWhateverTheVerdict) {
  const Answer good = Post("/v1/fn/call", CallOf("echo", "hello"));
  EXPECT_EQ(good.status, 200) << good.body;
  EXPECT_EQ(good.body["verdict"], "OK");
  EXPECT_EQ(good.body["run"]["stdout"]["data"], "hello");
  EXPECT_EQ(Post("/v1/fn/call", CallOf("exit")).body["verdict"], "WRONG_EXIT");
  EXPECT_EQ(Post("/v1/fn/call", CallOf("broken")).body["reason"], "fn.broken");
  const Answer unknown = Post("/v1/fn/call", {{"type", "nothing"}});
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(unknown.Field(), "type");
  const Answer full = Post("/v1/fn/call", CallOf("full"));
  EXPECT_EQ(full.status, 429);
  EXPECT_TRUE(full.fields.Find("Retry-After").has_value());
  ExpectRefused("POST", "/v1/fn/call", R"({"type":"fake","x":1})", "request.unknown_field", "x");
}

TEST_F(FnServerTest, Calls_AnswerEachOnceWithinTheirConcurrency) {
  json batch = Batch(300, "echo");
  batch["concurrency"] = 5;
  batch["calls"][7]["type"] = "nothing";
  const Answer all = Post("/v1/fn/calls", batch);
  ASSERT_EQ(all.body.size(), 301u);
  std::set<size_t> seen;
  for (const json& record : all.body) {
    if (record["type"] == "done") continue;
    const size_t index = record["index"];
    EXPECT_TRUE(seen.insert(index).second) << record;
    if (index == 7) {
      EXPECT_EQ(record["error"]["reason"], "fn.type_not_found");
    } else {
      EXPECT_EQ(record["result"]["run"]["stdout"]["data"], std::to_string(index));
    }
  }
  EXPECT_EQ(all.body.back(), json({{"type", "done"}, {"ok", 299}, {"failed", 1}}));
  EXPECT_LE(fake_.most, 5);
  EXPECT_GT(fake_.most, 1);
}

TEST_F(FnServerTest, Calls_WaitOutAFullQueue) {
  const Answer all = Post("/v1/fn/calls", Batch(1, "full"));
  EXPECT_EQ(all.body.back(), json({{"type", "done"}, {"ok", 1}, {"failed", 0}}));
  EXPECT_EQ(fake_.refused, 3);
}

TEST_F(FnServerTest, ClientThatLeaves_CancelsWhatRuns) {
  const http::Headers key = {{"X-API-Key", kKey}};
  for (const bool many : {false, true}) {
    const std::string target = many ? "/v1/fn/calls" : "/v1/fn/call";
    const std::string body = many ? Batch(3, "hang").dump() : CallOf("hang").dump();
    {
      http::testing::RawSocket client(server_->addresses()[0]);
      client.Send(fmt::format(
          "POST {} HTTP/1.1\r\nHost: x\r\nX-API-Key: {}\r\nContent-Length: {}\r\n\r\n{}", target,
          kKey, body.size(), body));
      Await([&] { return fake_.running == (many ? 3 : 1); });
    }
    Await([&] { return fake_.running == 0; });
  }
}

TEST_F(FnServerTest, Stop_EndsABatchWithAnErrorRecord) {
  auto client = http::BlockingClient::Create({.endpoint = server_->addresses()[0]}).value();
  std::string last;
  std::thread reader([&] {
    auto reply = client->Call(
        {"POST", "/v1/fn/calls", {{"X-API-Key", kKey}}, Batch(3, "hang").dump()}, kTime);
    if (reply.ok()) last = reply->body;
  });
  Await([&] { return fake_.running == 3; });
  StopServer();
  reader.join();
  EXPECT_THAT(last, HasSubstr("apiserver.stopping"));
  EXPECT_EQ(fake_.running, 0);
}

TEST_F(FnServerTest, ResultsTypesArtifactsPools_AreAnswered) {
  EXPECT_EQ(Ask("GET", "/v1/fn/calls/known").body["existed"], true);
  const Answer running = Ask("GET", "/v1/fn/calls/running?wait_ms=1");
  EXPECT_EQ(running.status, 202);
  EXPECT_EQ(running.body, json({{"op_id", "running"}, {"running", true}}));
  EXPECT_EQ(Ask("GET", "/v1/fn/calls/other").status, 404);
  const json type = {{"source", "main.x"}, {"run", {{"argv", {"/bin/x"}}}}};
  EXPECT_EQ(Ask("PUT", "/v1/fn/types/mine", type.dump()).body["name"], "mine");
  EXPECT_EQ(Ask("GET", "/v1/fn/types").body["types"][0]["source"], "main.x");
  const Answer other = Ask("PUT", "/v1/fn/types/mine", R"({"name":"yours"})");
  EXPECT_EQ(other.Reason(), "request.contradiction");
  EXPECT_EQ(Ask("PUT", "/v1/fn/types/mine", R"({"nme":"x"})").Reason(), "request.unknown_field");
  EXPECT_EQ(Ask("DELETE", "/v1/fn/types/mine").status, 204);
  EXPECT_EQ(Ask("DELETE", "/v1/fn/types/other").status, 404);
  const std::string digest = Ask("PUT", "/v1/fn/artifacts", "\xff\x01").body["artifact"];
  auto bytes = client_->Call({"GET", "/v1/fn/artifacts/" + digest, {{"X-API-Key", kKey}}}, kTime);
  EXPECT_EQ(bytes->body, "\xff\x01");
  EXPECT_EQ(Ask("GET", "/v1/fn/artifacts/none").status, 404);
  EXPECT_EQ(Ask("GET", "/v1/fn/pools").body["pools"][0]["workers"], 3);
}

TEST_F(FnServerTest, RunCode_SpeaksTheirWords) {
  const auto run = [&](const std::string& code) {
    return Post("/run_code", {{"code", code}, {"language", "fake"}, {"stdin", "in"}});
  };
  EXPECT_EQ(run("echo").body["status"], "Success");
  EXPECT_EQ(run("echo").body["run_result"]["stdout"], "in");
  EXPECT_EQ(run("exit").body["run_result"]["return_code"], 1);
  EXPECT_EQ(run("poison").body["status"], "SandboxError");
  for (const char* code : {"broken", "full", "away"}) EXPECT_EQ(run(code).status, 504) << code;
  const Answer unknown = Post("/run_code", {{"code", ""}, {"language", "cobol"}});
  EXPECT_EQ(unknown.status, 422);
  EXPECT_EQ(unknown.body["detail"][0]["loc"], json({"body", "type"}));
  EXPECT_EQ(Post("/run_code", {{"code", ""}}).status, 422);
}

TEST_F(FnServerTest, BasicScheme_IsForTheirRoutesAlone) {
  const auto basic = [](const std::string& pair) {
    std::string encoded;
    http::AppendBase64(pair, encoded);
    return http::Headers{{"Authorization", "Basic " + encoded}};
  };
  EXPECT_EQ(Ask("GET", "/v1/ping", "", basic("any:" + kKey)).body, "pong");
  EXPECT_EQ(Ask("GET", "/v1/ping", "", basic("any:" + kKey + "x")).Reason(), "auth.invalid");
  EXPECT_EQ(Ask("GET", "/v1/ping", "", basic(kKey)).Reason(), "auth.missing");
  EXPECT_EQ(Ask("GET", "/v1/ping", "", basic("any:")).Reason(), "auth.missing");
  EXPECT_EQ(Ask("GET", "/v1/node", "", basic("any:" + kKey)).Reason(), "auth.missing");
  EXPECT_EQ(Ask("GET", "/v1/fn/pools", "", basic("any:" + kKey)).Reason(), "auth.missing");
}

TEST_F(FnServerTest, Submit_JudgesInOrderAndStopsAtTheFirstFailure) {
  json tests = json::array();
  for (int i = 0; i < 40; ++i) {
    tests.push_back({{"input", {{"stdin", std::to_string(i)}}},
                     {"output", {{"stdout", i == 3 ? "other" : std::to_string(i) + "\n"}}}});
  }
  json body = {{"dataset", "d"},
               {"id", "q"},
               {"completion", "```fake\necho```"},
               {"config", {{"language", "fake"}, {"provided_data", {{"test", tests}}}}}};
  const Answer stopped = Post("/submit", body);
  EXPECT_EQ(stopped.status, 200) << stopped.body;
  EXPECT_EQ(stopped.body["accepted"], false);
  EXPECT_EQ(stopped.body["id"], "q");
  EXPECT_LT(stopped.body["tests"].size(), 40u);
  body["config"]["extra"]["run_all_cases"] = true;
  const Answer all = Post("/submit", body);
  ASSERT_EQ(all.body["tests"].size(), 40u);
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(all.body["tests"][i]["passed"], i != 3);
    EXPECT_EQ(all.body["tests"][i]["test_info"], tests[i]);
  }
  body["config"]["provided_data"]["test"].erase(3);
  EXPECT_EQ(Post("/submit", body).body["accepted"], true);
  body["completion"] = "```fake\nbroken```";
  EXPECT_EQ(Post("/submit", body).status, 504);
  body["config"]["language"] = "cobol";
  EXPECT_EQ(Post("/submit", body).status, 422);
}

}  // namespace
}  // namespace dsec::apiserver

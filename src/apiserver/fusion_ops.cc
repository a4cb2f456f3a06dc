// SPDX-License-Identifier: Apache-2.0
// The door for clients of SandboxFusion: run_code, submit, ping.
//
// Their retries decide the statuses: 504 is what all of them try again, so every fault of the
// platform that a retry may mend is 504; what the request is wrong in is 422, as there; a verdict,
// also of the platform when a retry will not help, is 200.
#include "apiserver/call.h"
#include "apiserver/fusion_json.h"
#include "apiserver/or_leave.h"
#include "runtime/async_event.h"
#include "runtime/gate.h"

namespace dsec::apiserver::fusion_ops {
namespace {

using http::JsonWriter;
using runtime::Deadline;
using runtime::Task;

constexpr size_t kWidth = 8;  // tests of one submission under way at once

// What a request failed with, in the words of their clients.
Task<void> Refuse(Call& call, Error error) {
  if (error.code() == Code::kResourceExhausted || error.code() == Code::kUnavailable) {
    co_return Error(Code::kDeadlineExceeded, error.reason(), error.message());
  }
  const bool request = error.code() == Code::kInvalidArgument || error.code() == Code::kNotFound;
  if (!request) co_return error;
  auto done = co_await call.Json(422, FusionRefusal(error));
  co_return done;
}

// Null or what its reply must be instead.
std::optional<Error> Retriable(const v1::FnResult& result) {
  if (result.verdict() != v1::FN_INFRASTRUCTURE || !result.retriable()) return std::nullopt;
  return Error(Code::kDeadlineExceeded, "fn.infrastructure",
               fmt::format("{}: {}", result.reason(), result.message()));
}

bool Passed(const FusionTest& test, const v1::FnResult& result) {
  if (result.verdict() != v1::FN_OK) return false;
  if (test.has_stdout && !SameText(result.run().stdout().data(), test.stdout)) return false;
  for (const auto& [path, content] : test.files) {
    bool same = false;
    for (const v1::FnFile& file : result.files())
      same = same || (file.path() == path && SameText(file.content(), content));
    if (!same) return false;
  }
  return true;
}

// The tests of one submission, taken in order by coroutines of one shard.
struct Judging {
  explicit Judging(const FusionSubmission& what) : submission(what), results(what.tests.size()) {}

  const FusionSubmission& submission;
  std::vector<std::optional<v1::FnResult>> results;
  std::optional<Error> error;
  size_t next = 0;
  size_t workers = 0;
  bool failed = false;
  runtime::AsyncEvent ended;

  bool More() const { return next < results.size() && !error && (submission.run_all || !failed); }
};

Task<void> JudgeNext(Call& call, Judging& judging) {
  const size_t index = judging.next++;
  const FusionTest& test = judging.submission.tests[index];
  auto result = co_await call.services.fn->Call(test.call, Deadline::Never());
  if (!result.ok()) {
    judging.error = std::move(result).error();
  } else if (auto fault = Retriable(*result)) {
    judging.error = std::move(fault);
  } else {
    judging.failed = judging.failed || !Passed(test, *result);
    judging.results[index] = std::move(*result);
  }
  co_return Ok();
}

Task<bool> JudgeFirst(Call& call, Judging& judging) {
  auto judged = co_await JudgeNext(call, judging);
  if (!judged.ok()) co_return std::move(judged).error();
  co_return true;
}

boost::asio::awaitable<void> JudgeRest(Call& call, Judging& judging) {
  while (judging.More()) {
    auto judged = co_await JudgeNext(call, judging);
    if (!judged.ok()) judging.error = std::move(judged).error();
  }
  if (--judging.workers == 0) judging.ended.Set();
}

Task<bool> Ended(Judging& judging) {
  auto waited = co_await judging.ended.Wait(Deadline::Never());
  if (!waited.ok()) co_return std::move(waited).error();
  co_return true;
}

// Until all are judged, or until the client has gone or the daemon stops (false).
Task<bool> JudgeAll(Call& call, Judging& judging) {
  // The first alone, since it compiles and the others find that in the cache.
  auto first = co_await OrLeave(call, JudgeFirst(call, judging));
  if (!first.ok()) co_return std::move(first).error();
  if (!first->has_value()) co_return false;
  if (!judging.More()) co_return true;
  const auto executor = co_await boost::asio::this_coro::executor;
  runtime::Gate gate;
  std::vector<runtime::Running> running;
  judging.workers = kWidth;
  for (size_t i = 0; i < kWidth; ++i)
    running.push_back(runtime::SpawnCancellable(gate, executor, JudgeRest(call, judging)));
  auto ended = co_await OrLeave(call, Ended(judging));
  for (const runtime::Running& worker : running) worker.Cancel();
  co_await gate.Close();
  if (!ended.ok()) co_return std::move(ended).error();
  co_return ended->has_value();
}

std::string SubmitReply(const Judging& judging) {
  const FusionSubmission& submission = judging.submission;
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.Members("\"id\":" + submission.id);
  json.Field("accepted", !judging.failed);
  json.Field("extracted_code", submission.code);
  json.Key("full_code");
  json.Null();
  json.Key("test_code");
  json.Null();
  json.BeginArray("tests");
  for (size_t i = 0; i < judging.results.size(); ++i) {
    if (!judging.results[i]) continue;  // not judged after a failure
    json.BeginObject();
    json.Field("passed", Passed(submission.tests[i], *judging.results[i]));
    json.Key("exec_info");
    WriteFusionResult(json, *judging.results[i]);
    json.Members("\"test_info\":" + submission.tests[i].info);
    json.EndObject();
  }
  json.EndArray();
  json.Field("extracted_type", submission.taken);
  json.Key("extra");
  json.Null();
  json.EndObject();
  return body;
}

}  // namespace

Task<void> RunCode(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.exchange.ReadAll(kMaxExecBody);
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(const iam::ProjectPath project, call.Project(""));
  auto request = ReadFusionRun(*text, call.services.fn_max_cpu_ms);
  if (!request.ok()) {
    auto refused = co_await Refuse(call, std::move(request).error());
    co_return refused;
  }
  request->set_project(project.ForRecord());
  auto result =
      co_await OrLeave(call, call.services.fn->Call(std::move(*request), Deadline::Never()));
  if (!result.ok()) {
    auto refused = co_await Refuse(call, std::move(result).error());
    co_return refused;
  }
  if (!result->has_value()) co_return Call::Stopping();
  if (auto fault = Retriable(**result)) co_return std::move(*fault);
  std::string body;
  JsonWriter json(body);
  WriteFusionResult(json, **result);
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> Submit(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.exchange.ReadAll(kMaxExecBody);
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(const iam::ProjectPath project, call.Project(""));
  auto submission = ReadFusionSubmission(*text, call.services.fn_max_cpu_ms);
  if (!submission.ok()) {
    auto refused = co_await Refuse(call, std::move(submission).error());
    co_return refused;
  }
  for (FusionTest& test : submission->tests) test.call.set_project(project.ForRecord());
  Judging judging(*submission);
  auto ended = co_await JudgeAll(call, judging);
  if (!ended.ok()) co_return std::move(ended).error();
  if (!*ended) co_return Call::Stopping();
  if (judging.error) {
    auto refused = co_await Refuse(call, *judging.error);
    co_return refused;
  }
  auto done = co_await call.Json(200, SubmitReply(judging));
  co_return done;
}

Task<void> Ping(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto done = co_await call.Json(200, "\"pong\"");
  co_return done;
}

}  // namespace dsec::apiserver::fusion_ops

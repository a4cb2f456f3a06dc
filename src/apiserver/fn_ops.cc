// SPDX-License-Identifier: Apache-2.0
// Stateless calls: one, many in a stream, results by op_id, task types, artefacts, pools.
#include <deque>

#include "apiserver/call.h"
#include "apiserver/fn_json.h"
#include "apiserver/or_leave.h"
#include "fn/task_type.h"
#include "runtime/async_event.h"
#include "runtime/gate.h"

namespace dsec::apiserver::fn_ops {
namespace {

using http::JsonWriter;
using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;

constexpr uint64_t kMaxCallsBody = 64 << 20;
constexpr uint64_t kMaxArtifact = 256 << 20;
constexpr uint64_t kMaxWaitMs = 600'000;
constexpr auto kKeepaliveAfter = std::chrono::seconds(5);
// The engine's queue is full of others' calls: an item of a batch waits and asks again.
constexpr auto kFullPause = milliseconds(100);
// How long a result may wait for others to be written with, as long as there are others to wait
// for: a write a result costs the client a wake-up a result.
constexpr auto kTogether = milliseconds(5);

struct Batch {
  std::deque<std::string> lines;
  runtime::AsyncEvent changed;
  size_t under_way = 0;
  size_t ok = 0;
  size_t failed = 0;
};

std::string ResultLine(size_t index, const v1::FnResult& result) {
  std::string line = fmt::format("{{\"type\":\"result\",\"index\":{},\"result\":", index);
  JsonWriter json(line);
  WriteFnResult(json, result);
  line += "}\n";
  return line;
}

// Runs one item; a full queue is waited out, since the batch is the one that keeps its rest back.
boost::asio::awaitable<void> RunItem(Call& call, Batch& batch, v1::FnCall item, size_t index) {
  for (;;) {
    auto result = co_await call.services.fn->Call(item, Deadline::Never());
    if (!result.ok() && result.error().code() == Code::kResourceExhausted) {
      auto slept = co_await runtime::SleepUntil(Deadline::After(kFullPause));
      if (slept.ok()) continue;
    }
    ++(result.ok() ? batch.ok : batch.failed);
    batch.lines.push_back(
        result.ok() ? ResultLine(index, *result)
                    : call.ErrorRecord(result.error(), fmt::format("\"index\":{},", index)));
    break;
  }
  --batch.under_way;
  batch.changed.Set();
}

// True when something changed, false when the time is over.
Task<bool> Changed(Batch& batch, Deadline until) {
  auto waited = co_await batch.changed.Wait(until);
  if (!waited.ok() && waited.error().code() != Code::kDeadlineExceeded)
    co_return std::move(waited).error();
  co_return waited.ok();
}

std::string TakeLines(Batch& batch) {
  std::string text;
  while (!batch.lines.empty() && text.size() < kChunk) {
    text += batch.lines.front();
    batch.lines.pop_front();
  }
  return text;
}

// Starts the calls and writes their results as they end. False: the client has gone or the daemon
// stops; what runs is still to be cancelled.
Task<bool> Stream(Call& call, Batch& batch, FnCallsBody& body, runtime::Gate& gate,
                  std::vector<runtime::Running>& running) {
  const auto executor = co_await boost::asio::this_coro::executor;
  size_t next = 0;
  std::optional<Deadline> flush;  // while there are lines
  for (;;) {
    while (next < body.calls.size() && batch.under_way < body.concurrency &&
           batch.lines.size() < body.concurrency) {
      ++batch.under_way;
      v1::FnCall item = std::move(body.calls[next]);
      running.push_back(
          runtime::SpawnCancellable(gate, executor, RunItem(call, batch, std::move(item), next)));
      ++next;
    }
    if (batch.lines.empty() && batch.under_way == 0) co_return true;
    if (!batch.lines.empty() && !flush.has_value()) flush = Deadline::After(kTogether);
    const bool write = flush.has_value() && (batch.under_way == 0 || flush->Expired() ||
                                             batch.lines.size() >= body.concurrency);
    if (!write) {
      const Deadline until = flush.value_or(Deadline::After(kKeepaliveAfter));
      batch.changed.Reset();
      auto changed = co_await OrLeave(call, Changed(batch, until));
      if (!changed.ok()) co_return std::move(changed).error();
      if (!changed->has_value()) co_return false;
      if (**changed || flush.has_value()) continue;
      auto kept = co_await call.exchange.Write(kKeepalive);
      if (!kept.ok()) co_return false;
      continue;
    }
    flush.reset();
    auto written = co_await call.exchange.Write(TakeLines(batch));
    if (!written.ok() || call.exchange.left()) co_return false;
  }
}

}  // namespace

Task<void> CallOne(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.exchange.ReadAll(kMaxExecBody);
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(v1::FnCall request, ReadFnCall(*text));
  DSEC_CO_TRY(const iam::ProjectPath project, call.Project(""));
  request.set_project(project.ForRecord());
  text->clear();
  text->shrink_to_fit();
  auto result =
      co_await OrLeave(call, call.services.fn->Call(std::move(request), Deadline::Never()));
  if (!result.ok()) co_return std::move(result).error();
  if (!result->has_value()) co_return Call::Stopping();
  std::string body;
  JsonWriter json(body);
  WriteFnResult(json, **result);
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> CallMany(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.exchange.ReadAll(kMaxCallsBody);
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(FnCallsBody body, ReadFnCalls(*text));
  DSEC_CO_TRY(const iam::ProjectPath project, call.Project(""));
  for (v1::FnCall& item : body.calls) item.set_project(project.ForRecord());
  text->clear();
  text->shrink_to_fit();
  call.exchange.Begin(200, {{"Content-Type", std::string(kNdjsonType)}});
  Batch batch;
  runtime::Gate gate;
  std::vector<runtime::Running> running;
  auto whole = co_await Stream(call, batch, body, gate, running);
  const bool ended = whole.ok() && *whole;
  if (!ended) {
    for (const runtime::Running& item : running) item.Cancel();
  }
  co_await gate.Close();
  if (!whole.ok()) co_return std::move(whole).error();
  if (!ended && !call.exchange.stopping()) co_return Ok();
  auto done = co_await call.exchange.WriteLast(
      ended ? fmt::format("{{\"type\":\"done\",\"ok\":{},\"failed\":{}}}\n", batch.ok, batch.failed)
            : call.ErrorRecord(Call::Stopping()));
  co_return done;
}

Task<void> GetResult(Call& call) {
  DSEC_CO_TRY(const OpId op, ParseOpId(call.params[0], "op_id"));
  const uint64_t wait = call.query.Number("wait_ms", 0, 0, kMaxWaitMs);
  DSEC_CO_TRY_VOID(call.query.Finish());
  DSEC_CO_TRY(const iam::ProjectPath project, call.Project(""));
  const Deadline until = Deadline::After(milliseconds(wait));
  auto result =
      co_await OrLeave(call, call.services.fn->Result(project.ForRecord(), op.str(), until));
  if (!result.ok() && result.error().reason() == "fn.still_running") {
    std::string body;
    JsonWriter json(body);
    json.BeginObject();
    json.Field("op_id", op.str());
    json.Field("running", true);
    json.EndObject();
    auto done = co_await call.Json(202, std::move(body));
    co_return done;
  }
  if (!result.ok()) co_return std::move(result).error();
  if (!result->has_value()) co_return Call::Stopping();
  std::string body;
  JsonWriter json(body);
  WriteFnResult(json, **result);
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> ListTypes(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  std::vector<std::string> types;
  for (const v1::FnTaskType& type : call.services.fn->Types())
    types.push_back(fn::FormatTaskType(type));
  auto done = co_await call.Json(200, fmt::format("{{\"types\":[{}]}}", fmt::join(types, ",")));
  co_return done;
}

Task<void> PutType(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(v1::FnTaskType type, fn::ParseTaskType(*text));
  const std::string& name = call.params[0];
  if (!type.name().empty() && type.name() != name) {
    co_return Error(Code::kInvalidArgument, "request.contradiction",
                    fmt::format("name: {} is not {}, the name in the path", type.name(), name))
        .WithField("name");
  }
  type.set_name(name);
  auto put = co_await call.services.fn->PutType(std::move(type), Call::Usual());
  if (!put.ok()) co_return std::move(put).error();
  auto done = co_await call.Json(200, fn::FormatTaskType(*put));
  co_return done;
}

Task<void> DeleteType(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto removed = co_await call.services.fn->RemoveType(call.params[0], Call::Usual());
  if (!removed.ok()) co_return std::move(removed).error();
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> PutArtifact(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto bytes = co_await call.exchange.ReadAll(kMaxArtifact);
  if (!bytes.ok()) co_return std::move(bytes).error();
  auto digest = co_await call.services.fn->PutArtifact(std::move(*bytes), Call::Usual());
  if (!digest.ok()) co_return std::move(digest).error();
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.Field("artifact", *digest);
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> GetArtifact(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto bytes = co_await call.services.fn->GetArtifact(call.params[0], Call::Usual());
  if (!bytes.ok()) co_return std::move(bytes).error();
  const http::Headers headers = {{"Content-Type", "application/octet-stream"}};
  auto done = co_await call.exchange.Reply(200, headers, *bytes);
  co_return done;
}

Task<void> Pools(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.BeginArray("pools");
  for (const v1::FnPoolInfo& pool : call.services.fn->Pools()) WriteFnPool(json, pool);
  json.EndArray();
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

}  // namespace dsec::apiserver::fn_ops

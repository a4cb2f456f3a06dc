// SPDX-License-Identifier: Apache-2.0
// Create, batch, list, get, delete, renew, stats.
#include <deque>

#include "apiserver/call.h"
#include "apiserver/json_out.h"
#include "runtime/async_event.h"
#include "runtime/gate.h"

namespace dsec::apiserver::sandbox_ops {
namespace {

using http::JsonWriter;
using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;

constexpr size_t kBatchWidth = 64;   // items of one batch under way at once
constexpr size_t kDeleteWidth = 64;  // the same of one delete
constexpr auto kKeepaliveAfter = std::chrono::seconds(5);
constexpr auto kDeleteTime = std::chrono::seconds(30);
constexpr uint64_t kMaxGraceMs = 300'000;

// The project that the body names, or the caller's own, and who calls.
Result<void> PutOwner(Call& call, v1::CreateRequest& request, const std::string& field) {
  DSEC_TRY(const iam::ProjectPath path, call.Project(request.project(), field));
  request.set_project(path.ForRecord());
  request.set_principal(call.Principal());
  return Ok();
}

std::string SandboxJson(const v1::SandboxRecord& record, int64_t execs_running) {
  std::string body;
  JsonWriter json(body);
  WriteSandbox(json, record, execs_running);
  return body;
}

// Lines of one NDJSON reply that coroutines of this shard add to while another writes them out.
struct Lines {
  std::deque<std::pair<std::string, std::unique_ptr<edge::Claim>>> ready;
  runtime::AsyncEvent arrived;
  size_t good = 0;
  size_t bad = 0;
  size_t under_way = 0;
  bool abandoned = false;

  void Add(std::string line, std::unique_ptr<edge::Claim> claim, bool ok) {
    ready.emplace_back(std::move(line), std::move(claim));
    ++(ok ? good : bad);
    --under_way;
    arrived.Set();
  }
};

// Starts `start(i)` for i below `count`, at most `width` at once, and writes their lines as they
// come, keepalives between. Returns when all have ended. False: the client has gone; what was
// started has ended, the rest was not started.
template <typename Start>
Task<bool> WriteAsTheyCome(Call& call, Lines& lines, size_t count, size_t width,
                           const Start& start) {
  size_t next = 0;
  while (next < count || lines.under_way > 0 || !lines.ready.empty()) {
    while (!lines.abandoned && next < count && lines.under_way < width) {
      ++lines.under_way;
      start(next++);
    }
    if (lines.abandoned) {
      next = count;
      lines.ready.clear();
    }
    if (lines.ready.empty()) {
      if (lines.under_way == 0) continue;
      lines.arrived.Reset();
      auto waited = co_await lines.arrived.Wait(Deadline::After(kKeepaliveAfter));
      if (waited.ok() || lines.abandoned) continue;
      auto kept = co_await call.exchange.Write(kKeepalive);
      lines.abandoned = !kept.ok() || call.exchange.Gone();
      continue;
    }
    std::string text;
    std::vector<std::unique_ptr<edge::Claim>> claims;
    while (!lines.ready.empty() && text.size() < kChunk) {
      text += lines.ready.front().first;
      claims.push_back(std::move(lines.ready.front().second));
      lines.ready.pop_front();
    }
    auto written = co_await call.exchange.Write(text);
    if (written.ok() && !call.exchange.Gone()) {
      for (const auto& claim : claims) {
        if (claim) claim->Delivered();
      }
    } else {
      lines.abandoned = true;
    }
  }
  co_return !lines.abandoned;
}

boost::asio::awaitable<void> CreateItem(Call& call, Lines& lines, v1::CreateRequest request,
                                        size_t index, uint64_t timeout_ms) {
  auto made =
      co_await call.edge().Create(std::move(request), Deadline::After(milliseconds(timeout_ms)));
  if (!made.ok()) {
    lines.Add(call.ErrorRecord(made.error(), fmt::format("\"index\":{},", index)), nullptr, false);
    co_return;
  }
  std::string line = fmt::format("{{\"type\":\"sandbox\",\"index\":{},\"sandbox\":", index);
  JsonWriter json(line);
  WriteSandbox(json, made->view.record(), static_cast<int64_t>(made->view.execs_running()));
  line += "}\n";
  lines.Add(std::move(line), std::move(made->claim), true);
}

// Who ends a sandbox, as its record says.
std::string WhoEnds(const Call& call) { return call.caller.root() ? "api" : call.caller.principal; }

Task<v1::SandboxView> DeleteOne(Call& call, std::string id, uint64_t grace_ms) {
  DSEC_CO_TRY_VOID(co_await call.MayWith(SandboxId(id), iam::Right::kSandboxDelete));
  v1::DeleteRequest request;
  request.set_id(std::move(id));
  request.set_grace_ms(grace_ms);
  request.set_who(WhoEnds(call));
  request.set_wait(true);
  auto ended = co_await call.edge().Delete(std::move(request),
                                           Deadline::After(kDeleteTime + milliseconds(grace_ms)));
  co_return ended;
}

boost::asio::awaitable<void> DeleteItem(Call& call, Lines& lines, std::string id,
                                        uint64_t grace_ms) {
  auto ended = co_await DeleteOne(call, id, grace_ms);
  if (!ended.ok()) {
    std::string extra = "\"id\":";
    JsonWriter json(extra);
    json.Value(id);
    extra += ',';
    lines.Add(call.ErrorRecord(ended.error(), extra), nullptr, false);
    co_return;
  }
  std::string line = "{\"type\":\"deleted\",\"id\":";
  JsonWriter id_json(line);
  id_json.Value(id);
  line += ",\"sandbox\":";
  JsonWriter json(line);
  WriteSandbox(json, ended->record(), -1);
  line += "}\n";
  lines.Add(std::move(line), nullptr, true);
}

// Leaves a list what the caller has the right for. False: there is nothing of that.
bool KeepWithin(Call& call, iam::Right right, v1::ListRequestAll& request) {
  if (call.caller.root()) return true;
  const auto reach = call.caller.Where(right);
  for (const iam::ProjectPath& path : reach.roots) request.add_within(path.ForRecord());
  for (const iam::ProjectPath& path : reach.without) request.add_not_within(path.ForRecord());
  return !reach.roots.empty();
}

// Ids of all live sandboxes with the labels.
Task<std::vector<std::string>> FindByLabels(Call& call, const DeleteManyBody& body) {
  std::vector<std::string> ids;
  std::string token;
  do {
    v1::ListRequestAll request;
    for (const auto& [key, value] : body.labels) (*request.mutable_labels())[key] = value;
    if (!KeepWithin(call, iam::Right::kSandboxDelete, request))
      co_return iam::Forbidden(call.caller, iam::Right::kSandboxDelete, call.caller.home);
    request.set_page_size(1000);
    request.set_page_token(token);
    auto page = co_await call.edge().List(std::move(request), Call::Usual());
    if (!page.ok()) co_return std::move(page).error();
    for (const v1::SandboxRecord& record : page->records()) ids.push_back(record.id());
    token = page->next_page_token();
  } while (!token.empty());
  co_return ids;
}

}  // namespace

Task<void> Create(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(CreateBody body, ReadCreate(*text));
  DSEC_CO_TRY_VOID(PutOwner(call, body.request, "project"));
  auto made = co_await call.edge().Create(std::move(body.request),
                                          Deadline::After(milliseconds(body.timeout_ms)));
  if (!made.ok()) co_return std::move(made).error();
  auto done = co_await call.Json(
      made->view.existed() ? 200 : 201,
      SandboxJson(made->view.record(), static_cast<int64_t>(made->view.execs_running())));
  if (done.ok() && made->claim && !call.exchange.Gone()) made->claim->Delivered();
  co_return done;
}

Task<void> Batch(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(BatchBody body, ReadBatch(*text));
  DSEC_CO_TRY_VOID(PutOwner(call, body.item.request, "sandbox.project"));
  call.exchange.Begin(200, {{"Content-Type", std::string(kNdjsonType)}});
  Lines lines;
  runtime::Gate gate;
  const auto executor = co_await boost::asio::this_coro::executor;
  const auto start = [&](size_t index) {
    v1::CreateRequest request = body.item.request;
    request.set_request_id(fmt::format("{}.{}", request.request_id(), index));
    runtime::Spawn(gate, executor,
                   CreateItem(call, lines, std::move(request), index, body.item.timeout_ms));
  };
  auto all = co_await WriteAsTheyCome(call, lines, body.count, kBatchWidth, start);
  co_await gate.Close();
  if (!all.ok()) co_return std::move(all).error();
  if (!*all) co_return Ok();
  auto done = co_await call.exchange.WriteLast(
      fmt::format("{{\"type\":\"done\",\"ready\":{},\"failed\":{}}}\n", lines.good, lines.bad));
  co_return done;
}

Task<void> List(Call& call) {
  v1::ListRequestAll request;
  for (const std::string& state : call.query.Texts("state")) {
    DSEC_CO_TRY(const v1::State parsed, ParseState(state, "state"));
    request.add_states(parsed);
  }
  for (const auto& [key, value] : call.query.Labels("label")) {
    (*request.mutable_labels())[key] = value;
  }
  request.set_name(call.query.Text("name"));
  request.set_include_ended(call.query.Flag("include_ended", false));
  request.set_page_size(static_cast<uint32_t>(call.query.Number("page_size", 100, 1, 1000)));
  request.set_page_token(call.query.Text("page_token"));
  const std::string under = call.query.Text("project");
  DSEC_CO_TRY_VOID(call.query.Finish());
  if (!KeepWithin(call, iam::Right::kSandboxRead, request))
    co_return iam::Forbidden(call.caller, iam::Right::kSandboxRead, call.caller.home);
  if (!under.empty()) {
    DSEC_CO_TRY(const iam::ProjectPath path, call.Project(under));
    request.clear_within();
    request.add_within(path.ForRecord());
  }
  auto page = co_await call.edge().List(std::move(request), Call::Usual());
  if (!page.ok()) co_return std::move(page).error();
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.BeginArray("sandboxes");
  for (const v1::SandboxRecord& record : page->records()) WriteSandbox(json, record, -1);
  json.EndArray();
  json.Field("next_page_token", page->next_page_token());
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> Get(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto view = co_await call.edge().Get(id, Call::Usual());
  if (!view.ok()) co_return std::move(view).error();
  auto done = co_await call.Json(
      200, SandboxJson(view->record(), static_cast<int64_t>(view->execs_running())));
  co_return done;
}

Task<void> Delete(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  v1::DeleteRequest request;
  request.set_id(id.str());
  request.set_grace_ms(call.query.Number("grace_ms", 0, 0, kMaxGraceMs));
  request.set_wait(call.query.Flag("wait", true));
  request.set_who(WhoEnds(call));
  DSEC_CO_TRY_VOID(call.query.Finish());
  const auto deadline = Deadline::After(kDeleteTime + milliseconds(request.grace_ms()));
  auto view = co_await call.edge().Delete(std::move(request), deadline);
  if (!view.ok()) co_return std::move(view).error();
  auto done = co_await call.Json(200, SandboxJson(view->record(), -1));
  co_return done;
}

Task<void> DeleteMany(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(DeleteManyBody body, ReadDeleteMany(*text));
  if (!body.labels.empty()) {
    auto found = co_await FindByLabels(call, body);
    if (!found.ok()) co_return std::move(found).error();
    body.ids = std::move(*found);
  }
  call.exchange.Begin(200, {{"Content-Type", std::string(kNdjsonType)}});
  Lines lines;
  runtime::Gate gate;
  const auto executor = co_await boost::asio::this_coro::executor;
  const auto start = [&](size_t index) {
    runtime::Spawn(gate, executor, DeleteItem(call, lines, body.ids[index], body.grace_ms));
  };
  auto all = co_await WriteAsTheyCome(call, lines, body.ids.size(), kDeleteWidth, start);
  co_await gate.Close();
  if (!all.ok()) co_return std::move(all).error();
  if (!*all) co_return Ok();
  auto done = co_await call.exchange.WriteLast(
      fmt::format("{{\"type\":\"done\",\"deleted\":{},\"failed\":{}}}\n", lines.good, lines.bad));
  co_return done;
}

Task<void> Renew(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(v1::RenewRequest request, ReadRenew(*text));
  request.set_id(id.str());
  auto view = co_await call.edge().Renew(std::move(request), Call::Usual());
  if (!view.ok()) co_return std::move(view).error();
  auto done = co_await call.Json(
      200, SandboxJson(view->record(), static_cast<int64_t>(view->execs_running())));
  co_return done;
}

Task<void> Stats(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto view = co_await call.edge().Get(id, Call::Usual());
  if (!view.ok()) co_return std::move(view).error();
  auto usage = co_await call.edge().Stats(id, Call::Usual());
  if (!usage.ok()) co_return std::move(usage).error();
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.Field("id", id.str());
  json.Field("state", StateName(view->record().state()));
  json.Key("usage");
  WriteUsage(json, *usage);
  json.Key("limits");
  WriteLimits(json, view->record().spec().limits());
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

}  // namespace dsec::apiserver::sandbox_ops

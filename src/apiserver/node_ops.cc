// SPDX-License-Identifier: Apache-2.0
// Node, events, layers.
#include "apiserver/call.h"
#include "apiserver/json_out.h"
#include "apiserver/or_leave.h"

namespace dsec::apiserver::node_ops {
namespace {

using http::JsonWriter;
using runtime::Deadline;
using runtime::Task;

constexpr uint64_t kWaitMs = 5000;  // of one long poll; a keepalive follows each
constexpr uint32_t kMaxEvents = 500;

// Whether a sandbox has ended.
Task<bool> Ended(Call& call, const std::string& id) {
  auto view = co_await call.edge().Get(SandboxId(id), Call::Usual());
  if (!view.ok()) co_return std::move(view).error();
  co_return view->record().ended_unix_ms() != 0;
}

// Events as NDJSON; of a sandbox until its terminal event when following.
Task<void> StreamEvents(Call& call, std::string id) {
  uint64_t after = call.query.Number("after", 0);
  const bool follow = call.query.Flag("follow", false);
  DSEC_CO_TRY_VOID(call.query.Finish());
  v1::EventsRequest request;
  request.set_id(id);
  request.set_after_seq(after);
  request.set_max_events(kMaxEvents);
  auto reply = co_await call.edge().Events(request, Call::Usual());
  if (!reply.ok()) co_return std::move(reply).error();
  call.exchange.Begin(200, {{"Content-Type", std::string(kNdjsonType)}});
  request.set_wait_ms(follow ? kWaitMs : 0);
  bool over = false;
  for (;;) {
    std::string lines;
    bool last = false;
    for (const v1::Event& event : reply->events()) {
      JsonWriter json(lines);
      WriteEvent(json, event);
      lines += '\n';
      after = id.empty() ? event.node_seq() : event.seq();
      last = last || (!id.empty() && event.type() == "ended");
    }
    const bool full = static_cast<uint32_t>(reply->events_size()) >= kMaxEvents;
    // Of an ended sandbox the edge answers at once: nothing more comes when it had ended before a
    // look that found nothing.
    last = last || (follow ? over && reply->events().empty() : !full);
    if (last) {
      auto done = co_await call.exchange.WriteLast(lines);
      co_return done;
    }
    if (!id.empty() && follow && reply->events().empty()) {
      auto ended = co_await Ended(call, id);
      over = ended.ok() && *ended;
    }
    if (lines.empty() && !over) lines = kKeepalive;
    if (!lines.empty()) {
      auto written = co_await call.exchange.Write(lines);
      if (!written.ok()) co_return std::move(written).error();
    }
    request.set_after_seq(after);
    auto next = co_await OrLeave(call, call.edge().Events(request, Call::Usual()));
    if (!next.ok()) {
      auto done = co_await call.exchange.WriteLast(call.ErrorRecord(next.error()));
      co_return done;
    }
    if (!next->has_value()) {
      if (call.exchange.Gone()) co_return Ok();
      auto done = co_await call.exchange.WriteLast(call.ErrorRecord(Call::Stopping()));
      co_return done;
    }
    reply = std::move(**next);
  }
}

}  // namespace

Task<void> Health(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto done = co_await call.Json(200, "{\"status\":\"ok\"}");
  co_return done;
}

Task<void> Metrics(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  const http::Headers headers = {{"Content-Type", "text/plain; version=0.0.4; charset=utf-8"}};
  auto done = co_await call.exchange.Reply(200, headers, call.services.registry.RenderPrometheus());
  co_return done;
}

Task<void> Node(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto node = co_await call.edge().Node(Call::Usual());
  if (!node.ok()) co_return std::move(node).error();
  if (call.services.fn != nullptr) {
    for (v1::Capability& line : call.services.fn->Capabilities()) {
      *node->add_capabilities() = std::move(line);
    }
  }
  std::string body;
  JsonWriter json(body);
  WriteNode(json, *node);
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> NodeEvents(Call& call) {
  auto done = co_await StreamEvents(call, "");
  co_return done;
}

Task<void> SandboxEvents(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  auto done = co_await StreamEvents(call, id.str());
  co_return done;
}

Task<void> ListLayers(Call& call) {
  LayerQuery query;
  query.kind = call.query.Text("kind");
  query.prefix = call.query.Text("prefix");
  query.labels = call.query.Labels("label");
  query.limit = static_cast<uint32_t>(call.query.Number("page_size", 100, 1, 1000));
  query.after = call.query.Text("page_token");
  DSEC_CO_TRY_VOID(call.query.Finish());
  const uint32_t limit = query.limit;
  auto found = co_await call.services.layers.List(std::move(query), Call::Usual());
  if (!found.ok()) co_return std::move(found).error();
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.BeginArray("layers");
  for (const LayerView& layer : *found) {
    WriteLayer(json, layer);
  }
  json.EndArray();
  json.Field("next_page_token", found->size() < limit ? std::string() : found->back().id);
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> GetLayer(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto found = co_await call.services.layers.Get(call.params[0], Call::Usual());
  if (!found.ok()) co_return std::move(found).error();
  std::string body;
  JsonWriter json(body);
  WriteLayer(json, *found);
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> DeleteLayer(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto removed = co_await call.services.layers.Remove(call.params[0], Call::Usual());
  if (!removed.ok()) co_return std::move(removed).error();
  auto done = co_await call.NoContent();
  co_return done;
}

}  // namespace dsec::apiserver::node_ops

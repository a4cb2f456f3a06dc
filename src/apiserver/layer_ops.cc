// SPDX-License-Identifier: Apache-2.0
// What removes layers that nobody needs, and who keeps it from doing so.
#include "apiserver/call.h"

namespace dsec::apiserver::layer_ops {
namespace {

using http::JsonWriter;
using runtime::Task;

std::string CollectJson(const CollectView& report, bool dry_run) {
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.BeginArray("removed");
  for (const std::string& id : report.removed) json.Value(id);
  json.EndArray();
  json.Field("removed_bytes", report.removed_bytes);
  json.BeginArray("in_use");
  for (const CollectView::InUse& item : report.in_use) {
    json.BeginObject();
    json.Field("id", item.id);
    json.Field("by", item.by);
    json.EndObject();
  }
  json.EndArray();
  json.Field("young", report.young);
  json.Field("waiting", report.waiting);
  json.Field("deleted", report.deleted);
  json.Field("dry_run", dry_run);
  json.EndObject();
  return body;
}

std::string NodesJson(const std::vector<LayerNodeView>& nodes) {
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.BeginArray("nodes");
  for (const LayerNodeView& node : nodes) {
    json.BeginObject();
    json.Field("node", node.node);
    json.Field("epoch", node.epoch);
    json.Field("layers", node.layers);
    json.Field("renewed_unix_ms", node.renewed_unix_ms);
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
  return body;
}

}  // namespace

Task<void> Collect(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(const CollectOrder order, ReadCollect(*text));
  auto report = co_await call.services.layers.Collect(order);
  if (!report.ok()) co_return std::move(report).error();
  auto done = co_await call.Json(200, CollectJson(*report, order.dry_run));
  co_return done;
}

Task<void> Nodes(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto nodes = co_await call.services.layers.Nodes(Call::Usual());
  if (!nodes.ok()) co_return std::move(nodes).error();
  auto done = co_await call.Json(200, NodesJson(*nodes));
  co_return done;
}

Task<void> ForgetNode(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto forgotten = co_await call.services.layers.ForgetNode(call.params[0], Call::Usual());
  if (!forgotten.ok()) co_return std::move(forgotten).error();
  auto done = co_await call.NoContent();
  co_return done;
}

}  // namespace dsec::apiserver::layer_ops

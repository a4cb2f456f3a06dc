// SPDX-License-Identifier: Apache-2.0
// Pack: what changed in a sandbox, as a layer. FirstTouch: what it has read first.
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <memory>
#include <mutex>
#include <optional>

#include "apiserver/call.h"
#include "apiserver/json_members.h"
#include "apiserver/json_out.h"
#include "apiserver/or_leave.h"
#include "runtime/gate.h"

namespace dsec::apiserver::pack_ops {
namespace {

using http::JsonWriter;
using runtime::Deadline;
using runtime::Task;

constexpr uint64_t kDefaultTimeoutMs = 600'000;
constexpr uint64_t kMaxTimeoutMs = 86'400'000;
constexpr auto kKeepaliveAfter = std::chrono::seconds(5);

struct PackBody {
  v1::PackRequest request;
  uint64_t timeout_ms = kDefaultTimeoutMs;
};

Result<PackBody> ReadPack(std::string_view text) {
  DSEC_TRY(const nlohmann::json object, ParseObject(text));
  PackBody body;
  v1::PackRequest& request = body.request;
  Members members(object, "");
  members.Text("kind", request.mutable_kind());
  members.Text("name", request.mutable_name());
  members.Map("labels", false, [&](const std::string& key, std::string value) {
    (*request.mutable_labels())[key] = std::move(value);
  });
  members.Strings("scrub", false, [&](std::string item) { request.add_scrub(std::move(item)); });
  bool default_scrub = true;
  members.Flag("default_scrub", &default_scrub);
  request.set_no_default_scrub(!default_scrub);
  members.Strings("canary_paths", false,
                  [&](std::string item) { request.add_canary_paths(std::move(item)); });
  members.Strings("canary_contents", true,
                  [&](std::string item) { request.add_canary_contents(std::move(item)); });
  members.Number("timeout_ms", &body.timeout_ms, 1, kMaxTimeoutMs);
  DSEC_TRY_VOID(members.Finish());
  return body;
}

// What passes between the pack, the thread that it reports from, and the coroutine that writes the
// reply. The event belongs to the shard of that coroutine.
struct Feed {
  std::mutex mutex;
  std::optional<v1::PackProgress> news;
  runtime::AsyncEvent changed;
  std::optional<Result<v1::PackReply>> reply;

  std::optional<v1::PackProgress> Take() {
    const std::lock_guard lock(mutex);
    return std::exchange(news, std::nullopt);
  }
};

std::string_view PhaseName(v1::PackProgress::Phase phase) {
  switch (phase) {
    case v1::PackProgress::PHASE_READ:
      return "read";
    case v1::PackProgress::PHASE_WRITE:
      return "write";
    case v1::PackProgress::PHASE_PUBLISH:
      return "publish";
    default:
      return "freeze";
  }
}

std::string ProgressLine(const v1::PackProgress& progress) {
  std::string line;
  JsonWriter json(line);
  json.BeginObject();
  json.Field("type", std::string_view("progress"));
  json.Field("phase", PhaseName(progress.phase()));
  json.Field("entries", progress.entries());
  json.Field("bytes", progress.bytes());
  json.Field("total_bytes", progress.total_bytes());
  json.EndObject();
  return line + "\n";
}

std::string LayerLine(const v1::PackReply& reply) {
  const v1::PackedLayer& layer = reply.layer();
  LayerView view;
  view.id = layer.id();
  view.kind = layer.kind();
  view.names = {layer.names().begin(), layer.names().end()};
  view.meta_bytes = layer.meta_bytes();
  view.blob_bytes = layer.blob_bytes();
  view.entries = layer.entries();
  view.content_bytes = layer.content_bytes();
  view.created_unix_ms = layer.created_unix_ms();
  view.source = layer.source();
  view.labels = {layer.labels().begin(), layer.labels().end()};
  std::string line;
  JsonWriter json(line);
  json.BeginObject();
  json.Field("type", std::string_view("layer"));
  json.Key("layer");
  WriteLayer(json, view);
  json.Field("existed", reply.existed());
  json.Field("scrubbed", reply.scrubbed());
  json.BeginArray("warnings");
  for (const std::string& warning : reply.warnings()) json.Value(warning);
  json.EndArray();
  json.Field("warning_count", reply.warning_count());
  json.Field("frozen_us", reply.frozen_us());
  json.Field("millis", reply.millis());
  json.EndObject();
  return line + "\n";
}

Result<v1::FirstTouchRequest> ReadFirstTouch(std::string_view text) {
  DSEC_TRY(const nlohmann::json object, ParseObject(text));
  Members members(object, "");
  bool save = false, merge = false, stop = false;
  members.Flag("save", &save);
  members.Flag("merge", &merge);
  members.Flag("stop", &stop);
  DSEC_TRY_VOID(members.Finish());
  v1::FirstTouchRequest request;
  request.set_save(save);
  request.set_merge(merge);
  request.set_stop(stop);
  return request;
}

std::string FirstTouchJson(const v1::FirstTouchReply& reply) {
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.BeginArray("layers");
  for (const v1::LayerTouch& layer : reply.layers()) {
    json.BeginObject();
    json.Field("id", layer.layer_id());
    json.Field("parts", layer.parts());
    json.Field("bytes", layer.bytes());
    json.Field("saved", layer.saved());
    json.Field("saved_parts", layer.saved_parts());
    json.Field("saved_bytes", layer.saved_bytes());
    json.EndObject();
  }
  json.EndArray();
  json.Field("lost", reply.lost());
  json.Field("truncated", reply.truncated());
  json.Field("stopped", reply.stopped());
  json.EndObject();
  return body;
}

boost::asio::awaitable<void> RunPack(edge::EdgeApi& edge, SandboxId id, PackBody body,
                                     std::shared_ptr<Feed> feed) {
  const runtime::Executor executor = co_await boost::asio::this_coro::executor;
  auto progress = [feed, executor](const v1::PackProgress& state) {
    {
      const std::lock_guard lock(feed->mutex);
      feed->news = state;
    }
    boost::asio::post(executor, [feed] { feed->changed.Set(); });
    return true;
  };
  auto reply = co_await edge.Pack(id, std::move(body.request), std::move(progress),
                                  Deadline::After(std::chrono::milliseconds(body.timeout_ms)));
  feed->reply = std::move(reply);
  feed->changed.Set();
}

// False: nothing has happened for a while.
Task<bool> WaitNews(Feed& feed) {
  auto waited = co_await feed.changed.Wait(Deadline::After(kKeepaliveAfter));
  if (!waited.ok() && waited.error().code() != Code::kDeadlineExceeded) {
    co_return std::move(waited).error();
  }
  co_return waited.ok();
}

// Writes what happens until the reply is there. False: the client has gone or the daemon stops.
Task<bool> Follow(Call& call, Feed& feed) {
  while (!feed.reply.has_value()) {
    auto waited = co_await OrLeave(call, WaitNews(feed));
    if (!waited.ok()) co_return std::move(waited).error();
    if (!waited->has_value()) co_return false;
    feed.changed.Reset();
    if (feed.reply.has_value()) break;
    const auto news = feed.Take();
    if (!call.exchange.begun()) {
      call.exchange.Begin(200, {{"Content-Type", std::string(kNdjsonType)}});
    }
    auto written = co_await call.exchange.Write(news.has_value() ? ProgressLine(*news)
                                                                 : std::string(kKeepalive));
    if (!written.ok() || call.exchange.Gone()) co_return false;
  }
  co_return true;
}

// Whoever gives a layer a name decides what others get by it: the name must begin with the path of
// the sandbox's project, or the caller manages layers.
Result<void> CheckLayerName(const Call& call, std::string_view name) {
  if (name.empty() || call.caller.root() ||
      call.caller.May(iam::Right::kLayerManage, iam::ProjectPath())) {
    return Ok();
  }
  const std::string own = call.project == "root" ? "" : call.project.substr(5) + "/";
  if (!own.empty() && name.starts_with(own)) return Ok();
  return Error(Code::kPermissionDenied, "auth.forbidden",
               fmt::format("name: without the right layer.manage at the root a name begins with {}",
                           own.empty() ? "the path of a project below the root" : own))
      .WithField("name");
}

}  // namespace

Task<void> Pack(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(PackBody body, ReadPack(*text));
  DSEC_CO_TRY_VOID(CheckLayerName(call, body.request.name()));
  body.request.set_principal(call.Principal());
  const auto feed = std::make_shared<Feed>();
  runtime::Gate gate;
  const auto executor = co_await boost::asio::this_coro::executor;
  auto running =
      runtime::SpawnCancellable(gate, executor, RunPack(call.edge(), id, std::move(body), feed));
  auto followed = co_await Follow(call, *feed);
  const bool whole = followed.ok() && *followed;
  if (!whole) running.Cancel();
  co_await gate.Close();
  if (!followed.ok()) co_return std::move(followed).error();
  if (!whole) {
    if (call.exchange.Gone()) co_return Ok();
    if (!call.exchange.begun()) co_return Call::Stopping();
    auto cut = co_await call.exchange.WriteLast(call.ErrorRecord(Call::Stopping()));
    co_return cut;
  }
  const Result<v1::PackReply>& reply = *feed->reply;
  if (!call.exchange.begun()) {
    if (!reply.ok()) co_return reply.error();
    call.exchange.Begin(200, {{"Content-Type", std::string(kNdjsonType)}});
  }
  auto done = co_await call.exchange.WriteLast(reply.ok() ? LayerLine(*reply)
                                                          : call.ErrorRecord(reply.error()));
  co_return done;
}

Task<void> FirstTouch(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(v1::FirstTouchRequest request, ReadFirstTouch(*text));
  auto reply = co_await call.edge().FirstTouch(id, std::move(request), Call::Usual());
  if (!reply.ok()) co_return std::move(reply).error();
  std::string body = FirstTouchJson(*reply);
  auto written = co_await call.Json(200, std::move(body));
  co_return written;
}

}  // namespace dsec::apiserver::pack_ops

// SPDX-License-Identifier: Apache-2.0
#include "apiserver/api_server.h"

#include "apiserver/call.h"
#include "apiserver/json_out.h"
#include "base/log.h"
#include "http/base64.h"
#include "http/error_body.h"
#include "http/message.h"
#include "http/router.h"
#include "runtime/gate.h"
#include "runtime/periodic.h"

namespace dsec::apiserver {
namespace {

using runtime::Task;

constexpr auto kAckDelay = std::chrono::seconds(60);
constexpr size_t kMaxPendingAcks = 200'000;

constexpr Route kRoutes[] = {
    {"GET", "/healthz", node_ops::Health, Route::Key::kNone},
    {"GET", "/metrics", node_ops::Metrics},
    {"GET", "/v1/node", node_ops::Node},
    {"GET", "/v1/events", node_ops::NodeEvents},
    {"POST", "/v1/sandboxes", sandbox_ops::Create},
    {"GET", "/v1/sandboxes", sandbox_ops::List},
    {"POST", "/v1/sandboxes:batch", sandbox_ops::Batch},
    {"POST", "/v1/sandboxes:delete", sandbox_ops::DeleteMany},
    {"GET", "/v1/sandboxes/{id}", sandbox_ops::Get},
    {"DELETE", "/v1/sandboxes/{id}", sandbox_ops::Delete},
    {"POST", "/v1/sandboxes/{id}/renew", sandbox_ops::Renew},
    {"POST", "/v1/sandboxes/{id}/pack", pack_ops::Pack},
    {"POST", "/v1/sandboxes/{id}/first-touch", pack_ops::FirstTouch},
    {"GET", "/v1/sandboxes/{id}/stats", sandbox_ops::Stats},
    {"GET", "/v1/sandboxes/{id}/events", node_ops::SandboxEvents},
    {"POST", "/v1/sandboxes/{id}/exec", exec_ops::Exec},
    {"GET", "/v1/sandboxes/{id}/exec", exec_ops::ListExecs},
    {"GET", "/v1/sandboxes/{id}/exec/{op}", exec_ops::GetExec},
    {"GET", "/v1/sandboxes/{id}/exec/{op}/stream", exec_ops::Stream},
    {"POST", "/v1/sandboxes/{id}/exec/{op}/stdin", exec_ops::Stdin},
    {"POST", "/v1/sandboxes/{id}/exec/{op}/signal", exec_ops::Signal},
    {"POST", "/v1/sandboxes/{id}/exec/{op}/resize", exec_ops::Resize},
    {"POST", "/v1/sandboxes/{id}/exec/{op}/cancel", exec_ops::Cancel},
    {"POST", "/v1/sandboxes/{id}/exec/{op}/ack", exec_ops::Ack},
    {"GET", "/v1/sandboxes/{id}/sessions", exec_ops::ListSessions},
    {"DELETE", "/v1/sandboxes/{id}/sessions/{name}", exec_ops::CloseSession},
    {"GET", "/v1/sandboxes/{id}/files", file_ops::Read},
    {"PUT", "/v1/sandboxes/{id}/files", file_ops::Write},
    {"DELETE", "/v1/sandboxes/{id}/files", file_ops::Remove},
    {"GET", "/v1/sandboxes/{id}/files/stat", file_ops::Stat},
    {"GET", "/v1/sandboxes/{id}/files/list", file_ops::List},
    {"POST", "/v1/sandboxes/{id}/files/mkdir", file_ops::Mkdir},
    {"POST", "/v1/sandboxes/{id}/files/move", file_ops::Move},
    {"POST", "/v1/sandboxes/{id}/files/chmod", file_ops::Chmod},
    {"GET", "/v1/sandboxes/{id}/files/watch", file_ops::Watch},
    {"GET", "/v1/sandboxes/{id}/archive", file_ops::GetArchive},
    {"PUT", "/v1/sandboxes/{id}/archive", file_ops::PutArchive},
    {"GET", "/v1/layers", node_ops::ListLayers},
    {"GET", "/v1/layers/{ref}", node_ops::GetLayer},
    {"DELETE", "/v1/layers/{ref}", node_ops::DeleteLayer},
    {"POST", "/v1/layers:collect", layer_ops::Collect},
    {"GET", "/v1/layer_nodes", layer_ops::Nodes},
    {"DELETE", "/v1/layer_nodes/{node}", layer_ops::ForgetNode},
    {"POST", "/v1/fn/call", fn_ops::CallOne, Route::Key::kHeader, Route::Needs::kFn},
    {"POST", "/v1/fn/calls", fn_ops::CallMany, Route::Key::kHeader, Route::Needs::kFn},
    {"GET", "/v1/fn/calls/{op}", fn_ops::GetResult, Route::Key::kHeader, Route::Needs::kFn},
    {"GET", "/v1/fn/types", fn_ops::ListTypes, Route::Key::kHeader, Route::Needs::kFn},
    {"PUT", "/v1/fn/types/{name}", fn_ops::PutType, Route::Key::kHeader, Route::Needs::kFn},
    {"DELETE", "/v1/fn/types/{name}", fn_ops::DeleteType, Route::Key::kHeader, Route::Needs::kFn},
    {"PUT", "/v1/fn/artifacts", fn_ops::PutArtifact, Route::Key::kHeader, Route::Needs::kFn},
    {"GET", "/v1/fn/artifacts/{digest}", fn_ops::GetArtifact, Route::Key::kHeader,
     Route::Needs::kFn},
    {"GET", "/v1/fn/pools", fn_ops::Pools, Route::Key::kHeader, Route::Needs::kFn},
    {"POST", "/run_code", fusion_ops::RunCode, Route::Key::kHeaderOrBasic, Route::Needs::kFn},
    {"POST", "/submit", fusion_ops::Submit, Route::Key::kHeaderOrBasic, Route::Needs::kFn},
    {"GET", "/v1/ping", fusion_ops::Ping, Route::Key::kHeaderOrBasic},
    {"GET", "/v1/iam/whoami", iam_ops::WhoAmI, Route::Key::kHeader, Route::Needs::kIam},
    {"GET", "/v1/iam/projects", iam_ops::ListProjects, Route::Key::kHeader, Route::Needs::kIam},
    {"GET", "/v1/iam/projects/{project}", iam_ops::GetProject, Route::Key::kHeader,
     Route::Needs::kIam},
    {"PUT", "/v1/iam/projects/{project}", iam_ops::PutProject, Route::Key::kHeader,
     Route::Needs::kIam},
    {"DELETE", "/v1/iam/projects/{project}", iam_ops::DeleteProject, Route::Key::kHeader,
     Route::Needs::kIam},
    {"GET", "/v1/iam/projects/{project}/grants", iam_ops::ListGrants, Route::Key::kHeader,
     Route::Needs::kIam},
    {"PUT", "/v1/iam/projects/{project}/grants/{principal}", iam_ops::PutGrant, Route::Key::kHeader,
     Route::Needs::kIam},
    {"DELETE", "/v1/iam/projects/{project}/grants/{principal}", iam_ops::DeleteGrant,
     Route::Key::kHeader, Route::Needs::kIam},
    {"GET", "/v1/iam/principals", iam_ops::ListPrincipals, Route::Key::kHeader, Route::Needs::kIam},
    {"GET", "/v1/iam/principals/{principal}", iam_ops::GetPrincipal, Route::Key::kHeader,
     Route::Needs::kIam},
    {"PUT", "/v1/iam/principals/{principal}", iam_ops::PutPrincipal, Route::Key::kHeader,
     Route::Needs::kIam},
    {"DELETE", "/v1/iam/principals/{principal}", iam_ops::DeletePrincipal, Route::Key::kHeader,
     Route::Needs::kIam},
    {"GET", "/v1/iam/principals/{principal}/keys", iam_ops::ListKeys, Route::Key::kHeader,
     Route::Needs::kIam},
    {"POST", "/v1/iam/principals/{principal}/keys", iam_ops::MakeKey, Route::Key::kHeader,
     Route::Needs::kIam},
    {"DELETE", "/v1/iam/keys/{keyid}", iam_ops::RevokeKey, Route::Key::kHeader, Route::Needs::kIam},
    {"GET", "/v1/iam/roles", iam_ops::ListRoles, Route::Key::kHeader, Route::Needs::kIam},
    {"PUT", "/v1/iam/roles/{role}", iam_ops::PutRole, Route::Key::kHeader, Route::Needs::kIam},
    {"DELETE", "/v1/iam/roles/{role}", iam_ops::DeleteRole, Route::Key::kHeader,
     Route::Needs::kIam},
    {"GET", "/v1/iam/audit", iam_ops::ListAudit, Route::Key::kHeader, Route::Needs::kIam},
};

// A name of a key that does not give it away.
std::string NameOf(const iam::KeyDigest& key) {
  return fmt::format("key:{:02x}", fmt::join(key.begin(), key.begin() + 6, ""));
}

// What follows `scheme` in an Authorization field; empty when it is of another scheme.
std::string_view Credentials(std::string_view field, std::string_view scheme) {
  if (field.size() <= scheme.size() ||
      !http::EqualsIgnoreCase(field.substr(0, scheme.size()), scheme))
    return {};
  return field.substr(scheme.size());
}

// `basic`: a client that only takes a URL gives the key in it, http://any:KEY@host, and sends it as
// the password of the Basic scheme.
std::string KeyOf(const http::Fields& fields, bool basic) {
  if (const auto field = fields.Find("Authorization")) {
    const std::string_view bearer = Credentials(*field, "Bearer ");
    if (!bearer.empty() || !basic) return std::string(bearer);
    const auto pair = http::DecodeBase64(Credentials(*field, "Basic "));
    const size_t colon = pair ? pair->find(':') : std::string::npos;
    return colon == std::string::npos ? std::string() : pair->substr(colon + 1);
  }
  return std::string(fields.Find("X-API-Key").value_or(std::string_view()));
}

// Part of a path as the audit log shows it.
std::string Printable(std::string_view text) {
  std::string shown(text.substr(0, 256));
  for (char& c : shown) {
    if (c <= ' ' || c > '~') c = '?';
  }
  return shown;
}

}  // namespace

std::vector<std::string> RouteNames() {
  std::vector<std::string> names;
  for (const Route& route : kRoutes)
    names.push_back(fmt::format("{} {}", route.method, route.pattern));
  return names;
}

void AckQueue::Add(SandboxId sandbox, std::string op_id) {
  const std::lock_guard lock(mutex_);
  // Past this bound the sandbox's own bound on kept results is left to do the work.
  if (items_.size() < kMaxPendingAcks) {
    items_.push_back(
        {std::chrono::steady_clock::now() + kAckDelay, std::move(sandbox), std::move(op_id)});
  }
}

std::vector<AckQueue::Item> AckQueue::TakeDue(MonoTime now) {
  const std::lock_guard lock(mutex_);
  std::vector<Item> due;
  while (!items_.empty() && items_.front().due <= now) {
    due.push_back(std::move(items_.front()));
    items_.pop_front();
  }
  return due;
}

Result<std::string> Call::Op() const {
  DSEC_TRY(const OpId id, ParseOpId(params[1], "op_id"));
  return id.str();
}

Result<iam::ProjectPath> Call::Project(const std::string& given, const std::string& field) {
  iam::ProjectPath path = caller.home;
  if (!given.empty()) {
    DSEC_TRY(path, iam::ProjectPath::Parse(given, field));
  }
  project = path.str();
  DSEC_TRY_VOID(iam::CheckProject(caller, *access->right, path, given.empty() ? "" : field));
  return path;
}

Task<void> Call::MayWith(SandboxId id, iam::Right right) {
  if (caller.root()) co_return Ok();
  auto of = co_await edge().ProjectOf(id);
  if (!of.ok()) co_return std::move(of).error();
  DSEC_CO_TRY(const auto path, iam::ProjectPath::FromRecord(*of));
  const iam::Rights rights = caller.In(path);
  // As if it had never been.
  if (rights.empty()) co_return edge::NotFoundError(id.str());
  if (access->scope == Scope::kSandbox) project = path.str();
  if (!rights.Has(right)) co_return iam::Forbidden(caller, right, path);
  co_return Ok();
}

Result<void> Call::StillGood() const {
  if (services.directory == nullptr) return Ok();
  return services.directory->StillGood(caller);
}

Task<void> Call::Json(int status, std::string body) {
  const http::Headers headers = {{"Content-Type", std::string(kJsonType)}};
  auto done = co_await exchange.Reply(status, headers, body);
  co_return done;
}

Task<void> Call::NoContent() {
  auto done = co_await exchange.Reply(204, {}, "");
  co_return done;
}

Task<void> Call::Failed(Error error, std::string allow) {
  std::string details;
  if (error.code() == Code::kGone && !params.empty()) {
    auto id = ParseSandboxId(params[0]);
    if (id.ok()) {
      auto view = co_await edge().Get(*id, Usual());
      if (view.ok() && (view->record().has_termination() || view->record().has_stop())) {
        const v1::SandboxRecord& record = view->record();
        details = "\"termination\":";
        http::JsonWriter json(details);
        WriteTermination(json, record.has_termination() ? record.termination() : record.stop());
      }
    }
  }
  http::Headers headers = {{"Content-Type", std::string(kJsonType)}};
  if (error.code() == Code::kResourceExhausted || error.code() == Code::kUnavailable) {
    headers.emplace_back("Retry-After",
                         std::to_string(std::max<int64_t>(1, edge::RetryAfter(error).count())));
  }
  if (!allow.empty()) headers.emplace_back("Allow", std::move(allow));
  auto done = co_await exchange.Reply(http::StatusOf(error), headers,
                                      http::ErrorBody(error, exchange.request_id(), details));
  co_return done;
}

std::string Call::ErrorRecord(const Error& error, std::string_view extra) {
  std::string out = "{\"type\":\"error\",";
  out += extra;
  out += "\"error\":";
  http::JsonWriter json(out);
  http::WriteError(json, error, exchange.request_id());
  out += "}\n";
  return out;
}

Error Call::Stopping() {
  return Error(Code::kUnavailable, "apiserver.stopping",
               "the daemon is stopping; go on from where this reply ends");
}

struct ApiServer::Impl {
  Impl(runtime::Shards& on, edge::EdgeApi& edge, LayerCatalog& layers, ApiServerOptions with)
      : shards(on),
        options(std::move(with)),
        root_key(iam::DigestOf(options.api_key)),
        layer_pool("layers", 2, 256),
        services{edge,
                 options.fn,
                 options.fn_max_cpu_ms,
                 layers,
                 layer_pool,
                 acks,
                 options.default_exec_timeout,
                 *options.registry,
                 NameOf(root_key),
                 options.iam,
                 nullptr,
                 options.audit,
                 options.quota} {
    if (options.iam != nullptr) admin.emplace(*options.iam, options.quota);
    services.admin = admin.has_value() ? &*admin : nullptr;
    for (size_t i = 0; i < std::size(kRoutes); ++i) {
      router.Add(kRoutes[i].method, kRoutes[i].pattern, i);
      access.push_back(&AccessOf(kRoutes[i].method, kRoutes[i].pattern));
    }
  }

  void Count(std::string_view route, std::string_view status, double seconds) const {
    metrics::Registry& registry = *options.registry;
    registry
        .GetCounter("dsec_api_requests_total", "Requests by route and class of status.",
                    {{"route", std::string(route)}, {"status", std::string(status)}})
        .Add();
    registry
        .GetHistogram("dsec_api_request_seconds", "Time in handlers, streams included.",
                      {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30},
                      {{"route", std::string(route)}})
        .Observe(seconds);
  }

  Result<iam::Caller> Authenticate(const http::RequestHead& head, Route::Key how) const {
    const std::string given = KeyOf(head.fields, how == Route::Key::kHeaderOrBasic);
    if (given.empty()) {
      return Error(Code::kUnauthenticated, "auth.missing",
                   "give the API key as Authorization: Bearer KEY or X-API-Key");
    }
    if (options.iam != nullptr) return options.iam->Authenticate(given);
    return iam::Authenticate(nothing, root_key, given, 0);
  }

  // Whether the route's row lets the caller in; what only the handler can know is left to it.
  static Task<void> Permit(Call& call) {
    const Access& access = *call.access;
    const iam::Caller& caller = call.caller;
    if (access.scope == Scope::kSandbox && !caller.root()) {
      auto id = call.Sandbox();
      if (!id.ok()) co_return std::move(id).error();
      auto may = co_await call.MayWith(*id, *access.right);
      co_return may;
    }
    if (access.scope == Scope::kSandbox && access.audit != Audit::kNone) co_await NoteProject(call);
    if (access.scope == Scope::kRoot) {
      const iam::ProjectPath root;
      if (!access.right.has_value() && !caller.root()) {
        co_return Error(Code::kPermissionDenied, "auth.forbidden", "only the root key may do this");
      }
      if (access.right.has_value() && !caller.May(*access.right, root))
        co_return iam::Forbidden(caller, *access.right, root);
    }
    if (access.scope == Scope::kAny && access.right.has_value() &&
        !caller.Somewhere(*access.right)) {
      co_return iam::Forbidden(caller, *access.right, caller.home);
    }
    co_return Ok();
  }

  // For the audit log of the root principal's calls, which nothing else asks for a project.
  static boost::asio::awaitable<void> NoteProject(Call& call) {
    auto id = call.Sandbox();
    if (!id.ok()) co_return;
    auto of = co_await call.edge().ProjectOf(*id);
    if (of.ok()) call.project = *std::move(of);
  }

  // What is written down of a call; never bodies, queries or keys.
  static v1::IamAuditRecord RecordOf(const Call& call, std::string_view route) {
    v1::IamAuditRecord record;
    record.set_at_unix_ms(UnixMillis(Clock::System().Wall()));
    record.set_principal(call.caller.principal);
    record.set_key_id(call.caller.key_id);
    record.set_action(fmt::format("{} {}", call.exchange.head().method, route));
    std::string object;
    for (const std::string& param : call.params)
      object += (object.empty() ? "" : " ") + Printable(param);
    record.set_object(std::move(object));
    record.set_project(call.project);
    record.set_request_id(call.exchange.request_id());
    record.set_peer(call.exchange.Peer());
    return record;
  }

  void WriteDown(const Call& call, std::string_view route, const Result<void>& result) const {
    if (options.audit == nullptr) return;
    const bool refused = !result.ok() && (result.error().code() == Code::kUnauthenticated ||
                                          result.error().code() == Code::kPermissionDenied);
    if (!refused && (call.access == nullptr || call.access->audit == Audit::kNone)) return;
    v1::IamAuditRecord record = RecordOf(call, route);
    record.set_outcome(result.ok() ? "ok" : std::string(result.error().reason()));
    record.set_status(static_cast<uint32_t>(result.ok() ? std::max(call.exchange.status(), 200)
                                                        : http::StatusOf(result.error())));
    if (refused) {
      options.audit->AddRefusal(std::move(record));
    } else {
      options.audit->Add(std::move(record));
    }
  }

  boost::asio::awaitable<void> Handle(http::Exchange& exchange) {
    const MonoTime started = std::chrono::steady_clock::now();
    const http::RequestHead& head = exchange.head();
    auto target = http::SplitTarget(head.target);
    std::string_view route = "none";
    Call call(exchange, services, {}, target.ok() ? target->query : std::string_view());
    auto result = co_await Dispatch(call, target, route);
    WriteDown(call, route, result);
    std::string_view status = "2xx";
    if (!result.ok()) {
      status = HttpStatus(result.error().code()) >= 500 ? "5xx" : "4xx";
      if (HttpStatus(result.error().code()) >= 500) {
        log::Warn(
            "api.failed",
            {{"request_id", exchange.request_id()}, {"route", route}, {"error", result.error()}});
      }
      // A reply that has begun cannot turn into an error: returning here cuts it, which tells the
      // client.
      if (!exchange.begun()) {
        std::string allow;
        if (result.error().reason() == "request.method") allow = router.Allowed(target->path);
        (void)co_await call.Failed(std::move(result).error(), std::move(allow));
      }
    }
    Count(route, status,
          std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  }

  Task<void> Dispatch(Call& call, const Result<http::Target>& target, std::string_view& route) {
    if (!target.ok()) co_return target.error();
    const http::RequestHead& head = call.exchange.head();
    auto match = router.Find(head.method, target->path);
    // Without a key nobody learns which paths there are.
    const Route::Key how = match.ok() ? kRoutes[match->route].key : Route::Key::kHeader;
    if (match.ok()) {
      route = kRoutes[match->route].pattern;
      call.params = std::move(match->params);
      call.access = access[match->route];
    }
    if (how != Route::Key::kNone) {
      const MonoTime begun = std::chrono::steady_clock::now();
      auto caller = Authenticate(head, how);
      if (!caller.ok()) co_return std::move(caller).error();
      call.caller = *std::move(caller);
      if (!match.ok()) co_return std::move(match).error();
      auto permitted = co_await Permit(call);
      if (!permitted.ok()) co_return std::move(permitted).error();
      check_seconds.Observe(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
    }
    DSEC_CO_TRY_VOID(CheckNeeds(kRoutes[match->route].needs));
    if (call.access->audit == Audit::kAround && options.audit != nullptr) {
      call.project = iam_ops::AboutProject(call, route);
      v1::IamAuditRecord record = RecordOf(call, route);
      record.set_outcome("begun");
      auto written = co_await options.audit->AddNow(std::move(record));
      if (!written.ok()) co_return std::move(written).error();
    }
    auto done = co_await kRoutes[match->route].handler(call);
    co_return done;
  }

  Result<void> CheckNeeds(Route::Needs needs) const {
    if (needs == Route::Needs::kFn && services.fn == nullptr)
      return Error(Code::kFailedPrecondition, "fn.not_here", "this node runs no FnCall");
    if (needs == Route::Needs::kIam && services.directory == nullptr)
      return Error(Code::kFailedPrecondition, "iam.not_here", "this node has no IAM");
    return Ok();
  }

  // Acknowledges what is due.
  boost::asio::awaitable<void> SendAcks() {
    for (AckQueue::Item& item : acks.TakeDue(std::chrono::steady_clock::now())) {
      v1::AckRequest request;
      request.set_op_id(item.op_id);
      (void)co_await services.edge.Ack(item.sandbox, std::move(request), Call::Usual());
    }
  }

  runtime::Shards& shards;
  const ApiServerOptions options;
  const iam::KeyDigest root_key;
  const std::shared_ptr<const iam::Snapshot> nothing = iam::Snapshot::Build({}, 0);
  std::optional<iam::Admin> admin;
  std::vector<const Access*> access;  // by route
  metrics::Histogram& check_seconds = options.registry->GetHistogram(
      "dsec_iam_check_seconds", "Time to find out who calls and whether they may.",
      {0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005}, {});
  http::Router router;
  AckQueue acks;
  runtime::BlockingPool layer_pool;
  Services services;
  std::unique_ptr<http::Server> server;
  std::unique_ptr<runtime::Periodic> acker;
};

ApiServer::ApiServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ApiServer::~ApiServer() = default;

Result<std::unique_ptr<ApiServer>> ApiServer::Start(runtime::Shards& shards, edge::EdgeApi& edge,
                                                    LayerCatalog& layers,
                                                    ApiServerOptions options) {
  auto impl = std::make_unique<Impl>(shards, edge, layers, std::move(options));
  Impl* raw = impl.get();
  DSEC_TRY(impl->server, http::Server::Start(
                             shards, raw->options.listen, http::ServerOptions(),
                             [raw](http::Exchange& exchange) { return raw->Handle(exchange); },
                             *raw->options.registry));
  impl->acker = std::make_unique<runtime::Periodic>(
      shards.at(0), "api_acks", std::chrono::seconds(1), [raw] { return raw->SendAcks(); });
  return std::unique_ptr<ApiServer>(new ApiServer(std::move(impl)));
}

const std::vector<std::string>& ApiServer::addresses() const { return impl_->server->addresses(); }

Task<void> ApiServer::Stop(runtime::Deadline deadline) {
  co_await impl_->acker->Join();
  co_await impl_->server->Stop(deadline);
  co_return Ok();
}

}  // namespace dsec::apiserver

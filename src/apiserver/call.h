// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "apiserver/access.h"
#include "apiserver/json_in.h"
#include "apiserver/layers_api.h"
#include "base/clock.h"
#include "base/metrics.h"
#include "edge/api.h"
#include "fn/fn_api.h"
#include "http/json_writer.h"
#include "http/server.h"
#include "iam/admin.h"
#include "iam/audit_log.h"
#include "runtime/blocking_pool.h"

namespace dsec::apiserver {

constexpr uint64_t kMaxJsonBody = 1 << 20;
constexpr uint64_t kMaxExecBody = 16 << 20;  // script and stdin are in it
constexpr size_t kChunk = size_t{1} << 20;   // of files, archives and output

// Results of attached execs are acknowledged some time after their exit record was sent, so that a
// client whose connection broke at the last moment can attach again. Thread-safe.
class AckQueue {
 public:
  struct Item {
    MonoTime due;
    SandboxId sandbox;
    std::string op_id;
  };
  void Add(SandboxId sandbox, std::string op_id);
  std::vector<Item> TakeDue(MonoTime now);

 private:
  std::mutex mutex_;
  std::deque<Item> items_;
};

// What the handlers share.
struct Services {
  edge::EdgeApi& edge;
  fn::FnApi* fn;  // null: this node runs no calls; the routes that need it then do not get here
  uint64_t fn_max_cpu_ms;
  LayerCatalog& layers;
  runtime::BlockingPool& layer_pool;
  AckQueue& acks;
  std::chrono::milliseconds default_exec_timeout;
  metrics::Registry& registry;
  std::string root_principal;  // who calls with the root key, in records of origin: "key:" and the
                               // start of its SHA-256
  iam::Directory* directory;   // null: there is only the root key; so are the next two
  iam::Admin* admin;
  iam::AuditLog* audit;
  iam::QuotaKeeper* quota;
};

// One request on its way through a handler.
class Call {
 public:
  Call(http::Exchange& exchange, Services& services, std::vector<std::string> params,
       std::string_view encoded_query)
      : exchange(exchange), services(services), params(std::move(params)), query(encoded_query) {}

  http::Exchange& exchange;
  Services& services;
  std::vector<std::string> params;
  Query query;
  iam::Caller caller;
  const Access* access = nullptr;
  std::string project;  // that the call is about, for the audit log

  edge::EdgeApi& edge() { return services.edge; }
  // Of most calls.
  static runtime::Deadline Usual() { return runtime::Deadline::After(std::chrono::seconds(60)); }
  // The project that the call names, or the caller's own when it names none, where the caller has
  // the right of the route. kPermissionDenied auth.forbidden, kNotFound iam.project_not_found.
  Result<iam::ProjectPath> Project(const std::string& given, const std::string& field = "project");
  // Whether the caller may do `right` with a sandbox: kNotFound sandbox.not_found when it sees
  // nothing of its project, kPermissionDenied auth.forbidden.
  runtime::Task<void> MayWith(SandboxId id, iam::Right right);
  // Whether the key would still be accepted, for calls that last.
  Result<void> StillGood() const;
  // Who calls, for records of origin.
  std::string Principal() const {
    return caller.root() ? services.root_principal : caller.principal;
  }
  // params[0] as a sandbox id.
  Result<SandboxId> Sandbox() const { return ParseSandboxId(params[0]); }
  Result<std::string> Op() const;
  runtime::Task<std::string> Body() { return exchange.ReadAll(kMaxJsonBody); }

  runtime::Task<void> Json(int status, std::string body);
  runtime::Task<void> NoContent();
  // Error reply; adds the termination of an ended sandbox to the details. `allow`: the methods of
  // the path when it is the method that is wrong.
  runtime::Task<void> Failed(Error error, std::string allow = {});
  // A record of a stream with an "error" member, and `extra` members before it.
  std::string ErrorRecord(const Error& error, std::string_view extra = {});
  // What a wait under way ends with when the daemon stops.
  static Error Stopping();
};

using Handler = runtime::Task<void> (*)(Call& call);

struct Route {
  std::string_view method;
  std::string_view pattern;
  Handler handler;
  enum class Key { kHeader, kHeaderOrBasic, kNone } key = Key::kHeader;  // how it is given
  enum class Needs { kNothing, kFn, kIam } needs = Needs::kNothing;      // of Services
};

// The handlers, by file.
namespace node_ops {
runtime::Task<void> Health(Call& call);
runtime::Task<void> Metrics(Call& call);
runtime::Task<void> Node(Call& call);
runtime::Task<void> NodeEvents(Call& call);
runtime::Task<void> SandboxEvents(Call& call);
runtime::Task<void> ListLayers(Call& call);
runtime::Task<void> GetLayer(Call& call);
runtime::Task<void> DeleteLayer(Call& call);
}  // namespace node_ops
namespace layer_ops {
runtime::Task<void> Collect(Call& call);
runtime::Task<void> Nodes(Call& call);
runtime::Task<void> ForgetNode(Call& call);
}  // namespace layer_ops
namespace sandbox_ops {
runtime::Task<void> Create(Call& call);
runtime::Task<void> Batch(Call& call);
runtime::Task<void> List(Call& call);
runtime::Task<void> Get(Call& call);
runtime::Task<void> Delete(Call& call);
runtime::Task<void> DeleteMany(Call& call);
runtime::Task<void> Renew(Call& call);
runtime::Task<void> Stats(Call& call);
}  // namespace sandbox_ops
namespace pack_ops {
runtime::Task<void> Pack(Call& call);
runtime::Task<void> FirstTouch(Call& call);
}  // namespace pack_ops
namespace exec_ops {
runtime::Task<void> Exec(Call& call);
runtime::Task<void> ListExecs(Call& call);
runtime::Task<void> GetExec(Call& call);
runtime::Task<void> Stream(Call& call);
runtime::Task<void> Stdin(Call& call);
runtime::Task<void> Signal(Call& call);
runtime::Task<void> Resize(Call& call);
runtime::Task<void> Cancel(Call& call);
runtime::Task<void> Ack(Call& call);
runtime::Task<void> ListSessions(Call& call);
runtime::Task<void> CloseSession(Call& call);
}  // namespace exec_ops
namespace file_ops {
runtime::Task<void> Read(Call& call);
runtime::Task<void> Write(Call& call);
runtime::Task<void> Remove(Call& call);
runtime::Task<void> Stat(Call& call);
runtime::Task<void> List(Call& call);
runtime::Task<void> Mkdir(Call& call);
runtime::Task<void> Move(Call& call);
runtime::Task<void> Chmod(Call& call);
runtime::Task<void> Watch(Call& call);
runtime::Task<void> GetArchive(Call& call);
runtime::Task<void> PutArchive(Call& call);
}  // namespace file_ops
namespace fn_ops {
runtime::Task<void> CallOne(Call& call);
runtime::Task<void> CallMany(Call& call);
runtime::Task<void> GetResult(Call& call);
runtime::Task<void> ListTypes(Call& call);
runtime::Task<void> PutType(Call& call);
runtime::Task<void> DeleteType(Call& call);
runtime::Task<void> PutArtifact(Call& call);
runtime::Task<void> GetArtifact(Call& call);
runtime::Task<void> Pools(Call& call);
}  // namespace fn_ops
namespace iam_ops {
// The project that a change of IAM is about, as far as its path tells; for the audit log.
std::string AboutProject(const Call& call, std::string_view route);
runtime::Task<void> WhoAmI(Call& call);
runtime::Task<void> ListProjects(Call& call);
runtime::Task<void> GetProject(Call& call);
runtime::Task<void> PutProject(Call& call);
runtime::Task<void> DeleteProject(Call& call);
runtime::Task<void> ListGrants(Call& call);
runtime::Task<void> PutGrant(Call& call);
runtime::Task<void> DeleteGrant(Call& call);
runtime::Task<void> ListPrincipals(Call& call);
runtime::Task<void> GetPrincipal(Call& call);
runtime::Task<void> PutPrincipal(Call& call);
runtime::Task<void> DeletePrincipal(Call& call);
runtime::Task<void> ListKeys(Call& call);
runtime::Task<void> MakeKey(Call& call);
runtime::Task<void> RevokeKey(Call& call);
runtime::Task<void> ListRoles(Call& call);
runtime::Task<void> PutRole(Call& call);
runtime::Task<void> DeleteRole(Call& call);
runtime::Task<void> ListAudit(Call& call);
}  // namespace iam_ops
namespace fusion_ops {
runtime::Task<void> RunCode(Call& call);
runtime::Task<void> Submit(Call& call);
runtime::Task<void> Ping(Call& call);
}  // namespace fusion_ops

inline constexpr std::string_view kJsonType = "application/json";
inline constexpr std::string_view kNdjsonType = "application/x-ndjson";
inline constexpr std::string_view kKeepalive = "{\"type\":\"keepalive\"}\n";

}  // namespace dsec::apiserver

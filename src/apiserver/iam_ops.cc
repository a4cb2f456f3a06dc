// SPDX-License-Identifier: Apache-2.0
// Who am I, projects, grants, roles.
#include "apiserver/call.h"
#include "apiserver/iam_json.h"
#include "apiserver/iam_page.h"
#include "iam/layout.h"

namespace dsec::apiserver::iam_ops {
namespace {

using http::JsonWriter;
using iam::ProjectPath;
using runtime::Task;

// The project of the path, as a parameter: not yet whether the caller may.
Result<ProjectPath> PathProject(Call& call) {
  DSEC_TRY(ProjectPath path, ProjectPath::Parse(call.params[0], "project"));
  call.project = path.str();
  return path;
}

// What all nodes hold; what this one uses is known exactly, of others what they hold.
Task<ProjectUse> UseOf(Call& call, const ProjectPath& path) {
  ProjectUse use;
  auto entry =
      co_await call.services.directory->store().Get(iam::layout::Ledger(path), Call::Usual());
  if (!entry.ok()) co_return std::move(entry).error();
  v1::IamLedger ledger;
  if (entry->has_value() && ledger.ParseFromString((*entry)->value))
    use.granted = iam::Amounts::Of(ledger.granted());
  if (const iam::QuotaKeeper* const quota = call.services.quota) {
    use.used = use.granted - quota->Held(path) + quota->Used(path);
  } else {
    use.used = use.granted;
  }
  co_return use;
}

Task<void> AnswerProject(Call& call, int status, const ProjectPath& path) {
  const auto snapshot = call.services.directory->Now();
  const iam::Snapshot::Project* const project = snapshot->FindProject(path);
  if (project == nullptr) {
    co_return Error(Code::kNotFound, "iam.project_not_found",
                    fmt::format("there is no project {}", path.str()));
  }
  DSEC_CO_TRY(const ProjectUse use, co_await UseOf(call, path));
  std::string body;
  JsonWriter json(body);
  WriteProject(json, *project, &use);
  auto done = co_await call.Json(status, std::move(body));
  co_return done;
}

}  // namespace

Task<void> WhoAmI(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  const iam::Caller& caller = call.caller;
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.Field("principal", caller.principal);
  json.Field("key_id", caller.key_id);
  json.Field("project", caller.home.str());
  json.Field("expires_unix_ms", caller.expires_unix_ms);
  WriteRights(json, "rights", caller.In(caller.home));
  json.BeginArray("grants");
  for (const size_t index : caller.snapshot->GrantsOf(caller.principal)) {
    const ProjectPath& project = caller.snapshot->grants()[index].project;
    json.BeginObject();
    json.Field("project", project.str());
    WriteRights(json, "rights", caller.In(project));
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> ListProjects(Call& call) {
  IamPage page(call);
  DSEC_CO_TRY_VOID(call.query.Finish());
  const auto reach = call.caller.Where(iam::Right::kIamRead);
  std::string body;
  page.Begin(body, "projects");
  for (const auto& [key, project] : call.caller.snapshot->projects()) {
    if (!reach.Has(project.path)) continue;
    if (!page.Add(key, [&](JsonWriter& json) { WriteProject(json, project, nullptr); })) break;
  }
  auto done = co_await call.Json(200, page.Finish());
  co_return done;
}

Task<void> GetProject(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  DSEC_CO_TRY(const ProjectPath path, PathProject(call));
  DSEC_CO_TRY_VOID(iam::CheckProject(call.caller, iam::Right::kIamRead, path, "project"));
  auto done = co_await AnswerProject(call, 200, path);
  co_return done;
}

Task<void> PutProject(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  DSEC_CO_TRY(const ProjectPath path, PathProject(call));
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(iam::ProjectSpec spec, ReadProjectSpec(*text));
  auto put = co_await call.services.admin->PutProject(call.caller, path, std::move(spec));
  if (!put.ok()) co_return put;
  auto done = co_await AnswerProject(call, 200, path);
  co_return done;
}

Task<void> DeleteProject(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  DSEC_CO_TRY(const ProjectPath path, PathProject(call));
  auto removed = co_await call.services.admin->DeleteProject(call.caller, path);
  if (!removed.ok()) co_return removed;
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> ListGrants(Call& call) {
  IamPage page(call);
  DSEC_CO_TRY_VOID(call.query.Finish());
  DSEC_CO_TRY(const ProjectPath path, PathProject(call));
  DSEC_CO_TRY_VOID(iam::CheckProject(call.caller, iam::Right::kIamRead, path, "project"));
  std::string body;
  page.Begin(body, "grants");
  // In order of principal, as the keys of the store are.
  for (const iam::Snapshot::Grant& grant : call.caller.snapshot->grants()) {
    if (grant.project != path) continue;
    if (!page.Add(grant.principal, [&](JsonWriter& json) { WriteGrant(json, grant); })) break;
  }
  auto done = co_await call.Json(200, page.Finish());
  co_return done;
}

Task<void> PutGrant(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  DSEC_CO_TRY(const ProjectPath path, PathProject(call));
  DSEC_CO_TRY_VOID(iam::CheckName(call.params[1], "principal"));
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(iam::GrantSpec spec, ReadGrantSpec(*text));
  auto put =
      co_await call.services.admin->PutGrant(call.caller, path, call.params[1], std::move(spec));
  if (!put.ok()) co_return put;
  std::string body;
  JsonWriter json(body);
  const auto snapshot = call.services.directory->Now();
  const iam::Snapshot::Grant* const grant = snapshot->FindGrant(path, call.params[1]);
  if (grant == nullptr) co_return Error(Code::kConflict, "iam.changed", "it is gone again");
  WriteGrant(json, *grant);
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> DeleteGrant(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  DSEC_CO_TRY(const ProjectPath path, PathProject(call));
  DSEC_CO_TRY_VOID(iam::CheckName(call.params[1], "principal"));
  auto removed = co_await call.services.admin->DeleteGrant(call.caller, path, call.params[1]);
  if (!removed.ok()) co_return removed;
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> ListRoles(Call& call) {
  IamPage page(call);
  DSEC_CO_TRY_VOID(call.query.Finish());
  std::string body;
  page.Begin(body, "roles");
  for (const auto& [name, role] : call.caller.snapshot->roles()) {
    if (!page.Add(name, [&](JsonWriter& json) { WriteRole(json, role); })) break;
  }
  auto done = co_await call.Json(200, page.Finish());
  co_return done;
}

Task<void> PutRole(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(RoleBody role, ReadRole(*text));
  auto put = co_await call.services.admin->PutRole(call.caller, call.params[0], role.rights,
                                                   std::move(role.description));
  if (!put.ok()) co_return put;
  std::string body;
  JsonWriter json(body);
  const auto snapshot = call.services.directory->Now();
  const iam::Snapshot::Role* const made = snapshot->FindRole(call.params[0]);
  if (made == nullptr) co_return Error(Code::kConflict, "iam.changed", "it is gone again");
  WriteRole(json, *made);
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> DeleteRole(Call& call) {
  DSEC_CO_TRY_VOID(iam::CheckName(call.params[0], "role"));
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto removed = co_await call.services.admin->DeleteRole(call.caller, call.params[0]);
  if (!removed.ok()) co_return removed;
  auto done = co_await call.NoContent();
  co_return done;
}

}  // namespace dsec::apiserver::iam_ops

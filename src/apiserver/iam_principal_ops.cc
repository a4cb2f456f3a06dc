// SPDX-License-Identifier: Apache-2.0
// Principals, their keys, the audit log.
#include "apiserver/call.h"
#include "apiserver/iam_json.h"
#include "apiserver/iam_page.h"

namespace dsec::apiserver::iam_ops {
namespace {

using http::JsonWriter;
using iam::ProjectPath;
using runtime::Task;

Error NoPrincipal(const std::string& id) {
  return Error(Code::kNotFound, "iam.principal_not_found",
               fmt::format("there is no principal {}", id));
}

// Of the path, when the caller is it or may look where it is at home.
Result<const iam::Snapshot::Principal*> Visible(Call& call) {
  const std::string& id = call.params[0];
  DSEC_TRY_VOID(iam::CheckName(id, "principal"));
  const iam::Snapshot::Principal* const found = call.caller.snapshot->FindPrincipal(id);
  if (found == nullptr) return NoPrincipal(id);
  call.project = found->home.str();
  if (call.caller.principal == id) return found;
  const iam::Rights rights = call.caller.In(found->home);
  if (rights.empty()) return NoPrincipal(id);
  if (!rights.Has(iam::Right::kIamRead))
    return iam::Forbidden(call.caller, iam::Right::kIamRead, found->home);
  return found;
}

Task<void> AnswerPrincipal(Call& call) {
  const auto snapshot = call.services.directory->Now();
  const iam::Snapshot::Principal* const found = snapshot->FindPrincipal(call.params[0]);
  if (found == nullptr) co_return NoPrincipal(call.params[0]);
  std::string body;
  JsonWriter json(body);
  WritePrincipal(json, *found);
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

}  // namespace

std::string AboutProject(const Call& call, std::string_view route) {
  if (call.params.empty()) return {};
  if (route.starts_with("/v1/iam/projects/")) {
    const auto path = ProjectPath::Parse(call.params[0], "project");
    return path.ok() ? path->str() : std::string();
  }
  const iam::Snapshot& snapshot = *call.caller.snapshot;
  std::string_view owner = call.params[0];
  if (route.starts_with("/v1/iam/keys/")) {
    const iam::Snapshot::Key* const key = snapshot.FindKey(owner);
    if (key == nullptr) return {};
    owner = key->message.principal();
  } else if (!route.starts_with("/v1/iam/principals/")) {
    return {};
  }
  const iam::Snapshot::Principal* const principal = snapshot.FindPrincipal(owner);
  return principal == nullptr ? std::string() : principal->home.str();
}

Task<void> ListPrincipals(Call& call) {
  IamPage page(call);
  DSEC_CO_TRY_VOID(call.query.Finish());
  const auto reach = call.caller.Where(iam::Right::kIamRead);
  std::string body;
  page.Begin(body, "principals");
  for (const auto& [id, principal] : call.caller.snapshot->principals()) {
    if (id != call.caller.principal && !reach.Has(principal.home)) continue;
    if (!page.Add(id, [&](JsonWriter& json) { WritePrincipal(json, principal); })) break;
  }
  auto done = co_await call.Json(200, page.Finish());
  co_return done;
}

Task<void> GetPrincipal(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  DSEC_CO_TRY_VOID(Visible(call));
  auto done = co_await AnswerPrincipal(call);
  co_return done;
}

Task<void> PutPrincipal(Call& call) {
  DSEC_CO_TRY_VOID(iam::CheckName(call.params[0], "principal"));
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(iam::PrincipalSpec spec, ReadPrincipalSpec(*text));
  call.project = spec.home.str();
  auto put =
      co_await call.services.admin->PutPrincipal(call.caller, call.params[0], std::move(spec));
  if (!put.ok()) co_return put;
  auto done = co_await AnswerPrincipal(call);
  co_return done;
}

Task<void> DeletePrincipal(Call& call) {
  DSEC_CO_TRY_VOID(iam::CheckName(call.params[0], "principal"));
  DSEC_CO_TRY_VOID(call.query.Finish());
  if (const auto* const found = call.caller.snapshot->FindPrincipal(call.params[0]))
    call.project = found->home.str();
  auto removed = co_await call.services.admin->DeletePrincipal(call.caller, call.params[0]);
  if (!removed.ok()) co_return removed;
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> ListKeys(Call& call) {
  IamPage page(call);
  DSEC_CO_TRY_VOID(call.query.Finish());
  DSEC_CO_TRY(const auto* const principal, Visible(call));
  std::string body;
  page.Begin(body, "keys");
  for (const auto& [id, key] : call.caller.snapshot->keys()) {
    if (key.message.principal() != principal->id) continue;
    if (!page.Add(id, [&](JsonWriter& json) { WriteKey(json, key); })) break;
  }
  auto done = co_await call.Json(200, page.Finish());
  co_return done;
}

Task<void> MakeKey(Call& call) {
  DSEC_CO_TRY_VOID(iam::CheckName(call.params[0], "principal"));
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(iam::KeySpec spec, ReadKeySpec(*text));
  if (const auto* const found = call.caller.snapshot->FindPrincipal(call.params[0]))
    call.project = found->home.str();
  auto made = co_await call.services.admin->MakeKey(call.caller, call.params[0], std::move(spec));
  if (!made.ok()) co_return std::move(made).error();
  const auto snapshot = call.services.directory->Now();
  const iam::Snapshot::Key* const key = snapshot->FindKey(made->id);
  if (key == nullptr) co_return Error(Code::kConflict, "iam.changed", "it is gone again");
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.Field("secret", made->Text());
  json.Key("key");
  WriteKey(json, *key);
  json.EndObject();
  auto done = co_await call.Json(201, std::move(body));
  co_return done;
}

Task<void> RevokeKey(Call& call) {
  DSEC_CO_TRY_VOID(call.query.Finish());
  if (!iam::IsKeyId(call.params[0])) {
    co_return Error(Code::kInvalidArgument, "request.invalid",
                    "keyid: must be a key's id, 16 hexadecimal digits")
        .WithField("keyid");
  }
  auto revoked = co_await call.services.admin->RevokeKey(call.caller, call.params[0]);
  if (!revoked.ok()) co_return revoked;
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> ListAudit(Call& call) {
  const auto limit = static_cast<uint32_t>(call.query.Number("page_size", 100, 1, 1000));
  const uint64_t before = call.query.Number("page_token", 0);
  const std::string principal = call.query.Text("principal");
  const std::string key_id = call.query.Text("key_id");
  const std::string under = call.query.Text("project");
  DSEC_CO_TRY_VOID(call.query.Finish());
  ProjectPath top;
  if (!under.empty()) {
    DSEC_CO_TRY(top, call.Project(under));
  }
  if (call.services.audit == nullptr)
    co_return Error(Code::kFailedPrecondition, "iam.not_here", "this node keeps no audit log");
  auto reach = call.caller.Where(iam::Right::kAuditRead);
  if (reach.roots.empty())
    co_return iam::Forbidden(call.caller, iam::Right::kAuditRead, call.caller.home);
  // What belongs to no project is the root's.
  auto wanted = [=](const v1::IamAuditRecord& record) {
    if (!principal.empty() && record.principal() != principal) return false;
    if (!key_id.empty() && record.key_id() != key_id) return false;
    auto path = ProjectPath::FromRecord(record.project());
    return path.ok() && path->Within(top) && reach.Has(*path);
  };
  auto page = co_await call.services.audit->List(before, limit, wanted, Call::Usual());
  if (!page.ok()) co_return std::move(page).error();
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.BeginArray("records");
  for (const auto& item : page->items) WriteAudit(json, item);
  json.EndArray();
  json.Field("next_page_token", page->next == 0 ? std::string() : std::to_string(page->next));
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

}  // namespace dsec::apiserver::iam_ops

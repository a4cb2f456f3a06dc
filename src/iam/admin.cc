// SPDX-License-Identifier: Apache-2.0
#include "iam/admin.h"

#include <algorithm>
#include <utility>

#include "base/id.h"
#include "iam/layout.h"

namespace dsec::iam {
namespace {

using runtime::Deadline;
using runtime::Task;

constexpr auto kStoreTime = std::chrono::seconds(10);
constexpr auto kReachTime = std::chrono::seconds(5);
constexpr size_t kMaxKeys = 64;   // of one principal that can still be used
constexpr size_t kMaxSpent = 64;  // revoked or expired ones that are kept for the record

Deadline Soon() { return Deadline::After(kStoreTime); }

Error NotFound(std::string_view reason, std::string_view what, std::string_view name) {
  return Error(Code::kNotFound, reason, fmt::format("there is no {} {}", what, name));
}

Error Exceeds(const Caller& caller, const ProjectPath& project, Rights missing) {
  return Error(Code::kPermissionDenied, "iam.rights_exceed",
               fmt::format("rights: {} does not have {} in {} and cannot hand it on",
                           caller.principal, fmt::join(missing.Names(), ", "), project.str()))
      .WithField("rights");
}

// The principal, when the caller manages it or is it.
Result<const Snapshot::Principal*> Managed(const Caller& caller, const std::string& id, bool self) {
  const Snapshot::Principal* const found = caller.snapshot->FindPrincipal(id);
  const bool visible =
      found != nullptr && (!caller.In(found->home).empty() || caller.principal == id);
  if (!visible) return NotFound("iam.principal_not_found", "principal", id);
  if (self && caller.principal == id) return found;
  if (!caller.May(Right::kPrincipalManage, found->home))
    return Forbidden(caller, Right::kPrincipalManage, found->home);
  return found;
}

template <typename Message>
Result<Message> ParseEntry(const std::optional<store::Entry>& entry) {
  Message message;
  if (entry.has_value() && message.ParseFromString(entry->value)) return message;
  return Error(Code::kInternal, "iam.damaged",
               "an entry of the store is missing or does not parse");
}

bool Spent(const v1::IamKey& key, int64_t now_ms) {
  return key.revoked_unix_ms() != 0 ||
         (key.expires_unix_ms() != 0 && key.expires_unix_ms() <= now_ms);
}

}  // namespace

Error Forbidden(const Caller& caller, Right right, const ProjectPath& project) {
  return Error(
      Code::kPermissionDenied, "auth.forbidden",
      fmt::format("{} has no right {} in {}", caller.principal, RightName(right), project.str()));
}

Result<void> CheckProject(const Caller& caller, Right right, const ProjectPath& project,
                          const std::string& field) {
  const bool there = project.root() || caller.snapshot->FindProject(project) != nullptr;
  const Rights rights = caller.In(project);
  if (!there || rights.empty()) {
    Error error = NotFound("iam.project_not_found", "project", project.str());
    return field.empty() ? std::move(error) : std::move(error).WithField(field);
  }
  if (!rights.Has(right)) return Forbidden(caller, right, project);
  return Ok();
}

Task<void> Admin::Commit(std::vector<store::Condition> conditions,
                         std::vector<store::Write> writes) {
  auto done = co_await directory_.store().Commit(std::move(conditions), std::move(writes), Soon());
  if (!done.ok() && done.error().reason() == "store.version") {
    co_return Error(Code::kConflict, "iam.changed",
                    "somebody else changed it at this moment: look again and repeat");
  }
  if (!done.ok()) co_return std::move(done).error();
  auto reached = co_await directory_.Reach(*done, Deadline::After(kReachTime));
  co_return reached;
}

// --- projects ---

Task<void> Admin::PutProject(Caller caller, ProjectPath path, ProjectSpec spec) {
  DSEC_CO_TRY_VOID(CheckDescription(spec.description, "description"));
  const ProjectPath above = path.root() ? path : path.Parent();
  DSEC_CO_TRY_VOID(CheckProject(caller, Right::kProjectManage, above, "project"));
  if (!path.root()) {
    DSEC_CO_TRY_VOID(CheckNarrower(spec.limits, caller.snapshot->LimitsOf(above), "limits."));
    const Snapshot::Project* const parent = caller.snapshot->FindProject(above);
    if (parent == nullptr) co_return NotFound("iam.project_not_found", "project", above.str());
    if (spec.ceiling.has_value() && !spec.ceiling->Within(parent->ceiling)) {
      co_return Error(
          Code::kInvalidArgument, "iam.rights_exceed",
          fmt::format("rights: {} is above the ceiling of {}",
                      fmt::join(spec.ceiling->Without(parent->ceiling).Names(), ", "), above.str()))
          .WithField("rights");
    }
  }
  v1::IamProject message;
  message.set_description(spec.description);
  if (spec.ceiling.has_value()) spec.ceiling->Into(*message.mutable_ceiling());
  spec.limits.Into(*message.mutable_limits());
  if (const Snapshot::Project* const before = caller.snapshot->FindProject(path)) {
    auto changed = co_await ChangeProject(*before, std::move(message));
    co_return changed;
  }
  auto made = co_await NewProject(caller, path, std::move(message));
  co_return made;
}

Task<void> Admin::NewProject(const Caller& caller, const ProjectPath& path,
                             v1::IamProject message) {
  const Snapshot::Project& parent = *caller.snapshot->FindProject(path.Parent());
  auto above = co_await directory_.store().Get(layout::Ledger(parent.path), Soon());
  if (!above.ok()) co_return std::move(above).error();
  DSEC_CO_TRY(auto parent_ledger, ParseEntry<v1::IamLedger>(*above));
  parent_ledger.set_children(parent_ledger.children() + 1);
  message.set_uid(NewUlid(Clock::System()));
  message.set_parent_uid(parent.message.uid());
  message.set_created_unix_ms(directory_.NowMs());
  message.set_created_by(caller.principal);
  v1::IamLedger ledger;
  ledger.set_project_uid(message.uid());
  *ledger.mutable_limits() = message.limits();
  auto done = co_await Commit({{layout::Project(path), 0},
                               {layout::Ledger(path), 0},
                               {layout::Project(parent.path), parent.version},
                               {(*above)->key, (*above)->version}},
                              {{layout::Project(path), message.SerializeAsString(), 0},
                               {layout::Ledger(path), ledger.SerializeAsString(), 0},
                               {(*above)->key, parent_ledger.SerializeAsString(), 0}});
  co_return done;
}

// The limits also lie in the ledger, which a refill that goes on at the same time holds on to.
Task<void> Admin::ChangeProject(const Snapshot::Project& before, v1::IamProject message) {
  constexpr int kTries = 16;
  message.set_uid(before.message.uid());
  message.set_parent_uid(before.message.parent_uid());
  message.set_created_unix_ms(before.message.created_unix_ms());
  message.set_created_by(before.message.created_by());
  const std::string key = layout::Project(before.path);
  const store::Revision version = before.version;
  for (int i = 0;; ++i) {
    auto entry = co_await directory_.store().Get(layout::Ledger(before.path), Soon());
    if (!entry.ok()) co_return std::move(entry).error();
    DSEC_CO_TRY(auto ledger, ParseEntry<v1::IamLedger>(*entry));
    *ledger.mutable_limits() = message.limits();
    auto done = co_await Commit(
        {{key, version}, {(*entry)->key, (*entry)->version}},
        {{key, message.SerializeAsString(), 0}, {(*entry)->key, ledger.SerializeAsString(), 0}});
    if (done.ok() || done.error().reason() != "iam.changed" || i == kTries) co_return done;
    auto now = co_await directory_.store().Get(key, Soon());
    if (!now.ok()) co_return std::move(now).error();
    if (!now->has_value() || (*now)->version != version) co_return done;
  }
}

Task<void> Admin::DeleteProject(Caller caller, ProjectPath path) {
  if (path.root()) {
    co_return Error(Code::kInvalidArgument, "iam.project_root", "project: the root stays")
        .WithField("project");
  }
  DSEC_CO_TRY_VOID(CheckProject(caller, Right::kProjectManage, path.Parent(), "project"));
  const Snapshot::Project* const before = caller.snapshot->FindProject(path);
  if (before == nullptr) co_return NotFound("iam.project_not_found", "project", path.str());
  for (const auto& [id, principal] : caller.snapshot->principals()) {
    if (principal.home != path) continue;
    co_return Error(Code::kConflict, "iam.project_has_principals",
                    fmt::format("{} is the home of {}", path.str(), id));
  }
  if (quota_ != nullptr) DSEC_CO_TRY_VOID(co_await quota_->Trim(path));
  auto entry = co_await directory_.store().Get(layout::Ledger(path), Soon());
  if (!entry.ok()) co_return std::move(entry).error();
  DSEC_CO_TRY(const auto ledger, ParseEntry<v1::IamLedger>(*entry));
  if (ledger.children() > 0) {
    co_return Error(Code::kConflict, "iam.project_has_children",
                    fmt::format("{} has {} projects below it", path.str(), ledger.children()));
  }
  if (!Amounts::Of(ledger.granted()).zero()) {
    co_return Error(Code::kConflict, "iam.project_in_use",
                    fmt::format("{} has {} sandboxes", path.str(), ledger.granted().live()));
  }
  auto above = co_await directory_.store().Get(layout::Ledger(path.Parent()), Soon());
  if (!above.ok()) co_return std::move(above).error();
  DSEC_CO_TRY(auto parent_ledger, ParseEntry<v1::IamLedger>(*above));
  parent_ledger.set_children(parent_ledger.children() -
                             std::min<uint64_t>(1, parent_ledger.children()));
  auto done = co_await Commit({{layout::Project(path), before->version},
                               {(*entry)->key, (*entry)->version},
                               {(*above)->key, (*above)->version}},
                              {{layout::Project(path), std::nullopt, 0},
                               {(*entry)->key, std::nullopt, 0},
                               {(*above)->key, parent_ledger.SerializeAsString(), 0}});
  co_return done;
}

// --- principals and keys ---

Task<void> Admin::PutPrincipal(Caller caller, std::string id, PrincipalSpec spec) {
  DSEC_CO_TRY_VOID(CheckName(id, "principal"));
  DSEC_CO_TRY_VOID(CheckDescription(spec.description, "description"));
  const Error taken(Code::kConflict, "iam.name_taken",
                    fmt::format("principal: the name {} is in use", id));
  if (id == kRootPrincipal) co_return taken;
  DSEC_CO_TRY_VOID(CheckProject(caller, Right::kPrincipalManage, spec.home, "project"));
  const Snapshot::Project* const home = caller.snapshot->FindProject(spec.home);
  if (home == nullptr) co_return NotFound("iam.project_not_found", "project", spec.home.str());
  v1::IamPrincipal message;
  const Snapshot::Principal* const before = caller.snapshot->FindPrincipal(id);
  if (before != nullptr) {
    if (caller.In(before->home).empty()) co_return taken;
    if (!caller.May(Right::kPrincipalManage, before->home))
      co_return Forbidden(caller, Right::kPrincipalManage, before->home);
    message = before->message;
  } else {
    message.set_uid(NewUlid(Clock::System()));
    message.set_created_unix_ms(directory_.NowMs());
    message.set_created_by(caller.principal);
  }
  message.set_kind(spec.kind);
  message.set_project(spec.home.str());
  message.set_project_uid(home->message.uid());
  message.set_description(spec.description);
  message.set_disabled(spec.disabled);
  auto done = co_await Commit({{layout::Principal(id), before == nullptr ? 0 : before->version}},
                              {{layout::Principal(id), message.SerializeAsString(), 0}});
  co_return done;
}

Task<void> Admin::DeletePrincipal(Caller caller, std::string id) {
  DSEC_CO_TRY(const auto* const principal, Managed(caller, id, false));
  // Its keys and grants count for nothing from here on; the directory removes them.
  auto done = co_await Commit({{layout::Principal(id), principal->version}},
                              {{layout::Principal(id), std::nullopt, 0}});
  co_return done;
}

Task<KeyText> Admin::MakeKey(Caller caller, std::string principal, KeySpec spec) {
  DSEC_CO_TRY_VOID(CheckDescription(spec.description, "description"));
  DSEC_CO_TRY(const auto* const owner, Managed(caller, principal, true));
  const bool self = caller.principal == principal;
  if (!self && !caller.maker.empty()) {
    co_return Error(Code::kPermissionDenied, "iam.rights_exceed",
                    "this key was made by another principal: it makes keys of its own only");
  }
  const int64_t now = directory_.NowMs();
  v1::IamKey message;
  message.set_principal(principal);
  message.set_principal_uid(owner->message.uid());
  message.set_description(spec.description);
  message.set_maker(self && !caller.maker.empty() ? caller.maker : caller.principal);
  if (const auto* const maker = caller.snapshot->FindPrincipal(message.maker()))
    message.set_maker_uid(maker->message.uid());
  const ProjectPath scope = spec.project.value_or(caller.scope);
  if (!scope.Within(caller.scope)) {
    co_return Error(Code::kPermissionDenied, "iam.rights_exceed",
                    fmt::format("project: this key reaches {} and what is below, not {}",
                                caller.scope.str(), scope.str()))
        .WithField("project");
  }
  if (!scope.root() && caller.snapshot->FindProject(scope) == nullptr) {
    co_return NotFound("iam.project_not_found", "project", scope.str()).WithField("project");
  }
  if (!scope.root() || spec.project.has_value()) message.set_project(scope.str());
  const Rights mask = spec.rights.value_or(caller.mask);
  if (!mask.Within(caller.mask)) co_return Exceeds(caller, scope, mask.Without(caller.mask));
  if (mask != Rights::All() || spec.rights.has_value()) mask.Into(*message.mutable_rights());
  int64_t expires = spec.expires_unix_ms;
  if (expires != 0 && expires <= now) {
    co_return Error(Code::kInvalidArgument, "iam.expiry",
                    fmt::format("expires_unix_ms: {} has passed", expires))
        .WithField("expires_unix_ms");
  }
  if (caller.expires_unix_ms != 0) {
    if (expires > caller.expires_unix_ms) {
      co_return Error(Code::kPermissionDenied, "iam.expiry",
                      fmt::format("expires_unix_ms: {} is after {}, the end of this key", expires,
                                  caller.expires_unix_ms))
          .WithField("expires_unix_ms");
    }
    if (expires == 0) expires = caller.expires_unix_ms;
  }
  message.set_expires_unix_ms(expires);
  message.set_created_unix_ms(now);
  const KeyText text = NewKey();
  const KeyDigest digest = DigestOf(text.secret);
  message.set_secret_sha256(std::string(digest.begin(), digest.end()));

  std::vector<store::Condition> conditions = {{layout::ApiKey(text.id), 0},
                                              {layout::Principal(principal), owner->version}};
  std::vector<store::Write> writes = {{layout::ApiKey(text.id), message.SerializeAsString(), 0}};
  size_t usable = 0;
  std::vector<const Snapshot::Key*> spent;
  for (const auto& [id, key] : caller.snapshot->keys()) {
    if (key.message.principal() != principal) continue;
    if (Spent(key.message, now)) {
      spent.push_back(&key);
    } else {
      ++usable;
    }
  }
  if (usable >= kMaxKeys) {
    co_return Error(
        Code::kConflict, "iam.too_many_keys",
        fmt::format("{} has {} keys, the most there can be: revoke some", principal, usable));
  }
  std::sort(spent.begin(), spent.end(), [](const auto* a, const auto* b) {
    return a->message.created_unix_ms() > b->message.created_unix_ms();
  });
  for (size_t i = kMaxSpent; i < spent.size() && writes.size() < 100; ++i)
    writes.push_back({layout::ApiKey(spent[i]->id), std::nullopt, 0});
  auto done = co_await Commit(std::move(conditions), std::move(writes));
  if (!done.ok()) co_return std::move(done).error();
  co_return text;
}

Task<void> Admin::RevokeKey(Caller caller, std::string id) {
  const Snapshot::Key* const key = caller.snapshot->FindKey(id);
  if (key == nullptr) co_return NotFound("iam.key_not_found", "key", id);
  auto owner = Managed(caller, key->message.principal(), true);
  if (!owner.ok() && owner.error().code() == Code::kNotFound)
    co_return NotFound("iam.key_not_found", "key", id);
  if (!owner.ok()) co_return std::move(owner).error();
  if (key->message.revoked_unix_ms() != 0) co_return Ok();
  v1::IamKey message = key->message;
  message.set_revoked_unix_ms(directory_.NowMs());
  auto done = co_await Commit({{layout::ApiKey(id), key->version}},
                              {{layout::ApiKey(id), message.SerializeAsString(), 0}});
  co_return done;
}

// --- roles and grants ---

Task<void> Admin::PutRole(Caller caller, std::string name, Rights rights, std::string description) {
  DSEC_CO_TRY_VOID(CheckName(name, "role"));
  DSEC_CO_TRY_VOID(CheckDescription(description, "description"));
  const ProjectPath root;
  DSEC_CO_TRY_VOID(CheckProject(caller, Right::kRoleManage, root, ""));
  if (const Rights missing = rights.Without(caller.In(root)); !missing.empty())
    co_return Exceeds(caller, root, missing);
  const Snapshot::Role* const before = caller.snapshot->FindRole(name);
  if (before != nullptr && before->version == 0) {
    co_return Error(Code::kConflict, "iam.role_built_in",
                    fmt::format("role: {} is built in and stays what it is", name));
  }
  v1::IamRole message;
  rights.Into(*message.mutable_rights());
  message.set_description(description);
  auto done = co_await Commit({{layout::Role(name), before == nullptr ? 0 : before->version}},
                              {{layout::Role(name), message.SerializeAsString(), 0}});
  co_return done;
}

Task<void> Admin::DeleteRole(Caller caller, std::string name) {
  DSEC_CO_TRY_VOID(CheckProject(caller, Right::kRoleManage, ProjectPath(), ""));
  const Snapshot::Role* const before = caller.snapshot->FindRole(name);
  if (before == nullptr) co_return NotFound("iam.role_not_found", "role", name);
  if (before->version == 0) {
    co_return Error(Code::kConflict, "iam.role_built_in",
                    fmt::format("role: {} is built in and stays", name));
  }
  for (const Snapshot::Grant& grant : caller.snapshot->grants()) {
    if (grant.message.role() != name) continue;
    co_return Error(Code::kConflict, "iam.role_in_use",
                    fmt::format("role: {} has it in {}", grant.principal, grant.project.str()));
  }
  auto done = co_await Commit({{layout::Role(name), before->version}},
                              {{layout::Role(name), std::nullopt, 0}});
  co_return done;
}

// Nobody hands on, changes or takes away what it does not have itself.
Result<void> Admin::CheckGrant(const Caller& caller, const ProjectPath& project,
                               const Snapshot::Grant* before, Rights rights) const {
  DSEC_TRY_VOID(CheckProject(caller, Right::kGrantManage, project, "project"));
  const Rights own = caller.In(project);
  if (before != nullptr) rights = rights | before->named;
  if (const Rights missing = rights.Without(own); !missing.empty())
    return Exceeds(caller, project, missing);
  return Ok();
}

Task<void> Admin::PutGrant(Caller caller, ProjectPath project, std::string principal,
                           GrantSpec spec) {
  const Snapshot& snapshot = *caller.snapshot;
  const Snapshot::Grant* const before = snapshot.FindGrant(project, principal);
  Rights rights = spec.rights.value_or(Rights());
  if (!spec.role.empty()) {
    const Snapshot::Role* const role = snapshot.FindRole(spec.role);
    if (role == nullptr)
      co_return NotFound("iam.role_not_found", "role", spec.role.substr(0, 64)).WithField("role");
    rights = role->rights;
  }
  DSEC_CO_TRY_VOID(CheckGrant(caller, project, before, rights));
  const Snapshot::Principal* const who = snapshot.FindPrincipal(principal);
  if (who == nullptr) co_return NotFound("iam.principal_not_found", "principal", principal);
  const Snapshot::Project* const where = snapshot.FindProject(project);
  if (where == nullptr) co_return NotFound("iam.project_not_found", "project", project.str());
  v1::IamGrant message;
  message.set_principal_uid(who->message.uid());
  message.set_project_uid(where->message.uid());
  message.set_role(spec.role);
  if (spec.role.empty()) rights.Into(*message.mutable_rights());
  message.set_granter(caller.principal);
  if (const auto* const granter = snapshot.FindPrincipal(caller.principal))
    message.set_granter_uid(granter->message.uid());
  message.set_created_unix_ms(directory_.NowMs());
  const std::string key = layout::Grant(project, principal);
  auto entry = co_await directory_.store().Get(key, Soon());
  if (!entry.ok()) co_return std::move(entry).error();
  // One of another life of either may lie there still.
  store::Revision version = entry->has_value() ? (*entry)->version : 0;
  if (before != nullptr) version = before->version;
  auto done = co_await Commit({{key, version}}, {{key, message.SerializeAsString(), 0}});
  co_return done;
}

Task<void> Admin::DeleteGrant(Caller caller, ProjectPath project, std::string principal) {
  const Snapshot::Grant* const before = caller.snapshot->FindGrant(project, principal);
  if (caller.principal != principal)
    DSEC_CO_TRY_VOID(CheckGrant(caller, project, before, Rights()));
  if (before == nullptr) co_return NotFound("iam.grant_not_found", "grant of", principal);
  const std::string key = layout::Grant(project, principal);
  auto done = co_await Commit({{key, before->version}}, {{key, std::nullopt, 0}});
  co_return done;
}

}  // namespace dsec::iam

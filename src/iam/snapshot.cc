// SPDX-License-Identifier: Apache-2.0
#include "iam/snapshot.h"

#include <algorithm>
#include <deque>
#include <set>

#include "base/log.h"
#include "iam/layout.h"

namespace dsec::iam {
namespace {

template <typename Map>
const typename Map::mapped_type* FindIn(const Map& map, std::string_view key) {
  const auto it = map.find(key);
  return it == map.end() ? nullptr : &it->second;
}

}  // namespace

template <typename Message>
std::optional<Message> Snapshot::Parse(const std::string& key, const Raw& raw) {
  Message message;
  if (message.ParseFromString(raw.value)) return message;
  log::Error("iam.damaged", {{"key", key}});
  return std::nullopt;
}

std::shared_ptr<const Snapshot> Snapshot::Build(const Entries& entries, store::Revision revision) {
  auto made = std::make_shared<Snapshot>();
  made->revision_ = revision;
  for (const BuiltInRole& role : BuiltInRoles()) {
    made->roles_[std::string(role.name)] = {std::string(role.name), role.rights,
                                            std::string(role.description), 0};
  }
  // Each kind refers to those before it. A project comes behind the one above it.
  using Add = void (Snapshot::*)(const std::string&, const Raw&);
  const std::pair<std::string_view, Add> kinds[] = {{layout::kProjects, &Snapshot::AddProject},
                                                    {layout::kPrincipals, &Snapshot::AddPrincipal},
                                                    {layout::kRoles, &Snapshot::AddRole},
                                                    {layout::kKeys, &Snapshot::AddKey},
                                                    {layout::kGrants, &Snapshot::AddGrant}};
  for (const auto& [prefix, add] : kinds) {
    for (auto it = entries.lower_bound(prefix);
         it != entries.end() && it->first.starts_with(prefix); ++it) {
      (made.get()->*add)(it->first, it->second);
    }
  }
  made->Settle();
  return made;
}

void Snapshot::AddProject(const std::string& key, const Raw& raw) {
  auto message = Parse<v1::IamProject>(key, raw);
  const std::string name = key.substr(layout::kProjects.size());
  auto path = ProjectPath::FromKey(name);
  if (!message.has_value() || !path.ok()) return;
  Project project{*path, *std::move(message), raw.version, {}, {}, {}};
  project.limits = Limits::Of(project.message.limits());
  project.tightest = project.limits;
  project.ceiling =
      project.message.has_ceiling() ? Rights::Of(project.message.ceiling()) : Rights::All();
  if (!path->root()) {
    const Project* const parent = FindProject(path->Parent());
    if (parent == nullptr || parent->message.uid() != project.message.parent_uid()) {
      log::Error("iam.project_without_parent", {{"project", path->str()}});
      return;
    }
    project.ceiling = project.ceiling & parent->ceiling;
    project.tightest = project.tightest.Tightest(parent->tightest);
  }
  projects_.emplace(name, std::move(project));
}

void Snapshot::AddPrincipal(const std::string& key, const Raw& raw) {
  auto message = Parse<v1::IamPrincipal>(key, raw);
  const std::string id = key.substr(layout::kPrincipals.size());
  if (!message.has_value() || id == kRootPrincipal) return;
  auto home = ProjectPath::Parse(message->project(), "project");
  if (!home.ok()) return;
  const Project* const project = FindProject(*home);
  if (project == nullptr || project->message.uid() != message->project_uid()) {
    leftovers_.push_back(key);
    return;
  }
  principals_.emplace(id, Principal{id, *std::move(message), raw.version, *home});
}

void Snapshot::AddRole(const std::string& key, const Raw& raw) {
  auto message = Parse<v1::IamRole>(key, raw);
  const std::string name = key.substr(layout::kRoles.size());
  if (!message.has_value()) return;
  // A built-in one stays what it is.
  roles_.emplace(name,
                 Role{name, Rights::Of(message->rights()), message->description(), raw.version});
}

void Snapshot::AddKey(const std::string& key, const Raw& raw) {
  auto message = Parse<v1::IamKey>(key, raw);
  const std::string id = key.substr(layout::kKeys.size());
  if (!message.has_value() || !IsKeyId(id)) return;
  const Principal* const owner = FindPrincipal(message->principal());
  if (owner == nullptr || owner->message.uid() != message->principal_uid()) {
    leftovers_.push_back(key);
    return;
  }
  keys_.emplace(id, Key{id, *std::move(message), raw.version});
}

void Snapshot::AddGrant(const std::string& key, const Raw& raw) {
  auto message = Parse<v1::IamGrant>(key, raw);
  const std::string name = key.substr(layout::kGrants.size());
  const size_t slash = name.find('/');
  if (!message.has_value() || slash == std::string::npos) return;
  const Project* const project = FindIn(projects_, name.substr(0, slash));
  const Principal* const principal = FindPrincipal(name.substr(slash + 1));
  if (project == nullptr || project->message.uid() != message->project_uid() ||
      principal == nullptr || principal->message.uid() != message->principal_uid()) {
    leftovers_.push_back(key);
    return;
  }
  Grant grant{project->path, principal->id, *std::move(message), raw.version, {}, {}};
  if (grant.message.role().empty()) {
    grant.named = Rights::Of(grant.message.rights());
  } else if (const Role* const role = FindRole(grant.message.role())) {
    grant.named = role->rights;
  }
  by_principal_[grant.principal].push_back(grants_.size());
  grants_.push_back(std::move(grant));
}

bool Snapshot::Enabled(std::string_view principal, std::string_view uid) const {
  const Principal* const found = FindPrincipal(principal);
  return found != nullptr && found->message.uid() == uid && !found->message.disabled();
}

// What grants come to: the least that satisfies "no more than the granter has there". It grows from
// the root, so that grants in a circle do not hold each other up.
void Snapshot::Settle() {
  std::map<std::string, std::vector<size_t>, std::less<>> by_granter;
  std::deque<size_t> look;
  for (size_t i = 0; i < grants_.size(); ++i) {
    const v1::IamGrant& message = grants_[i].message;
    if (message.granter() != kRootPrincipal && !Enabled(message.granter(), message.granter_uid())) {
      continue;
    }
    by_granter[message.granter()].push_back(i);
    look.push_back(i);
  }
  while (!look.empty()) {
    Grant& grant = grants_[look.front()];
    look.pop_front();
    const Rights now = grant.named & RightsOf(grant.message.granter(), grant.project);
    if (now.Within(grant.effective)) continue;
    grant.effective = grant.effective | now;
    const auto passed_on = by_granter.find(grant.principal);
    if (passed_on == by_granter.end()) continue;
    look.insert(look.end(), passed_on->second.begin(), passed_on->second.end());
  }
}

const Snapshot::Project* Snapshot::FindProject(const ProjectPath& path) const {
  return FindIn(projects_, path.Key());
}
const Snapshot::Principal* Snapshot::FindPrincipal(std::string_view id) const {
  return FindIn(principals_, id);
}
const Snapshot::Key* Snapshot::FindKey(std::string_view id) const { return FindIn(keys_, id); }
const Snapshot::Role* Snapshot::FindRole(std::string_view name) const {
  return FindIn(roles_, name);
}

const std::vector<size_t>& Snapshot::GrantsOf(std::string_view principal) const {
  static const std::vector<size_t> kNone;
  const auto* const found = FindIn(by_principal_, principal);
  return found == nullptr ? kNone : *found;
}

const Snapshot::Grant* Snapshot::FindGrant(const ProjectPath& project,
                                           std::string_view principal) const {
  for (const size_t index : GrantsOf(principal)) {
    if (grants_[index].project == project) return &grants_[index];
  }
  return nullptr;
}

const Snapshot::Project* Snapshot::Nearest(ProjectPath path) const {
  while (true) {
    if (const Project* const project = FindProject(path)) return project;
    if (path.root()) return nullptr;
    path = path.Parent();
  }
}

Rights Snapshot::RightsOf(std::string_view principal, const ProjectPath& project) const {
  if (principal == kRootPrincipal) return Rights::All();
  const Principal* const found = FindPrincipal(principal);
  if (found == nullptr || found->message.disabled()) return {};
  Rights rights;
  for (const size_t index : GrantsOf(principal)) {
    if (project.Within(grants_[index].project)) rights = rights | grants_[index].effective;
  }
  if (rights.empty()) return rights;
  const Project* const nearest = Nearest(project);
  return nearest == nullptr ? Rights() : rights & nearest->ceiling;
}

Limits Snapshot::LimitsOf(const ProjectPath& project) const {
  const Project* const nearest = Nearest(project);
  return nearest == nullptr ? Limits() : nearest->tightest;
}

// --- callers ---

Rights Caller::In(const ProjectPath& project) const {
  if (!project.Within(scope)) return {};
  Rights rights = snapshot->RightsOf(principal, project) & mask;
  if (!maker.empty() && !rights.empty()) rights = rights & snapshot->RightsOf(maker, project);
  return rights;
}

bool Caller::Reach::Has(const ProjectPath& project) const {
  const auto holds = [&](const ProjectPath& above) { return project.Within(above); };
  return std::any_of(roots.begin(), roots.end(), holds) &&
         std::none_of(without.begin(), without.end(), holds);
}

Caller::Reach Caller::Where(Right right) const {
  // Rights begin where a grant of its own or of its maker does, or at the scope.
  std::set<ProjectPath> starts = {scope};
  for (const std::string& who : {principal, maker}) {
    for (const size_t index : snapshot->GrantsOf(who)) {
      const ProjectPath& path = snapshot->grants()[index].project;
      if (path.Within(scope)) starts.insert(path);
    }
  }
  Reach reach;
  for (const ProjectPath& path : starts) {
    if (May(right, path) && !reach.Has(path)) reach.roots.push_back(path);
  }
  if (reach.roots.empty() || root()) return reach;
  // Below that only ceilings take a right away.
  for (const auto& [key, project] : snapshot->projects()) {
    if (!project.message.has_ceiling() || !reach.Has(project.path)) continue;
    if (!May(right, project.path)) reach.without.push_back(project.path);
  }
  return reach;
}

bool Caller::Somewhere(Right right) const { return !Where(right).roots.empty(); }

namespace {

Error NoKey(std::string_view reason, std::string message) {
  return Error(Code::kUnauthenticated, reason, std::move(message));
}

Result<void> CheckKey(const Snapshot& snapshot, const Snapshot::Key& key, int64_t now_unix_ms) {
  if (key.message.revoked_unix_ms() != 0)
    return NoKey("auth.revoked", fmt::format("the key {} was revoked", key.id));
  if (key.message.expires_unix_ms() != 0 && key.message.expires_unix_ms() <= now_unix_ms)
    return NoKey("auth.expired", fmt::format("the key {} has expired", key.id));
  const Snapshot::Principal* const owner = snapshot.FindPrincipal(key.message.principal());
  if (owner == nullptr || owner->message.disabled())
    return NoKey("auth.disabled", fmt::format("the principal of the key {} is disabled", key.id));
  return Ok();
}

}  // namespace

Result<Caller> Authenticate(const std::shared_ptr<const Snapshot>& snapshot,
                            const KeyDigest& root_key, std::string_view text, int64_t now_unix_ms) {
  const KeyDigest whole = DigestOf(text);
  if (SameDigest(root_key, {reinterpret_cast<const char*>(whole.data()), whole.size()})) {
    Caller caller;
    caller.snapshot = snapshot;
    caller.principal = kRootPrincipal;
    caller.key_id = "root";
    return caller;
  }
  const auto parsed = ParseKey(text);
  const Snapshot::Key* const key = parsed.has_value() ? snapshot->FindKey(parsed->id) : nullptr;
  static const std::string kNobody(32, '\0');
  // The same work for an id that is not there.
  const KeyDigest digest = DigestOf(parsed.has_value() ? std::string_view(parsed->secret) : text);
  const bool same = SameDigest(digest, key == nullptr ? kNobody : key->message.secret_sha256());
  if (key == nullptr || !same) return NoKey("auth.invalid", "the API key is not valid");
  DSEC_TRY_VOID(CheckKey(*snapshot, *key, now_unix_ms));
  Caller caller;
  caller.snapshot = snapshot;
  caller.principal = key->message.principal();
  caller.key_id = key->id;
  caller.home = snapshot->FindPrincipal(caller.principal)->home;
  caller.expires_unix_ms = key->message.expires_unix_ms();
  if (!key->message.project().empty()) {
    DSEC_TRY(caller.scope, ProjectPath::Parse(key->message.project(), "project"));
    caller.home = caller.scope;
  }
  if (key->message.has_rights()) caller.mask = Rights::Of(key->message.rights());
  const v1::IamKey& message = key->message;
  if (message.maker() != message.principal() && message.maker() != kRootPrincipal) {
    const Snapshot::Principal* const maker = snapshot->FindPrincipal(message.maker());
    if (maker == nullptr || maker->message.uid() != message.maker_uid()) {
      return NoKey("auth.disabled",
                   fmt::format("the principal that made the key {} is gone", key->id));
    }
    caller.maker = message.maker();
  }
  return caller;
}

Result<void> StillGood(const Snapshot& snapshot, const Caller& caller, int64_t now_unix_ms) {
  if (caller.root()) return Ok();
  const Snapshot::Key* const key = snapshot.FindKey(caller.key_id);
  if (key == nullptr) return NoKey("auth.revoked", "the key is no more");
  return CheckKey(snapshot, *key, now_unix_ms);
}

}  // namespace dsec::iam

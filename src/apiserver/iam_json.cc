// SPDX-License-Identifier: Apache-2.0
#include "apiserver/iam_json.h"

#include "apiserver/json_members.h"

namespace dsec::apiserver {
namespace {

using http::JsonWriter;
using nlohmann::json;

constexpr std::pair<v1::IamKind, std::string_view> kKinds[] = {
    {v1::IAM_PERSON, "person"}, {v1::IAM_SERVICE, "service"}, {v1::IAM_AGENT, "agent"}};

std::string_view KindName(v1::IamKind kind) {
  for (const auto& [value, name] : kKinds) {
    if (value == kind) return name;
  }
  return "person";
}

// nullopt when the member is not there.
std::optional<iam::Rights> ReadRights(Members& members, std::string_view key) {
  iam::Rights rights;
  const bool there = members.Strings(key, false, [&](const std::string& name) {
    auto right = iam::ParseRight(name, members.Name(key));
    if (right.ok()) {
      rights = rights | iam::Rights{*right};
    } else {
      members.Take(std::move(right).error());
    }
  });
  return there ? std::optional(rights) : std::nullopt;
}

std::optional<iam::ProjectPath> ReadProjectPath(Members& members, std::string_view key,
                                                bool required) {
  std::string text;
  if (!members.Text(key, &text, required)) return std::nullopt;
  auto path = iam::ProjectPath::Parse(text, members.Name(key));
  if (path.ok()) return *std::move(path);
  members.Take(std::move(path).error());
  return std::nullopt;
}

void ReadLimits(Members& members, iam::Limits& limits) {
  const json* const object = members.Object("limits");
  if (object == nullptr) return;
  Members inner(*object, "limits.");
  for (size_t i = 0; i < iam::kResourceCount; ++i) {
    uint64_t value = 0;
    if (inner.Number(iam::ResourceName(static_cast<iam::Resource>(i)), &value))
      limits.of[i] = value;
  }
  uint64_t starts = 0;
  if (inner.Number("starts_per_second", &starts)) limits.starts_per_second = starts;
  members.Take(inner.Finish());
}

void WriteAmounts(JsonWriter& json, std::string_view key, const iam::Amounts& amounts) {
  json.BeginObject(key);
  for (size_t i = 0; i < iam::kResourceCount; ++i)
    json.Field(iam::ResourceName(static_cast<iam::Resource>(i)), amounts.of[i]);
  json.EndObject();
}

void WriteLimitsOf(JsonWriter& json, std::string_view key, const iam::Limits& limits) {
  json.BeginObject(key);
  for (size_t i = 0; i < iam::kResourceCount; ++i) {
    if (limits.of[i].has_value())
      json.Field(iam::ResourceName(static_cast<iam::Resource>(i)), *limits.of[i]);
  }
  if (limits.starts_per_second.has_value())
    json.Field("starts_per_second", *limits.starts_per_second);
  json.EndObject();
}

}  // namespace

Result<iam::ProjectSpec> ReadProjectSpec(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  Members members(object, "");
  iam::ProjectSpec spec;
  members.Text("description", &spec.description);
  spec.ceiling = ReadRights(members, "rights");
  ReadLimits(members, spec.limits);
  DSEC_TRY_VOID(members.Finish());
  return spec;
}

Result<iam::PrincipalSpec> ReadPrincipalSpec(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  Members members(object, "");
  iam::PrincipalSpec spec;
  std::string kind;
  if (members.Text("kind", &kind, true)) {
    bool known = false;
    for (const auto& [value, name] : kKinds) {
      if (name != kind) continue;
      spec.kind = value;
      known = true;
    }
    if (!known) members.Fail("kind", "must be person, service or agent", "request.invalid");
  }
  if (auto home = ReadProjectPath(members, "project", true)) spec.home = *std::move(home);
  members.Text("description", &spec.description);
  members.Flag("disabled", &spec.disabled);
  DSEC_TRY_VOID(members.Finish());
  return spec;
}

Result<iam::KeySpec> ReadKeySpec(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  Members members(object, "");
  iam::KeySpec spec;
  members.Text("description", &spec.description);
  spec.project = ReadProjectPath(members, "project", false);
  spec.rights = ReadRights(members, "rights");
  uint64_t expires = 0;
  if (members.Number("expires_unix_ms", &expires, 1))
    spec.expires_unix_ms = static_cast<int64_t>(expires);
  DSEC_TRY_VOID(members.Finish());
  return spec;
}

Result<iam::GrantSpec> ReadGrantSpec(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  Members members(object, "");
  iam::GrantSpec spec;
  members.Text("role", &spec.role);
  spec.rights = ReadRights(members, "rights");
  if (!spec.role.empty() && spec.rights.has_value())
    members.Fail("rights", "is there beside role", "request.contradiction");
  if (spec.role.empty() && !spec.rights.has_value())
    members.Fail("role", "give either role or rights", "request.missing");
  DSEC_TRY_VOID(members.Finish());
  return spec;
}

Result<RoleBody> ReadRole(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  Members members(object, "");
  RoleBody role;
  const auto rights = ReadRights(members, "rights");
  if (!rights.has_value()) members.Fail("rights", "is required", "request.missing");
  role.rights = rights.value_or(iam::Rights());
  members.Text("description", &role.description);
  DSEC_TRY_VOID(members.Finish());
  return role;
}

void WriteRights(JsonWriter& json, std::string_view key, iam::Rights rights) {
  json.BeginArray(key);
  for (const std::string& name : rights.Names()) json.Value(name);
  json.EndArray();
}

void WriteProject(JsonWriter& json, const iam::Snapshot::Project& project, const ProjectUse* use) {
  json.BeginObject();
  json.Field("project", project.path.str());
  json.Field("description", project.message.description());
  json.Key("rights");
  if (project.message.has_ceiling()) {
    json.BeginArray();
    for (const std::string& name : iam::Rights::Of(project.message.ceiling()).Names())
      json.Value(name);
    json.EndArray();
  } else {
    json.Null();
  }
  WriteLimitsOf(json, "limits", project.limits);
  WriteLimitsOf(json, "effective_limits", project.tightest);
  json.Field("created_unix_ms", project.message.created_unix_ms());
  json.Field("created_by", project.message.created_by());
  if (use != nullptr) {
    WriteAmounts(json, "used", use->used);
    WriteAmounts(json, "granted", use->granted);
  }
  json.EndObject();
}

void WritePrincipal(JsonWriter& json, const iam::Snapshot::Principal& principal) {
  json.BeginObject();
  json.Field("principal", principal.id);
  json.Field("kind", KindName(principal.message.kind()));
  json.Field("project", principal.home.str());
  json.Field("description", principal.message.description());
  json.Field("disabled", principal.message.disabled());
  json.Field("created_unix_ms", principal.message.created_unix_ms());
  json.Field("created_by", principal.message.created_by());
  json.EndObject();
}

void WriteKey(JsonWriter& json, const iam::Snapshot::Key& key) {
  const v1::IamKey& message = key.message;
  json.BeginObject();
  json.Field("key_id", key.id);
  json.Field("principal", message.principal());
  json.Field("description", message.description());
  json.Field("made_by", message.maker());
  json.Field("project", message.project());
  json.Key("rights");
  if (message.has_rights()) {
    json.BeginArray();
    for (const std::string& name : iam::Rights::Of(message.rights()).Names()) json.Value(name);
    json.EndArray();
  } else {
    json.Null();
  }
  json.Field("created_unix_ms", message.created_unix_ms());
  json.Field("expires_unix_ms", message.expires_unix_ms());
  json.Field("revoked_unix_ms", message.revoked_unix_ms());
  json.EndObject();
}

void WriteRole(JsonWriter& json, const iam::Snapshot::Role& role) {
  json.BeginObject();
  json.Field("role", role.name);
  json.Field("description", role.description);
  json.Field("built_in", role.version == 0);
  WriteRights(json, "rights", role.rights);
  json.EndObject();
}

void WriteGrant(JsonWriter& json, const iam::Snapshot::Grant& grant) {
  json.BeginObject();
  json.Field("project", grant.project.str());
  json.Field("principal", grant.principal);
  json.Field("role", grant.message.role());
  WriteRights(json, "rights", grant.named);
  WriteRights(json, "effective_rights", grant.effective);
  json.Field("granted_by", grant.message.granter());
  json.Field("created_unix_ms", grant.message.created_unix_ms());
  json.EndObject();
}

void WriteAudit(JsonWriter& json, const iam::AuditLog::Item& item) {
  const v1::IamAuditRecord& record = item.record;
  json.BeginObject();
  json.Field("seq", item.seq);
  json.Field("at_unix_ms", record.at_unix_ms());
  json.Field("principal", record.principal());
  json.Field("key_id", record.key_id());
  json.Field("action", record.action());
  json.Field("object", record.object());
  json.Field("project", record.project());
  json.Field("outcome", record.outcome());
  json.Field("status", record.status());
  json.Field("request_id", record.request_id());
  json.Field("peer", record.peer());
  json.EndObject();
}

}  // namespace dsec::apiserver

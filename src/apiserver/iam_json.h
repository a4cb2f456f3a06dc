// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "http/json_writer.h"
#include "iam/admin.h"
#include "iam/audit_log.h"
#include "iam/snapshot.h"

namespace dsec::apiserver {

// The bodies of the routes of IAM, read as strictly as json_in.h says, and what they answer.
struct RoleBody {
  iam::Rights rights;
  std::string description;
};
Result<iam::ProjectSpec> ReadProjectSpec(std::string_view body);
Result<iam::PrincipalSpec> ReadPrincipalSpec(std::string_view body);
Result<iam::KeySpec> ReadKeySpec(std::string_view body);
Result<iam::GrantSpec> ReadGrantSpec(std::string_view body);
Result<RoleBody> ReadRole(std::string_view body);

// What the nodes have of a project, beside its limits.
struct ProjectUse {
  iam::Amounts used;
  iam::Amounts granted;
};

void WriteRights(http::JsonWriter& json, std::string_view key, iam::Rights rights);
// `use` may be null.
void WriteProject(http::JsonWriter& json, const iam::Snapshot::Project& project,
                  const ProjectUse* use);
void WritePrincipal(http::JsonWriter& json, const iam::Snapshot::Principal& principal);
void WriteKey(http::JsonWriter& json, const iam::Snapshot::Key& key);
void WriteRole(http::JsonWriter& json, const iam::Snapshot::Role& role);
void WriteGrant(http::JsonWriter& json, const iam::Snapshot::Grant& grant);
void WriteAudit(http::JsonWriter& json, const iam::AuditLog::Item& item);

}  // namespace dsec::apiserver

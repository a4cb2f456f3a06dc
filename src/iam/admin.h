// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "iam/directory.h"
#include "iam/quota_keeper.h"

namespace dsec::iam {

struct ProjectSpec {
  std::string description;
  std::optional<Rights> ceiling;
  Limits limits;
};
struct PrincipalSpec {
  v1::IamKind kind = v1::IAM_PERSON;
  ProjectPath home;
  std::string description;
  bool disabled = false;
};
struct KeySpec {
  std::string description;
  std::optional<ProjectPath> project;
  std::optional<Rights> rights;
  int64_t expires_unix_ms = 0;
};
struct GrantSpec {
  std::string role;  // or
  std::optional<Rights> rights;
};

// The changes of IAM's objects: checks that the caller may make them and that nothing is handed on
// that it does not have, and writes them in one transaction each. When a call has returned ok, the
// snapshot of this process shows the change. Errors beside those of the store:
//  - kPermissionDenied auth.forbidden: a right is missing, which the message names
//  - kPermissionDenied iam.rights_exceed: the caller lacks some of what it would hand on
//  - kNotFound iam.{project,principal,key,role,grant}_not_found: also of what the caller sees
//  nothing of
//  - kInvalidArgument iam.*, with the field
//  - kConflict iam.*: not in the present state
class Admin {
 public:
  // Both outlive it; `quota` may be null.
  Admin(Directory& directory, QuotaKeeper* quota) : directory_(directory), quota_(quota) {}

  runtime::Task<void> PutProject(Caller caller, ProjectPath path, ProjectSpec spec);
  runtime::Task<void> DeleteProject(Caller caller, ProjectPath path);
  runtime::Task<void> PutPrincipal(Caller caller, std::string id, PrincipalSpec spec);
  runtime::Task<void> DeletePrincipal(Caller caller, std::string id);
  // The key, whose secret exists nowhere else.
  runtime::Task<KeyText> MakeKey(Caller caller, std::string principal, KeySpec spec);
  runtime::Task<void> RevokeKey(Caller caller, std::string id);
  runtime::Task<void> PutRole(Caller caller, std::string name, Rights rights,
                              std::string description);
  runtime::Task<void> DeleteRole(Caller caller, std::string name);
  runtime::Task<void> PutGrant(Caller caller, ProjectPath project, std::string principal,
                               GrantSpec spec);
  runtime::Task<void> DeleteGrant(Caller caller, ProjectPath project, std::string principal);

 private:
  runtime::Task<void> Commit(std::vector<store::Condition> conditions,
                             std::vector<store::Write> writes);
  runtime::Task<void> NewProject(const Caller& caller, const ProjectPath& path,
                                 v1::IamProject message);
  runtime::Task<void> ChangeProject(const Snapshot::Project& before, v1::IamProject message);
  Result<void> CheckGrant(const Caller& caller, const ProjectPath& project,
                          const Snapshot::Grant* before, Rights rights) const;

  Directory& directory_;
  QuotaKeeper* const quota_;
};

// Ok, or why the caller may not: kPermissionDenied auth.forbidden, or kNotFound
// iam.project_not_found when it sees nothing of the project, or there is none.
Result<void> CheckProject(const Caller& caller, Right right, const ProjectPath& project,
                          const std::string& field);
// kPermissionDenied auth.forbidden.
Error Forbidden(const Caller& caller, Right right, const ProjectPath& project);

}  // namespace dsec::iam

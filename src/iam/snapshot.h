// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "dsec/v1/iam.pb.h"
#include "iam/amounts.h"
#include "iam/keys.h"
#include "iam/project.h"
#include "iam/rights.h"
#include "store/store.h"

namespace dsec::iam {

inline constexpr std::string_view kRootPrincipal = "root";

// Everything that IAM knows at one revision of the store: who is who, and what each may do where. A
// value, never changed once built; any thread. What does not parse, or refers to another life of
// what it names, is not in it.
class Snapshot {
 public:
  struct Raw {
    std::string value;
    store::Revision version = 0;
  };
  // By key, of layout::kConfig.
  using Entries = std::map<std::string, Raw, std::less<>>;

  struct Project {
    ProjectPath path;
    v1::IamProject message;
    store::Revision version = 0;
    Rights ceiling = Rights::All();  // with those above it
    Limits limits;                   // its own
    Limits tightest;                 // with those above it
  };
  struct Principal {
    std::string id;
    v1::IamPrincipal message;
    store::Revision version = 0;
    ProjectPath home;
  };
  struct Key {
    std::string id;
    v1::IamKey message;
    store::Revision version = 0;
  };
  struct Role {
    std::string name;
    Rights rights;
    std::string description;
    store::Revision version = 0;  // 0: built in
  };
  struct Grant {
    ProjectPath project;
    std::string principal;
    v1::IamGrant message;
    store::Revision version = 0;
    Rights named;      // what it says
    Rights effective;  // what it comes to, since its granter has no more
  };

  static std::shared_ptr<const Snapshot> Build(const Entries& entries, store::Revision revision);

  store::Revision revision() const { return revision_; }

  // Null when there is none.
  const Project* FindProject(const ProjectPath& path) const;
  const Principal* FindPrincipal(std::string_view id) const;
  const Key* FindKey(std::string_view id) const;
  const Role* FindRole(std::string_view name) const;
  const Grant* FindGrant(const ProjectPath& project, std::string_view principal) const;
  const std::map<std::string, Project, std::less<>>& projects() const { return projects_; }
  const std::map<std::string, Principal, std::less<>>& principals() const { return principals_; }
  const std::map<std::string, Key, std::less<>>& keys() const { return keys_; }
  const std::map<std::string, Role, std::less<>>& roles() const { return roles_; }
  const std::vector<Grant>& grants() const { return grants_; }
  // By principal, indices into grants().
  const std::vector<size_t>& GrantsOf(std::string_view principal) const;

  // What a principal may do in a project; in one that does not exist as in the nearest above it
  // that does. The root principal: everything.
  Rights RightsOf(std::string_view principal, const ProjectPath& project) const;
  // Of the project and all above it; of one that does not exist those of the nearest that does.
  Limits LimitsOf(const ProjectPath& project) const;

  // Keys of the store that belong to nothing any more: what a deleted principal or project has
  // left.
  const std::vector<std::string>& leftovers() const { return leftovers_; }

 private:
  template <typename Message>
  static std::optional<Message> Parse(const std::string& key, const Raw& raw);
  void AddProject(const std::string& key, const Raw& raw);
  void AddPrincipal(const std::string& key, const Raw& raw);
  void AddKey(const std::string& key, const Raw& raw);
  void AddRole(const std::string& key, const Raw& raw);
  void AddGrant(const std::string& key, const Raw& raw);
  void Settle();
  const Project* Nearest(ProjectPath path) const;
  bool Enabled(std::string_view principal, std::string_view uid) const;

  store::Revision revision_ = 0;
  std::map<std::string, Project, std::less<>> projects_;  // by ProjectPath::Key
  std::map<std::string, Principal, std::less<>> principals_;
  std::map<std::string, Key, std::less<>> keys_;
  std::map<std::string, Role, std::less<>> roles_;
  std::vector<Grant> grants_;
  std::map<std::string, std::vector<size_t>, std::less<>> by_principal_;
  std::vector<std::string> leftovers_;
};

// One who calls, as one key lets it. A value; keeps its snapshot.
struct Caller {
  std::shared_ptr<const Snapshot> snapshot;
  std::string principal;
  std::string key_id;  // "root" of the root key
  ProjectPath home;    // where it works when it names no project
  ProjectPath scope;   // the key reaches nothing outside of it
  Rights mask = Rights::All();
  std::string maker;            // whose rights narrow the key; empty: nobody's
  int64_t expires_unix_ms = 0;  // 0: never

  bool root() const { return principal == kRootPrincipal; }
  Rights In(const ProjectPath& project) const;
  bool May(Right right, const ProjectPath& project) const { return In(project).Has(right); }
  bool Somewhere(Right right) const;

  // The parts of the tree in which it has a right: below each of `roots`, but not below any of
  // `without`.
  struct Reach {
    std::vector<ProjectPath> roots;
    std::vector<ProjectPath> without;
    bool Has(const ProjectPath& project) const;
  };
  Reach Where(Right right) const;
};

// Who gave the key `text`: the root key's digest, or a key of the snapshot at `now_unix_ms`.
// kUnauthenticated auth.invalid, auth.expired, auth.revoked, auth.disabled.
Result<Caller> Authenticate(const std::shared_ptr<const Snapshot>& snapshot,
                            const KeyDigest& root_key, std::string_view text, int64_t now_unix_ms);
// Whether the key of a caller would still be accepted.
Result<void> StillGood(const Snapshot& snapshot, const Caller& caller, int64_t now_unix_ms);

}  // namespace dsec::iam

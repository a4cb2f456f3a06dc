// SPDX-License-Identifier: Apache-2.0
// Rights, projects and keys as values: whatever was written in whatever order, nobody has more than
// the one before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/rng.h"
#include "iam/keys.h"
#include "iam/layout.h"
#include "iam/snapshot.h"

namespace dsec::iam {
namespace {

using enum Right;

ProjectPath Path(const std::string& text) { return ProjectPath::Parse(text, "project").value(); }

TEST(ProjectPath, Names_AreCheckedAndNamed) {
  for (const char* good : {"root", "root/a", "root/a-1/b_2", "root/0"}) {
    EXPECT_TRUE(ProjectPath::Parse(good, "project").ok()) << good;
  }
  const std::string deep = "root" + std::string(120, 'x');
  for (const std::string bad : {"", "a", "roots", "root/", "root//a", "/root", "root/A", "root/-a",
                                "root/a!b", "root/..", "root/a/", "root/\xc3\xa4", deep.c_str()}) {
    const auto parsed = ProjectPath::Parse(bad, "where");
    ASSERT_FALSE(parsed.ok()) << bad;
    EXPECT_EQ(parsed.error().reason(), "iam.project_name");
    EXPECT_EQ(parsed.error().field(), "where");
  }
}

TEST(ProjectPath, Tree_ChainAndWithin) {
  EXPECT_EQ(Path("root/a/b").Chain(),
            (std::vector<ProjectPath>{Path("root/a/b"), Path("root/a"), Path("root")}));
  EXPECT_TRUE(Path("root/a/b").Within(Path("root/a")));
  EXPECT_FALSE(Path("root/ab").Within(Path("root/a")));
  EXPECT_TRUE(Path("root").Within(Path("root")));
  EXPECT_EQ(ProjectPath::FromKey(Path("root/a/b").Key())->str(), "root/a/b");
  EXPECT_EQ(Path("root").ForRecord(), "");
  EXPECT_EQ(ProjectPath::FromRecord("")->str(), "root");
}

TEST(Key, Text_RoundTripsAndRefusesTheRest) {
  const KeyText key = NewKey();
  const auto parsed = ParseKey(key.Text());
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(parsed->id, key.id);
  EXPECT_EQ(parsed->secret, key.secret);
  EXPECT_EQ(key.secret.size(), 64u);
  EXPECT_NE(NewKey().secret, key.secret);
  std::string text = key.Text();
  for (const std::string& bad : {text.substr(1), text + "0", std::string(), text.substr(0, 30)})
    EXPECT_FALSE(ParseKey(bad).has_value()) << bad;
  text[6] = 'G';
  EXPECT_FALSE(ParseKey(text).has_value());
}

// Entries of the store, written without any check: the worst that any order of operations leaves.
class World {
 public:
  void Project(const std::string& path, std::optional<Rights> ceiling = std::nullopt) {
    v1::IamProject message;
    message.set_uid("uid-" + path);
    if (!Path(path).root()) message.set_parent_uid("uid-" + Path(path).Parent().str());
    if (ceiling.has_value()) ceiling->Into(*message.mutable_ceiling());
    Put(layout::Project(Path(path)), message);
  }
  void Principal(const std::string& id, const std::string& home, bool disabled = false,
                 const std::string& life = "1") {
    v1::IamPrincipal message;
    message.set_uid(id + life);
    message.set_project(home);
    message.set_project_uid("uid-" + home);
    message.set_disabled(disabled);
    Put(layout::Principal(id), message);
  }
  void Grant(const std::string& project, const std::string& principal, Rights rights,
             const std::string& granter, const std::string& life = "1") {
    v1::IamGrant message;
    message.set_principal_uid(principal + life);
    message.set_project_uid("uid-" + project);
    rights.Into(*message.mutable_rights());
    message.set_granter(granter);
    message.set_granter_uid(granter + "1");
    Put(layout::Grant(Path(project), principal), message);
  }
  KeyText Key(const std::string& principal, const std::string& maker,
              const std::function<void(v1::IamKey&)>& change = {}) {
    const KeyText text = NewKey();
    const KeyDigest digest = DigestOf(text.secret);
    v1::IamKey message;
    message.set_principal(principal);
    message.set_principal_uid(principal + "1");
    message.set_maker(maker);
    message.set_maker_uid(maker + "1");
    message.set_secret_sha256(std::string(digest.begin(), digest.end()));
    if (change) change(message);
    Put(layout::ApiKey(text.id), message);
    return text;
  }
  template <typename Message>
  void Put(const std::string& key, const Message& message) {
    entries[key] = {message.SerializeAsString(), ++version};
  }
  std::shared_ptr<const Snapshot> Look() const { return Snapshot::Build(entries, version); }

  Snapshot::Entries entries;
  store::Revision version = 0;
};

const KeyDigest kRootKey = DigestOf("the root key");

TEST(Rights, Delegation_OnlyNarrowsAndFollowsTheGranter) {
  World world;
  world.Project("root");
  world.Project("root/a");
  world.Project("root/a/b");
  for (const char* id : {"ann", "bob", "bot"}) world.Principal(id, "root/a");
  world.Grant("root/a", "ann", {kSandboxRead, kSandboxUse, kGrantManage}, "root");
  // More than ann has: the surplus counts for nothing.
  world.Grant("root/a/b", "bob", {kSandboxRead, kSandboxDelete}, "ann");
  world.Grant("root/a/b", "bot", {kSandboxRead, kSandboxUse}, "bob");
  auto now = world.Look();
  EXPECT_EQ(now->RightsOf("bob", Path("root/a/b")), Rights{kSandboxRead});
  EXPECT_EQ(now->RightsOf("bob", Path("root/a")), Rights());
  EXPECT_EQ(now->RightsOf("bot", Path("root/a/b")), Rights{kSandboxRead});
  // What ann loses, all behind her lose.
  world.Grant("root/a", "ann", {kSandboxUse}, "root");
  now = world.Look();
  EXPECT_EQ(now->RightsOf("bob", Path("root/a/b")), Rights());
  EXPECT_EQ(now->RightsOf("bot", Path("root/a/b")), Rights());
  world.Grant("root/a", "ann", Rights::All(), "root");
  world.Principal("ann", "root/a", true);
  EXPECT_EQ(world.Look()->RightsOf("bob", Path("root/a/b")), Rights());
}

TEST(Rights, Circle_HoldsNothingUp) {
  World world;
  world.Project("root");
  for (const char* id : {"ann", "bob"}) world.Principal(id, "root");
  world.Grant("root", "ann", Rights::All(), "bob");
  world.Grant("root", "bob", Rights::All(), "ann");
  EXPECT_TRUE(world.Look()->RightsOf("ann", Path("root")).empty());
}

TEST(Rights, OtherLife_InheritsNothing) {
  World world;
  world.Project("root");
  world.Principal("ann", "root");
  world.Grant("root", "ann", Rights::All(), "root");
  const KeyText key = world.Key("ann", "root");
  EXPECT_TRUE(Authenticate(world.Look(), kRootKey, key.Text(), 0).ok());
  world.Principal("ann", "root", false, "2");
  const auto now = world.Look();
  EXPECT_TRUE(now->RightsOf("ann", Path("root")).empty());
  EXPECT_EQ(Authenticate(now, kRootKey, key.Text(), 0).error().reason(), "auth.invalid");
  EXPECT_EQ(now->leftovers().size(), 2u);
}

TEST(Authenticate, Key_ExpiredRevokedDisabledWrong) {
  World world;
  world.Project("root");
  world.Principal("ann", "root");
  world.Principal("off", "root", true);
  const auto reason = [&](const std::string& text) {
    const auto caller = Authenticate(world.Look(), kRootKey, text, 1000);
    return caller.ok() ? std::string("ok") : std::string(caller.error().reason());
  };
  EXPECT_EQ(reason("the root key"), "ok");
  EXPECT_EQ(reason("the root kex"), "auth.invalid");
  EXPECT_EQ(reason(world.Key("ann", "ann").Text()), "ok");
  EXPECT_EQ(reason(world.Key("off", "off").Text()), "auth.disabled");
  const auto expired = world.Key("ann", "ann", [](auto& key) { key.set_expires_unix_ms(1000); });
  EXPECT_EQ(reason(expired.Text()), "auth.expired");
  const auto later = world.Key("ann", "ann", [](auto& key) { key.set_expires_unix_ms(1001); });
  EXPECT_EQ(reason(later.Text()), "ok");
  const auto revoked = world.Key("ann", "ann", [](auto& key) { key.set_revoked_unix_ms(1); });
  EXPECT_EQ(reason(revoked.Text()), "auth.revoked");
  KeyText wrong = later;
  wrong.secret = revoked.secret;
  EXPECT_EQ(reason(wrong.Text()), "auth.invalid");
  // An expired or revoked key tells nothing to whoever has no secret.
  wrong.id = revoked.id;
  wrong.secret = later.secret;
  EXPECT_EQ(reason(wrong.Text()), "auth.invalid");
}

// --- property: random worlds ---

// By definition, from nothing: a right counts when some grant names it and its granter has it
// there. Iterated to the end, one right and one place at a time.
using Held = std::set<std::tuple<std::string, std::string, Right>>;

Held Reference(
    const World& world, const std::vector<std::string>& people,
    const std::vector<std::string>& projects, const std::map<std::string, Rights>& ceilings,
    const std::set<std::string>& disabled,
    const std::vector<std::tuple<std::string, std::string, Rights, std::string>>& grants) {
  (void)world;
  (void)people;
  Held held;
  for (bool more = true; more;) {
    more = false;
    for (const auto& [project, principal, rights, granter] : grants) {
      if (disabled.contains(principal)) continue;
      for (size_t r = 0; r < kRightCount; ++r) {
        const auto right = static_cast<Right>(r);
        if (!rights.Has(right)) continue;
        if (granter != "root" && !held.contains({granter, project, right})) continue;
        for (const std::string& place : projects) {
          if (!Path(place).Within(Path(project))) continue;
          bool cut = false;
          for (const ProjectPath& above : Path(place).Chain()) {
            const auto ceiling = ceilings.find(above.str());
            cut = cut || (ceiling != ceilings.end() && !ceiling->second.Has(right));
          }
          if (!cut) more |= held.insert({principal, place, right}).second;
        }
      }
    }
  }
  return held;
}

Rights SomeRights(Rng& rng) {
  Rights rights;
  for (size_t r = 0; r < kRightCount; ++r) {
    if (rng.Below(3) != 0) rights = rights | Rights{static_cast<Right>(r)};
  }
  return rights;
}

TEST(RightsProperty, AnyOrderOfOperations_GivesNobodyMoreThanTheOneBefore) {
  const std::vector<std::string> projects = {"root",     "root/a", "root/a/b", "root/a/b/c",
                                             "root/a-b", "root/x", "root/x/y"};
  const std::vector<std::string> people = {"p0", "p1", "p2", "p3", "p4"};
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    World world;
    std::map<std::string, Rights> ceilings;
    std::set<std::string> disabled;
    std::map<std::pair<std::string, std::string>, std::pair<Rights, std::string>> grants;
    for (const std::string& project : projects) world.Project(project);
    for (const std::string& id : people) world.Principal(id, "root");
    for (int step = 0; step < 40; ++step) {
      const std::string& project = projects[rng.Below(projects.size())];
      const std::string& who = people[rng.Below(people.size())];
      switch (rng.Below(8)) {
        case 0:
          ceilings[project] = SomeRights(rng);
          world.Project(project, ceilings[project]);
          break;
        case 1: {
          const bool off = rng.Below(2) == 0;
          if (off)
            disabled.insert(who);
          else
            disabled.erase(who);
          world.Principal(who, "root", off);
          break;
        }
        case 2:
          grants.erase({project, who});
          world.entries.erase(layout::Grant(Path(project), who));
          break;
        default: {
          const std::string granter = rng.Below(4) == 0 ? "root" : people[rng.Below(people.size())];
          const Rights rights = SomeRights(rng);
          grants[{project, who}] = {rights, granter};
          world.Grant(project, who, rights, granter);
        }
      }
    }
    std::vector<std::tuple<std::string, std::string, Rights, std::string>> list;
    for (const auto& [key, value] : grants) {
      const std::string& granter = value.second;
      if (granter == "root" || !disabled.contains(granter))
        list.emplace_back(key.first, key.second, value.first, granter);
    }
    const Held held = Reference(world, people, projects, ceilings, disabled, list);
    const auto now = world.Look();
    for (const std::string& who : people) {
      for (const std::string& project : projects) {
        const Rights rights = now->RightsOf(who, Path(project));
        for (size_t r = 0; r < kRightCount; ++r) {
          const auto right = static_cast<Right>(r);
          EXPECT_EQ(rights.Has(right), held.contains({who, project, right}))
              << who << " " << project << " " << RightName(right);
        }
        if (project != "root") {
          EXPECT_TRUE(rights.Within(now->FindProject(Path(project).Parent())->ceiling));
        }
      }
    }
    // Keys: never more than the principal, its maker, the mask and the scope.
    const std::string& owner = people[rng.Below(people.size())];
    const std::string& maker = people[rng.Below(people.size())];
    const std::string& scope = projects[rng.Below(projects.size())];
    const Rights mask = SomeRights(rng);
    const KeyText key = world.Key(owner, maker, [&](v1::IamKey& message) {
      message.set_project(scope);
      mask.Into(*message.mutable_rights());
    });
    const auto caller = Authenticate(world.Look(), kRootKey, key.Text(), 0);
    if (!caller.ok()) continue;
    for (const std::string& project : projects) {
      Rights most =
          now->RightsOf(owner, Path(project)) & now->RightsOf(maker, Path(project)) & mask;
      if (!Path(project).Within(Path(scope))) most = {};
      EXPECT_EQ(caller->In(Path(project)), most) << project;
      for (size_t r = 0; r < kRightCount; ++r) {
        const auto right = static_cast<Right>(r);
        EXPECT_EQ(caller->Where(right).Has(Path(project)), most.Has(right))
            << project << " " << RightName(right);
      }
    }
  }
}

TEST(Snapshot, DamagedEntries_AreLeftOut) {
  World world;
  world.Project("root");
  world.Principal("ann", "root");
  world.Grant("root", "ann", {kSandboxRead}, "root");
  for (const std::string_view prefix :
       {layout::kProjects, layout::kPrincipals, layout::kKeys, layout::kRoles, layout::kGrants}) {
    world.entries[std::string(prefix) + "root!x"] = {"\xff\xff\xff", 1};
    world.entries[std::string(prefix)] = {"", 1};
    world.entries[std::string(prefix) + "\xff/\xff"] = {"", 1};
  }
  const auto now = world.Look();
  EXPECT_EQ(now->RightsOf("ann", Path("root")), Rights{kSandboxRead});
  EXPECT_EQ(now->projects().size(), 1u);
}

}  // namespace
}  // namespace dsec::iam

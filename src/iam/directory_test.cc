// SPDX-License-Identifier: Apache-2.0
// Directories of several apiservers on one real store, the changes that Admin makes, and the audit
// log.
#include "iam/directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "iam/admin.h"
#include "iam/audit_log.h"
#include "iam/testing/away_store.h"
#include "runtime/shards.h"
#include "store/sqlite_store.h"

namespace dsec::iam {
namespace {

using enum Right;
using runtime::BlockOn;
using runtime::Deadline;
using std::chrono::milliseconds;
using std::chrono::seconds;

ProjectPath Path(const std::string& text) { return ProjectPath::Parse(text, "project").value(); }
const std::string kRootKey = "the-root-key";

class DirectoryTest : public ::testing::Test {
 protected:
  DirectoryTest() {
    std::string folder = (std::filesystem::temp_directory_path() / "dsec-iam-XXXXXX").string();
    dir_ = ::mkdtemp(folder.data());
    store_ =
        store::SqliteStore::Open(dir_ + "/control.db", shards_->at(0), Clock::System()).value();
    away_ = std::make_unique<testing::AwayStore>(*store_);
    one_ = Open(*store_);
    other_ = Open(*away_);
    admin_ = std::make_unique<Admin>(*one_, nullptr);
  }
  ~DirectoryTest() override {
    (void)BlockOn(shards_->at(1), one_->Stop());
    (void)BlockOn(shards_->at(1), other_->Stop());
    shards_->Stop();
    admin_.reset();
    one_.reset();
    other_.reset();
    away_.reset();
    store_.reset();
    shards_.reset();
    std::filesystem::remove_all(dir_);
  }
  std::unique_ptr<Directory> Open(store::Store& store) {
    DirectoryOptions options;
    options.root_key = DigestOf(kRootKey);
    options.cache_max = milliseconds(1500);
    return BlockOn(shards_->at(1), Directory::Open(store, shards_->at(1), options)).value();
  }
  template <typename T>
  Result<T> Do(runtime::Task<T> task) {
    return BlockOn(shards_->at(2), std::move(task));
  }
  Caller Root() { return one_->Authenticate(kRootKey).value(); }
  Caller As(const KeyText& key) { return one_->Authenticate(key.Text()).value(); }
  void Project(const std::string& path, const Limits& limits = {}) {
    ProjectSpec spec;
    spec.limits = limits;
    const auto put = Do(admin_->PutProject(Root(), Path(path), spec));
    ASSERT_TRUE(put.ok()) << put.error().ToString();
  }
  KeyText Person(const std::string& id, const std::string& project, Rights rights) {
    PrincipalSpec spec;
    spec.home = Path(project);
    EXPECT_TRUE(Do(admin_->PutPrincipal(Root(), id, spec)).ok());
    EXPECT_TRUE(Do(admin_->PutGrant(Root(), Path(project), id, {"", rights})).ok());
    auto key = Do(admin_->MakeKey(Root(), id, {}));
    EXPECT_TRUE(key.ok()) << key.error().ToString();
    return *std::move(key);
  }
  std::string ReasonAtOther(const std::string& key) {
    const auto caller = other_->Authenticate(key);
    return caller.ok() ? "ok" : std::string(caller.error().reason());
  }
  template <typename T>
  static std::string Reason(const Result<T>& result) {
    return result.ok() ? "ok" : std::string(result.error().reason());
  }
  // Milliseconds until the other directory answers so.
  int64_t Await(const std::string& key, const std::string& reason) {
    const auto start = std::chrono::steady_clock::now();
    while (ReasonAtOther(key) != reason) {
      if (std::chrono::steady_clock::now() - start > seconds(20)) {
        ADD_FAILURE() << ReasonAtOther(key);
        break;
      }
      std::this_thread::yield();
    }
    return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start)
        .count();
  }

  std::string dir_;
  std::unique_ptr<runtime::Shards> shards_ = std::make_unique<runtime::Shards>(3);
  std::unique_ptr<store::SqliteStore> store_;
  std::unique_ptr<testing::AwayStore> away_;
  std::unique_ptr<Directory> one_, other_;
  std::unique_ptr<Admin> admin_;
};

TEST_F(DirectoryTest, Revocation_ReachesAnotherApiserverWithinItsBound) {
  const KeyText key = Person("ann", "root", {kSandboxRead});
  Await(key.Text(), "ok");
  ASSERT_TRUE(Do(admin_->RevokeKey(Root(), key.id)).ok());
  EXPECT_EQ(Reason(one_->Authenticate(key.Text())), "auth.revoked");
  EXPECT_LE(Await(key.Text(), "auth.revoked"), Directory::kPoll.count());
  ASSERT_TRUE(Do(admin_->RevokeKey(Root(), key.id)).ok());
}

TEST_F(DirectoryTest, StoreAway_GoesOnForAWhileAndTheRootKeyForEver) {
  const KeyText key = Person("ann", "root", {kSandboxRead});
  Await(key.Text(), "ok");
  away_->SetAway(true);
  EXPECT_EQ(ReasonAtOther(key.Text()), "ok");
  EXPECT_GE(Await(key.Text(), "iam.stale"), 300);
  EXPECT_EQ(ReasonAtOther(kRootKey), "ok");
  EXPECT_EQ(ReasonAtOther("dsec_nothing"), "auth.invalid");
  away_->SetAway(false);
  Await(key.Text(), "ok");
}

TEST_F(DirectoryTest, Restart_KeepsEverythingAndNoSecret) {
  const KeyText key = Person("ann", "root", {kSandboxRead});
  auto page = Do(store_->Range(store::KeyRange::Prefix(""), 1000, Deadline::Never())).value();
  for (const store::Entry& entry : page.entries) {
    EXPECT_THAT(entry.value, ::testing::Not(::testing::HasSubstr(key.secret)));
    EXPECT_THAT(entry.value, ::testing::Not(::testing::HasSubstr(key.secret.substr(0, 16))));
  }
  const auto third = Open(*store_);
  EXPECT_TRUE(third->Authenticate(key.Text()).ok());
  (void)BlockOn(shards_->at(1), third->Stop());
}

TEST_F(DirectoryTest, Keys_NeverHaveMoreThanTheirMaker) {
  Project("root/a");
  Project("root/a/b");
  const KeyText boss = Person("boss", "root/a", {kPrincipalManage, kSandboxRead, kGrantManage});
  const KeyText worker = Person("worker", "root/a", {kSandboxRead, kSandboxUse});
  // The worker may more than the boss; a key that the boss makes of it may not.
  const KeyText made = Do(admin_->MakeKey(As(boss), "worker", {})).value();
  EXPECT_EQ(As(made).In(Path("root/a")), Rights{kSandboxRead});
  EXPECT_EQ(As(worker).In(Path("root/a")), (Rights{kSandboxRead, kSandboxUse}));
  // Its own keys stay as narrow as the one that made them.
  KeySpec narrow;
  narrow.project = Path("root/a/b");
  narrow.rights = Rights{kSandboxRead};
  narrow.expires_unix_ms = one_->NowMs() + 60'000;
  const KeyText small = Do(admin_->MakeKey(As(worker), "worker", narrow)).value();
  EXPECT_EQ(As(small).In(Path("root/a/b")), Rights{kSandboxRead});
  EXPECT_EQ(As(small).In(Path("root/a")), Rights());
  const KeyText smaller = Do(admin_->MakeKey(As(small), "worker", {})).value();
  EXPECT_EQ(As(smaller).In(Path("root/a/b")), Rights{kSandboxRead});
  EXPECT_EQ(As(smaller).In(Path("root/a")), Rights());
  EXPECT_EQ(As(smaller).expires_unix_ms, narrow.expires_unix_ms);
  KeySpec more;
  more.rights = Rights{kSandboxRead, kSandboxUse};
  EXPECT_EQ(Reason(Do(admin_->MakeKey(As(small), "worker", more))), "iam.rights_exceed");
  more = {};
  more.project = Path("root/a");
  EXPECT_EQ(Reason(Do(admin_->MakeKey(As(small), "worker", more))), "iam.rights_exceed");
  more = {};
  more.expires_unix_ms = narrow.expires_unix_ms + 1;
  EXPECT_EQ(Reason(Do(admin_->MakeKey(As(small), "worker", more))), "iam.expiry");
  // What was made through a key of another's making stays under it.
  const KeyText again = Do(admin_->MakeKey(As(made), "worker", {})).value();
  EXPECT_EQ(As(again).In(Path("root/a")), Rights{kSandboxRead});
  EXPECT_EQ(Reason(Do(admin_->MakeKey(As(made), "boss", {}))), "auth.forbidden");
}

TEST_F(DirectoryTest, Grants_OnlyWhatOneHas) {
  Project("root/a");
  Project("root/x");
  const KeyText lead = Person("lead", "root/a", {kGrantManage, kSandboxRead, kPrincipalManage});
  (void)Person("ann", "root/a", {});
  EXPECT_EQ(
      Reason(Do(admin_->PutGrant(As(lead), Path("root/a"), "ann", {"", Rights{kSandboxUse}}))),
      "iam.rights_exceed");
  EXPECT_EQ(Reason(Do(admin_->PutGrant(As(lead), Path("root/a"), "ann", {"owner", {}}))),
            "iam.rights_exceed");
  EXPECT_EQ(Reason(Do(admin_->PutGrant(As(lead), Path("root"), "ann", {"", Rights{kSandboxRead}}))),
            "iam.project_not_found");
  EXPECT_EQ(
      Reason(Do(admin_->PutGrant(As(lead), Path("root/x"), "ann", {"", Rights{kSandboxRead}}))),
      "iam.project_not_found");
  EXPECT_TRUE(
      Do(admin_->PutGrant(As(lead), Path("root/a"), "ann", {"", Rights{kSandboxRead}})).ok());
  // What the root gave is more than the lead could give, so it cannot take it either.
  ASSERT_TRUE(Do(admin_->PutGrant(Root(), Path("root/a"), "ann", {"owner", {}})).ok());
  EXPECT_EQ(Reason(Do(admin_->DeleteGrant(As(lead), Path("root/a"), "ann"))), "iam.rights_exceed");
  EXPECT_EQ(
      Reason(Do(admin_->PutGrant(As(lead), Path("root/a"), "ann", {"", Rights{kSandboxRead}}))),
      "iam.rights_exceed");
  // A foreign principal is as one that is not there.
  const KeyText far = Person("far", "root/x", {kPrincipalManage});
  EXPECT_EQ(Reason(Do(admin_->MakeKey(As(far), "ann", {}))), "iam.principal_not_found");
  EXPECT_EQ(Reason(Do(admin_->RevokeKey(As(far), lead.id))), "iam.key_not_found");
  EXPECT_EQ(Reason(Do(admin_->DeletePrincipal(As(far), "ann"))), "iam.principal_not_found");
  PrincipalSpec spec;
  spec.home = Path("root/x");
  EXPECT_EQ(Reason(Do(admin_->PutPrincipal(As(far), "ann", spec))), "iam.name_taken");
  EXPECT_EQ(Reason(Do(admin_->PutPrincipal(As(far), "root", spec))), "iam.name_taken");
}

TEST_F(DirectoryTest, Projects_ChildWithinParentAndLifeCycle) {
  Limits ten;
  ten[Resource::kLive] = 10;
  Limits eleven;
  eleven[Resource::kLive] = 11;
  Project("root/a", ten);
  ProjectSpec spec;
  spec.limits = eleven;
  EXPECT_EQ(Reason(Do(admin_->PutProject(Root(), Path("root/a/b"), spec))),
            "iam.quota_exceeds_parent");
  EXPECT_EQ(Reason(Do(admin_->PutProject(Root(), Path("root/no/b"), {}))), "iam.project_not_found");
  Project("root/a/b", ten);
  // The owner of a project can neither lift its limits nor its ceiling: that is of the one above.
  const KeyText owner = Person("owner", "root/a", Rights::All());
  EXPECT_EQ(Reason(Do(admin_->PutProject(As(owner), Path("root/a"), {}))), "iam.project_not_found");
  EXPECT_TRUE(Do(admin_->PutProject(As(owner), Path("root/a/b"), {})).ok());
  EXPECT_TRUE(Do(admin_->PutProject(As(owner), Path("root/a/c"), {})).ok());
  EXPECT_EQ(Reason(Do(admin_->DeleteProject(Root(), Path("root/a")))),
            "iam.project_has_principals");
  ASSERT_TRUE(Do(admin_->DeletePrincipal(Root(), "owner")).ok());
  EXPECT_EQ(Reason(one_->Authenticate(owner.Text())), "auth.invalid");
  EXPECT_EQ(Reason(Do(admin_->DeleteProject(Root(), Path("root/a")))), "iam.project_has_children");
  for (const char* path : {"root/a/b", "root/a/c", "root/a"})
    EXPECT_EQ(Reason(Do(admin_->DeleteProject(Root(), Path(path)))), "ok") << path;
  EXPECT_EQ(Reason(Do(admin_->DeleteProject(Root(), Path("root/a")))), "iam.project_not_found");
  EXPECT_EQ(Reason(Do(admin_->DeleteProject(Root(), Path("root")))), "iam.project_root");
  // What a deleted principal has left is removed.
  const auto until = std::chrono::steady_clock::now() + seconds(20);
  while (!Do(store_->Range(store::KeyRange::Prefix("iam/c/key/"), 10, Deadline::Never()))
              ->entries.empty()) {
    ASSERT_LT(std::chrono::steady_clock::now(), until);
    std::this_thread::yield();
  }
}

TEST_F(DirectoryTest, Depth_HasNoBoundButThePath) {
  std::string path = "root";
  while (path.size() + 2 <= ProjectPath::kMaxBytes) {
    path += "/p";
    Project(path);
  }
  EXPECT_GT(Path(path).Chain().size(), 100u);
  EXPECT_NE(one_->Now()->FindProject(Path(path)), nullptr);
}

TEST_F(DirectoryTest, AuditLog_PagesNewestFirstWithinItsBound) {
  AuditOptions options;
  options.keep = 50;
  options.refusals_per_second = 5;
  auto log = AuditLog::Open(dir_ + "/audit.db", shards_->at(0), options).value();
  const auto record = [](const std::string& who) {
    v1::IamAuditRecord made;
    made.set_principal(who);
    return made;
  };
  for (int i = 0; i < 40; ++i) log->Add(record(i % 2 == 0 ? "ann" : "bob"));
  ASSERT_TRUE(Do(log->AddNow(record("cat"))).ok());
  const auto everyone = [](const v1::IamAuditRecord&) { return true; };
  const auto ann = [](const v1::IamAuditRecord& r) { return r.principal() == "ann"; };
  auto page = Do(log->List(0, 3, everyone, Deadline::Never())).value();
  ASSERT_EQ(page.items.size(), 3u);
  EXPECT_EQ(page.items[0].record.principal(), "cat");
  EXPECT_GT(page.items[0].seq, page.items[1].seq);
  size_t seen = 0;
  for (uint64_t before = 0;;) {
    page = Do(log->List(before, 7, ann, Deadline::Never())).value();
    seen += page.items.size();
    before = page.next;
    if (before == 0) break;
  }
  EXPECT_EQ(seen, 20u);
  for (int i = 0; i < 100; ++i) log->AddRefusal(record("dan"));
  for (int i = 0; i < 60; ++i) log->Add(record("eve"));
  page = Do(log->List(0, 1000, everyone, Deadline::Never())).value();
  EXPECT_EQ(page.items.size(), 50u);
  EXPECT_EQ(page.items[0].record.action(), "audit.gap");
  EXPECT_THAT(page.items[0].record.outcome(), ::testing::HasSubstr("95"));
  (void)Do(log->Stop());
}

}  // namespace
}  // namespace dsec::iam

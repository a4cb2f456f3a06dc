// SPDX-License-Identifier: Apache-2.0
// What removes layers from a store of several nodes, and the leases that keep them. Needs root and
// file-backed EROFS (Linux 6.12).
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <future>

#include "base/fault.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "image/node_lease.h"
#include "image/testing/archives.h"
#include "image/testing/harness.h"
#include "os/file.h"

namespace dsec::image {
namespace {

namespace fs = std::filesystem;
using std::chrono::hours;
using std::chrono::milliseconds;

constexpr CollectOptions kAtOnce = {.unnamed_for = milliseconds(0), .grace = milliseconds(0)};

class CollectTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    auto store = LayerStore::Open(Root(), clock_);
    ASSERT_TRUE(store.ok()) << store.error().ToString();
    store_ = *std::move(store);
  }
  void TearDown() override { fault::DisarmAll(); }

  std::string Root() const { return folder_.path() + "/layers"; }
  std::string LeaseFile(const std::string& node) const {
    return Root() + "/nodes/" + node + ".json";
  }

  LayerId Build(const std::string& content, const std::string& name = "") {
    const auto built = testing::BuildOneFile(*store_, content, name);
    EXPECT_TRUE(built.ok()) << built.error().ToString();
    return built.ok() ? *built : LayerId();
  }

  // As a node of another machine writes it.
  void LeaseElsewhere(const std::string& node, std::set<LayerId> layers, int64_t renewed = 1) {
    ::mkdir((Root() + "/nodes").c_str(), 0700);
    const Lease lease{node, NewUlid(clock_), "another-boot", "another", renewed, std::move(layers)};
    testing::WriteFile(LeaseFile(node), lease.Encode());
  }

  std::set<LayerId> Listed(const std::string& node) const {
    const auto text = os::ReadFile(AT_FDCWD, LeaseFile(node).c_str(), 1 << 20);
    if (!text.ok()) return {};
    const auto lease = Lease::Parse(*text);
    EXPECT_TRUE(lease.ok()) << lease.error().ToString();
    return lease.ok() ? lease->layers : std::set<LayerId>();
  }

  bool HasFiles(const LayerId& id) const { return fs::exists(Root() + "/blobs/" + HexOf(id)); }
  size_t Condemned() const {
    const std::string path = Root() + "/condemned";
    if (!fs::exists(path)) return 0;
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(path), fs::directory_iterator()));
  }
  CollectReport Collect(const CollectOptions& options) {
    auto report = store_->Collect(options);
    EXPECT_TRUE(report.ok()) << report.error().ToString();
    return report.ok() ? *report : CollectReport();
  }

  os::TempDir folder_ = *os::TempDir::Create("dsec-timg-");
  FakeClock clock_;
  std::unique_ptr<LayerStore> store_;
};

TEST_F(CollectTest, Unnamed_GoesWhenItHasBeenSoForTheTime) {
  const LayerId old = Build("old", "a:1");
  clock_.Advance(hours(24 * 30));
  const LayerId kept = Build("new", "a:1");  // the name moves
  const LayerId by_id = Build("by id");
  clock_.Advance(hours(24 * 6));
  auto report = Collect({});
  EXPECT_EQ(report.young, 2u);
  EXPECT_TRUE(report.removed.empty());
  clock_.Advance(hours(25));
  report = Collect({.dry_run = true});
  EXPECT_EQ(report.removed.size(), 2u);
  EXPECT_TRUE(HasFiles(old));
  report = Collect({});
  EXPECT_EQ(report.removed.size(), 2u);
  EXPECT_GT(report.removed_bytes, 0u);
  EXPECT_EQ(report.waiting, 2u) << "their files stay for the grace";
  EXPECT_FALSE(HasFiles(old));
  EXPECT_FALSE(HasFiles(by_id));
  EXPECT_TRUE(HasFiles(kept));
  EXPECT_EQ(store_->Find(old.str()).error().reason(), "layer.not_found");
  EXPECT_EQ(store_->Find("a:1")->id, kept);
  clock_.Advance(hours(1));
  report = Collect({});
  EXPECT_EQ(report.deleted, 2u);
  EXPECT_EQ(Condemned(), 0u);
}

TEST_F(CollectTest, BuiltAgain_IsYoungAgain) {
  const LayerId id = Build("one");
  clock_.Advance(hours(24 * 30));
  ASSERT_EQ(Build("one"), id);
  EXPECT_EQ(Collect({}).young, 1u);
  EXPECT_TRUE(HasFiles(id));
}

TEST_F(CollectTest, RemovalWhileTheDaemonIsDead_KeepsFilesThatItsSandboxesHave) {
  const LayerId id = Build("one", "a:1");
  {
    NodeLease dead(Root(), "near");
    ASSERT_TRUE(dead.Hold(id).ok());
  }
  ASSERT_TRUE(store_->Remove("a:1").ok());
  EXPECT_FALSE(HasFiles(id));
  clock_.Advance(hours(1));
  EXPECT_EQ(store_->DeleteRemoved()->waiting, 1u);
  ASSERT_TRUE(DropLease(Root(), "near").ok());
  EXPECT_EQ(store_->DeleteRemoved()->deleted, 1u);
}

TEST_F(CollectTest, LeaseOfAnotherMachine_KeepsTheLayerAndItsFiles) {
  const LayerId id = Build("one"), named = Build("two", "two:1");
  LeaseElsewhere("far", {id, named});
  auto report = Collect(kAtOnce);
  ASSERT_EQ(report.in_use.size(), 1u);
  EXPECT_EQ(report.in_use[0].first, id);
  EXPECT_EQ(report.in_use[0].second, "node far");
  EXPECT_TRUE(HasFiles(id));
  const auto removed = store_->Remove("two:1");
  EXPECT_EQ(removed.error().reason(), "layer.in_use");
  EXPECT_NE(removed.error().message().find("node far"), std::string::npos);

  // Not in use, but the machine may be about to: the files wait.
  LeaseElsewhere("far", {id});
  ASSERT_TRUE(store_->Remove("two:1").ok());
  EXPECT_FALSE(HasFiles(named));
  EXPECT_EQ(Condemned(), 1u);
  LeaseElsewhere("far", {id, named});  // it had opened them just before
  EXPECT_EQ(Collect(kAtOnce).waiting, 1u);
  LeaseElsewhere("far", {id});
  EXPECT_EQ(Collect(kAtOnce).deleted, 1u);

  EXPECT_EQ(ForgetNode(Root(), "near").error().reason(), "layer.no_lease");
  EXPECT_EQ(ForgetNode(Root(), "../x").error().reason(), "layer.no_lease");
  ASSERT_TRUE(ForgetNode(Root(), "far").ok());
  clock_.Advance(hours(1));  // it was seen in use
  report = Collect(kAtOnce);
  EXPECT_EQ(report.removed, std::vector{id});
  EXPECT_EQ(report.deleted, 1u);
}

TEST_F(CollectTest, UnreadableLease_EndsIt) {
  const LayerId id = Build("one");
  LeaseElsewhere("far", {});
  testing::WriteFile(LeaseFile("far"), "{");
  EXPECT_EQ(store_->Collect(kAtOnce).error().reason(), "layer.bad_lease");
  EXPECT_EQ(store_->Remove(id.str()).error().reason(), "layer.bad_lease");
  EXPECT_TRUE(HasFiles(id));
}

TEST_F(CollectTest, Mount_IsListedBeforeItsFilesAreOpenedAndAWhileAfterItsEnd) {
  const LayerId one = Build("one"), two = Build("two");
  LayerMounts mounts(Root(), {.keep_idle = 0, .node = "near"});
  // Two at once: each listed whoever wrote the file.
  auto both = mounts.Acquire(std::vector{one, two});
  ASSERT_TRUE(both.ok()) << both.error().ToString();
  EXPECT_EQ(Listed("near"), (std::set{one, two}));
  EXPECT_EQ(Collect(kAtOnce).in_use.size(), 2u);
  both->pop_back();
  ASSERT_TRUE(mounts.Settle());
  for (int renewals = 0; renewals < 2; ++renewals) {
    EXPECT_EQ(Listed("near"), (std::set{one, two})) << renewals;
    mounts.Trim();
    ASSERT_TRUE(mounts.Settle());
  }
  EXPECT_EQ(Listed("near"), std::set{one});
  clock_.Advance(hours(1));
  EXPECT_EQ(Collect(kAtOnce).removed, std::vector{two});
}

TEST_F(CollectTest, Lease_IsWrittenBeforeTheFilesAreOpened) {
  const LayerId id = Build("one");
  LayerMounts mounts(Root(), {.node = "near"});
  constexpr char kPoint[] = "layer.mount.after_lease";
  ASSERT_TRUE(fault::Arm(std::string(kPoint) + "=block").ok());
  auto acquired = std::async(std::launch::async, [&] { return mounts.Acquire(id); });
  ASSERT_TRUE(fault::WaitFired(kPoint, 1, std::chrono::seconds(30)));
  EXPECT_EQ(Listed("near"), std::set{id});
  EXPECT_EQ(Collect(kAtOnce).in_use.size(), 1u);
  fault::DisarmAll();
  EXPECT_TRUE(acquired.get().ok());
}

TEST_F(CollectTest, LayerThatAnAdoptedSandboxCouldNotGet_StaysListed) {
  const LayerId one = Build("one"), two = Build("two");
  {
    ASSERT_TRUE(LayerMounts(Root(), {.node = "near"}).Acquire(one).ok());
  }
  LayerMounts mounts(Root(), {.node = "near"});
  const std::string files = Root() + "/blobs/" + HexOf(one);
  fs::rename(files, files + ".away");
  ASSERT_FALSE(mounts.Acquire(one).ok());
  auto later = mounts.AcquireLater(one);
  for (int minutes = 0; minutes < 15; ++minutes) {
    mounts.Trim();
    ASSERT_TRUE(mounts.Settle());
  }
  EXPECT_EQ(Listed("near"), std::set{one});
  EXPECT_EQ(mounts.mounted(), 0u);
  fs::rename(files + ".away", files);
  mounts.Trim();
  EXPECT_EQ(mounts.mounted(), 1u);
  EXPECT_EQ(store_->Remove(one.str()).error().reason(), "layer.in_use");
  later.reset();
  EXPECT_EQ(mounts.mounted(), 0u);
}

TEST_F(CollectTest, TwoMachinesOfOneNodeId_AreToldSo) {
  const LayerId one = Build("one"), two = Build("two");
  const int64_t now = UnixMillis(Clock::System().Wall());
  LeaseElsewhere("near", {one}, now);
  LayerMounts mounts(Root(), {.node = "near"});
  EXPECT_EQ(mounts.Acquire(one).error().reason(), "layer.node_id_taken");
  LeaseElsewhere("near", {one}, now - 3'600'000);  // it has been gone for an hour
  ASSERT_TRUE(mounts.Acquire(one).ok());
  LeaseElsewhere("near", {one}, now);  // and comes back
  EXPECT_EQ(mounts.Acquire(two).error().reason(), "layer.node_id_taken");
}

TEST_F(CollectTest, UnreadableLeaseOfItsOwn_StopsTheNodeUntilItIsForgotten) {
  const LayerId id = Build("one");
  LeaseElsewhere("near", {});
  testing::WriteFile(LeaseFile("near"), "{");
  LayerMounts mounts(Root(), {.node = "near"});
  EXPECT_EQ(mounts.Acquire(id).error().reason(), "layer.bad_lease");
  ASSERT_TRUE(ForgetNode(Root(), "near").ok());
  EXPECT_TRUE(mounts.Acquire(id).ok());
}

TEST_F(CollectTest, MountUsedAfterAnError_GetsItsHoldWithTheNextUse) {
  const LayerId id = Build("one", "one:1");
  LayerMounts mounts(Root(), {.node = "near", .patience = milliseconds(300)});
  ASSERT_TRUE(mounts.Acquire(id).ok());
  ASSERT_TRUE(mounts.Settle());
  ASSERT_TRUE(fault::Arm("layer.mount.before_open=block;layer.mount.after_lease=error:EIO").ok());
  auto used = mounts.Acquire(id);
  ASSERT_TRUE(used.ok()) << used.error().ToString();
  fault::Disarm("layer.mount.before_open");
  ASSERT_TRUE(fault::WaitFired("layer.mount.after_lease", 1, std::chrono::seconds(30)));
  ASSERT_TRUE(mounts.Settle());
  fault::DisarmAll();
  EXPECT_EQ(*mounts.Acquire(id), *used);
  ASSERT_TRUE(mounts.Settle());
  EXPECT_EQ(store_->Remove("one:1").error().reason(), "layer.in_use");
}

TEST_F(CollectTest, MountThatIsKeptWithoutAUse_DoesNotKeepTheLayerForEver) {
  const LayerId id = Build("one");
  LayerMounts mounts(Root(), {.keep_for = std::chrono::minutes(0), .node = "near"});
  ASSERT_TRUE(mounts.Acquire(id).ok());
  for (int renewals = 0; renewals < 3; ++renewals) {
    ASSERT_TRUE(mounts.Settle());
    mounts.Trim();
  }
  ASSERT_TRUE(mounts.Settle());
  EXPECT_EQ(mounts.idle(), 0u);
  EXPECT_TRUE(Listed("near").empty());
  EXPECT_EQ(Collect(kAtOnce).removed, std::vector{id});
}

TEST_F(CollectTest, NextDaemonOfTheNode_KeepsWhatTheOneBeforeListed) {
  const LayerId one = Build("one"), two = Build("two");
  {
    ASSERT_TRUE(LayerMounts(Root(), {.node = "near"}).Acquire(one).ok());
  }
  LayerMounts mounts(Root(), {.node = "near"});
  auto used = mounts.Acquire(two);
  ASSERT_TRUE(used.ok());
  EXPECT_EQ(Listed("near"), (std::set{one, two}));
  for (int minutes = 0; minutes < 12; ++minutes) {
    mounts.Trim();
    ASSERT_TRUE(mounts.Settle());
  }
  EXPECT_EQ(Listed("near"), std::set{two}) << "nobody has asked for it";
}

TEST_F(CollectTest, NodeThatRestarted_ListsNothingOfBefore) {
  const LayerId one = Build("one"), two = Build("two");
  LeaseElsewhere("near", {one});
  LayerMounts mounts(Root(), {.node = "near"});
  auto used = mounts.Acquire(two);
  ASSERT_TRUE(used.ok());
  EXPECT_EQ(Listed("near"), std::set{two}) << "no mount outlives its kernel";
}

TEST_F(CollectTest, ForgottenNode_MountsNothingUntilItHasLetGo) {
  const LayerId one = Build("one"), two = Build("two");
  LayerMounts mounts(Root(), {.node = "near"});
  auto used = mounts.Acquire(one);
  ASSERT_TRUE(used.ok());
  ASSERT_TRUE(ForgetNode(Root(), "near").ok());
  EXPECT_TRUE(ReadLeases(Root())->empty());
  EXPECT_EQ(mounts.Acquire(two).error().reason(), "layer.lease_lost");
  // Nor a new use of what it has.
  EXPECT_EQ(mounts.Acquire(std::vector{one}).error().reason(), "layer.lease_lost");
  used->reset();
  mounts.Trim();  // ends what is kept
  ASSERT_TRUE(mounts.Settle());
  mounts.Trim();  // renews
  ASSERT_TRUE(mounts.Settle());
  auto again = mounts.Acquire(two);
  ASSERT_TRUE(again.ok()) << again.error().ToString();
  EXPECT_EQ(Listed("near"), std::set{two});
  EXPECT_EQ(ReadLeases(Root())->size(), 1u);
}

TEST_F(CollectTest, DeathWhileTheLeaseIsWritten_LeavesTheOneBefore) {
  const LayerId one = Build("one"), two = Build("two");
  {
    ASSERT_TRUE(LayerMounts(Root(), {.node = "near"}).Acquire(one).ok());
  }
  const pid_t child = ::fork();
  if (child == 0) {
    if (!fault::Arm("layer.lease.before_rename=kill").ok()) ::_exit(1);
    NodeLease lease(Root(), "near");
    static_cast<void>(lease.Hold(two));
    ::_exit(2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  EXPECT_EQ(Listed("near"), std::set{one});
  NodeLease lease(Root(), "near");
  const auto pin = lease.Hold(two);
  ASSERT_TRUE(pin.ok()) << pin.error().ToString();
  EXPECT_EQ(Listed("near"), (std::set{one, two}));
}

TEST_F(CollectTest, LeaseThatCouldNotBeWritten_IsTriedAgain) {
  const LayerId one = Build("one"), two = Build("two");
  {
    ASSERT_TRUE(LayerMounts(Root(), {.node = "near"}).Acquire(one).ok());
  }
  NodeLease lease(Root(), "near");
  ASSERT_TRUE(fault::Arm("layer.lease.before_rename=error:ENOSPC*1").ok());
  EXPECT_FALSE(lease.Hold(two).ok());
  const auto pin = lease.Hold(two);
  ASSERT_TRUE(pin.ok()) << pin.error().ToString();
  EXPECT_EQ(Listed("near"), (std::set{one, two}));
}

TEST_F(CollectTest, LayersThatAreNotInUse_AreForgottenAndTheLeaseIsStillRenewed) {
  const LayerId one = Build("one"), two = Build("two");
  LayerMounts mounts(Root(), {.keep_idle = 0, .node = "near"});
  auto used = mounts.Acquire(one);
  ASSERT_TRUE(used.ok());
  ASSERT_TRUE(mounts.Acquire(two).ok());
  EXPECT_EQ(mounts.known(), 2u);
  ASSERT_TRUE(mounts.Settle());
  mounts.Trim();
  EXPECT_EQ(mounts.known(), 1u);
  used->reset();
  for (int renewals = 0; renewals < 3; ++renewals) {
    ASSERT_TRUE(mounts.Settle());
    mounts.Trim();
  }
  ASSERT_TRUE(mounts.Settle());
  EXPECT_EQ(mounts.known(), 0u);
  EXPECT_TRUE(Listed("near").empty());
}

}  // namespace
}  // namespace dsec::image

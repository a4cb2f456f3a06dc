// SPDX-License-Identifier: Apache-2.0
// Copies of metadata on the node, and mounts while the root of the store does not answer. Needs
// root and file-backed EROFS (Linux 6.12).
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <future>
#include <stop_token>

#include "base/fault.h"
#include "image/layer_cache.h"
#include "image/layer_files.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "image/shared_catalog.h"
#include "image/testing/archives.h"
#include "image/testing/harness.h"
#include "os/file.h"

namespace dsec::image {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr char kOpenPoint[] = "layer.mount.before_open";

class SharedRootTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    auto store = LayerStore::Open(Root());
    ASSERT_TRUE(store.ok()) << store.error().ToString();
    store_ = *std::move(store);
  }
  void TearDown() override { fault::DisarmAll(); }

  std::string Root() const { return folder_.path() + "/layers"; }
  std::string Copies() const { return folder_.path() + "/copies"; }

  LayerId Build(const std::string& content, const std::string& name = "") {
    const auto built = testing::BuildOneFile(*store_, content, name);
    EXPECT_TRUE(built.ok()) << built.error().ToString();
    return built.ok() ? *built : LayerId();
  }

  LayerMountOptions Options() const {
    return {.cache_dir = Copies(), .patience = milliseconds(500)};
  }

  static std::string Content(const std::shared_ptr<const MountedLayer>& layer) {
    auto text = os::ReadFile(layer->fd(), "file", 1 << 20);
    return text.ok() ? *text : text.error().ToString();
  }

  std::vector<std::string> CopiesThere() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(Copies()))
      names.push_back(entry.path().filename());
    std::ranges::sort(names);
    return names;
  }

  Result<LocalLayer> AddTo(LayerCache& cache, const LayerId& id) {
    DSEC_TRY(const auto blobs,
             os::OpenAt(AT_FDCWD, (Root() + "/blobs").c_str(), O_RDONLY | O_DIRECTORY));
    DSEC_TRY(const LayerFiles files, OpenLayer(blobs.get(), id, true));
    return cache.Add(id, files.manifest, files.meta.get(), [](const LayerId&) { return true; });
  }

  os::TempDir folder_ = *os::TempDir::Create("dsec-timg-");
  std::unique_ptr<LayerStore> store_;
};

TEST_F(SharedRootTest, Copy_ServesWhenTheStoreHasLostItsMetadata) {
  const LayerId id = Build("one");
  LayerMounts mounts(Root(), Options());
  ASSERT_TRUE(mounts.Acquire(id).ok());
  EXPECT_EQ(CopiesThere(), std::vector{HexOf(id)});
  fs::remove(Root() + "/blobs/" + HexOf(id) + "/meta.erofs");
  LayerMounts fresh(Root(), Options());
  auto layer = fresh.Acquire(id);
  ASSERT_TRUE(layer.ok()) << layer.error().ToString();
  EXPECT_EQ(Content(*layer), "one");
}

TEST_F(SharedRootTest, CopiesWhereNothingCanBeMounted_AreDoneWithout) {
  const LayerId one = Build("one"), two = Build("two");
  const std::string copies = "/dev/shm/dsec-timg-" + NewUlid(Clock::System());
  LayerMounts mounts(Root(), {.cache_dir = copies});
  ASSERT_TRUE(mounts.Check().ok());
  for (int uses = 0; uses < 2; ++uses) {
    const auto layer = mounts.Acquire(one);
    ASSERT_TRUE(layer.ok()) << layer.error().ToString();
    EXPECT_EQ(Content(*layer), "one");
  }
  EXPECT_TRUE(fs::is_empty(copies));
  const std::string meta = Root() + "/blobs/" + HexOf(two) + "/meta.erofs";
  const os::UniqueFd fd(::open(meta.c_str(), O_WRONLY | O_CLOEXEC));
  ASSERT_EQ(::pwrite(fd.get(), "X", 1, 3000), 1);
  EXPECT_EQ(mounts.Acquire(two).error().reason(), "layer.corrupt");
  fs::remove_all(copies);
}

TEST_F(SharedRootTest, DeathInTheMiddleOfACopy_LeavesNothingThatCounts) {
  const LayerId id = Build("one");
  const pid_t child = ::fork();
  if (child == 0) {
    if (!fault::Arm("layer.cache.before_rename=kill").ok()) ::_exit(1);
    auto cache = LayerCache::Open(Copies(), 1 << 30);
    if (cache.ok()) static_cast<void>(AddTo(**cache, id));
    ::_exit(2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  ASSERT_EQ(CopiesThere().size(), 1u);
  EXPECT_TRUE(CopiesThere()[0].starts_with("new-"));
  auto cache = LayerCache::Open(Copies(), 1 << 30);
  ASSERT_TRUE(cache.ok()) << cache.error().ToString();
  EXPECT_TRUE(CopiesThere().empty());
  EXPECT_FALSE((*cache)->Find(id)->has_value());
  EXPECT_TRUE(AddTo(**cache, id).ok());
  EXPECT_TRUE((*cache)->Find(id)->has_value());
}

TEST_F(SharedRootTest, DamagedCopy_CountsAsNone) {
  const LayerId id = Build("one");
  const std::string meta = Copies() + "/" + HexOf(id) + "/meta.erofs";
  for (const bool truncate : {false, true}) {
    auto cache = LayerCache::Open(Copies(), 1 << 30);
    ASSERT_TRUE(AddTo(**cache, id).ok());
    ASSERT_TRUE((*cache)->Find(id)->has_value());
    if (truncate) {
      fs::resize_file(meta, 100);
    } else {
      const os::UniqueFd fd(::open(meta.c_str(), O_WRONLY | O_CLOEXEC));
      ASSERT_EQ(::pwrite(fd.get(), "X", 1, 3000), 1);
    }
    EXPECT_FALSE((*cache)->Find(id)->has_value()) << "noticed while it is in use";
    EXPECT_TRUE(CopiesThere().empty());
  }
}

TEST_F(SharedRootTest, Copies_AreBoundedAndTheLongestUnusedGoesFirst) {
  const LayerId a = Build("a"), b = Build("b"), c = Build("c");
  const auto size = fs::file_size(Root() + "/blobs/" + HexOf(a) + "/meta.erofs");
  auto cache = LayerCache::Open(Copies(), 2 * size);
  ASSERT_TRUE(AddTo(**cache, a).ok());
  ASSERT_TRUE(AddTo(**cache, b).ok());
  ASSERT_TRUE((*cache)->Find(a)->has_value());
  ASSERT_TRUE(AddTo(**cache, c).ok());
  EXPECT_FALSE((*cache)->Find(b)->has_value());
  EXPECT_EQ((*cache)->bytes(), 2 * size);
  // The order of use holds over a start, and so does a smaller bound.
  ASSERT_TRUE((*cache)->Find(a)->has_value());
  cache = LayerCache::Open(Copies(), size);
  EXPECT_EQ(CopiesThere(), std::vector{HexOf(a)});
}

TEST_F(SharedRootTest, DamageInTheStore_IsNotCopied) {
  const LayerId id = Build("one");
  const std::string meta = Root() + "/blobs/" + HexOf(id) + "/meta.erofs";
  const os::UniqueFd fd(::open(meta.c_str(), O_WRONLY | O_CLOEXEC));
  ASSERT_EQ(::pwrite(fd.get(), "X", 1, 3000), 1);
  LayerMounts mounts(Root(), Options());
  EXPECT_EQ(mounts.Acquire(id).error().reason(), "layer.corrupt");
  EXPECT_TRUE(CopiesThere().empty());
}

TEST_F(SharedRootTest, HangingLayer_FailsInTimeAndHoldsNoOtherUp) {
  const LayerId one = Build("one"), two = Build("two"), three = Build("three");
  LayerMounts mounts(Root(), Options());
  auto used = mounts.Acquire(one);
  ASSERT_TRUE(used.ok());
  ASSERT_TRUE(mounts.Acquire(three).ok());  // and kept
  ASSERT_EQ(mounts.idle(), 1u);
  ASSERT_TRUE(fault::Arm(std::string(kOpenPoint) + "=block").ok());
  auto waiting = std::async(std::launch::async, [&] { return mounts.Acquire(two); });
  ASSERT_TRUE(fault::WaitFired(kOpenPoint, 1, std::chrono::seconds(30)));
  // In use; kept: neither needs an answer.
  EXPECT_EQ(*mounts.Acquire(one), *used);
  auto kept = mounts.Acquire(three);
  ASSERT_TRUE(kept.ok()) << kept.error().ToString();
  EXPECT_EQ(Content(*kept), "three");
  auto failed = waiting.get();
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().reason(), "layer.unreachable");
  EXPECT_EQ(failed.error().code(), Code::kUnavailable);
  EXPECT_EQ(mounts.Acquire(two).error().reason(), "layer.unreachable");
  // One call a layer, however often it is asked for.
  EXPECT_EQ(fault::Fired(kOpenPoint), 2u);
  fault::DisarmAll();
  ASSERT_TRUE(mounts.Settle());
  auto back = mounts.Acquire(two);
  ASSERT_TRUE(back.ok()) << back.error().ToString();
  EXPECT_EQ(Content(*back), "two");
}

TEST_F(SharedRootTest, MountUsedWithoutTheStore_GetsItsHoldThereWhenItAnswers) {
  const LayerId id = Build("one", "one:1");
  LayerMounts mounts(Root(), Options());
  ASSERT_TRUE(mounts.Acquire(id).ok());
  ASSERT_TRUE(mounts.Settle());
  ASSERT_TRUE(fault::Arm(std::string(kOpenPoint) + "=block").ok());
  auto used = mounts.Acquire(id);
  ASSERT_TRUE(used.ok()) << used.error().ToString();
  fault::DisarmAll();
  ASSERT_TRUE(mounts.Settle());  // the call that hung, too
  EXPECT_EQ(store_->Remove("one:1").error().reason(), "layer.in_use");
  used->reset();
  ASSERT_TRUE(mounts.Settle());
  EXPECT_TRUE(store_->Remove("one:1").ok());
}

TEST_F(SharedRootTest, RootThatIsNotThere_IsUnreachableAndIsNotMadeAnew) {
  const LayerId id = Build("one", "one:1"), other = Build("two", "two:1");
  LayerMounts mounts(Root(), Options());
  ASSERT_TRUE(mounts.catalog().Resolve("one:1", LayerKind::kBase).ok());
  auto used = mounts.Acquire(id);
  ASSERT_TRUE(used.ok());
  fs::rename(Root(), Root() + ".away");
  EXPECT_EQ(mounts.catalog().Resolve("one:1", LayerKind::kBase)->id, id);
  EXPECT_EQ(mounts.catalog().Resolve("two:1", LayerKind::kBase).error().reason(),
            "layer.unreachable");
  EXPECT_EQ(mounts.catalog().List({}).error().reason(), "layer.unreachable");
  EXPECT_EQ(mounts.Acquire(other).error().reason(), "layer.unreachable");
  LayerMounts fresh(Root(), Options());  // as a daemon that starts before the mount
  EXPECT_EQ(fresh.catalog().List({}).error().reason(), "layer.unreachable");
  EXPECT_FALSE(fs::exists(Root()));
  fs::rename(Root() + ".away", Root());
  EXPECT_EQ(mounts.catalog().Resolve("two:1", LayerKind::kBase)->id, other);
  EXPECT_TRUE(mounts.Acquire(other).ok());
}

TEST_F(SharedRootTest, NameThatIsGone_IsForgotten) {
  Build("one", "one:1");
  SharedCatalog catalog(Root(), milliseconds(500));
  ASSERT_TRUE(catalog.Resolve("one:1", LayerKind::kBase).ok());
  EXPECT_EQ(catalog.Resolve("one:1", LayerKind::kToolkit).error().reason(), "layer.wrong_kind");
  ASSERT_TRUE(store_->Remove("one:1").ok());
  EXPECT_EQ(catalog.Resolve("one:1", LayerKind::kBase).error().reason(), "layer.not_found");
  fs::rename(Root(), Root() + ".away");
  EXPECT_EQ(catalog.Resolve("one:1", LayerKind::kBase).error().reason(), "layer.unreachable");
}

TEST_F(SharedRootTest, CollectionThatHangs_EndsForItsCallerAndHoldsUpNoOther) {
  const LayerId unnamed = Build("of no name");
  SharedCatalog catalog(Root(), milliseconds(2000));
  ASSERT_TRUE(catalog.List({}).ok());
  const auto lock = os::OpenAt(AT_FDCWD, (Root() + "/lock").c_str(), O_RDWR);
  ASSERT_EQ(::flock(lock->get(), LOCK_EX), 0);
  const CollectOptions now = {.unnamed_for = milliseconds(0), .grace = milliseconds(0)};
  const auto late = catalog.Collect(now, milliseconds(50), {});
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().reason(), "layer.unreachable");
  EXPECT_TRUE(catalog.Find(unnamed.str()).ok());

  std::stop_source stop;
  auto stopped = std::async(std::launch::async, [&] {
    return catalog.Collect(now, std::chrono::minutes(5), stop.get_token());
  });
  stop.request_stop();
  EXPECT_EQ(stopped.get().error().reason(), "layer.unreachable");

  // What was begun goes on; whom nobody waits for is not begun.
  ASSERT_EQ(::flock(lock->get(), LOCK_UN), 0);
  const auto after = catalog.Collect(now, std::chrono::minutes(1), {});
  ASSERT_TRUE(after.ok()) << after.error().ToString();
  EXPECT_TRUE(after->removed.empty());
  EXPECT_EQ(catalog.Find(unnamed.str()).error().reason(), "layer.not_found");
}

}  // namespace
}  // namespace dsec::image

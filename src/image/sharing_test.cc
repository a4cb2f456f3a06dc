// SPDX-License-Identifier: Apache-2.0
// Content that several layers of a store have in common: kept once, mounted by the kernel, checked,
// removed, and built again after deaths and damage. Needs root and file-backed EROFS (Linux 6.12).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <thread>

#include "base/fault.h"
#include "base/rng.h"
#include "image/canonical_blob.h"
#include "image/chunk_index.h"
#include "image/erofs_writer.h"
#include "image/flatten.h"
#include "image/layer_cache.h"
#include "image/layer_check.h"
#include "image/layer_export.h"
#include "image/layer_files.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "image/share_meta.h"
#include "image/testing/archives.h"
#include "image/testing/harness.h"
#include "image/testing/sharing_fixture.h"
#include "os/file.h"

namespace dsec::image {
namespace {

namespace fs = std::filesystem;
using testing::Common;
using testing::DescribeTree;
using testing::File;
using ::testing::HasSubstr;
using testing::MakeTar;
using testing::Member;
using testing::Noise;
using testing::SharingTest;

TEST_F(SharingTest, Family_IsKeptOnceAndReadsTheSame) {
  const auto first = Build(1);
  EXPECT_EQ(first.shared_bytes, 0U);
  EXPECT_FALSE(IsShared(first.layer.id));
  const uint64_t one = StoredBytes();
  std::vector<LayerId> ids = {first.layer.id};
  for (uint64_t number = 2; number <= 4; ++number) {
    const auto next = Build(number);
    EXPECT_GT(next.shared_bytes, 5'500'000U);
    EXPECT_TRUE(IsShared(next.layer.id));
    EXPECT_TRUE(next.warnings.empty());
    ids.push_back(next.layer.id);
  }
  // Each adds what it alone has.
  EXPECT_LT(StoredBytes(), one + 3 * 1'700'000U);
  for (uint64_t number = 1; number <= 4; ++number) {
    const LayerId& id = ids[number - 1];
    ExpectRight(id, number);
    const auto verified = Verify(id);
    EXPECT_TRUE(verified.ok()) << verified.error().ToString();
  }
  const auto usage = MeasureStore(*store_, {});
  ASSERT_TRUE(usage.ok()) << usage.error().ToString();
  EXPECT_EQ(usage->kept_blocks, 0U);
  uint64_t shared = 0;
  for (const LayerUsage& item : usage->layers) shared += item.shared_bytes;
  EXPECT_GT(shared, 3 * 5'500'000U);
}

TEST_F(SharingTest, CanonicalBytes_AreThoseOfTheManifestAndGoodForFsck) {
  Build(1);
  const auto second = Build(2);
  ASSERT_TRUE(IsShared(second.layer.id));
  const auto files = store_->OpenFiles(second.layer.id);
  ASSERT_TRUE(files.ok()) << files.error().ToString();
  const CanonicalBlob blob(*files);
  std::vector<uint8_t> bytes(blob.size());
  ASSERT_TRUE(blob.ReadAt(0, bytes).ok());
  EXPECT_EQ(Sha256Hex({reinterpret_cast<const char*>(bytes.data()), bytes.size()}),
            files->manifest.blob.sha256);
  // From an odd place over the end of runs, and beyond the end of all.
  std::vector<uint8_t> part(3'000'001);
  ASSERT_TRUE(blob.ReadAt(1'234'567, part).ok());
  EXPECT_TRUE(std::ranges::equal(part, std::span(bytes).subspan(1'234'567, part.size())));
  EXPECT_EQ(blob.ReadAt(blob.size() - 10, part).error().reason(), "layer.corrupt");
  fs::create_directory(Path("whole"));
  testing::WriteFile(Path("whole/data.blob"),
                     {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  fs::copy_file(FileOf(second.layer.id, kMetaName), Path("whole/meta.erofs"));
  EXPECT_EQ(testing::FsckImage(Path("whole")), "");
}

TEST_F(SharingTest, RemovalOfEither_LeavesTheOtherWhole) {
  for (const uint64_t gone : {1, 2}) {
    const LayerId first = Build(1).layer.id, second = Build(2).layer.id;
    ASSERT_NE(IsShared(first), IsShared(second));
    ASSERT_TRUE(store_->Remove(fmt::format("image{}:1", gone)).ok());
    const LayerId& left = gone == 1 ? second : first;
    EXPECT_FALSE(fs::exists(FileOf(gone == 1 ? first : second, kManifestName)));
    ExpectRight(left, 3 - gone);
    EXPECT_TRUE(Verify(left).ok());
    const auto usage = MeasureStore(*store_, {});
    ASSERT_TRUE(usage.ok());
    // The file that was the first one's is kept for the other, and du says so.
    EXPECT_EQ(usage->kept_blocks > 0, gone == 1) << usage->kept_blocks;
    // What is left is found by the next, by whatever name it has.
    const auto third = Build(3);
    EXPECT_GT(third.shared_bytes, 5'500'000U);
    ExpectRight(third.layer.id, 3);
    for (const char* name : {"image1:1", "image2:1", "image3:1"})
      static_cast<void>(store_->Remove(name));
    ASSERT_TRUE(store_->Collect({}).ok());
    EXPECT_EQ(StoredBytes(), 0U);
  }
}

TEST_F(SharingTest, RemovalWhileMounted_IsRefusedAndSpaceComesBackAfterTheLast) {
  const LayerId first = Build(1).layer.id, second = Build(2).layer.id;
  {
    LayerMounts mounts(*store_);
    const auto held = mounts.Acquire(second);
    ASSERT_TRUE(held.ok()) << held.error().ToString();
    EXPECT_EQ(store_->Remove("image2:1").error().reason(), "layer.in_use");
    // The one that it shares with is not in use.
    ASSERT_TRUE(store_->Remove("image1:1").ok());
    if (plain_ == nullptr) plain_ = Open(Path("plain"));
    BuildRequest request = RequestOf(2);
    ASSERT_TRUE(plain_->Build(request, nullptr).ok());
    EXPECT_EQ(DescribeTree((*held)->fd()), Tree(*plain_, second));
  }
  ASSERT_TRUE(store_->Remove("image2:1").ok());
  EXPECT_EQ(StoredBytes(), 0U);
}

TEST_F(SharingTest, SameImageOnAnEmptyAndAFullStore_HasTheSameId) {
  Build(1);
  const LayerId full = Build(2).layer.id;
  const auto empty = Open(Path("empty"));
  const auto built = empty->Build(RequestOf(2), nullptr);
  ASSERT_TRUE(built.ok());
  EXPECT_EQ(built->layer.id, full);
  // And building it once more finds it there.
  const auto again = Build(2);
  EXPECT_TRUE(again.existed);
  EXPECT_TRUE(IsShared(full));
}

TEST_F(SharingTest, DeathAtEveryStep_LeavesNothingAndTheNextBuildShares) {
  const LayerId first = Build(1).layer.id;
  for (const char* point : {"layer.share.link", "layer.share.linked", "layer.share.own_written",
                            "layer.share.before_blob_goes", "layer.publish.before_catalog",
                            "layer.share.before_index"}) {
    store_.reset();
    const pid_t child = ::fork();
    if (child == 0) {
      auto store = LayerStore::Open(Root());
      if (!fault::Arm(fmt::format("{}=kill", point)).ok()) ::_exit(3);
      static_cast<void>((*store)->Build(RequestOf(2), nullptr));
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << point << " " << status;
    store_ = Open(Root());
    EXPECT_TRUE(fs::is_empty(Root() + "/tmp")) << point;
    struct stat blob;
    ASSERT_EQ(::stat(FileOf(first, kBlobName).c_str(), &blob), 0);
    const bool published = std::string_view(point) == "layer.share.before_index";
    EXPECT_EQ(blob.st_nlink, published ? 2U : 1U) << point;
    const auto second = Build(2);
    EXPECT_EQ(second.existed, published) << point;
    EXPECT_TRUE(IsShared(second.layer.id)) << point;
    EXPECT_TRUE(Verify(second.layer.id).ok()) << point;
    ASSERT_TRUE(store_->Remove("image2:1").ok());
  }
}

TEST_F(SharingTest, FailureAtAnyStep_KeepsTheContentWhole) {
  Build(1);
  for (const char* point : {"layer.share.link", "layer.share.linked", "layer.share.own_written",
                            "layer.share.before_blob_goes"}) {
    ASSERT_TRUE(fault::Arm(fmt::format("{}=error:EIO", point)).ok());
    const auto second = Build(2);
    fault::DisarmAll();
    EXPECT_FALSE(IsShared(second.layer.id)) << point;
    ASSERT_EQ(second.warnings.size(), 1U) << point;
    EXPECT_THAT(second.warnings[0], HasSubstr("kept once more"));
    for (const char* name : {"shared.1.blob", kOwnName, kFormName, kSharedMetaName})
      EXPECT_FALSE(fs::exists(FileOf(second.layer.id, name))) << point << " " << name;
    ExpectRight(second.layer.id, 2);
    ASSERT_TRUE(store_->Remove("image2:1").ok());
  }
}

TEST_F(SharingTest, WithoutHardLinks_NothingIsSharedAndItIsSaid) {
  EXPECT_TRUE(store_->CheckSharing().ok());
  Build(1);
  ASSERT_TRUE(fault::Arm("layer.share.link=error:EPERM").ok());
  EXPECT_EQ(store_->CheckSharing().error().reason(), "layer.no_links");
  const auto second = Build(2);
  EXPECT_FALSE(IsShared(second.layer.id));
  ASSERT_EQ(second.warnings.size(), 1U);
  EXPECT_THAT(second.warnings[0], HasSubstr("makes no hard links"));
  ExpectRight(second.layer.id, 2);
}

TEST_F(SharingTest, CancelWhileComparing_EndsTheBuild) {
  Build(1);
  // Longer than the time in which nobody is asked.
  ASSERT_TRUE(fault::Arm("layer.share.link=delay:200ms").ok());
  bool sharing = false;
  auto report = store_->Build(RequestOf(2), [&](const Progress& progress) {
    sharing = progress.phase == Progress::Phase::kWrite && fault::Fired("layer.share.link") > 0;
    return !sharing;
  });
  ASSERT_FALSE(report.ok());
  EXPECT_TRUE(sharing);
  EXPECT_EQ(report.error().reason(), "layer.cancelled");
  EXPECT_TRUE(fs::is_empty(Root() + "/tmp"));
}

TEST_F(SharingTest, DamagedForm_IsFoundAtTheMountAndBuiltAnew) {
  Build(1);
  const LayerId id = Build(2).layer.id;
  const std::string good = *os::ReadFile(AT_FDCWD, FileOf(id, kFormName).c_str(), 1 << 20);
  for (const std::string& bad :
       {std::string(), std::string("{}"), good.substr(0, good.size() / 2), good + "\n"}) {
    testing::WriteFile(FileOf(id, kFormName), bad);
    LayerMounts mounts(*store_);
    EXPECT_EQ(mounts.Acquire(id).error().reason(), "layer.corrupt") << bad.substr(0, 100);
    EXPECT_EQ(Verify(id).error().reason(), "layer.corrupt");
  }
  const auto again = Build(2);
  EXPECT_FALSE(again.existed);
  ExpectRight(id, 2);
  EXPECT_TRUE(Verify(id).ok());
  // One that fits and says something else: reads give other bytes, and verify says so.
  MakeFormWrong(again);
  EXPECT_EQ(Verify(id).error().reason(), "layer.corrupt");
  EXPECT_FALSE(Build(2).existed);
  ExpectRight(id, 2);
  EXPECT_TRUE(Verify(id).ok());
  EXPECT_TRUE(Build(2).existed);
}

TEST_F(SharingTest, DamagedSharedFile_IsFoundBySizeOrDigest) {
  Build(1);
  const LayerId id = Build(2).layer.id;
  const std::string shared = FileOf(id, "shared.1.blob");
  const auto size = fs::file_size(shared);
  fs::resize_file(shared, size - 4096);
  {
    LayerMounts mounts(*store_);
    EXPECT_EQ(mounts.Acquire(id).error().reason(), "layer.corrupt");
  }
  fs::resize_file(shared, size);
  EXPECT_EQ(Verify(id).error().reason(), "layer.corrupt");
  fs::remove(shared);
  {
    LayerMounts mounts(*store_);
    EXPECT_FALSE(mounts.Acquire(id).ok());
  }
  EXPECT_FALSE(Build(2).existed);
  ExpectRight(id, 2);
}

TEST_F(SharingTest, CopiesOnTheNode_AreMadeForTheFormAndHealed) {
  Build(1);
  const LayerId id = Build(2).layer.id;
  const std::string copies = Path("copies");
  const std::string meta = copies + "/" + HexOf(id) + "/" + kSharedMetaName;
  ExpectRight(id, 2, {.cache_dir = copies});
  ASSERT_TRUE(fs::exists(meta));
  EXPECT_EQ(*os::ReadFile(AT_FDCWD, meta.c_str(), 1 << 20),
            *os::ReadFile(AT_FDCWD, FileOf(id, kSharedMetaName).c_str(), 1 << 20));
  {
    LayerMounts mounts(*store_, {.cache_dir = copies});
    const auto before = DescribeTree((*mounts.Acquire(id))->fd());
    // Kept, then damaged: mounted anew from a new one.
    fs::resize_file(meta, fs::file_size(meta) / 2);
    const auto again = mounts.Acquire(id);
    ASSERT_TRUE(again.ok()) << again.error().ToString();
    EXPECT_EQ(DescribeTree((*again)->fd()), before);
  }
  // One that an earlier start has left is not believed.
  testing::WriteFile(meta, "what a crash left");
  ExpectRight(id, 2, {.cache_dir = copies});
  // The layer comes back in another form: in a store where it was the first.
  ASSERT_TRUE(store_->Remove("image1:1").ok());
  ASSERT_TRUE(store_->Remove("image2:1").ok());
  EXPECT_FALSE(IsShared(Build(2).layer.id));
  ExpectRight(id, 2, {.cache_dir = copies});
  EXPECT_FALSE(fs::exists(meta));
  // And in a third one.
  ASSERT_TRUE(store_->Remove("image2:1").ok());
  Build(3);
  EXPECT_TRUE(IsShared(Build(2).layer.id));
  ExpectRight(id, 2, {.cache_dir = copies});
}

TEST_F(SharingTest, WithoutCopies_TheStoresOwnMetadataAreCheckedAndMounted) {
  Build(1);
  const LayerId id = Build(2).layer.id;
  const std::string copies = "/dev/shm/dsec-timg-" + NewUlid(Clock::System());
  ExpectRight(id, 2, {.cache_dir = copies});
  {
    const os::UniqueFd fd(::open(FileOf(id, kSharedMetaName).c_str(), O_WRONLY | O_CLOEXEC));
    ASSERT_EQ(::pwrite(fd.get(), "X", 1, 3000), 1);
  }
  {
    LayerMounts mounts(*store_, {.cache_dir = copies});
    EXPECT_EQ(mounts.Acquire(id).error().reason(), "layer.corrupt");
  }
  EXPECT_EQ(Verify(id).error().reason(), "layer.corrupt");
  EXPECT_FALSE(Build(2).existed);
  ExpectRight(id, 2, {.cache_dir = copies});
  fs::remove_all(copies);
}

TEST_F(SharingTest, MountsApart_AndTracesReadTheRightFiles) {
  Build(1);
  const LayerId id = Build(2).layer.id;
  LayerTrace trace;
  trace.parts = {{"usr/lib/f05", 0, 64 << 10}, {"opt/own", 1 << 20, 256 << 10}};
  ASSERT_TRUE(store_->SaveTrace(id, trace, false).ok());
  LayerMounts mounts(*store_);
  const auto apart = mounts.AcquireApart({id});
  ASSERT_TRUE(apart.ok()) << apart.error().ToString();
  ExpectRight(id, 2);
  EXPECT_EQ(DescribeTree(apart->front()->fd()), Tree(*plain_, id));
  ASSERT_TRUE(mounts.Settle());
  const auto figures = mounts.prefetched();
  EXPECT_EQ(figures.layers, 1U);
  EXPECT_EQ(figures.dropped_bytes, 0U);
  EXPECT_GE(figures.read_bytes + figures.present_bytes, 320U << 10);
}

TEST_F(SharingTest, FlattenAndCompress_ReadASharedLayer) {
  Build(1);
  const auto second = Build(2);
  LayerMounts mounts(*store_);
  const auto flat = Flatten(*store_, mounts,
                            {.refs = {"image2:1"},
                             .kind = LayerKind::kBase,
                             .name = "flat:1",
                             .labels = {},
                             .compression = {}},
                            nullptr);
  ASSERT_TRUE(flat.ok()) << flat.error().ToString();
  EXPECT_EQ(flat->layer.id, second.layer.id);
  const auto packed = CompressLayer(*store_, mounts,
                                    {.ref = "image2:1",
                                     .name = "packed:1",
                                     .labels = {},
                                     .first_touch = {},
                                     .compression = {Compression::kDefault}},
                                    nullptr);
  ASSERT_TRUE(packed.ok()) << packed.error().ToString();
  EXPECT_EQ(packed->layer.id, second.layer.id);  // noise: no chunk became smaller
  // What is compressed has no chunks in common with what is not.
  std::vector<Member> members = Common();
  members.push_back(File("text", std::string(500'000, 'x')));
  testing::WriteFile(Path("image7.tar"), MakeTar(members));
  BuildRequest request = RequestOf(7);
  request.compression = {Compression::kDefault};
  const auto small = store_->Build(request, nullptr);
  ASSERT_TRUE(small.ok()) << small.error().ToString();
  EXPECT_EQ(small->shared_bytes, 0U);
  EXPECT_FALSE(IsShared(small->layer.id));
}

TEST_F(SharingTest, Export_WritesWhatTheIdStandsFor) {
  Build(1);
  const LayerId id = Build(2).layer.id;
  fs::create_directories(Path("out/blobs/" + HexOf(id) + ".part"));  // what a death has left
  EXPECT_TRUE(ExportLayer(*store_, id, Path("out"), nullptr).value());
  EXPECT_FALSE(ExportLayer(*store_, id, Path("out"), nullptr).value());
  const std::string folder = Path("out/blobs/" + HexOf(id)) + "/";
  const auto manifest =
      *Manifest::Parse(*os::ReadFile(AT_FDCWD, (folder + kManifestName).c_str(), 1 << 20));
  EXPECT_EQ(manifest.Id(), id);
  EXPECT_EQ(Sha256Hex(*os::ReadFile(AT_FDCWD, (folder + kBlobName).c_str(), 64 << 20)),
            manifest.blob.sha256);
  EXPECT_EQ(Sha256Hex(*os::ReadFile(AT_FDCWD, (folder + kTableName).c_str(), 1 << 20)),
            manifest.chunks.sha256);
  EXPECT_EQ(Sha256Hex(*os::ReadFile(AT_FDCWD, (folder + kMetaName).c_str(), 1 << 20)),
            manifest.meta.sha256);
  // Damaged content does not leave the store.
  const os::UniqueFd blob(::open(FileOf(id, kOwnName).c_str(), O_WRONLY | O_CLOEXEC));
  ASSERT_EQ(::pwrite(blob.get(), "X", 1, 5000), 1);
  EXPECT_EQ(ExportLayer(*store_, id, Path("other"), nullptr).error().reason(), "layer.corrupt");
  EXPECT_TRUE(fs::is_empty(Path("other/blobs")));
}

TEST_F(SharingTest, FileOfWhichLittleIsUsed_IsNotKeptAlive) {
  // A large layer of which the next has a tenth.
  std::vector<Member> members = Common();
  members.push_back(File("big", Noise(5, 60 << 20)));
  testing::WriteFile(Path("image8.tar"), MakeTar(members));
  Build(8);
  const auto second = Build(2);
  EXPECT_EQ(second.shared_bytes, 0U);
  EXPECT_FALSE(IsShared(second.layer.id));
}

TEST_F(SharingTest, BuildsAtTheSameTime_AreAllRight) {
  Build(1);
  std::vector<std::jthread> builders;
  std::vector<LayerId> ids(6);
  for (uint64_t i = 0; i < ids.size(); ++i) TarOf(i + 2);
  for (uint64_t i = 0; i < ids.size(); ++i) {
    builders.emplace_back([&, i] {
      const auto report = store_->Build(RequestOf(i + 2), nullptr);
      EXPECT_TRUE(report.ok()) << report.error().ToString();
      if (report.ok()) ids[i] = report->layer.id;
    });
  }
  builders.clear();
  for (uint64_t i = 0; i < ids.size(); ++i) {
    EXPECT_TRUE(IsShared(ids[i]));
    EXPECT_TRUE(Verify(ids[i]).ok());
    ExpectRight(ids[i], i + 2);
  }
}

TEST_F(SharingTest, CopiesForForms_CountAgainstTheBound) {
  Build(1);
  std::vector<BuildReport> built;
  for (uint64_t number = 2; number <= 4; ++number) built.push_back(Build(number));
  const uint64_t one = 2 * built[0].layer.meta_bytes;  // as large as the others, and twice
  const std::string copies = Path("copies");
  const auto blobs = os::OpenAt(AT_FDCWD, (Root() + "/blobs").c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_TRUE(blobs.ok());
  const auto all = [](const LayerId&) { return true; };
  // Room for all without what is made for the forms, and for two with it.
  {
    const auto cache = *LayerCache::Open(copies, 2 * one + one / 4);
    for (const BuildReport& layer : built) {
      const auto files = *OpenLayer(blobs->get(), layer.layer.id, true);
      const auto local = *cache->Add(layer.layer.id, files.manifest, files.meta.get(), all);
      ASSERT_TRUE(cache->SharedMeta(layer.layer.id, local, *files.form, all).ok());
      EXPECT_LE(cache->bytes(), 2 * one + one / 4);
    }
    EXPECT_EQ(cache->bytes(), 2 * one);
    EXPECT_FALSE(cache->Find(built[0].layer.id)->has_value());
    ASSERT_TRUE(cache->Find(built[2].layer.id)->has_value());
  }
  const auto cache = *LayerCache::Open(copies, 1 << 30);
  EXPECT_EQ(cache->bytes(), 2 * one);
  const std::string meta = copies + "/" + HexOf(built[2].layer.id) + "/" + kSharedMetaName;
  ASSERT_TRUE(fs::exists(meta));
  cache->DropSharedMeta(built[2].layer.id);
  EXPECT_FALSE(fs::exists(meta));
  EXPECT_EQ(cache->bytes(), one + one / 2);
  EXPECT_TRUE(cache->Find(built[2].layer.id)->has_value());
}

TEST_F(SharingTest, MetadataInMemory_AreTwoAtMost) {
  Build(1);
  const LayerId id = Build(2).layer.id;
  std::vector<std::jthread> readers;
  for (int i = 0; i < 16; ++i) readers.emplace_back([&] { EXPECT_TRUE(Verify(id).ok()); });
  readers.clear();
  EXPECT_GE(MetaTurn::most(), 1);
  EXPECT_LE(MetaTurn::most(), 2);
}

// The content is the other layer's before and after, so it does not tell the two apart.
TEST_F(SharingTest, KeptMount_DoesNotSurviveTheRepairOfALayerWithoutOwnContent) {
  Build(1);
  const auto built = BuildCommon();
  const LayerId id = built.layer.id;
  ASSERT_FALSE(FormOf(built).has_own());
  const auto right = Tree(*store_, id);
  MakeFormWrong(built);
  LayerMounts mounts(*store_);
  {
    const auto layer = mounts.Acquire(id);
    ASSERT_TRUE(layer.ok()) << layer.error().ToString();
    ASSERT_NE(DescribeTree((*layer)->fd()), right);
  }
  ASSERT_TRUE(mounts.Settle());
  ASSERT_EQ(mounts.idle(), 1U);
  ASSERT_TRUE(store_->Remove("common:1").ok());
  ASSERT_EQ(BuildCommon().layer.id, id);
  const auto again = mounts.Acquire(id);
  ASSERT_TRUE(again.ok()) << again.error().ToString();
  EXPECT_EQ(DescribeTree((*again)->fd()), right);
}

}  // namespace
}  // namespace dsec::image

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
#include "image/sqlite.h"
#include "image/testing/archives.h"
#include "image/testing/harness.h"
#include "os/file.h"

namespace dsec::image {
namespace {

namespace fs = std::filesystem;
using testing::DescribeTree;
using testing::Dir;
using testing::File;
using ::testing::HasSubstr;
using testing::MakeTar;
using testing::Member;

std::string Noise(uint64_t seed, size_t bytes) {
  Rng rng(seed);
  std::string text(bytes, 0);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t word = rng.Next();
    std::memcpy(text.data() + i, &word, sizeof(word));
  }
  return text;
}

// What the images of a family have in common, 6 MB in files of several sizes.
std::vector<Member> Common() {
  std::vector<Member> members = {Dir("usr"), Dir("usr/lib")};
  for (uint64_t i = 0; i < 40; ++i) {
    members.push_back(
        File(fmt::format("usr/lib/f{:02}", i), Noise(i, 100'000 + 2'500 * static_cast<size_t>(i))));
  }
  return members;
}

class SharingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    store_ = Open(Root());
  }
  void TearDown() override { fault::DisarmAll(); }

  std::string Root() const { return folder_.path() + "/layers"; }
  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }
  std::string FileOf(const LayerId& id, const std::string& name) const {
    return Root() + "/blobs/" + HexOf(id) + "/" + name;
  }

  static std::unique_ptr<LayerStore> Open(const std::string& root) {
    auto store = LayerStore::Open(root);
    EXPECT_TRUE(store.ok()) << store.error().ToString();
    return store.ok() ? *std::move(store) : nullptr;
  }

  // The family's content and what the image `number` alone has.
  std::string TarOf(uint64_t number) const {
    std::string path = Path(fmt::format("image{}.tar", number));
    if (fs::exists(path)) return path;
    std::vector<Member> members = Common();
    members.push_back(Dir("opt"));
    members.push_back(File("opt/own", Noise(1000 + number, 1'500'000)));
    members.push_back(File("usr/lib/f10.extra", Noise(2000 + number, 20'000)));
    members.push_back(File("zero", std::string(300'000, 0)));
    testing::WriteFile(path, MakeTar(members));
    return path;
  }

  // Has nothing that an image of the family has not.
  BuildReport BuildCommon() {
    std::vector<Member> members = Common();
    testing::WriteFile(Path("common.tar"), MakeTar(members));
    BuildRequest request;
    request.source = SourceKind::kTar;
    request.path = Path("common.tar");
    request.name = "common:1";
    auto report = store_->Build(request, nullptr);
    EXPECT_TRUE(report.ok()) << report.error().ToString();
    return report.ok() ? *std::move(report) : BuildReport();
  }

  StoredForm FormOf(const BuildReport& built) const {
    const auto text = os::ReadFile(AT_FDCWD, FileOf(built.layer.id, kFormName).c_str(), 1 << 20);
    EXPECT_TRUE(text.ok());
    return *StoredForm::Parse(*text, built.layer.blob_bytes);
  }

  // One that fits and says something else.
  void MakeFormWrong(const BuildReport& built) {
    StoredForm form = FormOf(built);
    const auto moved =
        std::ranges::find_if(form.runs, [](const StoredForm::Run& run) { return run.block > 0; });
    ASSERT_NE(moved, form.runs.end());
    --moved->block;
    testing::WriteFile(FileOf(built.layer.id, kFormName), form.Encode());
  }

  // On the index of chunks, as another program would.
  void Sql(const std::string& sql) const {
    sqlite3* db = nullptr;
    EXPECT_TRUE(sql::Open(Root() + "/chunks.db", &db).ok());
    const auto done = sql::Execute(db, sql.c_str());
    EXPECT_TRUE(done.ok()) << done.error().ToString();
    ::sqlite3_close_v2(db);
  }
  uint64_t Count(const std::string& table) const {
    sqlite3* db = nullptr;
    EXPECT_TRUE(sql::Open(Root() + "/chunks.db", &db).ok());
    uint64_t count = UINT64_MAX;
    {
      sql::Statement ask(db, "SELECT COUNT(*) FROM " + table);
      const auto found = ask.Step();
      if (found.ok() && *found) count = ask.NumberAt(0);
    }
    ::sqlite3_close_v2(db);
    return count;
  }
  static nlink_t LinksOf(const std::string& path) {
    struct stat status = {};
    EXPECT_EQ(::lstat(path.c_str(), &status), 0) << path;
    return status.st_nlink;
  }

  BuildRequest RequestOf(uint64_t number) const {
    BuildRequest request;
    request.source = SourceKind::kTar;
    request.path = TarOf(number);
    request.name = fmt::format("image{}:1", number);
    return request;
  }

  BuildReport Build(uint64_t number) {
    auto report = store_->Build(RequestOf(number), nullptr);
    EXPECT_TRUE(report.ok()) << report.error().ToString();
    return report.ok() ? *std::move(report) : BuildReport();
  }

  // The layer as the kernel shows it is what the same tar gives where nothing is shared.
  void ExpectRight(const LayerId& id, uint64_t number, LayerMountOptions options = {}) {
    if (plain_ == nullptr) plain_ = Open(Path("plain"));
    BuildRequest request = RequestOf(number);
    request.share = false;
    const auto expected = plain_->Build(request, nullptr);
    ASSERT_TRUE(expected.ok()) << expected.error().ToString();
    EXPECT_EQ(expected->layer.id, id) << "the id depends on what else is in the store";
    EXPECT_EQ(expected->shared_bytes, 0U);
    EXPECT_EQ(Tree(*store_, id, std::move(options)), Tree(*plain_, id));
  }

  static std::vector<std::string> Tree(const LayerStore& store, const LayerId& id,
                                       LayerMountOptions options = {}) {
    LayerMounts mounts(store, std::move(options));
    const auto layer = mounts.Acquire(id);
    EXPECT_TRUE(layer.ok()) << layer.error().ToString();
    return layer.ok() ? DescribeTree((*layer)->fd()) : std::vector<std::string>();
  }

  Result<LayerInfo> Verify(const LayerId& id) { return VerifyLayer(*store_, id.str(), nullptr); }

  bool IsShared(const LayerId& id) const {
    return fs::exists(FileOf(id, kFormName)) && !fs::exists(FileOf(id, kBlobName));
  }

  // All that lies in the store, each file once.
  uint64_t StoredBytes() const {
    std::map<ino_t, uint64_t> sizes;
    for (const auto& entry : fs::recursive_directory_iterator(Root() + "/blobs")) {
      struct stat status;
      if (entry.is_regular_file() && ::lstat(entry.path().c_str(), &status) == 0)
        sizes[status.st_ino] = static_cast<uint64_t>(status.st_size);
    }
    uint64_t total = 0;
    for (const auto& [inode, size] : sizes) total += size;
    return total;
  }

  os::TempDir folder_ = *os::TempDir::Create("dsec-timg-");
  std::unique_ptr<LayerStore> store_, plain_;
};

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

TEST_F(SharingTest, DamagedIndex_IsMadeAnewAndFilledFromTheLayers) {
  const LayerId first = Build(1).layer.id;
  testing::WriteFile(Root() + "/chunks.db", Noise(7, 40'000));
  const auto second = Build(2);
  EXPECT_FALSE(IsShared(second.layer.id));  // nothing was known
  ExpectRight(second.layer.id, 2);
  const auto third = Build(3);
  EXPECT_TRUE(IsShared(third.layer.id));
  fs::remove(Root() + "/chunks.db");
  EXPECT_EQ(store_->IndexContent(nullptr).value(), 3U);
  EXPECT_EQ(store_->IndexContent(nullptr).value(), 0U);
  const auto fourth = Build(4);
  EXPECT_GT(fourth.shared_bytes, 5'500'000U);
  ExpectRight(fourth.layer.id, 4);
  EXPECT_TRUE(Verify(first).ok());
}

// An index that is wrong throughout: content under hashes that are not its own.
TEST_F(SharingTest, LyingIndex_SharesNothingThatIsNotEqual) {
  const LayerId first = Build(1).layer.id;
  {
    const os::UniqueFd blob(::open(FileOf(first, kBlobName).c_str(), O_RDWR | O_CLOEXEC));
    const std::string other = Noise(99, 4096);
    // In the middle of a run, and not known to the index.
    ASSERT_EQ(::pwrite(blob.get(), other.data(), other.size(), 3 << 20), 4096);
  }
  const auto second = Build(2);
  ExpectRight(second.layer.id, 2);
  EXPECT_TRUE(Verify(second.layer.id).ok());
  EXPECT_EQ(Verify(first).error().reason(), "layer.corrupt");
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

// Rows that lead out of the layers' folders, or to what is no content, with the right bytes there.
TEST_F(SharingTest, HostileIndexRows_LeadNowhereAndAreForgotten) {
  const LayerId first = Build(1).layer.id;
  const std::string blob = FileOf(first, kBlobName);
  const std::string layer = HexOf(first);
  fs::copy_file(blob, Path("data.blob"));
  fs::copy_file(blob, FileOf(first, "other.blob"));
  for (const auto& [where, name] : {std::pair<std::string, std::string>("../..", "data.blob"),
                                    {layer, "../../../data.blob"},
                                    {layer, "other.blob"},
                                    {layer, "shared.8.blob"},
                                    {layer + "/", "data.blob"},
                                    {"", ""},
                                    {"x", "data.blob"}}) {
    Sql(fmt::format("UPDATE places SET layer = '{}', name = '{}'", where, name));
    const auto second = Build(2);
    EXPECT_TRUE(second.warnings.empty()) << second.warnings[0];
    EXPECT_FALSE(IsShared(second.layer.id)) << where << " " << name;
    EXPECT_EQ(LinksOf(Path("data.blob")), 1U);
    EXPECT_EQ(LinksOf(FileOf(first, "other.blob")), 1U);
    EXPECT_EQ(Count("places"), 1U) << "the hostile one is still there";
    ASSERT_TRUE(store_->Remove("image2:1").ok());
  }
}

TEST_F(SharingTest, PlaceThatIsNoFile_IsForgottenAndHoldsNothingUp) {
  const LayerId first = Build(1).layer.id;
  const std::string blob = FileOf(first, kBlobName);
  fs::rename(blob, Path("away"));
  for (const char* what : {"fifo", "symlink", "folder", "file for its folder"}) {
    Sql(fmt::format("UPDATE places SET layer = '{}', name = 'data.blob'", HexOf(first)));
    if (what == std::string_view("fifo")) {
      ASSERT_EQ(::mkfifo(blob.c_str(), 0600), 0);
    } else if (what == std::string_view("symlink")) {
      fs::create_symlink(Path("away"), blob);
    } else if (what == std::string_view("folder")) {
      fs::create_directory(blob);
    } else {
      fs::remove_all(fs::path(blob).parent_path());
      testing::WriteFile(fs::path(blob).parent_path(), "x");
    }
    const auto second = Build(2);
    EXPECT_TRUE(second.warnings.empty()) << what << ": " << second.warnings[0];
    EXPECT_FALSE(IsShared(second.layer.id)) << what;
    EXPECT_EQ(Count("places"), 1U) << what;
    ASSERT_TRUE(store_->Remove("image2:1").ok());
    if (what != std::string_view("file for its folder")) fs::remove_all(blob);
  }
}

TEST_F(SharingTest, FileWithAllLinksThatItMayHave_IsPassedOverAndKeptInMind) {
  Build(1);
  ASSERT_TRUE(fault::Arm("layer.share.link=error:EMLINK").ok());
  const auto second = Build(2);
  fault::DisarmAll();
  EXPECT_TRUE(second.warnings.empty());
  EXPECT_FALSE(IsShared(second.layer.id));
  EXPECT_TRUE(IsShared(Build(3).layer.id));
}

// What removed layers have left in the index hides nothing, and goes.
TEST_F(SharingTest, FilesWithoutAPlace_HideNoneThatIsThere) {
  Build(1);
  Sql("UPDATE files SET id = 1000; UPDATE places SET file = 1000; UPDATE samples SET file = 1000;"
      "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40)"
      "INSERT INTO files SELECT i, chunks FROM n, files WHERE id = 1000;"
      "INSERT INTO samples SELECT hash, id FROM samples, files WHERE id < 1000;");
  ASSERT_EQ(Count("files"), 41U);
  EXPECT_TRUE(IsShared(Build(2).layer.id));
  ASSERT_EQ(Count("files"), 42U);
  // A collection takes them out though each place is there.
  ASSERT_TRUE(store_->Collect({}).ok());
  EXPECT_EQ(Count("files"), 2U);
  // A removal takes out the places, and what has none any more.
  ASSERT_TRUE(store_->Remove("image1:1").ok());
  EXPECT_EQ(Count("files"), 2U);
  EXPECT_EQ(Count("places"), 2U);
  ASSERT_TRUE(store_->Remove("image2:1").ok());
  for (const char* table : {"files", "places", "samples"}) EXPECT_EQ(Count(table), 0U) << table;
}

TEST_F(SharingTest, ErrorWhilePruning_ForgetsNothing) {
  const LayerId first = Build(1).layer.id;
  fs::remove_all(fs::path(FileOf(first, kBlobName)).parent_path());
  ASSERT_TRUE(fault::Arm("layer.share.prune=error:EIO").ok());
  ASSERT_TRUE(store_->Collect({}).ok());
  fault::DisarmAll();
  EXPECT_EQ(Count("places"), 1U);
  ASSERT_TRUE(store_->Collect({}).ok());
  EXPECT_EQ(Count("places"), 0U);
}

TEST_F(SharingTest, IndexOfAnotherVersion_IsLeftAlone) {
  Build(1);
  Sql("PRAGMA user_version = 2");
  const auto second = Build(2);
  EXPECT_FALSE(IsShared(second.layer.id));
  ASSERT_EQ(second.warnings.size(), 1U);
  EXPECT_THAT(second.warnings[0], HasSubstr("has schema 2"));
  EXPECT_EQ(store_->IndexContent(nullptr).error().reason(), "layer.index_schema");
  EXPECT_EQ(Count("files"), 1U);
  Sql("PRAGMA user_version = 1");
  EXPECT_TRUE(IsShared(Build(3).layer.id));
}

// The layer whose file it was is gone: what the others have of it is found all the same.
TEST_F(SharingTest, LostIndex_IsFilledFromFilesOfRemovedLayersToo) {
  Build(1);
  Build(2);
  const auto common = BuildCommon();
  ASSERT_FALSE(FormOf(common).has_own());
  ASSERT_TRUE(store_->Remove("image1:1").ok());
  fs::remove(Root() + "/chunks.db");
  EXPECT_EQ(store_->IndexContent(nullptr).value(), 2U);
  EXPECT_EQ(store_->IndexContent(nullptr).value(), 0U);
  EXPECT_EQ(Count("places"), 3U);
  EXPECT_EQ(Count("files"), 2U);  // one of them has two places
  const auto third = Build(3);
  EXPECT_GT(third.shared_bytes, 5'500'000U);
  ExpectRight(third.layer.id, 3);
}

TEST_F(SharingTest, IndexMadeAnewDuringABuild_GetsNothingOfIt) {
  Build(1);
  bool lost = false;
  const auto second = store_->Build(RequestOf(2), [&](const Progress& progress) {
    if (!lost && progress.phase == Progress::Phase::kRead) {
      lost = true;
      fs::remove(Root() + "/chunks.db");
      Build(3);
    }
    return true;
  });
  ASSERT_TRUE(second.ok()) << second.error().ToString();
  EXPECT_FALSE(IsShared(second->layer.id));
  ASSERT_EQ(second->warnings.size(), 1U);
  EXPECT_THAT(second->warnings[0], HasSubstr("layer.other_index"));
  EXPECT_EQ(Count("files"), 1U);
  EXPECT_EQ(Count("places WHERE layer = '" + HexOf(second->layer.id) + "'"), 0U);
  EXPECT_TRUE(IsShared(Build(4).layer.id));
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

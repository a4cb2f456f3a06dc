// SPDX-License-Identifier: Apache-2.0
// The index by which layers find content that they share: lost, damaged, hostile, out of date.
// Needs root and file-backed EROFS (Linux 6.12).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "base/fault.h"
#include "image/chunk_index.h"
#include "image/erofs_writer.h"
#include "image/layer_files.h"
#include "image/layer_store.h"
#include "image/testing/sharing_fixture.h"
#include "os/file.h"

namespace dsec::image {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::Noise;
using testing::SharingTest;

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

}  // namespace
}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/fault.h"
#include "base/rng.h"
#include "image/erofs_writer.h"
#include "image/layer_check.h"
#include "image/layer_files.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "image/sqlite.h"
#include "image/stored_form.h"
#include "image/testing/archives.h"
#include "image/testing/harness.h"
#include "os/file.h"

namespace dsec::image::testing {

inline std::string Noise(uint64_t seed, size_t bytes) {
  Rng rng(seed);
  std::string text(bytes, 0);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t word = rng.Next();
    std::memcpy(text.data() + i, &word, sizeof(word));
  }
  return text;
}

// What the images of a family have in common, 6 MB in files of several sizes.
inline std::vector<Member> Common() {
  std::vector<Member> members = {Dir("usr"), Dir("usr/lib")};
  for (uint64_t i = 0; i < 40; ++i) {
    members.push_back(
        File(fmt::format("usr/lib/f{:02}", i), Noise(i, 100'000 + 2'500 * static_cast<size_t>(i))));
  }
  return members;
}

// A store of layers that have content in common, and one where nothing is shared.
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
    if (std::filesystem::exists(path)) return path;
    std::vector<Member> members = Common();
    members.push_back(Dir("opt"));
    members.push_back(File("opt/own", Noise(1000 + number, 1'500'000)));
    members.push_back(File("usr/lib/f10.extra", Noise(2000 + number, 20'000)));
    members.push_back(File("zero", std::string(300'000, 0)));
    WriteFile(path, MakeTar(members));
    return path;
  }

  // Has nothing that an image of the family has not.
  BuildReport BuildCommon() {
    std::vector<Member> members = Common();
    WriteFile(Path("common.tar"), MakeTar(members));
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
    WriteFile(FileOf(built.layer.id, kFormName), form.Encode());
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
    return std::filesystem::exists(FileOf(id, kFormName)) &&
           !std::filesystem::exists(FileOf(id, kBlobName));
  }

  // All that lies in the store, each file once.
  uint64_t StoredBytes() const {
    std::map<ino_t, uint64_t> sizes;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(Root() + "/blobs")) {
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

}  // namespace dsec::image::testing

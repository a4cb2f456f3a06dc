// SPDX-License-Identifier: Apache-2.0
// Images that become several layers: cut at a bound, laid over each other by overlayfs, and
// compared with the same image as one layer. Needs root and file-backed EROFS (Linux 6.12).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <ranges>

#include "base/fault.h"
#include "base/rng.h"
#include "image/flatten.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "image/testing/archives.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::image {
namespace {

namespace fs = std::filesystem;
using testing::DescribeTree;
using testing::Device;
using testing::Dir;
using testing::File;
using testing::Hardlink;
using ::testing::IsEmpty;
using testing::LayoutLayer;
using testing::MakeTar;
using testing::Member;
using ::testing::SizeIs;
using testing::Symlink;

class PairsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    store_ = *LayerStore::Open(Root());
  }
  void TearDown() override { fault::DisarmAll(); }

  std::string Root() const { return folder_.path() + "/layers"; }

  // An image of these layers as a folder.
  std::string Layout(const std::vector<std::vector<Member>>& layers) {
    const std::string path = folder_.path() + fmt::format("/layout{}", ++layouts_);
    fs::create_directory(path);
    std::vector<LayoutLayer> tars;
    for (const auto& members : layers) tars.push_back({.tar = MakeTar(members)});
    ImageConfig config;
    config.env = {"PATH=/bin"};
    testing::WriteOciLayout(path, tars, config, "image");
    return path;
  }

  Result<BuildReport> Build(const std::string& layout, uint64_t collapse,
                            const std::string& name = "") {
    BuildRequest request;
    request.source = SourceKind::kOciLayout;
    request.path = layout;
    request.name = name;
    request.collapse_bytes = collapse;
    return store_->Build(request, nullptr);
  }

  // What programs see of an image: a mount of its one layer, or an overlay of all.
  std::vector<std::string> Shown(const LayerInfo& info) {
    LayerMounts mounts(*store_);
    std::vector<LayerId> ids = info.lower;
    ids.push_back(info.id);
    const auto held = mounts.Acquire(ids);
    EXPECT_TRUE(held.ok()) << held.error().ToString();
    if (!held.ok()) return {};
    auto overlay = *os::FsContext::Open("overlay");
    EXPECT_TRUE(overlay.SetString("source", "overlay").ok());
    for (const auto& layer : *held | std::views::reverse)
      EXPECT_TRUE(overlay.SetFd("lowerdir+", layer->fd()).ok());
    // The kernel wants two.
    const std::string empty = folder_.path() + "/empty";
    fs::create_directory(empty);
    const auto lowest = *os::OpenAt(AT_FDCWD, empty.c_str(), O_PATH);
    EXPECT_TRUE(overlay.SetFd("lowerdir+", lowest.get()).ok());
    EXPECT_TRUE(overlay.SetString("redirect_dir", "nofollow").ok());
    EXPECT_TRUE(overlay.SetString("metacopy", "off").ok());
    auto mount = std::move(overlay).Mount(MOUNT_ATTR_RDONLY);
    EXPECT_TRUE(mount.ok()) << mount.error().ToString();
    return mount.ok() ? DescribeTree(mount->get()) : std::vector<std::string>();
  }

  // The image in pairs shows what it shows as one layer; returns the pairs.
  LayerInfo ExpectSame(const std::vector<std::vector<Member>>& layers, uint64_t collapse) {
    const std::string layout = Layout(layers);
    const auto whole = Build(layout, 0);
    EXPECT_TRUE(whole.ok()) << whole.error().ToString();
    const auto pairs = Build(layout, collapse);
    EXPECT_TRUE(pairs.ok()) << pairs.error().ToString();
    if (!whole.ok() || !pairs.ok()) return {};
    EXPECT_THAT(whole->layer.lower, IsEmpty());
    EXPECT_EQ(Shown(pairs->layer), Shown(whole->layer));
    EXPECT_EQ(pairs->layer.config, whole->layer.config);
    return pairs->layer;
  }

  static std::string Bytes(char of, size_t count) { return std::string(count, of); }

  os::TempDir folder_ = *os::TempDir::Create("dsec-timg-");
  std::unique_ptr<LayerStore> store_;
  int layouts_ = 0;
};

std::vector<std::vector<Member>> Layered() {
  return {{Dir("usr"), Dir("usr/lib"), Symlink("lib", "usr/lib"),
           File("usr/lib/a", std::string(60'000, 'a')), File("usr/lib/gone", "gone"),
           Dir("etc", 0750), File("etc/conf", "one"), Dir("etc/sub"), File("etc/sub/x", "x"),
           Dir("cache"), File("cache/1", "1"), File("cache/2", "2"), File("was-file", "f"),
           Dir("was-dir"), File("was-dir/in", "i"), File("linked", "content of links")},
          {File("usr/lib/b", std::string(70'000, 'b')), File("usr/lib/.wh.gone", ""),
           File("cache/.wh..wh..opq", ""), File("cache/3", "3"), File(".wh.was-file", ""),
           Dir("was-file"), File("was-file/now", "dir"), File(".wh.was-dir", ""),
           File("was-dir", "now a file")},
          // Through a link of the lowest layer, into a folder that nothing here describes.
          {File("lib/c", std::string(50'000, 'c')), File("etc/conf", "two"),
           Hardlink("usr/again", "linked"), File("etc/sub/.wh.x", ""), Dir("cache", 0700)},
          {File("top", std::string(90'000, 't')), File(".wh.etc", ""), Dir("etc", 0711),
           File("etc/new", "n"), File("usr/lib/gone", "back")}};
}

TEST_F(PairsTest, Bound_DecidesHowManyAndAllShowTheSame) {
  EXPECT_THAT(ExpectSame(Layered(), 1 << 20).lower, IsEmpty());
  EXPECT_THAT(ExpectSame(Layered(), 250'000).lower, SizeIs(1));
  EXPECT_THAT(ExpectSame(Layered(), 145'000).lower, SizeIs(1));
  EXPECT_THAT(ExpectSame(Layered(), 125'000).lower, SizeIs(2));
  EXPECT_THAT(ExpectSame(Layered(), 1).lower, SizeIs(3));
}

TEST_F(PairsTest, LowerPair_IsTheLayersBelowByThemselvesAndSharedByImages) {
  auto layers = Layered();
  const auto one = Build(Layout(layers), 145'000, "one:1");
  ASSERT_TRUE(one.ok()) << one.error().ToString();
  ASSERT_THAT(one->layer.lower, SizeIs(1));
  layers.back() = {File("other", Bytes('o', 85'000))};
  const auto two = Build(Layout(layers), 145'000, "two:1");
  ASSERT_TRUE(two.ok()) << two.error().ToString();
  EXPECT_EQ(two->layer.lower, one->layer.lower);
  EXPECT_NE(two->layer.id, one->layer.id);
  // The id of the top names those below: it proves the whole image.
  const auto files = store_->OpenFiles(one->layer.id);
  ASSERT_TRUE(files.ok());
  EXPECT_EQ(files->manifest.lower, one->layer.lower);
  EXPECT_EQ(files->manifest.format, Manifest::kWithLower);
  EXPECT_EQ(*Manifest::Parse(files->manifest.Encode()), files->manifest);
}

TEST_F(PairsTest, WhiteoutAndOpaqueOverPairs_HideWhatLiesInAnyOfThem) {
  // Each layer a pair.
  ExpectSame(
      {{Dir("d"), Dir("d/e"), File("d/e/f", Bytes('1', 9000)), File("d/g", "g"), File("x", "x")},
       {File("d/.wh.e", ""), File("y", Bytes('2', 9000))},
       {Dir("d/e"), File("d/e/new", Bytes('3', 9000)), File(".wh.x", "")},
       {File("d/.wh..wh..opq", ""), File("d/only", Bytes('4', 9000)), File("x", "again")}},
      1);
  // The root loses everything.
  ExpectSame({{Dir("a"), File("a/b", Bytes('1', 9000)), File("c", "c")},
              {File(".wh..wh..opq", ""), File("d", Bytes('2', 9000))}},
             1);
  // Owners, modes and xattrs of folders alone; a folder that comes back empty.
  ExpectSame({{Dir("a"), File("a/b", Bytes('1', 9000)), Dir("e"), File("e/f", "f")},
              {Member{.name = "a", .type = '5', .mode = 01777, .uid = 7, .gid = 8},
               File(".wh.e", ""), File("z", Bytes('2', 9000))},
              {Dir("e"), File("zz", Bytes('3', 9000))}},
             1);
}

// What a generator makes of names, kinds and whiteouts, each layer a pair, as one layer and in
// pairs.
TEST_F(PairsTest, RandomImages_ShowTheSameInPairs) {
  Rng rng(20261130);
  int images = 0;
  for (int round = 0; round < 400 && images < 40; ++round) {
    std::vector<std::vector<Member>> layers;
    for (int layer = 0; layer < 4; ++layer) {
      auto& members = layers.emplace_back();
      const auto letter = [&](char from) {
        return std::string(1, static_cast<char>(from + static_cast<int>(rng.Below(3))));
      };
      for (int i = 0; i < 20; ++i) {
        std::string folder;  // A to C are folders, e to g change what they are
        for (uint64_t depth = rng.Below(3); depth > 0; --depth) folder += letter('A') + "/";
        const std::string leaf = folder + letter('e');
        switch (rng.Below(layer == 0 ? 5 : 9)) {
          case 0:
          case 1:
            members.push_back(File(leaf, fmt::format("{}-{}-{}", round, layer, i)));
            break;
          case 2:
            members.push_back(Dir(leaf, static_cast<uint32_t>(0700 + rng.Below(64))));
            members.push_back(File(leaf + "/in", "in"));
            break;
          case 3:
            members.push_back(
                Dir(folder + letter('A'), static_cast<uint32_t>(0700 + rng.Below(64))));
            break;
          case 4:
            members.push_back(Symlink(leaf, letter('A')));
            break;
          case 5:
            members.push_back(File(folder + ".wh." + letter('e'), ""));
            break;
          case 6:
            members.push_back(File(folder + ".wh." + letter('A'), ""));
            break;
          case 7:
            members.push_back(File(folder + ".wh..wh..opq", ""));
            break;
          default:
            members.push_back(File(leaf, ""));
        }
      }
      members.push_back(File(fmt::format("filler{}", layer), Bytes('f', 5000)));
    }
    const std::string layout = Layout(layers);
    const auto whole = Build(layout, 0);
    // Some are no images: a way leads through a file.
    if (!whole.ok()) {
      EXPECT_EQ(whole.error().code(), Code::kInvalidArgument) << whole.error().ToString();
      continue;
    }
    ++images;
    const auto pairs = Build(layout, 5500);
    ASSERT_TRUE(pairs.ok()) << pairs.error().ToString();
    EXPECT_THAT(pairs->layer.lower, SizeIs(3));
    ASSERT_EQ(Shown(pairs->layer), Shown(whole->layer)) << "round " << round;
  }
  EXPECT_EQ(images, 40);
}

TEST_F(PairsTest, LayersBelow_StayWhileOneIsAboveThem) {
  const auto built = Build(Layout(Layered()), 1, "image:1");
  ASSERT_TRUE(built.ok());
  ASSERT_THAT(built->layer.lower, SizeIs(3));
  for (const LayerId& id : built->layer.lower)
    EXPECT_EQ(store_->Remove(id.str()).error().reason(), "layer.in_use");
  CollectOptions now;
  now.unnamed_for = std::chrono::milliseconds(-1);
  now.grace = std::chrono::milliseconds(-1);
  EXPECT_THAT(store_->Collect(now)->removed, IsEmpty());
  EXPECT_THAT(Shown(built->layer), ::testing::Not(IsEmpty()));
  ASSERT_TRUE(store_->Remove("image:1").ok());
  // They have lost the last above them just now.
  EXPECT_THAT(store_->Collect({})->removed, IsEmpty());
  // An upper one of them first, then what is below it.
  size_t removed = 0;
  for (int run = 0; run < 3; ++run) removed += store_->Collect(now)->removed.size();
  EXPECT_EQ(removed, 3U);
  EXPECT_THAT(*store_->List({}), IsEmpty());
}

TEST_F(PairsTest, LostCatalogue_KnowsWhatLiesBelow) {
  const auto built = Build(Layout(Layered()), 1, "image:1");
  ASSERT_TRUE(built.ok());
  store_.reset();
  fs::remove(Root() + "/catalog.db");
  store_ = *LayerStore::Open(Root());
  const auto found = store_->Find(built->layer.id.str());
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->lower, built->layer.lower);
  EXPECT_EQ(store_->Remove(built->layer.lower[0].str()).error().reason(), "layer.in_use");
}

TEST_F(PairsTest, DeathBetweenPairs_LeavesWholeLayersAndTheNextImportIsTheSame) {
  const std::string layout = Layout(Layered());
  store_.reset();
  const pid_t child = ::fork();
  if (child == 0) {
    store_ = *LayerStore::Open(Root());
    if (!fault::Arm("layer.pairs.between=kill").ok()) ::_exit(3);
    static_cast<void>(Build(layout, 1, "image:1"));
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  store_ = *LayerStore::Open(Root());
  EXPECT_TRUE(fs::is_empty(Root() + "/tmp"));
  EXPECT_EQ(store_->List({})->size(), 1U);
  EXPECT_EQ(store_->Find("image:1").error().reason(), "layer.not_found");
  const auto built = Build(layout, 1, "image:1");
  ASSERT_TRUE(built.ok());
  const auto whole = Build(layout, 0);
  EXPECT_EQ(Shown(built->layer), Shown(whole->layer));
}

TEST_F(PairsTest, FlattenedAndCompressed_AreOneOrStayAbove) {
  const auto built = Build(Layout(Layered()), 1, "image:1");
  ASSERT_TRUE(built.ok());
  const auto shown = Shown(built->layer);
  LayerMounts mounts(*store_);
  const auto flat = Flatten(*store_, mounts,
                            {.refs = {"image:1"},
                             .kind = LayerKind::kBase,
                             .name = "flat:1",
                             .labels = {},
                             .compression = {}},
                            nullptr);
  ASSERT_TRUE(flat.ok()) << flat.error().ToString();
  EXPECT_THAT(flat->layer.lower, IsEmpty());
  EXPECT_EQ(flat->layer.config, built->layer.config);
  EXPECT_EQ(Shown(flat->layer), shown);
  const auto packed = CompressLayer(*store_, mounts,
                                    {.ref = "image:1",
                                     .name = "packed:1",
                                     .labels = {},
                                     .first_touch = {},
                                     .compression = {Compression::kDefault}},
                                    nullptr);
  ASSERT_TRUE(packed.ok()) << packed.error().ToString();
  EXPECT_EQ(packed->layer.lower, built->layer.lower);
  EXPECT_EQ(Shown(packed->layer), shown);
}

TEST_F(PairsTest, ManyLayers_BecomeNoMorePairsThanABaseMayHave) {
  std::vector<std::vector<Member>> layers;
  for (int i = 0; i < 30; ++i)
    layers.push_back(
        {File(fmt::format("f{}", i), Bytes('x', 5000)), File("same", std::to_string(i))});
  EXPECT_THAT(ExpectSame(layers, 1).lower, SizeIs(Manifest::kMaxLower));
}

TEST_F(PairsTest, Workspaces_AreOneLayer) {
  BuildRequest request;
  request.kind = LayerKind::kWorkspace;
  request.source = SourceKind::kOciLayout;
  request.path = Layout({{File("a", Bytes('a', 9000))}, {File("b", Bytes('b', 9000))}});
  request.collapse_bytes = 1;
  const auto built = store_->Build(request, nullptr);
  ASSERT_TRUE(built.ok()) << built.error().ToString();
  EXPECT_THAT(built->layer.lower, IsEmpty());
}

}  // namespace
}  // namespace dsec::image

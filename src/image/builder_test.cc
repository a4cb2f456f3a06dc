// SPDX-License-Identifier: Apache-2.0
// Archives that mean harm, whiteouts and duplicates, from tar to what the kernel shows of the
// image. Needs root and file-backed EROFS (Linux 6.12).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>

#include "image/testing/archives.h"
#include "image/testing/harness.h"
#include "image/tree_builder.h"
#include "os/file.h"

namespace dsec::image {
namespace {

using testing::DescribeTree;
using testing::Device;
using testing::Dir;
using ::testing::ElementsAre;
using testing::File;
using testing::Hardlink;
using ::testing::HasSubstr;
using testing::Member;
using testing::Symlink;
using ::testing::UnorderedElementsAre;

// A folder with a canary beside the work; whatever is imported, nothing else may change. Every
// import is done twice: into an image, and by the kernel's file system into a folder. Both must
// accept or refuse, and show the same tree.
class BuilderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    testing::WriteFile(folder_.path() + "/canary", "untouched");
    ASSERT_EQ(::mkdir((folder_.path() + "/outside").c_str(), 0755), 0);
    ASSERT_EQ(::mkdir((folder_.path() + "/image").c_str(), 0755), 0);
    ASSERT_EQ(::mkdir((folder_.path() + "/tree").c_str(), 0755), 0);
    before_ = Outside();
  }
  void TearDown() override {
    if (::geteuid() == 0) EXPECT_EQ(Outside(), before_);
  }

  // The image's root, as the kernel shows it.
  std::string Tree() const { return fmt::format("/proc/self/fd/{}", mount_.get()); }

  std::vector<std::string> Outside() const {
    std::vector<std::string> lines;
    for (const std::string& line : testing::DescribeTree(folder_.path())) {
      if (!line.starts_with("tree") && !line.starts_with("image") && !line.starts_with(". ")) {
        lines.push_back(line);
      }
    }
    return lines;
  }

  // Layers of members, lowest first.
  Result<uint64_t> Import(const std::vector<std::vector<Member>>& layers,
                          bool keep_whiteouts = false, const ImportLimits& limits = {}) {
    std::vector<std::string> tars;
    for (const auto& members : layers) tars.push_back(testing::MakeTar(members));
    const TreeOptions options{limits, keep_whiteouts};
    const std::string image = folder_.path() + "/image";
    const std::string unpacked = folder_.path() + "/tree";
    auto built = testing::BuildImage(image, tars, options, warnings_);
    Warnings ignored;
    auto plain = testing::UnpackTars(unpacked, tars, options, ignored);
    if (built.ok()) {
      DSEC_TRY(mount_, testing::MountImage(image));
      EXPECT_EQ(testing::FsckImage(image), "");
      EXPECT_TRUE(plain.ok()) << plain.error().ToString();
      if (plain.ok()) {
        EXPECT_EQ(*plain, built->meta.entries);
        EXPECT_EQ(DescribeTree(mount_.get()), testing::DescribeTree(unpacked));
      }
    } else {
      EXPECT_FALSE(plain.ok()) << built.error().ToString();
      if (!plain.ok()) EXPECT_EQ(built.error().reason(), plain.error().reason());
    }
    EXPECT_TRUE(os::RemoveTree(AT_FDCWD, unpacked.c_str()).ok());
    EXPECT_EQ(::mkdir(unpacked.c_str(), 0755), 0);
    if (!built.ok()) return std::move(built).error();
    return built->meta.entries;
  }

  // What refused the import, or "accepted".
  std::string Refusal(const std::vector<Member>& members, const ImportLimits& limits = {}) {
    auto done = Import({members}, false, limits);
    if (done.ok()) return "accepted";
    message_ = done.error().ToString();
    return std::string(done.error().reason());
  }

  // Paths of the tree with what whiteouts left: "w" for a whiteout, "o" for an opaque folder.
  std::vector<std::string> Paths() const {
    std::vector<std::string> paths;
    for (const std::string& line : testing::DescribeTree(mount_.get())) {
      std::string path = line.substr(0, line.find(' '));
      if (path == ".") continue;
      if (line.find("dev 0:0") != std::string::npos) path += " w";
      if (line.find("trusted.overlay.opaque=y") != std::string::npos) path += " o";
      paths.push_back(path);
    }
    return paths;
  }

  std::string Content(const std::string& path) const {
    return *os::ReadFile(AT_FDCWD, (Tree() + "/" + path).c_str(), 1 << 20);
  }

  os::TempDir folder_ = *os::TempDir::Create("dsec-timg-");
  std::vector<std::string> before_;
  os::UniqueFd mount_;
  Warnings warnings_;
  std::string message_;
};

// --- case 111 ---

TEST_F(BuilderTest, LinkThenFileThroughIt_StaysInside) {
  const std::string outside = folder_.path() + "/outside";
  // Resolved as after a chroot into the tree, where these folders exist as well.
  ASSERT_TRUE(Import({{Dir(outside.substr(1)), Dir("outside"), Dir("tmp"), Symlink("abs", outside),
                       File("abs/x"), Symlink("up", "../outside"), File("up/y"),
                       Symlink("deep", "../../../../../../../../../../tmp"), File("deep/z")}})
                  .ok());
  EXPECT_EQ(Content("outside/y"), "x");
  EXPECT_EQ(Content("tmp/z"), "x");
  EXPECT_EQ(Content(outside.substr(1) + "/x"), "x");
  // Where they do not, there is nothing to write to.
  EXPECT_EQ(Refusal({Symlink("abs2", "/no/such/folder"), File("abs2/x")}), "layer.bad_path");
  EXPECT_THAT(message_, HasSubstr("abs2"));
}

TEST_F(BuilderTest, LinkToFileThenWrite_ReplacesTheLink) {
  ASSERT_TRUE(Import({{Symlink("l", folder_.path() + "/canary"), File("l", "mine")}}).ok());
  EXPECT_EQ(Content("l"), "mine");
}

TEST_F(BuilderTest, ParentNames_AreRefused) {
  for (const char* name : {"../x", "a/../../x", "..", "a/.."}) {
    EXPECT_EQ(Refusal({File(name)}), "layer.bad_path") << name;
    EXPECT_THAT(message_, HasSubstr(name));
  }
}

TEST_F(BuilderTest, AbsoluteNames_AreConfined) {
  ASSERT_TRUE(Import({{File("/etc/dsec-test"), File("//x//y")}}).ok());
  EXPECT_THAT(Paths(), ElementsAre("etc", "etc/dsec-test", "x", "x/y"));
}

TEST_F(BuilderTest, HardlinkOutside_IsRefused) {
  EXPECT_EQ(Refusal({Hardlink("h", "../canary")}), "layer.bad_hardlink");
  EXPECT_EQ(Refusal({Hardlink("h", folder_.path() + "/canary")}), "layer.bad_hardlink");
  EXPECT_EQ(Refusal({Symlink("s", folder_.path()), Hardlink("h", "s/canary")}),
            "layer.bad_hardlink");
  EXPECT_EQ(Refusal({Dir("d"), Hardlink("h", "d")}), "layer.bad_hardlink");
  EXPECT_EQ(Refusal({Hardlink("h", "h2"), Hardlink("h2", "h")}), "layer.bad_hardlink");
  EXPECT_EQ(Refusal({File("e/f"), Hardlink("e", "e/f")}), "layer.bad_hardlink");
  EXPECT_THAT(message_, HasSubstr("\"e\""));
}

TEST_F(BuilderTest, HardlinkToLink_NeverFollows) {
  ASSERT_TRUE(
      Import({{Symlink("s", folder_.path() + "/canary"), Hardlink("h", "s"), File("h", "new")}})
          .ok());
  EXPECT_EQ(Content("h"), "new");
  ASSERT_TRUE(
      Import({{File("f"), Hardlink("f", "f"), Hardlink("g", "f"), Hardlink("g", "f")}}).ok());
}

TEST_F(BuilderTest, DeviceNodes_AreDataAndNeverOpened) {
  // Opening this FIFO or the tape drive that no host has would block or fail.
  Member fifo{.name = "fifo", .type = '6'};
  ASSERT_TRUE(Import({{Device("disk", 9, 250), fifo, File("fifo2"), Device("null", 1, 3)}}).ok());
  struct stat status;
  ASSERT_EQ(::lstat((Tree() + "/disk").c_str(), &status), 0);
  EXPECT_TRUE(S_ISCHR(status.st_mode) && status.st_rdev == makedev(9, 250));
  EXPECT_EQ(Refusal({Device("d", 4096, 0)}), "layer.malformed");
  EXPECT_EQ(Refusal({Device("d", 1, 1 << 20)}), "layer.malformed");
}

TEST_F(BuilderTest, Caps_AreTyped) {
  ImportLimits limits;
  limits.max_entries = 100;
  std::vector<Member> many;
  for (int i = 0; i < 101; ++i) many.push_back(File(std::to_string(i), ""));
  EXPECT_EQ(Refusal(many, limits), "layer.too_many_entries");

  limits = {};
  limits.max_bytes = 1000;
  EXPECT_EQ(Refusal({File("a", std::string(600, 'x')), File("b", std::string(600, 'x'))}, limits),
            "layer.too_large");
  EXPECT_THAT(message_, HasSubstr("\"b\""));
  // A hole counts as what it looks like.
  Member sparse = File("s", "1\n0\n1\n" + std::string(506, '\0') + "x");
  sparse.pax = {{"GNU.sparse.major", "1"},
                {"GNU.sparse.minor", "0"},
                {"GNU.sparse.name", "s"},
                {"GNU.sparse.realsize", "9000000000000000000"}};
  EXPECT_EQ(Refusal({sparse}), "layer.too_large");

  limits = {};
  limits.max_metadata_bytes = 1000;
  Member wide = File("w");
  wide.pax = {{"SCHILY.xattr.user.big", std::string(2000, 'v')}};
  EXPECT_EQ(Refusal({wide}, limits), "layer.too_large");

  limits = {};
  limits.max_depth = 5;
  EXPECT_EQ(Refusal({File("1/2/3/4/5/6")}, limits), "layer.bad_path");
  // Deeper than any name: through a link that leads down.
  EXPECT_EQ(Refusal({Dir("a/b/c"), Symlink("s", "a/b/c"), Dir("s/d/e/f")}, limits),
            "layer.bad_path");
}

TEST_F(BuilderTest, LinkLoops_AreRefused) {
  EXPECT_EQ(Refusal({Symlink("a", "b"), Symlink("b", "a"), File("a/x")}), "layer.bad_path");
  EXPECT_EQ(Refusal({Symlink("d", "missing"), File("d/x")}), "layer.bad_path");
  EXPECT_EQ(Refusal({File("f"), File("f/x")}), "layer.bad_path");
}

TEST_F(BuilderTest, Duplicates_LastOneCounts) {
  ASSERT_TRUE(Import({{File("f", "1"), File("f", "2"), Dir("x"), File("x/in"), File("x", "file"),
                       File("y"), Dir("y"), File("y/in"), Symlink("z", "f"), Dir("z"),
                       Dir("k", 0700), Dir("k", 0711)}})
                  .ok());
  EXPECT_EQ(Content("f"), "2");
  EXPECT_EQ(Content("x"), "file");
  EXPECT_THAT(Paths(), ElementsAre("f", "k", "x", "y", "y/in", "z"));
  struct stat status;
  ASSERT_EQ(::stat((Tree() + "/k").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0711U);
}

TEST_F(BuilderTest, LinkReplacedByFolder_IsSeenByTheNextMember) {
  ASSERT_TRUE(Import({{Dir("d"), Symlink("d/loop", "."), File("d/loop/1"), Dir("d/loop"),
                       File("d/loop/2")}})
                  .ok());
  EXPECT_THAT(Paths(), ElementsAre("d", "d/1", "d/loop", "d/loop/2"));
}

TEST_F(BuilderTest, OverlayXattrs_AreLeftOutWithAWarning) {
  Member dir = Dir("d");
  dir.pax = {{"SCHILY.xattr.trusted.overlay.redirect", "/etc"},
             {"SCHILY.xattr.trusted.overlay.opaque", "y"},
             {"SCHILY.xattr.user.ok", "1"}};
  Member file = File("f");
  file.pax = {{"SCHILY.xattr.trusted.overlay.metacopy", ""}, {"SCHILY.xattr.com.apple.x", "1"}};
  ASSERT_TRUE(Import({{dir, file}}, true).ok());
  EXPECT_EQ(::getxattr((Tree() + "/d").c_str(), "trusted.overlay.redirect", nullptr, 0), -1);
  EXPECT_EQ(::getxattr((Tree() + "/d").c_str(), "trusted.overlay.opaque", nullptr, 0), -1);
  EXPECT_EQ(::getxattr((Tree() + "/d").c_str(), "user.ok", nullptr, 0), 1);
  EXPECT_EQ(warnings_.count(), 4U);
  EXPECT_THAT(warnings_.list()[0], HasSubstr("trusted.overlay"));
}

TEST_F(BuilderTest, OversizedXattr_IsRefusedByName) {
  Member file = File("f");
  file.pax = {{"SCHILY.xattr.user.big", std::string(70'000, 'v')}};
  EXPECT_EQ(Refusal({file}), "layer.xattr_too_large");
}

TEST_F(BuilderTest, Attributes_AreExact) {
  Member file = File("bin/su", "program");
  file.mode = 04755;
  file.uid = 1000;
  file.gid = 3'000'000'000;
  // VFS_CAP_REVISION_2 with cap_net_raw, linux/capability.h.
  file.pax = {
      {"SCHILY.xattr.security.capability",
       std::string(
           "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00", 20)},
      {"mtime", "-5"}};
  Member dir = Dir("bin", 01777);
  dir.mtime = 77;
  ASSERT_TRUE(Import({{dir, file, File("implicit/x")}}).ok());
  struct stat status;
  ASSERT_EQ(::stat((Tree() + "/bin/su").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 04755U);
  EXPECT_EQ(status.st_gid, 3'000'000'000U);
  EXPECT_EQ(status.st_mtime, -5);
  EXPECT_EQ(::getxattr((Tree() + "/bin/su").c_str(), "security.capability", nullptr, 0), 20);
  ASSERT_EQ(::stat((Tree() + "/bin").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 01777U);
  EXPECT_EQ(status.st_mtime, 77);
  ASSERT_EQ(::stat((Tree() + "/implicit").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0755U);
  EXPECT_EQ(status.st_mtime, 0);
}

// --- whiteouts ---

TEST_F(BuilderTest, WhiteoutsInABase_ActOnLowerLayersAndAreGone) {
  ASSERT_TRUE(
      Import(
          {{Dir("d"), File("d/low"), File("d/both", "1"), File("f"), Dir("tree"), File("tree/x/y")},
           {File("d/.wh.low"), File("d/.wh.both"), File("d/both", "2"), File(".wh.f"),
            File(".wh.tree"), File(".wh.never"), File(".wh..wh.plnk/1"), File(".wh..wh.aufs")}})
          .ok());
  EXPECT_THAT(Paths(), ElementsAre("d", "d/both"));
  EXPECT_EQ(Content("d/both"), "2");
}

TEST_F(BuilderTest, OpaqueFolder_HidesLowerButNotOwnLayerInAnyOrder) {
  const std::vector<Member> lower = {File("d/low"), File("d/sub/low"), File("d/keep/low")};
  for (const bool first : {false, true}) {
    std::vector<Member> upper = {Dir("d"), File("d/new"), Dir("d/sub"), File("d/sub/new"),
                                 File("d/keep/new")};
    upper.insert(first ? upper.begin() : upper.end(), File("d/.wh..wh..opq"));
    ASSERT_TRUE(Import({lower, upper}).ok());
    EXPECT_THAT(Paths(), ElementsAre("d", "d/keep", "d/keep/new", "d/new", "d/sub", "d/sub/new"))
        << first;
  }
}

TEST_F(BuilderTest, WhiteoutsInAToolkit_StayForTheOverlay) {
  ASSERT_TRUE(Import({{File("etc/own"), File("opt/x")},
                      {File("etc/.wh.base-file"), File("etc/.wh.own"), File("opt/.wh..wh..opq"),
                       File("opt/y"), File(".wh.gone"), Dir("gone"), File("gone/new"), Dir("dir"),
                       File(".wh.dir")}},
                     true)
                  .ok());
  EXPECT_THAT(Paths(), ElementsAre("dir o", "etc", "etc/base-file w", "etc/own w", "gone o",
                                   "gone/new", "opt o", "opt/y"));
}

TEST_F(BuilderTest, WhiteoutInLowerLayerOfAToolkit_GivesWayToWhatComesLater) {
  ASSERT_TRUE(Import({{File("a/.wh.f"), File("a/.wh.d"), File("a/.wh.implicit"), File("file")},
                      {File("a/f", "back"), Dir("a/d"), File("a/implicit/x"), Dir("file")}},
                     true)
                  .ok());
  EXPECT_THAT(Paths(), ElementsAre("a", "a/d o", "a/f", "a/implicit o", "a/implicit/x", "file o"));
}

TEST_F(BuilderTest, HostileWhiteouts_AreRefused) {
  EXPECT_EQ(Refusal({File(".wh...")}), "layer.bad_whiteout");
  EXPECT_EQ(Refusal({File("a/.wh.")}), "layer.bad_whiteout");
  EXPECT_EQ(Refusal({File(".wh.d/x")}), "layer.bad_whiteout");
  auto root = Import({{File(".wh..wh..opq")}}, true);
  EXPECT_EQ(root.error().reason(), "layer.bad_whiteout");
}

TEST_F(BuilderTest, WhiteoutThroughALink_StaysInside) {
  testing::WriteFile(folder_.path() + "/outside/file", "stay");
  before_ = Outside();
  ASSERT_TRUE(Import({{File("outside/file"), Symlink("up", "../outside")},
                      {File("up/.wh.file"), File("up/.wh..wh..opq")}})
                  .ok());
  EXPECT_THAT(Paths(), ElementsAre("outside", "up"));
  EXPECT_EQ(Refusal({Symlink("l", folder_.path() + "/outside"), File("l/.wh.file")}),
            "layer.bad_path");
}

TEST_F(BuilderTest, WhiteoutDevicesInABase_AreLeftOut) {
  ASSERT_TRUE(Import({{Device("w", 0, 0), File("f")}}).ok());
  EXPECT_THAT(Paths(), ElementsAre("f"));
  EXPECT_EQ(warnings_.count(), 1U);
}

TEST_F(BuilderTest, UpperLayer_ReplacesHardlinkedFileOfLowerWithoutTouchingItsTwin) {
  ASSERT_TRUE(Import({{File("a", "old"), Hardlink("b", "a")}, {File("a", "new")}}).ok());
  EXPECT_EQ(Content("a"), "new");
  EXPECT_EQ(Content("b"), "old");
}

}  // namespace
}  // namespace dsec::image

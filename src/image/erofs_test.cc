// SPDX-License-Identifier: Apache-2.0
// The EROFS writer before judges that we did not write: the kernel's mount, fsck.erofs, dump.erofs,
// GNU tar's unpacking and mkfs.erofs of what it unpacked. Trees are random; each failure names its
// seed. Needs root and file-backed EROFS (Linux 6.12).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "base/rng.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "image/testing/archives.h"
#include "image/testing/harness.h"
#include "os/file.h"

namespace dsec::image {
namespace {

using testing::BuildImage;
using testing::DescribeTree;
using testing::Device;
using testing::Dir;
using testing::File;
using testing::FsckImage;
using testing::Hardlink;
using testing::MakeTar;
using testing::Member;
using testing::MountImage;
using testing::Symlink;

bool Shell(const std::string& command) {
  return std::system(("set -e; " + command).c_str()) == 0;  // NOLINT(concurrency-mt-unsafe)
}

std::string Digits(uint64_t value, size_t width) { return fmt::format("{:0{}}", value, width); }

// Content whose size lies around the bounds of blocks and chunks, of zeros, repeats and noise.
std::string RandomContent(Rng& rng) {
  constexpr std::array<uint64_t, 9> kBounds = {0, 1, 4096, 8192, 65536, 131072, 200000, 4097, 100};
  uint64_t size = kBounds[rng.Below(kBounds.size())];
  size += rng.Below(3);
  size -= std::min<uint64_t>(size, rng.Below(3));
  std::string text;
  while (text.size() < size) {
    const size_t run = std::min<uint64_t>(size - text.size(), 1 + rng.Below(70'000));
    switch (rng.Below(3)) {
      case 0:
        text.append(run, '\0');
        break;
      case 1:
        text.append(run, static_cast<char>('a' + rng.Below(2)));
        break;
      default:
        for (size_t i = 0; i < run; ++i) text += static_cast<char>(rng.Next());
        break;
    }
  }
  return text;
}

std::string RandomName(Rng& rng, size_t number) {
  std::string name;
  const size_t length = rng.Below(20) == 0 ? 200 + rng.Below(40) : rng.Below(12);
  while (name.size() < length) {
    const auto byte =
        static_cast<char>(rng.Below(4) == 0 ? 1 + rng.Below(255) : 'a' + rng.Below(4));
    if (byte != '/') name += byte;
  }
  return name + Digits(number, 1);
}

void Decorate(Rng& rng, Member& member) {
  member.mode = static_cast<uint32_t>(rng.Below(010000));
  const auto id = [&]() -> uint64_t {
    return rng.Below(3) == 0 ? rng.Below(UINT32_MAX) : rng.Below(3) * 1000;
  };
  member.uid = id();
  member.gid = id();
  // Times before 1970 have whole seconds: libarchive misreads their fractions.
  member.mtime = rng.Below(3) == 0 ? 1'600'000'000 : static_cast<int64_t>(rng.Below(1ULL << 33));
  if (rng.Below(10) == 0) {
    member.pax["mtime"] = fmt::format("-{}", rng.Below(1'000'000'000));
  } else if (rng.Below(2) == 0) {
    member.pax["mtime"] = fmt::format("{}.{:09}", member.mtime, rng.Below(1'000'000'000));
  }
  if (member.type != '0' && member.type != '5') return;
  for (size_t i = rng.Below(4); i > 0; --i) {
    const std::string space = rng.Below(2) == 0 ? "user." : "trusted.";
    const size_t size = rng.Below(8) == 0 ? rng.Below(1500) : rng.Below(12);
    member.pax["SCHILY.xattr." + space + Digits(rng.Below(5), 1)] = std::string(size, 'v');
  }
}

// A tree of everything in the order that tar would write it, folders before what is in them.
std::vector<Member> RandomTree(Rng& rng) {
  std::vector<Member> members = {Dir(".")};
  std::vector<std::string> folders = {""};
  std::vector<std::string> files;
  const size_t count = 20 + rng.Below(150);
  for (size_t number = 0; number < count; ++number) {
    const std::string path = folders[rng.Below(folders.size())] + RandomName(rng, number);
    if (path.size() > 2000) continue;
    Member member;
    switch (rng.Below(8)) {
      case 0:
      case 1:
        member = Dir(path);
        folders.push_back(path + "/");
        break;
      case 2:
        member = Symlink(path, std::string(1 + rng.Below(rng.Below(5) == 0 ? 4000 : 60), 't'));
        break;
      case 3:
        if (files.empty()) continue;
        member = Hardlink(path, files[rng.Below(files.size())]);
        break;
      case 4:
        member = Device(path, 1 + static_cast<uint32_t>(rng.Below(4095)),
                        static_cast<uint32_t>(rng.Below(1 << 20)));
        if (rng.Below(2) == 0) member.type = '4';
        if (rng.Below(3) == 0) member = {.name = path, .type = '6'};
        break;
      default:
        member = File(path, RandomContent(rng));
        files.push_back(path);
        break;
    }
    if (member.type != '1') Decorate(rng, member);
    // Names and targets that no ustar header holds.
    member.pax["path"] = path;
    if (!member.target.empty()) member.pax["linkpath"] = member.target;
    member.name = "n";
    members.push_back(std::move(member));
  }
  return members;
}

class ErofsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    for (const char* name : {"image", "mkfs", "plain"}) {
      ASSERT_EQ(::mkdir(Path(name).c_str(), 0755), 0);
    }
  }
  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }

  void Unpack(const std::string& tar) {
    testing::WriteFile(Path("a.tar"), tar);
    ASSERT_TRUE(
        Shell(fmt::format("cd {}; rm -rf plain; mkdir plain; tar -C plain -xpf a.tar "
                          "--numeric-owner --delay-directory-restore --xattrs --xattrs-include='*'",
                          folder_.path())));
  }

  std::vector<std::string> Mounted(const std::string& name) {
    auto mount = MountImage(Path(name));
    EXPECT_TRUE(mount.ok()) << mount.error().ToString();
    return mount.ok() ? DescribeTree(mount->get()) : std::vector<std::string>();
  }

  // What mkfs.erofs makes of the unpacked tree. It keeps mtimes that lie, unsigned, before the
  // epoch.
  std::vector<std::string> MountedMkfs() {
    EXPECT_TRUE(
        Shell(fmt::format("cd {}/mkfs; SOURCE_DATE_EPOCH=18446744073709551614 mkfs.erofs --quiet "
                          "--preserve-mtime --blobdev={} --chunksize=65536 "
                          "-Enoinline_data,force-chunk-indexes {} ../plain >log 2>&1",
                          folder_.path(), kBlobName, kMetaName)));
    return Mounted("mkfs");
  }

  os::TempDir folder_ = *os::TempDir::Create("dsec-timg-");
  Warnings warnings_;
};

// Links of every folder below: ".", ".." of its children, and its name.
void CheckFolderLinks(int dirfd) {
  struct stat status;
  ASSERT_EQ(::fstat(dirfd, &status), 0);
  const auto names = ListNames(dirfd, UINT64_MAX);
  ASSERT_TRUE(names.ok());
  nlink_t links = 2;
  for (const std::string& name : *names) {
    struct stat child;
    ASSERT_EQ(::fstatat(dirfd, name.c_str(), &child, AT_SYMLINK_NOFOLLOW), 0);
    if (!S_ISDIR(child.st_mode)) continue;
    ++links;
    auto fd = os::OpenAt(dirfd, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    ASSERT_TRUE(fd.ok());
    CheckFolderLinks(fd->get());
  }
  EXPECT_EQ(status.st_nlink, links);
}

TEST_F(ErofsTest, RandomTrees_AreWhatTarUnpacksAndWhatMkfsMakesOfIt) {
  for (uint64_t seed = 1; seed <= 25; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(seed);
    const std::string tar = MakeTar(RandomTree(rng));
    Unpack(tar);
    auto built = BuildImage(Path("image"), {tar}, {}, warnings_);
    ASSERT_TRUE(built.ok()) << built.error().ToString();
    EXPECT_EQ(FsckImage(Path("image")), "");
    const auto plain = DescribeTree(Path("plain"));
    ASSERT_EQ(Mounted("image"), plain);
    EXPECT_EQ(built->meta.entries, plain.size() - 1);
    EXPECT_EQ(MountedMkfs(), plain);
    // Content takes no more room than mkfs.erofs needs, and metadata little more: it packs inodes
    // into the gaps that ours leaves.
    EXPECT_LE(built->blob.digest.size, std::filesystem::file_size(Path("mkfs/data.blob")));
    EXPECT_LE(built->meta.digest.size,
              std::filesystem::file_size(Path("mkfs/meta.erofs")) * 5 / 4 + 8192);
    auto mount = MountImage(Path("image"));
    auto root = os::OpenAt(mount->get(), ".", O_RDONLY | O_DIRECTORY);
    CheckFolderLinks(root->get());
    if (HasFailure()) return;
  }
  EXPECT_EQ(warnings_.count(), 0U);
}

// Few names, so that members meet: folders in place of files, links on the way, whiteouts of what
// is and what is not there. The kernel's file system resolves the names for the other side.
std::vector<Member> RandomLayer(Rng& rng) {
  const auto name = [&] { return std::string(1, static_cast<char>('a' + rng.Below(4))); };
  const auto path = [&] {
    std::string text = name();
    for (size_t depth = rng.Below(4); depth > 0; --depth) text += "/" + name();
    return text;
  };
  std::vector<Member> members;
  for (size_t count = 1 + rng.Below(12); count > 0; --count) {
    switch (rng.Below(10)) {
      case 0:
      case 1:
        members.push_back(Dir(path(), 0700 + static_cast<uint32_t>(rng.Below(64))));
        break;
      case 2:
        members.push_back(Symlink(path(), rng.Below(2) == 0 ? path() : "../" + path()));
        break;
      case 3:
        members.push_back(Symlink(path(), "/" + path()));
        break;
      case 4:
        members.push_back(Hardlink(path(), path()));
        break;
      case 5:
        members.push_back(File(path() + "/.wh." + name()));
        break;
      case 6:
        members.push_back(File(path() + "/.wh..wh..opq"));
        break;
      case 7:
        members.push_back(Device(path(), 0, 0));
        break;
      default:
        members.push_back(File(path(), Digits(rng.Next() % 5, 1)));
        break;
    }
    members.back().mtime = static_cast<int64_t>(rng.Below(1000));
  }
  return members;
}

TEST_F(ErofsTest, RandomLayers_EndAsTheKernelsFileSystemHasThem) {
  int accepted = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(seed);
    std::vector<std::string> tars;
    for (size_t layers = 1 + rng.Below(3); layers > 0; --layers) {
      tars.push_back(MakeTar(RandomLayer(rng)));
    }
    const TreeOptions options{{}, rng.Below(2) == 0};
    auto built = BuildImage(Path("image"), tars, options, warnings_);
    Warnings ignored;
    auto plain = testing::UnpackTars(Path("plain"), tars, options, ignored);
    ASSERT_EQ(built.ok(), plain.ok()) << (built.ok() ? plain.error() : built.error()).ToString();
    if (built.ok()) {
      ++accepted;
      ASSERT_EQ(Mounted("image"), DescribeTree(Path("plain")));
    } else {
      ASSERT_EQ(built.error().reason(), plain.error().reason());
    }
    ASSERT_TRUE(os::RemoveTree(AT_FDCWD, Path("plain").c_str()).ok());
    ASSERT_EQ(::mkdir(Path("plain").c_str(), 0755), 0);
  }
  EXPECT_GT(accepted, 50);
}

TEST_F(ErofsTest, OrderOfTheSource_ChangesNothing) {
  for (uint64_t seed = 100; seed < 110; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(seed);
    std::vector<Member> members = RandomTree(rng);
    // Links must come after their files; the first name of a file is as good as any.
    std::erase_if(members, [](const Member& member) { return member.type == '1'; });
    auto first = BuildImage(Path("image"), {MakeTar(members)}, {}, warnings_);
    ASSERT_TRUE(first.ok()) << first.error().ToString();
    rng.Shuffle(std::span(members));
    auto second = BuildImage(Path("mkfs"), {MakeTar(members)}, {}, warnings_);
    ASSERT_TRUE(second.ok()) << second.error().ToString();
    EXPECT_EQ(first->meta.digest, second->meta.digest);
    EXPECT_EQ(first->blob.digest, second->blob.digest);
  }
}

// The bytes are part of the format: another digest here needs another number of the format.
TEST_F(ErofsTest, KnownTree_HasTheBytesThatItHadEverywhere) {
  Member tool = File("bin/tool", std::string(100'000, 'x') + std::string(70'000, 'y'));
  tool.mode = 04755;
  tool.pax = {{"mtime", "1234567890.123456789"}, {"SCHILY.xattr.user.k", "shared by both files"}};
  Member twin = File("lib/twin", tool.data);
  twin.uid = 3'000'000'000;
  twin.pax = {{"SCHILY.xattr.user.k", "shared by both files"}};
  std::vector<Member> members = {Dir("bin"),
                                 tool,
                                 Dir("lib"),
                                 twin,
                                 File("zero", ""),
                                 Hardlink("also", "bin/tool"),
                                 Symlink("link", "bin/tool"),
                                 Device("null", 1, 3)};
  for (int i = 0; i < 400; ++i) members.push_back(File(fmt::format("many/{:0150}", i), ""));
  auto built = BuildImage(Path("image"), {MakeTar(members)}, {}, warnings_);
  ASSERT_TRUE(built.ok()) << built.error().ToString();
  EXPECT_EQ(FsckImage(Path("image")), "");
  EXPECT_EQ(built->meta.digest.sha256,
            "e4e1eb5c9db37f3f8338e78d668059cc7dd094939055cd932a46405a70591d19");
  EXPECT_EQ(built->blob.digest.sha256,
            "549f6b187a428e10c0f68820ede90e717a762c1bf899e61ea307dfe833530adb");
}

TEST_F(ErofsTest, DumpErofs_SeesTheSameFileSystem) {
  Rng rng(7);
  const std::string tar = MakeTar(RandomTree(rng));
  auto built = BuildImage(Path("image"), {tar}, {}, warnings_);
  ASSERT_TRUE(built.ok());
  const auto plain = Mounted("image");
  ASSERT_TRUE(Shell(fmt::format("cd {}/image; dump.erofs -s --device={} {} > dump", folder_.path(),
                                kBlobName, kMetaName)));
  const std::string text = *os::ReadFile(AT_FDCWD, Path("image/dump").c_str(), 1 << 20);
  const size_t links = static_cast<size_t>(std::ranges::count_if(
      plain, [](const std::string& line) { return line.find(" = ") != std::string::npos; }));
  std::set<std::string> groups;
  for (const std::string& line : plain) {
    if (const size_t at = line.rfind(" = "); at != std::string::npos)
      groups.insert(line.substr(at));
  }
  EXPECT_THAT(text, ::testing::ContainsRegex(
                        fmt::format("inode count: +{}\n", plain.size() - links + groups.size())));
  EXPECT_THAT(text, ::testing::HasSubstr("chunked_file device_table"));
}

// --- content ---

TEST_F(ErofsTest, SparseFilesOfEveryFormat_ComeOutRight) {
  ASSERT_TRUE(
      Shell(fmt::format("cd {}; truncate -s 30M plain/sparse; for at in 0 70000 9000000 "
                        "31457270; do printf data | dd of=plain/sparse bs=1 seek=$at "
                        "conv=notrunc status=none; done; truncate -s 5M plain/hole; "
                        "head -c 100000 /dev/urandom > plain/dense; touch -d @1000 plain/*; "
                        "touch -d @1000 plain",
                        folder_.path())));
  const auto plain = DescribeTree(Path("plain"));
  for (const char* format : {"gnu", "posix --sparse-version=0.0", "posix --sparse-version=0.1",
                             "posix --sparse-version=1.0"}) {
    ASSERT_TRUE(
        Shell(fmt::format("cd {}; tar -C plain --sparse --numeric-owner --format={} -cf a.tar .",
                          folder_.path(), format)));
    const std::string tar = *os::ReadFile(AT_FDCWD, Path("a.tar").c_str(), 64 << 20);
    auto built = BuildImage(Path("image"), {tar}, {}, warnings_);
    ASSERT_TRUE(built.ok()) << format << built.error().ToString();
    EXPECT_EQ(Mounted("image"), plain) << format;
    EXPECT_LE(built->blob.digest.size, 5U * ChunkStore::kChunkBytes + 102'400) << format;
  }
}

TEST_F(ErofsTest, EqualChunksAndOverwrittenFiles_TakeNoRoom) {
  Rng rng(3);
  std::string noise;
  while (noise.size() < 3 * ChunkStore::kChunkBytes) noise += static_cast<char>(rng.Next());
  const std::string low = MakeTar({File("gone", noise + "1"), File("kept", noise.substr(0, 200))});
  const std::string high = MakeTar({File("gone", noise), File("again", noise), File(".wh.never")});
  auto built = BuildImage(Path("image"), {low, high}, {}, warnings_);
  ASSERT_TRUE(built.ok()) << built.error().ToString();
  EXPECT_TRUE(built->blob.copied);
  EXPECT_EQ(built->blob.digest.size, noise.size() + 4096);
  EXPECT_EQ(built->meta.content_bytes, 2 * noise.size() + 200);
  EXPECT_EQ(FsckImage(Path("image")), "");
}

TEST_F(ErofsTest, FirstTouch_LiesInFrontInItsOrder) {
  const auto content = [](char c) { return std::string(3 * ChunkStore::kChunkBytes, c); };
  std::string mixed;
  for (const char c : {'p', 'q', 'r'}) mixed += std::string(ChunkStore::kChunkBytes, c);
  const std::string tar = MakeTar(
      {File("a", content('a')), File("d/b", content('b')), File("c", mixed), Symlink("l", "d")});
  const auto first = ParseFirstTouch("c\t65536\t10\n\n/l/b\nmissing\n");
  ASSERT_TRUE(first.ok()) << first.error().ToString();
  auto built = BuildImage(Path("image"), {tar}, {}, warnings_, *first);
  ASSERT_TRUE(built.ok()) << built.error().ToString();
  const std::string blob = *os::ReadFile(AT_FDCWD, Path("image/data.blob").c_str(), 8 << 20);
  std::string order;
  for (size_t at = 0; at < blob.size(); at += ChunkStore::kChunkBytes) order += blob[at];
  EXPECT_EQ(order, "qbapr");
  EXPECT_EQ(warnings_.count(), 1U);
  EXPECT_EQ(FsckImage(Path("image")), "");
  for (const char* bad : {"a\t1", "a\tx\t2", "a\t1\t2\t3", "a\t-1\t2"}) {
    EXPECT_EQ(ParseFirstTouch(bad).error().reason(), "layer.bad_first_touch") << bad;
  }
}

// A folder of many blocks, links of every length around the bounds of a block, and xattrs that fill
// what an inode can hold.
TEST_F(ErofsTest, LargeMetadata_IsReadBack) {
  std::vector<Member> members = {Dir("wide")};
  for (int i = 0; i < 20'000; ++i) members.push_back(File(fmt::format("wide/{:x}", i * 7919), ""));
  for (size_t length = 2990; length <= 4095; length += 17) {
    Member link = Symlink("n", "t");
    link.pax = {{"path", fmt::format("links/{}", length)}, {"linkpath", std::string(length, 't')}};
    members.push_back(link);
  }
  Member many = File("xattrs");
  for (int i = 0; i < 700; ++i) many.pax[fmt::format("SCHILY.xattr.user.{}", i)] = "v";
  Member big = File("xattr");
  big.pax = {{"SCHILY.xattr.user.big", std::string(UINT16_MAX, 'v')}};
  Member twin = many;
  twin.name = "xattrs2";
  members.insert(members.end(), {many, big, twin});
  auto built = BuildImage(Path("image"), {MakeTar(members)}, {}, warnings_);
  ASSERT_TRUE(built.ok()) << built.error().ToString();
  EXPECT_EQ(FsckImage(Path("image")), "");
  auto mount = MountImage(Path("image"));
  ASSERT_TRUE(mount.ok()) << mount.error().ToString();
  const auto lines = DescribeTree(mount->get());
  EXPECT_EQ(lines.size(), built->meta.entries + 1);
  const auto find = [&](const std::string& start) {
    const auto found = std::ranges::find_if(
        lines, [&](const std::string& line) { return line.starts_with(start); });
    return found == lines.end() ? std::string() : *found;
  };
  EXPECT_THAT(find("xattrs "), ::testing::HasSubstr(" user.699=v"));
  EXPECT_THAT(find("xattrs2 "), ::testing::HasSubstr(" user.0=v"));
  EXPECT_THAT(find("xattr "), ::testing::HasSubstr("(65535 bytes)"));
  for (size_t length = 2990; length <= 4095; length += 17) {
    EXPECT_THAT(find(fmt::format("links/{} ", length)),
                ::testing::HasSubstr(fmt::format("({} bytes)", length)));
  }
}

TEST_F(ErofsTest, DamagedFirstBlock_IsNoticed) {
  ASSERT_TRUE(BuildImage(Path("image"), {MakeTar({File("f")})}, {}, warnings_).ok());
  auto fd = os::OpenAt(AT_FDCWD, Path("image/meta.erofs").c_str(), O_RDWR);
  EXPECT_TRUE(CheckSuperblock(fd->get()).ok());
  ASSERT_EQ(::pwrite(fd->get(), "X", 1, 1300), 1);
  EXPECT_EQ(CheckSuperblock(fd->get()).error().reason(), "layer.corrupt");
}

}  // namespace
}  // namespace dsec::image

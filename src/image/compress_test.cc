// SPDX-License-Identifier: Apache-2.0
// Compressed layers before judges that we did not write: the kernel's mount beside the plain form,
// fsck.erofs, dump.erofs and mkfs.erofs -zlz4hc of the same tree. Needs root and an EROFS that is
// file-backed (Linux 6.12) and can decompress.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lz4.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "base/rng.h"
#include "image/compressor.h"
#include "image/erofs_mount.h"
#include "image/erofs_writer.h"
#include "image/flatten.h"
#include "image/layer_check.h"
#include "image/testing/archives.h"
#include "image/testing/harness.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::image {
namespace {

using testing::BuildImage;
using testing::BuiltImage;
using testing::DescribeTree;
using testing::Dir;
using testing::File;
using testing::FsckImage;
using testing::Hardlink;
using ::testing::HasSubstr;
using testing::MakeTar;
using testing::Member;
using testing::MountImage;

constexpr Compression kHc = {Compression::kDefault};

bool Shell(const std::string& command) {
  return std::system(("set -e; " + command).c_str()) == 0;  // NOLINT(concurrency-mt-unsafe)
}

std::string Noise(Rng& rng, size_t size) {
  std::string bytes(size, '\0');
  for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
    const uint64_t word = rng.Next();
    std::memcpy(bytes.data() + at, &word, std::min(sizeof(word), size - at));
  }
  return bytes;
}

// Words of which no two runs are alike for long, some 40% of it when compressed.
std::string Prose(Rng& rng, size_t size) {
  static constexpr std::array<std::string_view, 12> kWords = {
      "layer ",   "the ", "of ",   "chunk ", "static_cast<", "return ",
      "include ", "a ",   "node ", "{\n  ",  "is ",          ";\n"};
  std::string text;
  while (text.size() < size) {
    text += kWords[rng.Below(kWords.size())];
    if (rng.Below(3) == 0) text += fmt::format("{:x}", rng.Below(1 << 20));
  }
  text.resize(size);
  return text;
}

// Stretches of prose, zeros and noise, their ends near the bounds of blocks and chunks.
std::string Mixed(Rng& rng) {
  constexpr std::array<uint64_t, 8> kStretches = {1,      4096,    5000,   60'000,
                                                  65'536, 131'072, 70'000, 300};
  std::string text;
  for (uint64_t count = rng.Below(5); count > 0; --count) {
    uint64_t size = kStretches[rng.Below(kStretches.size())] + rng.Below(3);
    size -= std::min<uint64_t>(size, rng.Below(3));
    switch (rng.Below(4)) {
      case 0:
        text.append(size, '\0');
        break;
      case 1:
        text += Noise(rng, size);
        break;
      default:
        text += Prose(rng, size);
        break;
    }
  }
  return text;
}

class CompressTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    for (const char* name : {"plain", "packed"}) {
      ASSERT_EQ(::mkdir(Path(name).c_str(), 0755), 0);
    }
  }
  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }

  // Builds both forms and compares all that the kernel shows of them; leaves them there.
  void Compare(const std::vector<Member>& members) {
    const std::string tar = MakeTar(members);
    auto plain = BuildImage(Path("plain"), {tar}, {}, warnings_);
    ASSERT_TRUE(plain.ok()) << plain.error().ToString();
    plain_ = *plain;
    auto packed = BuildImage(Path("packed"), {tar}, {}, warnings_, {}, kHc);
    ASSERT_TRUE(packed.ok()) << packed.error().ToString();
    packed_ = *packed;
    EXPECT_EQ(FsckImage(Path("packed")), "");
    ASSERT_EQ(Shown("packed"), Shown("plain"));
  }

  std::vector<std::string> Shown(const std::string& image) const {
    auto mount = MountImage(Path(image));
    EXPECT_TRUE(mount.ok()) << mount.error().ToString();
    return mount.ok() ? DescribeTree(mount->get()) : std::vector<std::string>();
  }

  os::TempDir folder_ = *os::TempDir::Create("dsec-timg-");
  Warnings warnings_;
  BuiltImage plain_, packed_;
};

// --- the same content ---

TEST_F(CompressTest, RandomTrees_LookLikeThePlainForm) {
  uint64_t saved = 0;
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(seed);
    std::vector<Member> members = {Dir("d")};
    std::vector<std::string> contents = {""};
    for (int i = 0; i < 25; ++i) {
      std::string name = fmt::format("{}f{}", rng.Below(2) == 0 ? "d/" : "", i);
      if (rng.Below(8) == 0 && i > 0) {
        members.push_back(Hardlink(name, members[1 + rng.Below(members.size() - 1)].name));
        continue;
      }
      // Now and then content of another file, with what comes before or behind it.
      std::string text = rng.Below(4) == 0 ? contents[rng.Below(contents.size())] : Mixed(rng);
      if (rng.Below(6) == 0) text += Mixed(rng);
      contents.push_back(text);
      Member file = File(name, std::move(text));
      if (rng.Below(4) == 0) file.pax["SCHILY.xattr.user.k"] = std::string(rng.Below(99), 'v');
      members.push_back(std::move(file));
    }
    ASSERT_NO_FATAL_FAILURE(Compare(members));
    EXPECT_LE(packed_.blob.digest.size, plain_.blob.digest.size);
    saved += plain_.blob.digest.size - packed_.blob.digest.size;
  }
  EXPECT_GT(saved, 10U << 20);
}

TEST_F(CompressTest, SizesAroundEveryBound_ComeOutRight) {
  Rng rng(1);
  std::vector<Member> members;
  const auto add = [&](size_t size) {
    members.push_back(File(fmt::format("prose-{}", size), Prose(rng, size)));
    members.push_back(File(fmt::format("noise-{}", size), Noise(rng, size)));
    members.push_back(File(fmt::format("a-{}", size), std::string(size, 'a')));
    members.push_back(File(fmt::format("zeros-{}", size), std::string(size, '\0')));
    // A chunk of zeros between others, and a tail of every kind behind what compresses.
    std::string text = Prose(rng, 65'536) + std::string(65'536, '\0') + Noise(rng, 65'536);
    members.push_back(File(fmt::format("tail-prose-{}", size), text + Prose(rng, size)));
    members.push_back(File(fmt::format("tail-noise-{}", size), text + Noise(rng, size)));
    members.push_back(File(fmt::format("tail-zeros-{}", size), text + std::string(size, '\0')));
  };
  for (const size_t bound : {0, 4096, 8192, 12'288, 61'440, 65'536, 131'072}) {
    if (bound > 0) add(bound - 1);
    add(bound);
    add(bound + 1);
  }
  Compare(members);
}

TEST_F(CompressTest, ManySmallFiles_AreReadBack) {
  Rng rng(2);
  std::vector<Member> members;
  for (int i = 0; i < 5'000; ++i) {
    members.push_back(File(fmt::format("{}/{}", i % 50, i), Prose(rng, rng.Below(12'000))));
  }
  Compare(members);
  EXPECT_LT(packed_.blob.digest.size, plain_.blob.digest.size * 3 / 4);
}

TEST_F(CompressTest, RandomReads_GiveTheirBytes) {
  Rng rng(3);
  std::string content;
  while (content.size() < 8 << 20) content += Mixed(rng);
  ASSERT_TRUE(
      BuildImage(Path("packed"), {MakeTar({File("f", content)})}, {}, warnings_, {}, kHc).ok());
  auto mount = MountImage(Path("packed"));
  ASSERT_TRUE(mount.ok()) << mount.error().ToString();
  auto file = os::OpenAt(mount->get(), "f", O_RDONLY);
  ASSERT_TRUE(file.ok());
  ASSERT_EQ(::posix_fadvise(file->get(), 0, 0, POSIX_FADV_RANDOM), 0);
  std::string bytes;
  for (int i = 0; i < 3'000; ++i) {
    if (i % 500 == 0) {
      ASSERT_EQ(::posix_fadvise(file->get(), 0, 0, POSIX_FADV_DONTNEED), 0);
    }
    const size_t at = rng.Below(content.size());
    bytes.resize(std::min<size_t>(1 + rng.Below(20'000), content.size() - at));
    ASSERT_EQ(::pread(file->get(), bytes.data(), bytes.size(), static_cast<off_t>(at)),
              static_cast<ssize_t>(bytes.size()));
    ASSERT_TRUE(content.compare(at, bytes.size(), bytes) == 0) << at << " " << bytes.size();
  }
}

// One file whose content comes from a function of the offset.
class Generated : public EntrySource {
 public:
  using Fill = std::function<void(uint64_t, std::span<uint8_t>)>;
  // `start`: what lies before it is a hole.
  Generated(uint64_t start, uint64_t size, Fill fill)
      : at_(start), size_(size), fill_(std::move(fill)), buffer_(1 << 20) {}
  Result<bool> Next(Entry&) override { return false; }
  Result<DataRun> ReadData() override {
    const uint64_t step = std::min<uint64_t>(buffer_.size(), size_ - at_);
    const std::span<uint8_t> run(buffer_.data(), step);
    fill_(at_, run);
    at_ += step;
    return DataRun{at_ - step, run};
  }

 private:
  uint64_t at_;
  uint64_t size_;
  Fill fill_;
  std::vector<uint8_t> buffer_;
};

struct BuiltFile {
  uint64_t blob_bytes = 0;
  uint64_t meta_bytes = 0;
};
Result<BuiltFile> BuildFile(const std::string& folder, Generated source, uint64_t size) {
  DSEC_TRY(const auto dir, os::OpenAt(AT_FDCWD, folder.c_str(), O_RDONLY | O_DIRECTORY));
  DSEC_TRY(const auto chunks, ChunkStore::Create(dir.get(), kBlobName, kHc));
  Tree tree;
  Warnings warnings;
  TreeBuilder builder(tree, *chunks, {}, warnings);
  builder.BeginLayer(false);
  Entry entry;
  entry.path = "f";
  entry.size = size;
  DSEC_TRY_VOID(builder.Add(entry, source));
  DSEC_TRY_VOID(SettleContent(tree, *chunks));
  PlaceContent(tree, {}, *chunks, warnings);
  DSEC_TRY(const auto meta, os::OpenAt(dir.get(), kMetaName, O_RDWR | O_CREAT | O_EXCL, 0600));
  DSEC_TRY(const auto image, WriteErofs(tree, *chunks, meta.get(), nullptr));
  DSEC_TRY(const auto blob, chunks->Finish(nullptr));
  return BuiltFile{blob.digest.size, image.digest.size};
}

// All of it is one block, to which sixteen thousand extents lead.
TEST_F(CompressTest, GibibyteOfOneByte_IsABlock) {
  constexpr uint64_t kSize = 1 << 30;
  const auto built = BuildFile(
      Path("packed"),
      Generated(0, kSize,
                [](uint64_t, std::span<uint8_t> run) { std::ranges::fill(run, uint8_t{'a'}); }),
      kSize);
  ASSERT_TRUE(built.ok()) << built.error().ToString();
  EXPECT_EQ(built->blob_bytes, 4096U);
  EXPECT_LT(built->meta_bytes, 3U << 20);
  auto mount = MountImage(Path("packed"));
  ASSERT_TRUE(mount.ok()) << mount.error().ToString();
  auto file = os::OpenAt(mount->get(), "f", O_RDONLY);
  ASSERT_TRUE(file.ok());
  const std::string expected(1 << 20, 'a');
  std::string bytes(1 << 20, '\0');
  for (uint64_t at = 0; at < kSize; at += bytes.size()) {
    ASSERT_EQ(::pread(file->get(), bytes.data(), bytes.size(), static_cast<off_t>(at)),
              static_cast<ssize_t>(bytes.size()));
    ASSERT_TRUE(bytes == expected) << at;
    if (at % (64 << 20) == 0) ::posix_fadvise(file->get(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

// The map of a compressed file has an entry a block, so one of holes stays as it is.
TEST_F(CompressTest, HugeHole_CostsNoCompressedMap) {
  constexpr uint64_t kSize = uint64_t{32} << 30;
  const std::string text = "the end of a long way, the end of a long way, ";
  const auto built = BuildFile(Path("packed"),
                               Generated(kSize - 8'192, kSize,
                                         [&](uint64_t at, std::span<uint8_t> run) {
                                           for (uint64_t i = 0; i < run.size(); ++i) {
                                             run[i] =
                                                 static_cast<uint8_t>(text[(at + i) % text.size()]);
                                           }
                                         }),
                               kSize);
  ASSERT_TRUE(built.ok()) << built.error().ToString();
  EXPECT_EQ(built->blob_bytes, 65'536U);  // the chunk of it, plain
  EXPECT_LT(built->meta_bytes, 5U << 20);
  auto mount = MountImage(Path("packed"));
  ASSERT_TRUE(mount.ok());
  auto file = os::OpenAt(mount->get(), "f", O_RDONLY);
  std::string bytes(12'288, 'x');
  ASSERT_EQ(::pread(file->get(), bytes.data(), bytes.size(), kSize - 12'288), 12'288);
  EXPECT_EQ(bytes.substr(0, 4'096), std::string(4'096, '\0'));
  for (uint64_t i = 0; i < 8'192; ++i) {
    ASSERT_EQ(bytes[4'096 + i], text[(kSize - 8'192 + i) % text.size()]);
  }
}

// --- what is stored ---

TEST_F(CompressTest, Noise_GivesThePlainImage) {
  Rng rng(4);
  Compare({File("a", Noise(rng, 300'000)), File("b", Noise(rng, 5'000)), File("c", ""),
           File("hole", std::string(1 << 20, '\0')), File("short", "text, but of one block")});
  EXPECT_EQ(packed_.meta.digest, plain_.meta.digest);
  EXPECT_EQ(packed_.blob.digest, plain_.blob.digest);
  EXPECT_FALSE(packed_.meta.compressed);
}

TEST_F(CompressTest, FileOfMostlyNoise_StaysPlain) {
  Rng rng(5);
  Compare({File("f", Noise(rng, 2 << 20) + Prose(rng, 65'536))});
  EXPECT_EQ(packed_.blob.digest, plain_.blob.digest);
  // The same prose is compressed where that pays, and then is there in both forms.
  const std::string prose = Prose(rng, 65'536);
  Compare({File("f", Noise(rng, 2 << 20) + prose), File("g", prose)});
  EXPECT_TRUE(packed_.meta.compressed);
  EXPECT_GT(packed_.blob.digest.size, plain_.blob.digest.size);
}

TEST_F(CompressTest, EqualContent_IsStoredOnce) {
  Rng rng(6);
  const std::string prose = Prose(rng, 500'000);
  Compare({File("a", prose)});
  const uint64_t once = packed_.blob.digest.size;
  EXPECT_LT(once, prose.size() * 2 / 3);
  Compare({File("a", prose), File("b", prose), File("c", prose), Hardlink("d", "a"),
           File("longer", prose.substr(0, 7 * 65'536) + "and more")});
  EXPECT_LE(packed_.blob.digest.size, once + 4096);
}

TEST_F(CompressTest, FirstTouch_LiesInFront) {
  Rng rng(7);
  const std::string tar = MakeTar({File("a", Prose(rng, 300'000)), File("b", Prose(rng, 150'000))});
  ASSERT_TRUE(BuildImage(Path("plain"), {tar}, {}, warnings_, {}, kHc).ok());
  const auto first = ParseFirstTouch("b\t65536\t1\n");
  ASSERT_TRUE(BuildImage(Path("packed"), {tar}, {}, warnings_, *first, kHc).ok());
  EXPECT_EQ(Shown("packed"), Shown("plain"));
  EXPECT_EQ(FsckImage(Path("packed")), "");
  const std::string walk = *os::ReadFile(AT_FDCWD, Path("plain/data.blob").c_str(), 8 << 20);
  const std::string ours = *os::ReadFile(AT_FDCWD, Path("packed/data.blob").c_str(), 8 << 20);
  ASSERT_EQ(walk.size(), ours.size());
  EXPECT_NE(walk.substr(0, 4096), ours.substr(0, 4096));
  EXPECT_NE(walk.find(ours.substr(0, 4096)), std::string::npos);
}

TEST_F(CompressTest, SameTree_GivesTheSameBytes) {
  Rng rng(8);
  std::vector<Member> members;
  for (int i = 0; i < 50; ++i) members.push_back(File(fmt::format("f{}", i), Mixed(rng)));
  auto first = BuildImage(Path("plain"), {MakeTar(members)}, {}, warnings_, {}, kHc);
  rng.Shuffle(std::span(members));
  auto second = BuildImage(Path("packed"), {MakeTar(members)}, {}, warnings_, {}, kHc);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->meta.digest, second->meta.digest);
  EXPECT_EQ(first->blob.digest, second->blob.digest);
}

// With liblz4 of Debian 12; another one may find other matches (format_spec.md).
TEST_F(CompressTest, KnownTree_HasItsBytes) {
  if (std::string_view(::LZ4_versionString()) != "1.9.4") {
    GTEST_SKIP() << "the digests are of liblz4 1.9.4";
  }
  Rng rng(9);
  auto built = BuildImage(Path("packed"),
                          {MakeTar({File("a", Prose(rng, 200'000)), File("b", Noise(rng, 9'000)),
                                    File("c", Prose(rng, 5'000))})},
                          {}, warnings_, {}, kHc);
  ASSERT_TRUE(built.ok()) << built.error().ToString();
  EXPECT_EQ(built->meta.digest.sha256,
            "4f18d8d32d44add8dfcb87904ff2042168e296286d796af77182ae4489f342ab");
  EXPECT_EQ(built->blob.digest.sha256,
            "09b4c44a2792a9aaa6b97b4f548fe8d0368ab6c536d16b5088e49bb1615bc0e6");
}

// --- other judges ---

TEST_F(CompressTest, MkfsErofs_MakesTheSameTreeAndNotMuchLess) {
  ASSERT_TRUE(Shell(fmt::format(
      "cd {}; tar -C /usr/include --numeric-owner --sort=name -cf t.tar c++ linux; mkdir t; tar -C "
      "t -xf t.tar; mkfs.erofs --quiet --preserve-mtime -zlz4hc,9 -C65536 -Enoinline_data "
      "mkfs.erofs t",
      folder_.path())));
  const std::string tar = *os::ReadFile(AT_FDCWD, Path("t.tar").c_str(), 256 << 20);
  auto built = BuildImage(Path("packed"), {tar}, {}, warnings_, {}, kHc);
  ASSERT_TRUE(built.ok()) << built.error().ToString();
  EXPECT_EQ(FsckImage(Path("packed")), "");
  auto context = os::FsContext::Open("erofs");
  ASSERT_TRUE(context->SetString("source", Path("mkfs.erofs").c_str()).ok());
  ASSERT_TRUE(context->SetFlag("ro").ok());
  auto mount = std::move(*context).Mount(0);
  ASSERT_TRUE(mount.ok()) << mount.error().ToString();
  auto packed = Shown("packed"), mkfs = DescribeTree(mount->get());
  ASSERT_FALSE(packed.empty() || mkfs.empty());
  // The tar has no root, so its time differs.
  packed.erase(packed.begin());
  mkfs.erase(mkfs.begin());
  EXPECT_EQ(packed, mkfs);
  struct stat theirs;
  ASSERT_EQ(::stat(Path("mkfs.erofs").c_str(), &theirs), 0);
  const uint64_t ours = built->meta.digest.size + built->blob.digest.size;
  EXPECT_LT(ours, static_cast<uint64_t>(theirs.st_size) * 21 / 20);
}

TEST_F(CompressTest, DumpErofs_SeesLz4) {
  Rng rng(10);
  Compare({File("f", Prose(rng, 200'000))});
  ASSERT_TRUE(
      Shell(fmt::format("cd {}/packed; dump.erofs -s --device={} {} > dump; dump.erofs "
                        "--path=/f -e --device={} {} > extents",
                        folder_.path(), kBlobName, kMetaName, kBlobName, kMetaName)));
  const std::string text = *os::ReadFile(AT_FDCWD, Path("packed/dump").c_str(), 1 << 20);
  EXPECT_THAT(text, HasSubstr(" 0padding big_pcluster"));
  EXPECT_THAT(text, HasSubstr("device_table"));
  const std::string extents = *os::ReadFile(AT_FDCWD, Path("packed/extents").c_str(), 1 << 20);
  EXPECT_THAT(extents, HasSubstr("/f: 4 extents found"));
}

// --- what is no image of ours ---

TEST_F(CompressTest, ForeignImages_AreRefused) {
  Rng rng(11);
  ASSERT_TRUE(BuildImage(Path("packed"), {MakeTar({File("f", Prose(rng, 100'000))})}, {}, warnings_,
                         {}, kHc)
                  .ok());
  const std::string path = Path("packed/meta.erofs");
  const std::string good = *os::ReadFile(AT_FDCWD, path.c_str(), 1 << 20);
  const auto refused = [&](size_t at, std::initializer_list<uint8_t> bytes) {
    std::string image = good;
    std::ranges::copy(bytes, image.begin() + static_cast<ptrdiff_t>(at));
    testing::WriteFile(path, image);
    auto fd = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY);
    const auto checked = CheckSuperblock(fd->get());
    return checked.ok() ? std::string("accepted") : std::string(checked.error().reason());
  };
  EXPECT_EQ(refused(0, {}), "accepted");
  constexpr size_t kFeatures = 1024 + 80, kAlgorithms = 1024 + 84, kConfig = 1024 + 128;
  EXPECT_EQ(refused(kAlgorithms, {2}), "layer.corrupt");   // MicroLZMA
  EXPECT_EQ(refused(kAlgorithms, {3}), "layer.corrupt");   // one more
  EXPECT_EQ(refused(kConfig + 4, {17}), "layer.corrupt");  // clusters of 68 KiB
  EXPECT_EQ(refused(kConfig, {6}), "layer.corrupt");       // a short config
  EXPECT_EQ(refused(kFeatures, {0x0e}), "layer.corrupt");  // no zeros in front
  EXPECT_EQ(refused(kFeatures, {0x1f}), "layer.corrupt");  // tails
  EXPECT_EQ(refused(kFeatures, {0x2f}), "layer.corrupt");  // fragments
  EXPECT_EQ(refused(1024 + 200, {1}), "layer.corrupt");    // its checksum
  ASSERT_TRUE(
      Shell(fmt::format("mkdir {0}/t; echo x > {0}/t/x; mkfs.erofs --quiet -zlz4hc "
                        "{0}/packed/meta.erofs {0}/t",
                        folder_.path())));
  auto mkfs = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY);
  EXPECT_EQ(CheckSuperblock(mkfs->get()).error().reason(), "layer.corrupt");
}

TEST_F(CompressTest, DamagedContent_IsAnErrorOfTheReadAlone) {
  Rng rng(12);
  const std::string prose = Prose(rng, 200'000);
  ASSERT_TRUE(
      BuildImage(Path("packed"), {MakeTar({File("f", prose)})}, {}, warnings_, {}, kHc).ok());
  auto blob = os::OpenAt(AT_FDCWD, Path("packed/data.blob").c_str(), O_RDWR);
  const std::string noise = Noise(rng, 4096);
  ASSERT_EQ(::pwrite(blob->get(), noise.data(), noise.size(), 0), 4096);
  auto mount = MountImage(Path("packed"));
  ASSERT_TRUE(mount.ok());
  auto file = os::OpenAt(mount->get(), "f", O_RDONLY);
  std::string bytes(4096, '\0');
  ASSERT_EQ(::pread(file->get(), bytes.data(), bytes.size(), 60'000), -1);
  EXPECT_TRUE(errno == EIO || errno == EUCLEAN) << errno;
  ASSERT_EQ(::pread(file->get(), bytes.data(), bytes.size(), 150'000), 4096);
  EXPECT_EQ(bytes, prose.substr(150'000, 4096));
}

TEST_F(CompressTest, KernelThatReadsNone_IsATypedError) {
  Rng rng(13);
  Compare({File("f", Prose(rng, 100'000))});
  const auto reason = [&](const char* image, int number) {
    auto fd = os::OpenAt(AT_FDCWD, (Path(image) + "/meta.erofs").c_str(), O_RDONLY);
    const Error cause = Error(Code::kInternal, "os.mount", "no").WithErrno(number);
    return std::string(MountRefused(fd->get(), cause).reason());
  };
  EXPECT_EQ(reason("packed", EOPNOTSUPP), "layer.compression_unsupported");
  EXPECT_EQ(reason("packed", EINVAL), "layer.mount_failed");
  EXPECT_EQ(reason("plain", EOPNOTSUPP), "layer.mount_failed");
}

// --- in a store ---

class CompressStoreTest : public CompressTest {
 protected:
  void SetUp() override {
    CompressTest::SetUp();
    if (IsSkipped()) return;
    store_ = *LayerStore::Open(Path("store"));
    mounts_ = std::make_unique<LayerMounts>(*store_);
  }

  LayerInfo Build(LayerKind kind, const std::vector<Member>& members,
                  const Compression& compression = {}) {
    testing::WriteFile(Path("layer.tar"), MakeTar(members));
    BuildRequest request;
    request.kind = kind;
    request.source = SourceKind::kTar;
    request.path = Path("layer.tar");
    request.labels = {{"k", "v"}};
    request.compression = compression;
    auto built = store_->Build(request, nullptr);
    EXPECT_TRUE(built.ok()) << built.error().ToString();
    return built->layer;
  }
  static CompressRequest Request(const std::string& ref, const Compression& compression) {
    CompressRequest request;
    request.ref = ref;
    request.compression = compression;
    return request;
  }
  LayerInfo Compress(const LayerInfo& layer, const Compression& compression) {
    uint64_t calls = 0;
    auto built = CompressLayer(
        *store_, *mounts_, Request(layer.id.str(), compression), [&](const Progress& progress) {
          ++calls;
          EXPECT_LE(progress.bytes, std::max(progress.total_bytes, layer.content_bytes));
          return true;
        });
    EXPECT_TRUE(built.ok()) << built.error().ToString();
    EXPECT_GT(calls, 0U);
    return built->layer;
  }
  std::vector<std::string> Describe(const LayerInfo& layer) {
    auto mounted = mounts_->Acquire(layer.id);
    EXPECT_TRUE(mounted.ok()) << mounted.error().ToString();
    return DescribeTree((*mounted)->fd());
  }

  std::unique_ptr<LayerStore> store_;
  std::unique_ptr<LayerMounts> mounts_;
};

TEST_F(CompressStoreTest, ThereAndBack_IsTheSameLayer) {
  Rng rng(20);
  std::vector<Member> members = {Dir("d")};
  for (int i = 0; i < 40; ++i) members.push_back(File(fmt::format("d/{}", i), Mixed(rng)));
  for (const LayerKind kind : {LayerKind::kBase, LayerKind::kWorkspace}) {
    if (kind == LayerKind::kWorkspace) {
      members.push_back(File("d/.wh.gone"));
      members.push_back(File("o/.wh..wh..opq"));
    }
    const LayerInfo plain = Build(kind, members);
    const LayerInfo packed = Compress(plain, kHc);
    EXPECT_NE(packed.id, plain.id);
    EXPECT_LT(packed.blob_bytes, plain.blob_bytes);
    EXPECT_EQ(packed.kind, kind);
    EXPECT_EQ(packed.labels.at(kCompressedLabel), DescribeCompression(kHc));
    EXPECT_EQ(packed.labels.at("dsec.compress.layer"), plain.id.str());
    EXPECT_EQ(packed.labels.at("k"), "v");
    EXPECT_EQ(Describe(packed), Describe(plain));
    EXPECT_TRUE(VerifyLayer(*store_, packed.id.str(), nullptr).ok());
    EXPECT_EQ(Build(kind, members, kHc).id, packed.id);
    const LayerInfo again = Compress(packed, {});
    EXPECT_EQ(again.id, plain.id);
    EXPECT_FALSE(again.labels.contains(kCompressedLabel));
  }
}

TEST_F(CompressStoreTest, FlattenOfCompressedLayers_IsThatOfPlainOnes) {
  Rng rng(21);
  const std::vector<Member> low = {File("a", Prose(rng, 90'000)), File("b", Mixed(rng))};
  const std::vector<Member> high = {File("a", Prose(rng, 90'000)), File(".wh.b")};
  const auto flatten = [&](const Compression& parts, const Compression& whole) {
    FlattenRequest request;
    request.kind = LayerKind::kBase;
    request.refs = {Build(LayerKind::kBase, low, parts).id.str(),
                    Build(LayerKind::kToolkit, high, parts).id.str()};
    request.compression = whole;
    auto built = Flatten(*store_, *mounts_, request, nullptr);
    EXPECT_TRUE(built.ok()) << built.error().ToString();
    return built->layer;
  };
  const LayerInfo plain = flatten({}, {});
  EXPECT_EQ(flatten(kHc, {}).id, plain.id);
  const LayerInfo packed = flatten(kHc, kHc);
  EXPECT_NE(packed.id, plain.id);
  EXPECT_EQ(Describe(packed), Describe(plain));
}

TEST_F(CompressStoreTest, Cancelled_LeavesNothing) {
  Rng rng(22);
  const LayerInfo plain = Build(LayerKind::kBase, {File("a", Prose(rng, 3 << 20))});
  const auto stopped = CompressLayer(*store_, *mounts_, Request(plain.id.str(), kHc),
                                     [](const Progress&) { return false; });
  EXPECT_EQ(stopped.error().reason(), "layer.cancelled");
  EXPECT_EQ(store_->List({})->size(), 1U);
  EXPECT_EQ(CompressLayer(*store_, *mounts_, Request("no:1", kHc), nullptr).error().reason(),
            "layer.not_found");
}

TEST_F(CompressStoreTest, Damage_IsFoundByVerify) {
  Rng rng(23);
  const LayerInfo packed = Build(LayerKind::kBase, {File("a", Prose(rng, 300'000))}, kHc);
  const std::string blob = Path("store/blobs/") + packed.id.str().substr(7) + "/data.blob";
  auto fd = os::OpenAt(AT_FDCWD, blob.c_str(), O_RDWR);
  ASSERT_EQ(::pwrite(fd->get(), "X", 1, 8000), 1);
  EXPECT_EQ(VerifyLayer(*store_, packed.id.str(), nullptr).error().reason(), "layer.corrupt");
}

// --- the compressor by itself ---

TEST(CompressorTest, Words_AreParsed) {
  EXPECT_EQ(ParseCompression("none")->level, 0);
  EXPECT_EQ(ParseCompression("lz4hc")->level, 9);
  EXPECT_EQ(ParseCompression("lz4hc:12")->level, 12);
  for (const char* bad : {"", "lz4", "lz4hc:", "lz4hc:2", "lz4hc:13", "lz4hc:9x", "zstd", "lz4hcx",
                          "lz4hc:-9", "lz4hc: 9"}) {
    const auto parsed = ParseCompression(bad);
    ASSERT_FALSE(parsed.ok()) << bad;
    EXPECT_EQ(parsed.error().reason(), "layer.bad_compression");
  }
}

TEST(CompressorTest, Pieces_ComeBackOrStay) {
  Rng rng(30);
  for (int level = Compression::kLowest; level <= Compression::kHighest; ++level) {
    Compressor compressor({level});
    for (int i = 0; i < 60; ++i) {
      std::string text = Mixed(rng);
      text.resize(std::min(std::max<size_t>(text.size(), 1), Compressor::kMaxPiece));
      const std::span piece(reinterpret_cast<const uint8_t*>(text.data()), text.size());
      const auto blocks = compressor.Compress(piece);
      if (blocks.empty()) continue;
      EXPECT_EQ(blocks.size() % 4096, 0U);
      EXPECT_LT(blocks.size(), text.size());
      std::vector<uint8_t> out(text.size());
      ASSERT_TRUE(Compressor::Decompress(blocks, out).ok());
      EXPECT_TRUE(std::ranges::equal(out, piece));
      std::vector<uint8_t> shorter(text.size() - 1), longer(text.size() + 1);
      EXPECT_EQ(Compressor::Decompress(blocks, shorter).error().reason(), "layer.corrupt");
      EXPECT_EQ(Compressor::Decompress(blocks, longer).error().reason(), "layer.corrupt");
    }
  }
}

}  // namespace
}  // namespace dsec::image

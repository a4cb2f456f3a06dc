// SPDX-License-Identifier: Apache-2.0
// Layers built from every kind of source, mounted by the kernel and compared with what they were
// built from; concurrency, death and lack of space. Needs root and file-backed EROFS (Linux 6.12).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/fault.h"
#include "image/digest.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "image/testing/archives.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::image {
namespace {

using testing::DescribeTree;
using testing::Dir;
using ::testing::ElementsAre;
using testing::File;
using ::testing::HasSubstr;
using testing::LayoutLayer;
using testing::MakeTar;
using testing::Member;
using testing::Symlink;

void Shell(const std::string& command) {
  ASSERT_EQ(std::system(("set -e; " + command).c_str()), 0) << command;
}

bool Have(const char* program) {
  return std::system(fmt::format("command -v {} >/dev/null 2>&1", program).c_str()) == 0;
}

size_t CountEntries(const std::string& path) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path), {}));
}

class StoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    store_ = Open();
    Shell("mkdir -m 0755 " + Source());
  }
  void TearDown() override {
    if (store_ == nullptr) return;
    EXPECT_EQ(CountEntries(Root() + "/tmp"), 0U) << "a work folder stays";
  }

  std::string Root() const { return folder_.path() + "/layers"; }
  std::string Source() const { return folder_.path() + "/source"; }
  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }

  std::unique_ptr<LayerStore> Open() const {
    auto store = LayerStore::Open(Root());
    EXPECT_TRUE(store.ok()) << store.error().ToString();
    return store.ok() ? *std::move(store) : nullptr;
  }

  Result<BuildReport> Build(SourceKind source, const std::string& path,
                            LayerKind kind = LayerKind::kBase, const std::string& name = "") {
    BuildRequest request;
    request.kind = kind;
    request.name = name;
    request.source = source;
    request.path = path;
    return store_->Build(request, nullptr);
  }

  LayerId BuildId(SourceKind source, const std::string& path, LayerKind kind = LayerKind::kBase) {
    auto report = Build(source, path, kind);
    EXPECT_TRUE(report.ok()) << report.error().ToString();
    return report.ok() ? report->layer.id : LayerId();
  }

  std::shared_ptr<const MountedLayer> Acquire(LayerMounts& mounts, const LayerId& id) {
    auto mounted = mounts.Acquire(id);
    EXPECT_TRUE(mounted.ok()) << mounted.error().ToString();
    return mounted.ok() ? *mounted : nullptr;
  }

  std::vector<std::string> MountedTree(const LayerId& id) {
    LayerMounts mounts(*store_);
    auto layer = Acquire(mounts, id);
    return layer == nullptr ? std::vector<std::string>() : DescribeTree(layer->fd());
  }

  // One of everything.
  void FillSource() {
    Shell("cd " + Source() + R"sh(
      mkdir -p bin empty 'sp ace/deep/er'; chmod 1777 empty; chmod 0700 'sp ace'
      seq 1 200000 > big; head -c 70000 /dev/urandom > bin/tool; chmod 4755 bin/tool
      setcap cap_net_raw+ep bin/tool 2>/dev/null || true
      : > zero; printf x > one; head -c 4096 /dev/zero > page; printf '%s' "$(printf '\377\376')" > "$(printf 'bad\377name')"
      ln -s bin/tool link; ln -s /nowhere dangling; ln big hard1; ln big 'sp ace/hard2'
      truncate -s 20M sparse; printf mid | dd of=sparse bs=1 seek=9000000 conv=notrunc status=none
      mknod null c 1 3; mknod disk b 8 300; mkfifo fifo
      chown 1000:1000 one; chown 3000000000:65534 zero; chown -h 7:8 link
      setfattr -n user.note -v hello big; setfattr -n trusted.x -v y bin
      touch -d '2001-02-03 04:05:06.123456789' big; touch -h -d '1969-12-31 23:00:00.5' link; touch -d '2039-01-01' one
      touch -d '2010-10-10 10:10:10.000000001' bin
      chmod 000 page; mkdir many; for i in $(seq 1 300); do echo $i > many/$i; done)sh");
  }

  os::TempDir folder_ = *os::TempDir::Create("dsec-timg-");
  std::unique_ptr<LayerStore> store_;
};

// --- the content is right ---

TEST_F(StoreTest, Directory_MountsAsItWas) {
  FillSource();
  const auto before = DescribeTree(Source());
  auto report = Build(SourceKind::kDirectory, Source(), LayerKind::kBase, "all:1");
  ASSERT_TRUE(report.ok()) << report.error().ToString();
  EXPECT_FALSE(report->existed);
  EXPECT_EQ(report->warning_count, 0U) << report->warnings.front();
  EXPECT_EQ(report->layer.entries, before.size() - 1);
  EXPECT_EQ(MountedTree(report->layer.id), before);
  EXPECT_THAT(report->layer.names, ElementsAre("all:1"));
  // Bytes that nobody wrote take no room: 20 MiB of hole and a hard-linked file are stored once at
  // most.
  EXPECT_LT(report->layer.blob_bytes, 3U << 20);
}

TEST_F(StoreTest, TarOfEveryFormat_MountsAsTheFolderItWasMadeFrom) {
  FillSource();
  // What tar itself cannot say: fractions of times before 1970 (libarchive reads them wrong) and
  // trusted.* in a GNU header.
  Shell("touch -h -d '1969-12-31 23:00:00' " + Source() + "/link");
  const auto before = DescribeTree(Source());
  const std::string make = "tar -C " + Source() + " --sparse --numeric-owner ";
  Shell(make + "--xattrs --xattrs-include='*' --format=posix -cf " + Path("posix.tar") + " .");
  EXPECT_EQ(MountedTree(BuildId(SourceKind::kTar, Path("posix.tar"))), before);
  for (const char* program : {"gzip", "xz -1", "zstd -q", "bzip2 -1"}) {
    Shell(fmt::format("{} -c {} > {}", program, Path("posix.tar"), Path("packed")));
    EXPECT_EQ(BuildId(SourceKind::kTar, Path("packed")),
              BuildId(SourceKind::kTar, Path("posix.tar")))
        << program;
  }
  // GNU headers hold whole seconds and no xattrs.
  Shell("cd " + Source() +
        " && setfattr -x user.note big && setfattr -x trusted.x bin && (setcap -r bin/tool "
        "2>/dev/null || true)" +
        " && find . -depth -exec touch -h -d '2011-11-11 11:11:11' {} +");
  const auto whole = DescribeTree(Source());
  Shell(make + "--format=gnu -cf " + Path("gnu.tar") + " .");
  EXPECT_EQ(MountedTree(BuildId(SourceKind::kTar, Path("gnu.tar"))), whole);
  EXPECT_EQ(BuildId(SourceKind::kTar, Path("gnu.tar")), BuildId(SourceKind::kDirectory, Source()));
}

TEST_F(StoreTest, TarFromAPipe_Builds) {
  FillSource();
  Shell("tar -C " + Source() +
        " --numeric-owner --xattrs --xattrs-include='*' --format=posix -cf " + Path("a.tar") +
        " .");
  const std::string fifo = Path("pipe");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::thread writer([&] { Shell("cat " + Path("a.tar") + " > " + fifo); });
  const LayerId id = BuildId(SourceKind::kTar, fifo);
  writer.join();
  EXPECT_EQ(id, BuildId(SourceKind::kTar, Path("a.tar")));
}

TEST_F(StoreTest, EmptyTree_Mounts) {
  const LayerId id = BuildId(SourceKind::kDirectory, Source());
  EXPECT_EQ(MountedTree(id).size(), 1U);
}

TEST_F(StoreTest, ScratchImageOfOneBinary_KeepsItsConfig) {
  ImageConfig config{.env = {"A=b"},
                     .workdir = "/absent",
                     .user = "nobody-here",
                     .entrypoint = {"/app"},
                     .cmd = {"-v"}};
  Member app = File("app", "static binary");
  app.mode = 0755;
  Shell("mkdir " + Path("layout"));
  testing::WriteOciLayout(Path("layout"), {{.tar = MakeTar({app})}}, config);
  auto report = Build(SourceKind::kOciLayout, Path("layout"), LayerKind::kBase, "scratch:1");
  ASSERT_TRUE(report.ok()) << report.error().ToString();
  EXPECT_EQ(report->layer.entries, 1U);
  EXPECT_EQ(store_->Resolve("scratch:1", LayerKind::kBase)->config, config);
  // The same files without a config, or as another kind, are another layer.
  Shell("mkdir " + Path("plain"));
  testing::WriteOciLayout(Path("plain"), {{.tar = MakeTar({app})}}, {});
  EXPECT_NE(BuildId(SourceKind::kOciLayout, Path("plain")), report->layer.id);
  EXPECT_NE(BuildId(SourceKind::kOciLayout, Path("layout"), LayerKind::kToolkit), report->layer.id);
}

const std::vector<std::string> kImageTars = {
    MakeTar({Dir("etc"), File("etc/passwd", "root"), File("etc/old", "old"), Dir("lib"),
             File("lib/a", "a"), File("lib/b", "b")}),
    MakeTar({File("etc/.wh.old"), File("etc/new", "new"), Dir("lib"), File("lib/.wh..wh..opq"),
             File("lib/c", "c")}),
    MakeTar({File("etc/passwd", "root\nuser")})};

TEST_F(StoreTest, OciLayersAndDockerArchive_FlattenToTheSameLayer) {
  const ImageConfig config{
      .env = {"PATH=/bin"}, .workdir = "/", .user = "", .entrypoint = {}, .cmd = {"sh"}};
  Shell("mkdir " + Path("layout"));
  std::vector<LayoutLayer> layers = {{.tar = kImageTars[0],
                                      .media_type = "application/vnd.oci.image.layer.v1.tar+gzip",
                                      .blob = testing::Compress("gzip", kImageTars[0])},
                                     {.tar = kImageTars[1],
                                      .media_type = "application/vnd.oci.image.layer.v1.tar+zstd",
                                      .blob = testing::Compress("zstd -q", kImageTars[1])},
                                     {.tar = kImageTars[2]}};
  testing::WriteOciLayout(Path("layout"), layers, config, "v1");
  const LayerId id = BuildId(SourceKind::kOciLayout, Path("layout"));
  std::vector<std::string> paths;
  for (const std::string& line : MountedTree(id)) paths.push_back(line.substr(0, line.find(' ')));
  EXPECT_THAT(paths, ElementsAre(".", "etc", "etc/new", "etc/passwd", "lib", "lib/c"));

  testing::WriteFile(Path("image.tar"), testing::MakeDockerArchive(kImageTars, config, "img:1"));
  EXPECT_EQ(BuildId(SourceKind::kDockerArchive, Path("image.tar")), id);
  Shell("gzip -k " + Path("image.tar"));
  EXPECT_EQ(BuildId(SourceKind::kDockerArchive, Path("image.tar.gz")), id);
  // As a toolkit the whiteouts stay.
  const auto toolkit =
      MountedTree(BuildId(SourceKind::kDockerArchive, Path("image.tar"), LayerKind::kToolkit));
  EXPECT_THAT(toolkit, ::testing::Contains(::testing::ContainsRegex("etc/old .*dev 0:0")));
  EXPECT_THAT(toolkit, ::testing::Contains(::testing::ContainsRegex("lib .*opaque=y")));
}

TEST_F(StoreTest, ArchiveThatSkopeoWrote_GivesTheSameLayer) {
  if (!Have("skopeo")) GTEST_SKIP() << "skopeo is not installed";
  const ImageConfig config{
      .env = {"PATH=/bin"}, .workdir = "/w", .user = "1", .entrypoint = {"/e"}, .cmd = {"sh"}};
  Shell("mkdir " + Path("layout"));
  testing::WriteOciLayout(Path("layout"),
                          {{.tar = kImageTars[0]}, {.tar = kImageTars[1]}, {.tar = kImageTars[2]}},
                          config, "v1");
  const LayerId id = BuildId(SourceKind::kOciLayout, Path("layout"));
  const std::string copy =
      "cd " + folder_.path() + " && skopeo --insecure-policy copy -q oci:layout:v1 ";
  Shell(copy + "docker-archive:saved.tar:img:1");
  EXPECT_EQ(BuildId(SourceKind::kDockerArchive, Path("saved.tar")), id);
  Shell(copy + "--dest-oci-accept-uncompressed-layers=false oci:packed:v2 2>/dev/null || true");
  if (std::filesystem::exists(Path("packed"))) {
    EXPECT_EQ(BuildId(SourceKind::kOciLayout, Path("packed")), id);
  }
}

TEST_F(StoreTest, DamagedImage_IsRefused) {
  Shell("mkdir " + Path("layout"));
  testing::WriteOciLayout(Path("layout"), {{.tar = kImageTars[0]}}, {});
  const std::string blob = Path("layout") + "/blobs/sha256/" + Sha256Hex(kImageTars[0]);
  std::string bad = kImageTars[0];
  bad.back() = 'x';  // behind the end of the archive, where no reader of tar looks
  testing::WriteFile(blob, bad);
  EXPECT_EQ(Build(SourceKind::kOciLayout, Path("layout")).error().reason(),
            "layer.digest_mismatch");
  Shell("rm " + blob + " && ln -s /etc/passwd " + blob);
  EXPECT_EQ(Build(SourceKind::kOciLayout, Path("layout")).error().reason(), "layer.source");
  auto archive = testing::MakeDockerArchive({kImageTars[0]}, {}, "a:1");
  archive.replace(archive.find("old"), 3, "odd");
  testing::WriteFile(Path("bad.tar"), archive);
  EXPECT_FALSE(Build(SourceKind::kDockerArchive, Path("bad.tar")).ok());
}

TEST_F(StoreTest, BadSources_AreNamed) {
  EXPECT_EQ(Build(SourceKind::kDirectory, Path("missing")).error().reason(), "layer.source");
  EXPECT_EQ(Build(SourceKind::kTar, Path("missing")).error().reason(), "layer.source");
  EXPECT_EQ(Build(SourceKind::kTar, Source()).error().reason(), "layer.source");
  EXPECT_EQ(Build(SourceKind::kTar, "/dev/zero").error().reason(), "layer.source");
  EXPECT_EQ(Build(SourceKind::kOciLayout, Source()).error().reason(), "layer.source");
  testing::WriteFile(Path("text"), "not an archive at all, not even nearly");
  EXPECT_EQ(Build(SourceKind::kTar, Path("text")).error().reason(), "layer.malformed");
  EXPECT_EQ(Build(SourceKind::kDirectory, Source(), LayerKind::kBase, "Bad Name").error().reason(),
            "layer.bad_name");
}

TEST_F(StoreTest, SourceWithAMountInside_IsRefused) {
  ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
  ASSERT_EQ(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
  Shell("mkdir " + Source() + "/proc && mount -t tmpfs none " + Source() + "/proc");
  auto report = Build(SourceKind::kDirectory, Source());
  Shell("umount " + Source() + "/proc");
  EXPECT_EQ(report.error().reason(), "layer.source_crosses_mount");
  EXPECT_THAT(report.error().ToString(), HasSubstr("proc"));
}

// --- identity ---

TEST_F(StoreTest, SameContent_GivesTheSameIdWhateverTheOrderOfTheFolder) {
  const auto fill = [&](const std::string& folder, const std::string& order) {
    Shell("mkdir -m 0755 " + folder + "; for i in $(seq 1 200 | " + order + "); do mkdir " +
          folder + "/d$i; echo $i > " + folder + "/d$i/f; seq $i 3000 > " + folder +
          "/n$i; done; find " + folder + " -depth -exec touch -h -d @1000 {} +");
  };
  fill(Path("a"), "cat");
  fill(Path("b"), "sort -rn");
  const LayerId a = BuildId(SourceKind::kDirectory, Path("a"));
  auto b = Build(SourceKind::kDirectory, Path("b"));
  ASSERT_TRUE(b.ok());
  EXPECT_EQ(b->layer.id, a);
  EXPECT_TRUE(b->existed);
  EXPECT_EQ(CountEntries(Root() + "/blobs"), 1U);
  // One byte, one mode bit, one nanosecond: another layer.
  Shell("touch -d @1000.000000001 " + Path("b") + "/n1");
  EXPECT_NE(BuildId(SourceKind::kDirectory, Path("b")), a);
}

TEST_F(StoreTest, ConcurrentBuildsOfOneThing_GiveOneResult) {
  FillSource();
  std::vector<std::thread> threads;
  std::array<Result<BuildReport>, 4> reports = {
      Error(Code::kInternal, "t", ""), Error(Code::kInternal, "t", ""),
      Error(Code::kInternal, "t", ""), Error(Code::kInternal, "t", "")};
  for (auto& report : reports) {
    threads.emplace_back(
        [&] { report = Build(SourceKind::kDirectory, Source(), LayerKind::kBase, "same:1"); });
  }
  for (auto& thread : threads) thread.join();
  int made = 0;
  for (auto& report : reports) {
    ASSERT_TRUE(report.ok()) << report.error().ToString();
    EXPECT_EQ(report->layer.id, reports[0]->layer.id);
    if (!report->existed) ++made;
  }
  EXPECT_EQ(made, 1);
  EXPECT_EQ(CountEntries(Root() + "/blobs"), 1U);
}

TEST_F(StoreTest, Names_MoveAndKindsDoNotMix) {
  testing::WriteFile(Source() + "/f", "1");
  const LayerId first = Build(SourceKind::kDirectory, Source(), LayerKind::kBase, "app")->layer.id;
  testing::WriteFile(Source() + "/f", "22");
  const LayerId second =
      Build(SourceKind::kDirectory, Source(), LayerKind::kBase, "app:latest")->layer.id;
  EXPECT_EQ(store_->Resolve("app", LayerKind::kBase)->id, second);
  EXPECT_TRUE(store_->Resolve(first.str(), LayerKind::kBase)->names.empty());
  EXPECT_EQ(store_->Resolve("app", LayerKind::kToolkit).error().reason(), "layer.wrong_kind");
  EXPECT_EQ(store_->Resolve("no:such", LayerKind::kBase).error().reason(), "layer.not_found");
  EXPECT_EQ(Build(SourceKind::kDirectory, Source(), LayerKind::kToolkit, "app").error().reason(),
            "layer.kind_conflict");
}

// --- interruption ---

TEST_F(StoreTest, Cancel_LeavesNothing) {
  FillSource();
  Shell("head -c 200M /dev/urandom > " + Source() + "/large");
  BuildRequest request;
  request.path = Source();
  for (const auto phase :
       {Progress::Phase::kRead, Progress::Phase::kWrite, Progress::Phase::kPublish}) {
    auto report =
        store_->Build(request, [&](const Progress& progress) { return progress.phase != phase; });
    ASSERT_FALSE(report.ok()) << static_cast<int>(phase);
    EXPECT_EQ(report.error().reason(), "layer.cancelled");
    EXPECT_EQ(CountEntries(Root() + "/tmp"), 0U);
    EXPECT_EQ(CountEntries(Root() + "/blobs"), 0U);
  }
}

// A process of its own that builds and dies by kill -9.
TEST_F(StoreTest, KilledBuild_IsSweptByTheNextOpenAndNotWhileItRuns) {
  FillSource();
  Shell("head -c 150M /dev/urandom > " + Source() + "/large");
  store_.reset();
  std::array<int, 2> pipe;
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    auto store = LayerStore::Open(Root());
    BuildRequest request;
    request.path = Source();
    auto report = (*store)->Build(request, [&](const Progress& progress) {
      if (progress.phase == Progress::Phase::kWrite) {
        static_cast<void>(!::write(pipe[1], "w", 1));
        ::pause();
      }
      return true;
    });
    ::_exit(0);
  }
  char byte;
  ASSERT_EQ(::read(pipe[0], &byte, 1), 1);
  store_ = Open();  // must leave the running build alone
  EXPECT_EQ(CountEntries(Root() + "/tmp"), 1U);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  store_ = Open();
  EXPECT_EQ(CountEntries(Root() + "/tmp"), 0U);
  EXPECT_EQ(CountEntries(Root() + "/blobs"), 0U);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST_F(StoreTest, DeathBetweenFilesAndCatalogue_LeavesNoOrphan) {
  FillSource();
  for (const char* point : {"layer.publish.before_catalog", "layer.remove.after_catalog"}) {
    const bool removing = std::string_view(point).find("remove") != std::string_view::npos;
    if (removing) {
      ASSERT_TRUE(Build(SourceKind::kDirectory, Source(), LayerKind::kBase, "victim:1").ok());
    }
    store_.reset();
    const pid_t child = ::fork();
    if (child == 0) {
      auto store = LayerStore::Open(Root());
      if (!fault::Arm(fmt::format("{}=kill", point)).ok()) ::_exit(3);
      BuildRequest request;
      request.path = Source();
      if (removing) {
        static_cast<void>((*store)->Remove("victim:1"));
      } else {
        static_cast<void>((*store)->Build(request, nullptr));
      }
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status)) << point;
    EXPECT_EQ(CountEntries(Root() + "/blobs"), 1U) << point;
    store_ = Open();
    EXPECT_EQ(CountEntries(Root() + "/blobs"), 0U) << point;
    EXPECT_TRUE(store_->List({})->empty()) << point;
  }
}

TEST_F(StoreTest, LostCatalogue_IsRebuiltWithOriginsAndWithoutNames) {
  FillSource();
  BuildRequest request;
  request.kind = LayerKind::kToolkit;
  request.path = Source();
  request.name = "a:1";
  request.labels = {{"made", "first"}};
  const auto first = store_->Build(request, nullptr);
  ASSERT_TRUE(first.ok()) << first.error().ToString();
  // The same content again: where it comes from is what the last build says.
  request.labels = {{"made", "second \n\xc3\xa9"}, {"by", "me"}};
  const auto second = store_->Build(request, nullptr);
  ASSERT_TRUE(second.ok()) << second.error().ToString();
  ASSERT_TRUE(second->existed);
  const LayerInfo known = second->layer;
  const auto rebuild = [&] {
    store_.reset();
    Shell("rm " + Root() + "/catalog.db");
    store_ = Open();
    return *store_->Resolve(known.id.str(), LayerKind::kToolkit);
  };
  LayerInfo found = rebuild();
  EXPECT_EQ(found.id, known.id);
  EXPECT_TRUE(found.names.empty());
  EXPECT_EQ(found.labels, request.labels);
  EXPECT_EQ(found.source, Source());
  EXPECT_GE(found.created_unix_ms, known.created_unix_ms) << "of the second build";
  EXPECT_EQ(found.entries, known.entries);
  EXPECT_EQ(found.content_bytes, known.content_bytes);
  // An origin that cannot be read costs the origin, not the layer.
  const std::string origin = Root() + "/blobs/" + known.id.str().substr(7) + "/origin.json";
  for (const char* spoil : {"echo '{\"labels\":{\"a\":1},\"source\":\"s\"}' > ", ": > ", "rm "}) {
    Shell(spoil + origin);
    found = rebuild();
    EXPECT_EQ(found.id, known.id) << spoil;
    EXPECT_TRUE(found.labels.empty()) << spoil;
  }
}

// --- space (case 118) ---

TEST_F(StoreTest, TooLittleSpace_IsRefusedEarlyAndLeavesNothing) {
  ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
  ASSERT_EQ(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
  store_.reset();
  Shell("mount -t tmpfs -o size=100M none " + Root());
  store_ = Open();
  Shell("head -c 60M /dev/urandom > " + Source() + "/a; tar -C " + Source() + " -cf " +
        Path("a.tar") + " .; gzip -1kf " + Path("a.tar"));
  uint64_t taken = 0;
  for (const auto& [kind, path] :
       {std::pair(SourceKind::kDirectory, Source()), std::pair(SourceKind::kTar, Path("a.tar")),
        std::pair(SourceKind::kTar, Path("a.tar.gz"))}) {
    BuildRequest request;
    request.source = kind;
    request.path = path;
    auto report = store_->Build(request, [&](const Progress& progress) {
      taken = std::max(taken, progress.bytes);
      return true;
    });
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.error().reason(), "layer.no_space") << report.error().ToString();
    EXPECT_EQ(report.error().code(), Code::kResourceExhausted);
    EXPECT_EQ(CountEntries(Root() + "/tmp"), 0U);
  }
  EXPECT_EQ(taken, 0U) << "known before any work";
  // A size that nobody can know before: it ends during the work, in order.
  // Its period of 3,001 bytes makes each chunk another.
  Shell("rm " + Source() + "/a; yes $(head -c 3000 /dev/zero | tr '\\0' z) | head -c 400M > " +
        Source() + "/z; tar -C " + Source() + " -czf " + Path("z.tgz") + " .");
  auto report = Build(SourceKind::kTar, Path("z.tgz"));
  EXPECT_EQ(report.error().reason(), "layer.no_space") << report.error().ToString();
  EXPECT_EQ(CountEntries(Root() + "/tmp"), 0U);
  store_.reset();
  Shell("umount " + Root());
}

TEST_F(StoreTest, FolderInThePlaceOfALinkOfMostBases_IsWarnedOf) {
  BuildRequest request;
  request.kind = LayerKind::kToolkit;
  request.source = SourceKind::kTar;
  request.path = folder_.path() + "/tool.tar";
  testing::WriteFile(request.path, MakeTar({File("lib/x", "x"), File("usr/lib/y", "y")}));
  auto built = store_->Build(request, nullptr);
  ASSERT_TRUE(built.ok()) << built.error().ToString();
  ASSERT_EQ(built->warning_count, 1u);
  EXPECT_TRUE(built->warnings[0].starts_with("/lib is a folder")) << built->warnings[0];
}

TEST_F(StoreTest, Bomb_IsRefusedBeforeItFillsTheStore) {
  // 10 GiB of zeros in 10 MiB, made of gzip members that each hold 64 MiB of them.
  Shell("cd " + folder_.path() + R"sh(
      truncate -s 10G zeros; (tar -cf - zeros 2>/dev/null || true) | head -c 512 | gzip > bomb.tgz
      head -c 64M /dev/zero | gzip > part; for i in $(seq 160); do cat part >> bomb.tgz; done; rm zeros)sh");
  auto report = Build(SourceKind::kTar, Path("bomb.tgz"));
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().reason(), "layer.bomb") << report.error().ToString();
}

// --- mounts ---

std::string MountInfo() { return *os::ReadFile(AT_FDCWD, "/proc/self/mountinfo", 1 << 20); }

TEST_F(StoreTest, Mount_IsSharedDetachedAndEndsWithItsLastOwner) {
  FillSource();
  const LayerId id = BuildId(SourceKind::kDirectory, Source());
  const std::string before = MountInfo();
  LayerMounts mounts(*store_);
  auto first = Acquire(mounts, id);
  auto second = Acquire(mounts, id);
  EXPECT_EQ(first.get(), second.get());
  EXPECT_EQ(mounts.mounted(), 1U);
  EXPECT_EQ(MountInfo(), before);
  EXPECT_EQ(first->info().id, id);
  first.reset();
  EXPECT_EQ(mounts.mounted(), 1U);
  second.reset();
  EXPECT_EQ(mounts.mounted(), 0U);
  EXPECT_EQ(Acquire(mounts, id)->info().id, id);
}

TEST_F(StoreTest, KeptMount_IsUsedAgainAndStandsInNobodysWay) {
  FillSource();
  const LayerId id = BuildId(SourceKind::kDirectory, Source());
  LayerMounts mounts(*store_);
  const auto device = [&] {
    struct stat root;
    EXPECT_EQ(::fstat(Acquire(mounts, id)->fd(), &root), 0);
    return root.st_dev;
  };
  const dev_t first = device();
  EXPECT_EQ(mounts.idle(), 1U);
  EXPECT_EQ(device(), first);
  mounts.Trim();
  EXPECT_EQ(mounts.idle(), 1U);
  ASSERT_TRUE(mounts.Settle());
  EXPECT_TRUE(store_->Remove(id.str()).ok());
  EXPECT_EQ(mounts.Acquire(id).error().reason(), "layer.not_found");
  mounts.Trim();
  EXPECT_EQ(mounts.idle(), 0U);
}

TEST_F(StoreTest, KeptMounts_AreBounded) {
  FillSource();
  const LayerId one = BuildId(SourceKind::kDirectory, Source());
  Shell("echo more > " + Source() + "/more");
  const LayerId two = BuildId(SourceKind::kDirectory, Source());
  LayerMounts mounts(*store_, {.keep_idle = 1});
  Acquire(mounts, one).reset();
  auto held = Acquire(mounts, two);
  EXPECT_EQ(mounts.idle(), 1U);
  held.reset();
  EXPECT_EQ(mounts.idle(), 1U);
  held = Acquire(mounts, two);
  EXPECT_EQ(mounts.idle(), 0U);
  LayerMounts none(*store_, {.keep_idle = 0});
  Acquire(none, one).reset();
  EXPECT_EQ(none.idle(), 0U);
}

TEST_F(StoreTest, ConcurrentAcquires_MakeOneMount) {
  FillSource();
  const LayerId id = BuildId(SourceKind::kDirectory, Source());
  LayerMounts mounts(*store_);
  std::array<std::shared_ptr<const MountedLayer>, 8> layers;
  std::vector<std::thread> threads;
  for (auto& layer : layers) threads.emplace_back([&] { layer = *mounts.Acquire(id); });
  for (auto& thread : threads) thread.join();
  for (const auto& layer : layers) EXPECT_EQ(layer.get(), layers[0].get());
}

TEST_F(StoreTest, ReadAhead_IsRaisedOnTheMountsDevice) {
  FillSource();
  const LayerId id = BuildId(SourceKind::kDirectory, Source());
  const auto devices = [] {
    std::map<std::string, std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator("/sys/class/bdi")) {
      const std::string name = entry.path().filename();
      if (name.starts_with("erofs-"))
        found[name] = *os::ReadFile(AT_FDCWD, (entry.path() / "read_ahead_kb").c_str(), 64);
    }
    return found;
  };
  const auto before = devices();
  LayerMounts mounts(*store_, {.read_ahead_kib = 768});
  auto layer = Acquire(mounts, id);
  size_t raised = 0;
  for (const auto& [name, value] : devices()) {
    if (!before.contains(name) && value == "768\n") ++raised;
  }
  EXPECT_EQ(raised, 1U);
}

TEST_F(StoreTest, LayerMountedElsewhere_MountsHereToo) {
  FillSource();
  const LayerId id = BuildId(SourceKind::kDirectory, Source());
  LayerMounts mounts(*store_);
  auto here = Acquire(mounts, id);
  auto other_store = Open();
  LayerMounts other(*other_store);
  auto there = Acquire(other, id);
  EXPECT_EQ(DescribeTree(here->fd()), DescribeTree(there->fd()));
}

TEST_F(StoreTest, DamagedLayer_IsNotMounted) {
  FillSource();
  const LayerId id = Build(SourceKind::kDirectory, Source(), LayerKind::kBase, "d:1")->layer.id;
  const std::string folder = Root() + "/blobs/" + id.str().substr(7);
  const auto reason = [&] {
    LayerMounts mounts(*store_);  // without a copy of its own
    auto mounted = mounts.Acquire(id);
    return mounted.ok() ? std::string("mounted") : std::string(mounted.error().reason());
  };
  EXPECT_EQ(reason(), "mounted");
  Shell("printf X | dd of=" + folder + "/meta.erofs bs=1 seek=3000 conv=notrunc status=none");
  EXPECT_EQ(reason(), "layer.corrupt");
  Shell("rm -r " + folder + "/data.blob");
  EXPECT_NE(reason(), "mounted");
  // Building it again heals what is visibly damaged.
  auto again = Build(SourceKind::kDirectory, Source());
  ASSERT_TRUE(again.ok()) << again.error().ToString();
  EXPECT_EQ(again->layer.id, id);
  EXPECT_FALSE(again->existed);
  EXPECT_EQ(reason(), "mounted");
  Shell("rm -r " + folder);
  EXPECT_EQ(reason(), "layer.not_found");
}

TEST_F(StoreTest, Remove_IsRefusedWhileInUseAndTakesNamesOneByOne) {
  FillSource();
  const LayerId id = Build(SourceKind::kDirectory, Source(), LayerKind::kBase, "a:1")->layer.id;
  ASSERT_TRUE(Build(SourceKind::kDirectory, Source(), LayerKind::kBase, "a:2").ok());
  LayerMounts mounts(*store_);
  auto layer = Acquire(mounts, id);
  auto other = Open();  // as `dsec layer rm` beside a running node
  EXPECT_EQ(other->Remove(id.str()).error().reason(), "layer.in_use");
  EXPECT_TRUE(other->Remove("a:1").ok());  // a name only
  EXPECT_EQ(other->Remove("a:2").error().reason(), "layer.in_use");
  EXPECT_EQ(store_->Remove("a:2").error().reason(), "layer.in_use");
  layer.reset();
  ASSERT_TRUE(mounts.Settle());
  EXPECT_EQ(
      other->Remove("a:2", [](const LayerId&) -> Result<bool> { return true; }).error().reason(),
      "layer.in_use");
  ASSERT_TRUE(other->Remove("a:2").ok());
  EXPECT_EQ(CountEntries(Root() + "/blobs"), 0U);
  EXPECT_EQ(mounts.Acquire(id).error().reason(), "layer.not_found");
  EXPECT_EQ(other->Remove("a:2").error().reason(), "layer.not_found");
}

// Base, workspace and toolkit in one overlay as the sandboxes have it: order, deletion by a
// toolkit, setuid through a nosuid lower.
TEST_F(StoreTest, Overlay_ComposesLayersAndHonoursWhiteoutsAndSetuid) {
  const std::string id = *os::ReadFile(AT_FDCWD, "/usr/bin/id", 4 << 20);
  Member program = File("bin/id", id);
  program.mode = 04755;
  program.uid = 12345;
  testing::WriteFile(
      Path("base.tar"),
      MakeTar({Dir("bin"), program, File("etc/keep", "base"), File("etc/drop", "base"),
               File("shared/name", "base"), File("wd/old", "base")}));
  testing::WriteFile(Path("work.tar"),
                     MakeTar({File("shared/name", "workspace"), File("shared/only", "workspace")}));
  testing::WriteFile(Path("kit.tar"), MakeTar({File("etc/.wh.drop"), File("shared/name", "toolkit"),
                                               File("wd/.wh..wh..opq"), File("wd/new", "toolkit"),
                                               File("opt/kit", "v1")}));
  LayerMounts mounts(*store_);
  const auto base = Acquire(mounts, BuildId(SourceKind::kTar, Path("base.tar")));
  const auto work =
      Acquire(mounts, BuildId(SourceKind::kTar, Path("work.tar"), LayerKind::kWorkspace));
  const auto kit = Acquire(mounts, BuildId(SourceKind::kTar, Path("kit.tar"), LayerKind::kToolkit));
  auto context = os::FsContext::Open("overlay");
  ASSERT_TRUE(context.ok());
  for (const auto& layer : {kit, work, base})
    ASSERT_TRUE(context->SetFd("lowerdir+", layer->fd()).ok());
  auto overlay = std::move(*context).Mount(0);
  ASSERT_TRUE(overlay.ok()) << overlay.error().ToString();
  const auto content = [&](const char* path) {
    auto text = os::ReadFile(overlay->get(), path, 1 << 20);
    return text.ok() ? *text : std::string("missing");
  };
  EXPECT_EQ(content("etc/keep"), "base");
  EXPECT_EQ(content("etc/drop"), "missing");
  EXPECT_EQ(content("shared/name"), "toolkit");
  EXPECT_EQ(content("shared/only"), "workspace");
  EXPECT_EQ(content("wd/old"), "missing");
  EXPECT_EQ(content("wd/new"), "toolkit");
  EXPECT_EQ(content("opt/kit"), "v1");

  ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
  ASSERT_EQ(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
  Shell("mkdir " + Path("mnt"));
  ASSERT_TRUE(os::MoveMount(overlay->get(), AT_FDCWD, Path("mnt").c_str()).ok());
  overlay->Reset();
  Shell("setpriv --reuid 1 --clear-groups " + Path("mnt") + "/bin/id -u > " + Path("uid") +
        " 2>/dev/null; umount " + Path("mnt"));
  EXPECT_EQ(*os::ReadFile(AT_FDCWD, Path("uid").c_str(), 100), "12345\n");
}

}  // namespace
}  // namespace dsec::image

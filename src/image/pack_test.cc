// SPDX-License-Identifier: Apache-2.0
// What overlayfs leaves in an upper folder, as a layer: the judge is overlayfs itself, which must
// show over the layer what it showed over the upper. Needs root and Linux 6.13.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <random>

#include "image/dir_source.h"
#include "image/flatten.h"
#include "image/layer_mounts.h"
#include "image/testing/archives.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::image {
namespace {

using testing::DescribeTree;
using ::testing::HasSubstr;

// For programs started by this one too.
std::string PathOf(int fd) { return fmt::format("/proc/{}/fd/{}", ::getpid(), fd); }

// As DescribeTree, but a file that is the only one of its links there is one without links: over a
// file that was copied up, overlayfs goes on to show the count of its lower layer for the others.
std::vector<std::string> Described(int root) {
  std::vector<std::string> lines = DescribeTree(root);
  std::map<std::string, int> groups;
  const auto group = [](const std::string& line) { return line.rfind(" = "); };
  for (const std::string& line : lines) {
    if (group(line) != std::string::npos) ++groups[line.substr(group(line))];
  }
  for (std::string& line : lines) {
    if (group(line) != std::string::npos && groups[line.substr(group(line))] == 1) {
      line.erase(group(line));
    }
  }
  return lines;
}

// An overlay on the kernel, with a writable layer on a tmpfs when it has one.
struct Overlay {
  os::UniqueFd disk, upper, work, root;
  std::string path() const { return PathOf(root.get()); }
};

class PackTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    auto opened = LayerStore::Open(folder_.path() + "/store");
    ASSERT_TRUE(opened.ok()) << opened.error().ToString();
    store_ = std::move(*opened);
    mounts_ = std::make_unique<LayerMounts>(*store_);
  }

  // A layer of what `fill` makes in a folder.
  std::string Layer(LayerKind kind, const std::string& name,
                    const std::function<void(const std::string&)>& fill) {
    const std::string tree = folder_.path() + "/tree";
    EXPECT_EQ(::mkdir(tree.c_str(), 0755), 0);
    fill(tree);
    BuildRequest request;
    request.kind = kind;
    request.name = name;
    request.path = tree;
    const auto built = store_->Build(request, nullptr);
    EXPECT_TRUE(built.ok()) << built.error().ToString();
    std::filesystem::remove_all(tree);
    return built.ok() ? built->layer.id.str() : "";
  }

  // Lowest first.
  Overlay Mount(const std::vector<std::string>& layers, bool writable) {
    Overlay overlay;
    auto context = os::FsContext::Open("overlay").value();
    for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
      auto mounted = mounts_->Acquire(LayerId(*layer));
      EXPECT_TRUE(mounted.ok()) << mounted.error().ToString();
      EXPECT_TRUE(context.SetFd("lowerdir+", (*mounted)->fd()).ok());
      held_.push_back(*mounted);
    }
    if (writable) {
      overlay.disk = std::move(*os::FsContext::Open("tmpfs")).Mount(0).value();
      for (auto [name, fd] :
           {std::pair("upper", &overlay.upper), std::pair("work", &overlay.work)}) {
        EXPECT_EQ(::mkdirat(overlay.disk.get(), name, 0755), 0);
        *fd = os::OpenAt(overlay.disk.get(), name, O_RDONLY | O_DIRECTORY).value();
      }
      EXPECT_TRUE(context.SetFd("upperdir", overlay.upper.get()).ok());
      EXPECT_TRUE(context.SetFd("workdir", overlay.work.get()).ok());
      EXPECT_TRUE(context.SetFlag("volatile").ok());
    }
    // As sandbox/rootfs.cc.
    constexpr std::pair<const char*, const char*> kOptions[] = {
        {"redirect_dir", "nofollow"}, {"metacopy", "off"}, {"index", "off"}, {"xino", "auto"}};
    for (const auto& [key, value] : kOptions) {
      EXPECT_TRUE(context.SetString(key, value).ok());
    }
    auto root = std::move(context).Mount(0);
    EXPECT_TRUE(root.ok()) << root.error().ToString();
    overlay.root = os::OpenAt(root->get(), ".", O_RDONLY | O_DIRECTORY).value();
    return overlay;
  }

  Result<BuildReport> TryPack(int upper, PackRules rules = {.default_scrub = false},
                              IdRange ids = {}) {
    PackFilter filter(std::move(rules));
    BuildRequest request;
    request.kind = LayerKind::kWorkspace;
    request.path = "test";
    request.open = [&](Warnings& warnings) -> Result<std::unique_ptr<ImageReader>> {
      OverlayFolders folders;
      DSEC_TRY(auto own, os::OpenAt(upper, ".", O_RDONLY | O_DIRECTORY));
      folders.folders.push_back(std::move(own));
      folders.ids = ids;
      folders.filter = &filter;
      return OpenOverlayFolders(std::move(folders), request.limits, warnings);
    };
    return store_->Build(request, nullptr);
  }
  std::string Pack(const Overlay& overlay) {
    auto packed = TryPack(overlay.upper.get());
    EXPECT_TRUE(packed.ok()) << packed.error().ToString();
    return packed.ok() ? packed->layer.id.str() : "";
  }
  std::string Flattened(LayerKind kind, const std::vector<std::string>& refs) {
    FlattenRequest request;
    request.refs = refs;
    request.kind = kind;
    auto flat = Flatten(*store_, *mounts_, request, nullptr);
    EXPECT_TRUE(flat.ok()) << flat.error().ToString();
    return flat.ok() ? flat->layer.id.str() : "";
  }
  std::vector<std::string> Shown(const std::vector<std::string>& layers) {
    if (layers.size() == 1) {
      auto mounted = mounts_->Acquire(LayerId(layers.front()));
      EXPECT_TRUE(mounted.ok());
      return Described((*mounted)->fd());
    }
    return Described(Mount(layers, false).root.get());
  }

  os::TempDir folder_ = os::TempDir::Create("dsec-tpack-").value();
  std::unique_ptr<LayerStore> store_;
  std::unique_ptr<LayerMounts> mounts_;
  std::vector<std::shared_ptr<const MountedLayer>> held_;
};

void Shell(const std::string& folder, const std::string& script) {
  ASSERT_EQ(std::system(("set -e; cd " + folder + "; " + script).c_str()), 0) << script;
}

void FillBase(const std::string& tree) {
  Shell(tree,
        "mkdir -p etc usr/bin usr/lib/deep/er home/u; echo passwd > etc/passwd; echo a > usr/bin/a;"
        "echo b > usr/bin/b; chmod 4755 usr/bin/a; ln usr/bin/a usr/bin/hard; ln -s a usr/bin/link;"
        "echo x > usr/lib/deep/er/x; echo y > usr/lib/deep/y; chown 1000:1000 home/u;"
        "echo data > home/u/f; setfattr -n user.k -v v home/u/f || true");
}

TEST_F(PackTest, Changes_ShowTheSameOverTheSameLayers) {
  const std::string base = Layer(LayerKind::kBase, "", FillBase);
  const std::string workspace = Layer(LayerKind::kWorkspace, "", [](const std::string& tree) {
    Shell(tree, "mkdir -p work/src usr/lib; echo w > work/src/w; echo z > usr/lib/z");
  });
  const Overlay live = Mount({base, workspace}, true);
  Shell(live.path(),
        "rm usr/bin/b; rm -r usr/lib/deep; mkdir usr/lib/deep; echo new > usr/lib/deep/new;"
        "echo more >> etc/passwd; chmod 0600 etc/passwd; rm -r work/src; echo file > work/src;"
        "rm home/u/f; mkdir home/u/f; ln usr/bin/a usr/bin/second; mkfifo pipe;"
        "truncate -s 10M sparse; echo end >> sparse; touch -d @-5.25 old; ln -s /etc/passwd link;"
        "rm usr/bin/link; chown 4242:17 etc; mkdir -m 1777 sticky; printf 'a\\nb' > 'new\nline'");
  const std::string packed = Pack(live);
  const auto shown = Described(live.root.get());
  EXPECT_EQ(Shown({base, workspace, packed}), shown);
  // The same upper again: the same layer.
  EXPECT_EQ(Pack(live), packed);
  // Chains as one layer, above the base and with it.
  const std::string flat = Flattened(LayerKind::kWorkspace, {workspace, packed});
  EXPECT_EQ(Shown({base, flat}), shown);
  const std::string whole = Flattened(LayerKind::kBase, {base, workspace, packed});
  EXPECT_EQ(Shown({whole}), shown);
  EXPECT_EQ(store_->Find(packed)->labels.size(), 0U);
  EXPECT_EQ(store_->Find(flat)->labels.at("dsec.flatten.layers"), workspace + "," + packed);
}

TEST_F(PackTest, OnAnotherBase_DeletesAndHidesThereToo) {
  const std::string base = Layer(LayerKind::kBase, "", FillBase);
  const std::string other = Layer(LayerKind::kBase, "", [](const std::string& tree) {
    Shell(tree,
          "mkdir -p usr/bin usr/lib/deep other; echo B > usr/bin/b; echo C > usr/bin/c;"
          "echo D > usr/lib/deep/d");
  });
  const Overlay live = Mount({base}, true);
  Shell(live.path(),
        "rm usr/bin/b; rm -r usr/lib/deep; mkdir usr/lib/deep; echo n > usr/lib/deep/n;"
        "rm home/u/f; touch home/u; rm etc/passwd");
  const std::string packed = Pack(live);
  const Overlay over = Mount({other, packed}, false);
  Shell(over.path(),
        "test ! -e usr/bin/b; test -e usr/bin/c; test ! -e usr/lib/deep/d;"
        "test -e usr/lib/deep/n; test -d other;"
        // Folders that the other base has not: what was deleted in them is in no listing either.
        "test -z \"$(ls -A home/u)\"; test -z \"$(ls -A etc)\"");
  // Alone under a writable layer, and as the lower of two that meet there.
  const std::string third = Layer(LayerKind::kToolkit, "", [](const std::string& tree) {
    Shell(tree, "mkdir -p etc tool; echo t > etc/t");
  });
  const Overlay three = Mount({other, packed, third}, true);
  Shell(three.path(),
        "test \"$(ls -A etc)\" = t; test -z \"$(ls -A home/u)\"; echo again > home/u/f;"
        "test \"$(ls -A home/u)\" = f; rm -r home; test ! -e home; mkdir home; test -z \"$(ls -A "
        "home)\"");
}

// Random operations through overlayfs, for some hundred trees.
TEST_F(PackTest, RandomOperations_ShowTheSame) {
  const std::string base = Layer(LayerKind::kBase, "", FillBase);
  const std::string workspace = Layer(LayerKind::kWorkspace, "", [](const std::string& tree) {
    Shell(tree, "mkdir -p usr/bin a/b/c; echo w > a/b/w; echo w > a/b/c/w; echo w > usr/bin/w");
  });
  const std::vector<std::string> names = {"a", "b", "c", "usr", "bin", "lib", "deep", "w", "link"};
  constexpr int kTrees = 60;
  constexpr int kOperations = 60;
  for (int seed = 0; seed < kTrees; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(static_cast<uint32_t>(seed));
    const auto below = [&](size_t bound) { return random() % bound; };
    const Overlay live = Mount({base, workspace}, true);
    const int root = live.root.get();
    const auto path = [&] {
      std::string text = names[below(names.size())];
      for (size_t depth = below(3); depth > 0; --depth) text += "/" + names[below(names.size())];
      return text;
    };
    for (int i = 0; i < kOperations; ++i) {
      const std::string one = path();
      const std::string two = path();
      const std::string full = live.path() + "/" + one;
      std::error_code ignored;
      // Each may fail, as for any program.
      switch (below(12)) {
        case 0: {
          const os::UniqueFd file(
              ::openat(root, one.c_str(), O_CREAT | O_WRONLY | O_NONBLOCK | O_NOFOLLOW, 0644));
          const std::string data(below(100'000), static_cast<char>('a' + below(3)));
          if (file.valid()) {
            (void)!::pwrite(file.get(), data.data(), data.size(),
                            static_cast<off_t>(below(3) * 100'000));
          }
          break;
        }
        case 1:
          ::mkdirat(root, one.c_str(), 0755);
          break;
        case 2:
          ::unlinkat(root, one.c_str(), 0);
          break;
        case 3:
          std::filesystem::remove_all(full, ignored);
          break;
        case 4:
          ::renameat(root, one.c_str(), root, two.c_str());
          break;
        case 5:
          ::renameat2(root, one.c_str(), root, two.c_str(), RENAME_EXCHANGE);
          break;
        case 6:
          ::linkat(root, one.c_str(), root, two.c_str(), 0);
          break;
        case 7:
          ::symlinkat(two.c_str(), root, one.c_str());
          break;
        case 8:
          ::fchownat(root, one.c_str(), static_cast<uid_t>(below(2000)), 5, AT_SYMLINK_NOFOLLOW);
          break;
        case 9:
          ::lsetxattr(full.c_str(), "user.k", two.data(), two.size(), 0);
          break;
        case 10:
          std::filesystem::remove_all(full, ignored);
          ::mkdirat(root, one.c_str(), 0711);
          break;
        default:
          ::mkfifoat(root, one.c_str(), 0640);
          break;
      }
    }
    const auto shown = Described(root);
    const std::string packed = Pack(live);
    ASSERT_EQ(Shown({base, workspace, packed}), shown);
    const std::string flat = Flattened(LayerKind::kWorkspace, {workspace, packed});
    ASSERT_EQ(Shown({base, flat}), shown);
    const std::string whole = Flattened(LayerKind::kBase, {base, flat});
    ASSERT_EQ(Shown({whole}), shown);
    held_.clear();
  }
}

TEST_F(PackTest, IdsOfTheSandbox_AreThoseInside) {
  const os::UniqueFd disk = std::move(*os::FsContext::Open("tmpfs")).Mount(0).value();
  const os::UniqueFd upper = os::OpenAt(disk.get(), ".", O_RDONLY | O_DIRECTORY).value();
  Shell(PathOf(upper.get()), "echo x > f; chown 500007:500008 f; chown 500000:500000 .");
  auto packed = TryPack(upper.get(), {}, {500'000, 65'536});
  ASSERT_TRUE(packed.ok()) << packed.error().ToString();
  auto mounted = mounts_->Acquire(packed->layer.id);
  ASSERT_TRUE(mounted.ok());
  struct stat status;
  ASSERT_EQ(::fstatat((*mounted)->fd(), "f", &status, 0), 0);
  EXPECT_EQ(status.st_uid, 7U);
  EXPECT_EQ(status.st_gid, 8U);
  Shell(PathOf(upper.get()), "chown 0 f");
  const auto refused = TryPack(upper.get(), {}, {500'000, 65'536});
  EXPECT_EQ(refused.error().reason(), "pack.foreign_id");
  EXPECT_THAT(refused.error().ToString(), HasSubstr("\"f\""));
}

TEST_F(PackTest, HostileUpper_IsRefusedOrConfined) {
  const auto upper = [](const std::string& script) {
    os::UniqueFd disk = std::move(*os::FsContext::Open("tmpfs")).Mount(0).value();
    auto fd = os::OpenAt(disk.get(), ".", O_RDONLY | O_DIRECTORY).value();
    Shell(PathOf(fd.get()), script);
    return fd;
  };
  const auto reason = [&](const os::UniqueFd& fd) {
    const auto packed = TryPack(fd.get());
    return packed.ok() ? "packed" : std::string(packed.error().reason());
  };
  EXPECT_EQ(reason(upper("echo x > f; setfattr -n trusted.overlay.redirect -v /etc/shadow f")),
            "pack.redirect");
  EXPECT_EQ(reason(upper("echo x > f; setfattr -n trusted.overlay.metacopy f")), "pack.redirect");
  EXPECT_EQ(reason(upper("setfattr -n trusted.overlay.opaque -v y .")), "layer.bad_whiteout");
  EXPECT_EQ(reason(upper("i=0; while [ $i -lt 300 ]; do mkdir d; cd d; i=$((i+1)); done")),
            "layer.bad_path");

  // A link out of the tree is a link and no way.
  const auto links = upper("ln -s / out; ln -s /etc/passwd file; mkdir d; ln -s ../../.. d/up");
  auto packed = TryPack(links.get());
  ASSERT_TRUE(packed.ok()) << packed.error().ToString();
  EXPECT_EQ(packed->layer.entries, 4U);
  EXPECT_EQ(packed->layer.content_bytes, 0U);

  // The form of a whiteout that is an xattr, and the private xattrs of a copied-up file.
  const std::string base = Layer(LayerKind::kBase, "", FillBase);
  const auto marked = upper(
      "mkdir -p usr/bin; setfattr -n trusted.overlay.opaque -v x usr/bin; : > usr/bin/a;"
      "setfattr -n trusted.overlay.whiteout usr/bin/a; echo n > usr/bin/b;"
      "setfattr -n trusted.overlay.origin -v 0xff usr/bin/b");
  packed = TryPack(marked.get());
  ASSERT_TRUE(packed.ok()) << packed.error().ToString();
  EXPECT_EQ(packed->warning_count, 0U);
  const Overlay shown = Mount({base, packed->layer.id.str()}, false);
  Shell(shown.path(),
        "test ! -e usr/bin/a; test -e usr/bin/hard; grep -q n usr/bin/b;"
        "! getfattr -m - -d usr/bin/b | grep overlay");

  // Sockets are counted.
  const auto sockets = upper("mkdir d");
  const os::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  fmt::format_to_n(address.sun_path, sizeof(address.sun_path) - 1, "{}/s", PathOf(sockets.get()));
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  packed = TryPack(sockets.get());
  ASSERT_TRUE(packed.ok());
  EXPECT_EQ(packed->layer.entries, 1U);
  EXPECT_EQ(packed->warning_count, 1U);
}

// All that a file system takes and that makes a careless reader stumble.
TEST_F(PackTest, OddMembers_ArePackedAsTheyAre) {
  const os::UniqueFd disk = std::move(*os::FsContext::Open("tmpfs")).Mount(0).value();
  const os::UniqueFd upper = os::OpenAt(disk.get(), ".", O_RDONLY | O_DIRECTORY).value();
  const int dir = upper.get();
  const auto file = [&](const std::string& name, const std::string& data) {
    ASSERT_TRUE(os::CreateFile(dir, name.c_str(), data, 0600).ok());
  };
  file("empty", "");
  file("two\nlines\r\x1b[2J", "1");
  file(std::string(255, 'n'), "2");
  file("\xff\xfe not UTF-8", "3");
  file(".wh.no-whiteout", "4");
  file("-rf", "5");
  file("huge-xattr", "6");
  const std::string huge(48 << 10, 'v');
  ASSERT_EQ(::setxattr((PathOf(dir) + "/huge-xattr").c_str(), "trusted.huge", huge.data(),
                       huge.size(), 0),
            0);
  // The longest link; one to nowhere; one in a circle.
  ASSERT_EQ(::symlinkat(std::string(4095, 'l').c_str(), dir, "long-link"), 0);
  ASSERT_EQ(::symlinkat("circle", dir, "circle"), 0);
  ASSERT_EQ(::mknodat(dir, "disk", S_IFBLK | 0600, makedev(8, 0)), 0);
  ASSERT_EQ(::mknodat(dir, "null", S_IFCHR | 0666, makedev(1, 3)), 0);
  ASSERT_EQ(::mkfifoat(dir, "fifo", 0600), 0);
  // Eight gigabytes without a byte of them on the disk, and eight with the last.
  const os::UniqueFd hole(::openat(dir, "hole", O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  ASSERT_EQ(::ftruncate(hole.get(), off_t{8} << 30), 0);
  const os::UniqueFd last(::openat(dir, "last", O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  ASSERT_EQ(::pwrite(last.get(), "x", 1, (off_t{8} << 30) - 1), 1);
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(::linkat(dir, "empty", dir, fmt::format("link{}", i).c_str(), 0), 0);
  }
  const auto packed = TryPack(dir);
  ASSERT_TRUE(packed.ok()) << packed.error().ToString();
  EXPECT_EQ(packed->warning_count, 0U);
  EXPECT_LT(packed->layer.blob_bytes, 1U << 20);
  EXPECT_EQ(packed->layer.content_bytes, (uint64_t{16} << 30) + 6);
  // Without the two whose content takes its time.
  ASSERT_EQ(::unlinkat(dir, "hole", 0), 0);
  ASSERT_EQ(::unlinkat(dir, "last", 0), 0);
  const auto small = TryPack(dir);
  ASSERT_TRUE(small.ok()) << small.error().ToString();
  EXPECT_EQ(Shown({small->layer.id.str()}), Described(dir));

  // More than the bounds of an import allow.
  ASSERT_EQ(::ftruncate(hole.get(), 1), 0);
  for (const int name : {1, 2}) {
    const os::UniqueFd vast(
        ::openat(dir, fmt::format("vast{}", name).c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    ASSERT_EQ(::ftruncate(vast.get(), off_t{40} << 30), 0);
  }
  EXPECT_EQ(TryPack(dir).error().reason(), "layer.too_large");
  EXPECT_THAT(*store_->List({}), ::testing::SizeIs(2));
}

// Where a writable layer has no copies the agent may write while it is read.
TEST_F(PackTest, FileThatChangesWhileItIsRead_IsNoticed) {
  const os::UniqueFd disk = std::move(*os::FsContext::Open("tmpfs")).Mount(0).value();
  const os::UniqueFd upper = os::OpenAt(disk.get(), ".", O_RDONLY | O_DIRECTORY).value();
  const std::string data(3 << 20, 'd');
  for (const char* change : {"", "echo more >> f", "truncate -s 5 f",
                             "printf X | dd of=f "
                             "conv=notrunc status=none",
                             "rm f; echo other > f"}) {
    ::unlinkat(upper.get(), "f", 0);
    ASSERT_TRUE(os::CreateFile(upper.get(), "f", data, 0600).ok());
    Warnings warnings;
    OverlayFolders stack;
    stack.folders.push_back(os::OpenAt(upper.get(), ".", O_RDONLY | O_DIRECTORY).value());
    const auto image = OpenOverlayFolders(std::move(stack), {}, warnings).value();
    const auto source = image->OpenLayer(0).value();
    Entry entry;
    ASSERT_TRUE(*source->Next(entry));  // the root
    ASSERT_TRUE(*source->Next(entry));
    ASSERT_EQ(entry.path, "f");
    ASSERT_EQ(source->ReadData()->bytes.size(), 1U << 20);
    Shell(PathOf(upper.get()), change);
    Result<void> read;
    size_t bytes = 1 << 20;
    while (read.ok()) {
      const auto run = source->ReadData();
      if (!run.ok()) {
        read = run.error();
      } else if (run->bytes.empty()) {
        break;
      } else {
        bytes += run->bytes.size();
      }
    }
    // Who has it open still reads all of a file that was removed; it is whole.
    const bool whole = std::string_view(change).empty() || change[0] == 'r';
    EXPECT_EQ(read.ok(), whole) << change;
    if (whole) {
      EXPECT_EQ(bytes, data.size()) << change;
    } else {
      EXPECT_EQ(read.error().reason(), "layer.source_changed") << change;
    }
  }
}

TEST_F(PackTest, Rules_LeaveOutAndRefuse) {
  const os::UniqueFd disk = std::move(*os::FsContext::Open("tmpfs")).Mount(0).value();
  const os::UniqueFd upper = os::OpenAt(disk.get(), ".", O_RDONLY | O_DIRECTORY).value();
  Shell(PathOf(upper.get()),
        "mkdir -p tmp/x root work var/log; echo t > tmp/x/t; echo h > root/.bash_history;"
        "echo s > work/s; echo l > var/log/l; mknod work/gone c 0 0; ln root/.bash_history work/h");
  const auto names = [&](const PackRules& rules) -> std::vector<std::string> {
    auto packed = TryPack(upper.get(), rules);
    EXPECT_TRUE(packed.ok()) << packed.error().ToString();
    if (!packed.ok()) return {};
    std::vector<std::string> found;
    auto held = mounts_->Acquire(packed->layer.id);
    const std::string path = PathOf((*held)->fd()) + "/";
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      found.push_back(entry.path().string().substr(path.size()));
    }
    std::ranges::sort(found);
    return found;
  };
  EXPECT_THAT(names({}), ::testing::ElementsAre("root", "tmp", "var", "var/log", "work",
                                                "work/gone", "work/h", "work/s"));
  EXPECT_THAT(
      names({.scrub = {"/work/*", "/var"}, .default_scrub = false}),
      ::testing::ElementsAre("root", "root/.bash_history", "tmp", "tmp/x", "tmp/x/t", "work"));
  const auto refusal = [&](const PackRules& rules) {
    const auto packed = TryPack(upper.get(), rules);
    EXPECT_FALSE(packed.ok());
    return packed.ok() ? "" : packed.error().ToString();
  };
  EXPECT_THAT(refusal({.canary_paths = {"/work/s"}}), HasSubstr("pack.canary"));
  EXPECT_TRUE(TryPack(upper.get(), {.canary_paths = {".bash_history"}}).ok()) << "left out before";
  // In content (over the end of a read), in a link, in an xattr.
  Shell(PathOf(upper.get()),
        "head -c 1048570 /dev/zero | tr '\\0' a > work/big; echo sk-live-1234 >> work/big");
  EXPECT_THAT(refusal({.canary_contents = {"sk-live"}}), HasSubstr("\"work/big\" hits"));
  Shell(PathOf(upper.get()), "rm work/big; ln -s sk-live-1 work/l");
  EXPECT_THAT(refusal({.canary_contents = {"sk-live"}}), HasSubstr("\"work/l\" hits"));
  Shell(PathOf(upper.get()), "rm work/l; setfattr -n trusted.t -v sk-live-2 work/s");
  EXPECT_THAT(refusal({.canary_contents = {"sk-live"}}), HasSubstr("\"work/s\" hits"));
  EXPECT_THAT(*store_->List({}), ::testing::SizeIs(2)) << "refused packs leave nothing";
}

TEST_F(PackTest, Flatten_WantsAStackThatFits) {
  const std::string base = Layer(LayerKind::kBase, "base:1", FillBase);
  const std::string top = Layer(LayerKind::kToolkit, "top:1",
                                [](const std::string& tree) { Shell(tree, "echo t > t"); });
  const auto field = [&](std::vector<std::string> refs, LayerKind kind) {
    FlattenRequest request;
    request.refs = std::move(refs);
    request.kind = kind;
    const auto flat = Flatten(*store_, *mounts_, request, nullptr);
    EXPECT_FALSE(flat.ok());
    return flat.ok() ? "" : std::string(flat.error().reason()) + " " + flat.error().field();
  };
  EXPECT_EQ(field({}, LayerKind::kBase), "layer.bad_stack refs");
  EXPECT_EQ(field({top, base}, LayerKind::kToolkit), "layer.bad_stack refs[1]");
  EXPECT_EQ(field({base, top}, LayerKind::kToolkit), "layer.bad_stack kind");
  EXPECT_EQ(field({top, top}, LayerKind::kBase), "layer.bad_stack kind");
  EXPECT_EQ(field({top, "none:1"}, LayerKind::kToolkit), "layer.not_found ");
}

}  // namespace
}  // namespace dsec::image

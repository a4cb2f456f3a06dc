// SPDX-License-Identifier: Apache-2.0
// Imports from a real registry (Debian's docker-registry on loopback) through skopeo. Needs both
// and root.
#include "image/registry.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "image/digest.h"
#include "image/fs.h"
#include "image/layer_store.h"
#include "image/testing/archives.h"
#include "os/file.h"

namespace dsec::image {
namespace {

using testing::Dir;
using testing::File;
using testing::MakeTar;

bool Shell(const std::string& command) { return std::system(("set -e; " + command).c_str()) == 0; }

os::UniqueFd ConnectTo(uint16_t port) {
  os::UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* raw = reinterpret_cast<const sockaddr*>(&address);
  if (::connect(fd.get(), raw, sizeof(address)) != 0) fd.Reset();
  return fd;
}

// A port of loopback that is free now.
uint16_t FreePort() {
  const os::UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(fd.get(), raw, sizeof(address)), 0);
  EXPECT_EQ(::getsockname(fd.get(), raw, &size), 0);
  return ntohs(address.sin_port);
}

class RegistryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    if (!Shell("command -v docker-registry skopeo >/dev/null")) {
      GTEST_SKIP() << "docker-registry or skopeo is not installed";
    }
    store_ = *LayerStore::Open(Path("layers"));
    ASSERT_EQ(::mkdir(Path("layout").c_str(), 0755), 0);
    // Compressed already: skopeo would do it, and the digests be others.
    std::vector<testing::LayoutLayer> layers;
    for (size_t i = 0; i < packed_.size(); ++i) {
      std::string noise;
      while (noise.size() < 200'000) noise += Sha256Hex(fmt::format("{} {}", i, noise.size()));
      const std::string tar = MakeTar({Dir("etc"), File(fmt::format("etc/{}", i), noise)});
      packed_[i] = testing::Compress("gzip -n", tar);
      layers.push_back({.tar = tar,
                        .media_type = "application/vnd.oci.image.layer.v1.tar+gzip",
                        .blob = packed_[i]});
    }
    ImageConfig config;
    config.workdir = "/w";
    testing::WriteOciLayout(Path("layout"), layers, config, "v1");
    StartRegistry();
    ASSERT_TRUE(
        Shell(fmt::format("cd {} && skopeo copy -q --dest-tls-verify=false oci:layout:v1 "
                          "docker://{}",
                          folder_.path(), Ref())));
  }

  void TearDown() override {
    if (registry_ <= 0) return;
    ::kill(registry_, SIGKILL);
    ::waitpid(registry_, nullptr, 0);
  }

  void StartRegistry() {
    for (int attempt = 0; attempt < 5; ++attempt) {
      port_ = FreePort();
      testing::WriteFile(Path("registry.yml"),
                         fmt::format("version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: "
                                     "{}/registry\nhttp:\n  addr: 127.0.0.1:{}\n",
                                     folder_.path(), port_));
      posix_spawn_file_actions_t actions;
      ::posix_spawn_file_actions_init(&actions);
      ::posix_spawn_file_actions_addopen(&actions, 1, Path("log").c_str(),
                                         O_WRONLY | O_CREAT | O_APPEND, 0600);
      ::posix_spawn_file_actions_adddup2(&actions, 1, 2);
      std::string config = Path("registry.yml");
      std::array<std::string, 3> words = {"docker-registry", "serve", config};
      std::array<char*, 4> argv = {words[0].data(), words[1].data(), words[2].data(), nullptr};
      ASSERT_EQ(::posix_spawnp(&registry_, argv[0], &actions, nullptr, argv.data(), ::environ), 0);
      ::posix_spawn_file_actions_destroy(&actions);
      // Nothing tells that it listens but that it does; one that could not bind ends.
      const auto end = Clock::System().Mono() + std::chrono::seconds(60);
      while (Clock::System().Mono() < end) {
        if (ConnectTo(port_).valid()) return;
        if (::waitpid(registry_, nullptr, WNOHANG) == registry_) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    }
    FAIL() << "docker-registry does not start";
  }

  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }
  std::string Ref() const { return fmt::format("127.0.0.1:{}/team/image:v1", port_); }

  Result<BuildReport> Import(const std::string& ref, const ProgressFn& progress = nullptr) {
    BuildRequest request;
    request.source = SourceKind::kRegistry;
    request.path = ref;
    request.plain_http = true;
    return store_->Build(request, progress);
  }

  // Times that the registry was asked for the blob of a layer since the last call.
  std::vector<int> Downloads() {
    const std::string log = *os::ReadFile(AT_FDCWD, Path("log").c_str(), 64 << 20);
    std::vector<int> counts;
    for (const std::string& blob : packed_) {
      const std::string needle = "\"GET /v2/team/image/blobs/sha256:" + Sha256Hex(blob);
      int count = 0;
      for (size_t at = log.find(needle, log_read_); at != std::string::npos;
           at = log.find(needle, at + 1)) {
        ++count;
      }
      counts.push_back(count);
    }
    log_read_ = log.size();
    return counts;
  }

  std::string Blob(size_t layer) const {
    return Path("layers/cache/sha256/") + Sha256Hex(packed_[layer]);
  }

  os::TempDir folder_ = *os::TempDir::Create("dsec-timg-");
  std::unique_ptr<LayerStore> store_;
  std::array<std::string, 3> packed_;
  pid_t registry_ = -1;
  uint16_t port_ = 0;
  size_t log_read_ = 0;
};

using ::testing::ElementsAre;

TEST_F(RegistryTest, Import_IsTheImageAndTheSecondTryFetchesWhatIsMissing) {
  BuildRequest local;
  local.source = SourceKind::kOciLayout;
  local.path = Path("layout");
  const auto expected = store_->Build(local, nullptr);
  ASSERT_TRUE(expected.ok()) << expected.error().ToString();
  auto report = Import(Ref());
  ASSERT_TRUE(report.ok()) << report.error().ToString();
  EXPECT_EQ(report->layer.id, expected->layer.id);
  EXPECT_EQ(report->layer.config.workdir, "/w");
  EXPECT_THAT(Downloads(), ElementsAre(1, 1, 1));
  // As after a download that broke off: two blobs are there, one is not.
  ASSERT_EQ(::unlink(Blob(1).c_str()), 0);
  EXPECT_TRUE(Import(Ref()).ok());
  EXPECT_THAT(Downloads(), ElementsAre(0, 1, 0));
  // Bytes that power loss took.
  testing::WriteFile(Blob(2), std::string(packed_[2].size(), '\0'));
  auto healed = Import(Ref());
  ASSERT_TRUE(healed.ok()) << healed.error().ToString();
  EXPECT_EQ(healed->layer.id, expected->layer.id);
  EXPECT_THAT(Downloads(), ElementsAre(0, 0, 1));
}

TEST_F(RegistryTest, UnusedBlobs_GoAfterAWeek) {
  ASSERT_TRUE(Import(Ref()).ok());
  const std::string old = Path("layers/cache/sha256/") + std::string(64, 'a');
  testing::WriteFile(old, "x");
  ASSERT_TRUE(Shell("touch -d '8 days ago' " + old + " " + Blob(0)));
  ASSERT_TRUE(Import(Ref()).ok());
  EXPECT_NE(::access(old.c_str(), F_OK), 0);
  EXPECT_EQ(::access(Blob(0).c_str(), F_OK), 0) << "it was used";
}

TEST_F(RegistryTest, Failures_AreTypedAndLeaveNothing) {
  EXPECT_EQ(Import("127.0.0.1:1/none").error().reason(), "layer.registry");
  auto missing = Import(Ref() + "x");
  EXPECT_EQ(missing.error().code(), Code::kUnavailable);
  EXPECT_THAT(missing.error().message(), ::testing::HasSubstr("manifest unknown"));
  EXPECT_EQ(Import("a b").error().reason(), "layer.source");
  EXPECT_EQ(Import("").error().reason(), "layer.source");
  auto cancelled = Import(Ref(), [](const Progress&) { return false; });
  EXPECT_EQ(cancelled.error().reason(), "layer.cancelled");
  const auto dir = os::OpenAt(AT_FDCWD, Path("layers/tmp").c_str(), O_RDONLY | O_DIRECTORY);
  EXPECT_TRUE(ListNames(dir->get(), 10)->empty());
}

}  // namespace
}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
// dsec-diskfs for real: a FUSE file with a file system in it, NBD beside it, and kill -9.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "blobfs/supervise.h"
#include "disk/client.h"
#include "disk/image_io.h"
#include "disk/published.h"
#include "disk/testing/model.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

using std::chrono::seconds;
using testing::Fill;
using testing::RandomBytes;

// A loop device over a file, which goes with its last user.
class Loop {
 public:
  explicit Loop(int fd) {
    const auto control = os::OpenAt(AT_FDCWD, "/dev/loop-control", O_RDWR).value();
    for (int attempt = 0; attempt < 32; ++attempt) {
      const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
      if (number < 0) break;
      path_ = fmt::format("/dev/loop{}", number);
      auto device = os::OpenAt(AT_FDCWD, path_.c_str(), O_RDWR);
      if (!device.ok()) break;
      loop_config config{};
      config.fd = static_cast<uint32_t>(fd);
      config.block_size = 4096;
      config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
      if (::ioctl(device->get(), LOOP_CONFIGURE, &config) == 0) {
        device_ = *std::move(device);
        return;
      }
      if (errno != EBUSY) break;
    }
    ADD_FAILURE() << "no loop device: " << path_ << ": " << ::strerror(errno);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  os::UniqueFd device_;
};

class DiskfsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(os::MakeDir(dir_.fd(), "run", 0700).ok());
    StartClient();
  }
  void TearDown() override {
    client_.reset();
    const auto purged = Client::Purge(dir_.path() + "/diskfs", dir_.path() + "/run",
                                      Clock::System().Mono() + seconds(20));
    EXPECT_TRUE(purged.ok()) << purged.error().ToString();
  }
  void StartClient() {
    ClientOptions options;
    options.settings.dir = dir_.path() + "/diskfs";
    options.settings.root = dir_.path() + "/root";
    options.settings.cache_dir = dir_.path() + "/cache";
    options.settings.cache_bytes = 64 << 20;
    options.run_dir = dir_.path() + "/run";
    options.program = DSEC_DISKFS;
    auto client = Client::Start(std::move(options));
    ASSERT_TRUE(client.ok()) << client.error().ToString();
    client_ = *std::move(client);
  }
  Client::Opened MakeDisk(const std::string& name, uint64_t bytes,
                          const std::vector<LowerName>& lowers = {}, DiskOptions options = {}) {
    const auto made = Disk::Create(dir_.path() + "/" + name, bytes, lowers, options);
    EXPECT_TRUE(made.ok()) << made.error().ToString();
    auto opened = client_->Open(dir_.path() + "/" + name);
    EXPECT_TRUE(opened.ok()) << opened.error().ToString();
    return *opened;
  }
  os::PidFd Process(const char* name) const {
    return blobfs::ProcessOf(dir_.path() + "/diskfs", name);
  }
  // The next process of that name.
  void Kill(const char* name) {
    const auto process = Process(name);
    ASSERT_TRUE(process.valid()) << name;
    ASSERT_TRUE(process.Signal(SIGKILL).ok());
    ASSERT_TRUE(process.WaitExit(Clock::System().Mono() + seconds(20)).value());
  }
  int Run(const std::string& script) const {
    const std::string path = dir_.path() + "/script";
    ::unlink(path.c_str());
    EXPECT_TRUE(os::CreateFile(AT_FDCWD, path.c_str(), script, 0700).ok());
    return std::system(fmt::format("unshare -m --propagation private sh -ec '. {}' > {}/said 2>&1",
                                   path, dir_.path())
                           .c_str());
  }
  std::string Said() const { return os::ReadFile(dir_.fd(), "said", 1 << 20).value(); }

  os::TempDir dir_ = os::TempDir::Create("dsec-disk-").value();
  std::unique_ptr<Client> client_;
};

TEST_F(DiskfsTest, File_IsReadAndWrittenAsADisk) {
  const auto disk = MakeDisk("disk", 16 << 20);
  const auto file = client_->OpenFile(disk.node, O_RDWR).value();
  struct stat status;
  ASSERT_EQ(::fstat(file.get(), &status), 0);
  EXPECT_EQ(status.st_size, 16 << 20);
  Rng rng(5);
  std::vector<uint8_t> model(16 << 20);
  for (int i = 0; i < 100; ++i) {
    const uint64_t at = rng.Below(model.size() - (2 << 20));
    const auto bytes = RandomBytes(rng, 1 + rng.Below(i % 10 == 0 ? 2 << 20 : 9000));
    ASSERT_TRUE(WriteFully(file.get(), at, bytes).ok());
    std::ranges::copy(bytes, model.begin() + static_cast<ptrdiff_t>(at));
  }
  ASSERT_EQ(::fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 1000, 3 << 20), 0);
  std::fill_n(model.begin() + 1000, 3 << 20, uint8_t{0});
  ASSERT_EQ(::fsync(file.get()), 0);
  std::vector<uint8_t> got(model.size());
  // What the page cache holds, and what is below it.
  for (const int flags : {O_RDONLY, O_RDONLY | O_DIRECT}) {
    const auto reader = client_->OpenFile(disk.node, flags).value();
    void* aligned = nullptr;
    ASSERT_EQ(::posix_memalign(&aligned, 4096, got.size()), 0);
    const std::span<uint8_t> out(static_cast<uint8_t*>(aligned), got.size());
    EXPECT_TRUE(ReadFully(reader.get(), 0, out).ok());
    EXPECT_TRUE(std::ranges::equal(out, model)) << flags;
    ::free(aligned);
  }
  // It neither grows nor shrinks, and there is no other name.
  EXPECT_EQ(::ftruncate(file.get(), 4096), -1);
  EXPECT_EQ(::pwrite(file.get(), "x", 1, 16 << 20), -1);
  EXPECT_FALSE(client_->OpenFile(disk.node + 1, O_RDONLY).ok());
  EXPECT_EQ(client_->Close(disk.node, false).error().reason(), "disk.in_use");
  EXPECT_EQ(client_->Seal(77).error().reason(), "disk.not_served");
}

TEST_F(DiskfsTest, Ext4_IsMadeMountedCheckedOverSnapshotsAndDeaths) {
  const auto disk = MakeDisk("disk", 256 << 20);
  {
    const auto file = client_->OpenFile(disk.node, O_RDWR).value();
    const Loop loop(file.get());
    ASSERT_EQ(Run("mkfs.ext4 -q -E nodiscard " + loop.path()), 0) << Said();
  }
  const auto snapshot = client_->Seal(disk.node).value();
  {
    const auto file = client_->OpenFile(disk.node, O_RDWR).value();
    const Loop loop(file.get());
    std::jthread killer([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));  // in the middle of anything
        const auto worker = Process(blobfs::kWorkerName);
        if (worker.valid()) static_cast<void>(worker.Signal(SIGKILL));
      }
    });
    const int status =
        Run(fmt::format("mkdir {0}/m; mount -o discard {1} {0}/m\n"
                        "for i in 1 2 3; do cp -r /usr/include/linux {0}/m/$i; sync; done\n"
                        "rm -r {0}/m/2; sync\n"
                        "echo 3 > /proc/sys/vm/drop_caches; diff -r /usr/include/linux {0}/m/3\n"
                        "umount {0}/m; fsck.ext4 -fn {1}\n",
                        dir_.path(), loop.path()));
    killer.request_stop();
    killer.join();
    EXPECT_EQ(status, 0) << Said();
  }
  // The snapshot has the empty file system still.
  auto fork = Disk::Create(dir_.path() + "/fork", 256 << 20, {{snapshot.path, ""}}, {});
  ASSERT_TRUE(fork.ok()) << fork.error().ToString();
  const auto forked = client_->Open(dir_.path() + "/fork").value();
  const auto file = client_->OpenFile(forked.node, O_RDWR).value();
  const Loop loop(file.get());
  EXPECT_EQ(Run(fmt::format("fsck.ext4 -fn {1}; mount {1} {0}/m; test ! -e {0}/m/1; umount {0}/m",
                            dir_.path(), loop.path())),
            0)
      << Said();
}

TEST_F(DiskfsTest, AnyOneKilled_NoAcknowledgedWriteIsLost) {
  const auto disk = MakeDisk("disk", 8 << 20);
  const auto file = client_->OpenFile(disk.node, O_RDWR).value();
  std::atomic<uint32_t> done = 0;
  std::atomic<bool> failed = false;
  std::jthread writer([&](const std::stop_token& stop) {
    for (uint32_t n = 1; !stop.stop_requested(); ++n) {
      std::vector<uint8_t> block(4096);
      std::memcpy(block.data(), &n, sizeof n);
      if (!WriteFully(file.get(), 4096 * (n % 512), block).ok()) {
        failed = true;
        return;
      }
      done = n;
    }
  });
  const auto wait_for_more = [&] {
    const uint32_t now = done;
    const MonoTime until = Clock::System().Mono() + seconds(20);
    while (done < now + 20 && !failed && Clock::System().Mono() < until) std::this_thread::yield();
    ASSERT_GE(done, now + 20);
    ASSERT_FALSE(failed);
  };
  wait_for_more();
  const uint64_t session = client_->session();
  for (int round = 0; round < 3; ++round) {
    Kill(blobfs::kWorkerName);
    wait_for_more();
  }
  // The keeper alone, then both: the client starts them anew with the session that it holds.
  Kill(blobfs::kKeeperName);
  wait_for_more();
  Kill(blobfs::kWorkerName);
  wait_for_more();
  EXPECT_EQ(client_->session(), session);
  // Without the client, which comes back.
  client_.reset();
  wait_for_more();
  Kill(blobfs::kWorkerName);
  wait_for_more();
  StartClient();
  EXPECT_EQ(client_->session(), session);
  writer.request_stop();
  writer.join();
  ASSERT_FALSE(failed);
  Kill(blobfs::kWorkerName);
  const auto direct = client_->OpenFile(disk.node, O_RDONLY | O_DIRECT).value();
  void* aligned = nullptr;
  ASSERT_EQ(::posix_memalign(&aligned, 4096, 4096), 0);
  const uint32_t last = done;
  for (uint32_t n = last > 511 ? last - 511 : 1; n <= last; ++n) {
    const std::span<uint8_t> block(static_cast<uint8_t*>(aligned), 4096);
    ASSERT_TRUE(ReadFully(direct.get(), 4096 * (n % 512), block).ok());
    uint32_t got = 0;
    std::memcpy(&got, block.data(), sizeof got);
    ASSERT_EQ(got, n);
  }
  ::free(aligned);
}

TEST_F(DiskfsTest, Nbd_IsThereAgainAfterADeath) {
  const auto disk = MakeDisk("disk", 8 << 20);
  const std::string socket = dir_.path() + "/run/nbd";
  ASSERT_TRUE(client_->ServeNbd(disk.node, socket).ok());
  const std::string url = "'nbd+unix:///?socket=" + socket + "'";
  // qemu-io waits for the server to come back, as a VM would.
  const std::string opts = fmt::format(
      "--image-opts "
      "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.reconnect-delay="
      "20",
      socket);
  std::jthread killer([&] {
    for (int i = 0; i < 3; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      const auto worker = Process(blobfs::kWorkerName);
      if (worker.valid()) static_cast<void>(worker.Signal(SIGKILL));
    }
  });
  std::string io;
  for (int i = 0; i < 60; ++i)
    io += fmt::format(" -c 'write -P {} {} 64k' -c flush -c 'sleep 20'", i + 1, i * 65536);
  EXPECT_EQ(Run("qemu-io " + opts + io), 0) << Said();
  EXPECT_EQ(Said().find("failed"), std::string::npos) << Said();
  killer.join();
  io.clear();
  for (int i = 0; i < 60; ++i) io += fmt::format(" -c 'read -P {} {} 64k'", i + 1, i * 65536);
  EXPECT_EQ(Run("qemu-io " + opts + io), 0) << Said();
  EXPECT_EQ(Said().find("failed"), std::string::npos) << Said();
  ASSERT_TRUE(client_->Close(disk.node, false).ok());
  EXPECT_NE(Run("qemu-io -f raw -c 'read 0 512' " + url), 0);
}

TEST_F(DiskfsTest, PublishedLayer_IsServedFromTheRoot) {
  Rng rng(9);
  const auto content = RandomBytes(rng, 4 << 20);
  ASSERT_TRUE(os::CreateFile(dir_.fd(), "image",
                             {reinterpret_cast<const char*>(content.data()), content.size()}, 0600)
                  .ok());
  ASSERT_TRUE(ImportRaw(dir_.path() + "/image", dir_.path() + "/image.lsmt", {}, {}).ok());
  const std::string hex = Publish(dir_.path() + "/root", dir_.path() + "/image.lsmt", {}).value();
  PublishedStore::Options store_options;
  store_options.root = dir_.path() + "/root";
  auto store = PublishedStore::Open(store_options, nullptr).value();
  DiskOptions options;
  options.find_published = [&](const std::string& id) { return store->Find(id); };
  const auto disk = MakeDisk("disk", 4 << 20, {{"", hex}}, options);
  const auto file = client_->OpenFile(disk.node, O_RDWR).value();
  std::vector<uint8_t> got(65536);
  ASSERT_TRUE(ReadFully(file.get(), 1 << 20, got).ok());
  EXPECT_TRUE(std::ranges::equal(got, std::span(content).subspan(1 << 20, got.size())));
  const auto info = nlohmann::json::parse(client_->Info(disk.node).value());
  EXPECT_LE(info["fetched_bytes"].get<uint64_t>(), 2u << 20);
  // A sector in part, over bytes of the root.
  ASSERT_TRUE(WriteFully(file.get(), 2000001, Fill('p', 100)).ok());
  ASSERT_EQ(::fsync(file.get()), 0);
  ASSERT_TRUE(ReadFully(file.get(), 1999990, std::span(got).first(200)).ok());
  EXPECT_TRUE(
      std::ranges::equal(std::span(got).first(11), std::span(content).subspan(1999990, 11)));
  EXPECT_EQ(got[11], 'p');
  EXPECT_TRUE(std::ranges::equal(std::span(got).subspan(111, 89),
                                 std::span(content).subspan(1999990 + 111, 89)));
}

}  // namespace
}  // namespace dsec::disk

// SPDX-License-Identifier: Apache-2.0
// Layers of a shared root, read on demand.
#include "disk/published.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <barrier>
#include <condition_variable>
#include <future>
#include <thread>

#include "base/fault.h"
#include "disk/image_io.h"
#include "disk/testing/model.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

using std::chrono::seconds;
using testing::Fill;
using testing::kBootA;
using testing::OptionsOf;
using testing::RandomBytes;

constexpr uint64_t kChunk = 256 << 10;

// Passes reads on; those that meet [from, to) wait while it is held.
class HeldSource : public blobfs::LayerSource {
 public:
  explicit HeldSource(std::string root) : inner_(blobfs::FolderSource(std::move(root))) {}
  Result<std::string> ReadAll(const std::string& hex, const char* name, size_t limit) override {
    return inner_->ReadAll(hex, name, limit);
  }
  std::unique_ptr<image::BlobReader> Open(const std::string& hex, const char* name,
                                          uint64_t size) override {
    class Reader : public image::BlobReader {
     public:
      Reader(HeldSource& source, std::unique_ptr<image::BlobReader> inner)
          : source_(source), inner_(std::move(inner)) {}
      Result<void> ReadAt(uint64_t offset, std::span<uint8_t> out) override {
        std::unique_lock lock(source_.mutex_);
        const bool meets = offset < source_.to_ && offset + out.size() > source_.from_;
        if (meets) {
          ++source_.waiting_;
          source_.changed_.notify_all();
          source_.changed_.wait(lock, [&] { return source_.to_ == 0; });
        }
        lock.unlock();
        return inner_->ReadAt(offset, out);
      }
      void Reopen() override { inner_->Reopen(); }

     private:
      HeldSource& source_;
      const std::unique_ptr<image::BlobReader> inner_;
    };
    return std::make_unique<Reader>(*this, inner_->Open(hex, name, size));
  }
  void Hold(uint64_t from, uint64_t to) {
    const std::lock_guard lock(mutex_);
    from_ = from;
    to_ = to;
  }
  void WaitHeld() {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, seconds(20), [&] { return waiting_ > 0; }));
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    from_ = to_ = 0;
    changed_.notify_all();
  }
  void Stop() override { Release(); }

 private:
  const std::unique_ptr<blobfs::LayerSource> inner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t from_ = 0, to_ = 0;
  int waiting_ = 0;
};

class PublishedTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Rng rng(11);
    content_ = RandomBytes(rng, kBytes);
    std::fill_n(content_.begin() + (1 << 20), 1 << 20, uint8_t{0});
    ASSERT_TRUE(os::CreateFile(dir_.fd(), "image",
                               {reinterpret_cast<const char*>(content_.data()), content_.size()},
                               0600)
                    .ok());
    const std::string layer = dir_.path() + "/layer.lsmt";
    const auto imported = ImportRaw(dir_.path() + "/image", layer, {}, {});
    ASSERT_TRUE(imported.ok()) << imported.error().ToString();
    hex_ = Publish(root_, layer, {}).value();
    EXPECT_EQ(Publish(root_, layer, {}).value(), hex_);
  }
  void TearDown() override { fault::DisarmAll(); }
  void OpenStore(uint64_t cache_bytes = 64 << 20) {
    disk_.reset();
    store_.reset();
    PublishedStore::Options options;
    options.root = root_;
    options.cache_dir = dir_.path() + "/cache";
    options.cache_bytes = cache_bytes;
    options.loader.bad_pause = std::chrono::milliseconds(0);
    auto source = std::make_unique<HeldSource>(root_);
    source_ = source.get();
    store_ = PublishedStore::Open(options, std::move(source)).value();
  }
  // A disk over the published layer.
  void OpenDisk() {
    auto options = OptionsOf(kBootA);
    options.find_published = [this](const std::string& hex) { return store_->Find(hex); };
    const std::string path = dir_.path() + "/disk";
    if (::access(path.c_str(), F_OK) != 0)
      ASSERT_TRUE(Disk::Create(path, kBytes, {{"", hex_}}, options).ok());
    disk_ = Disk::Open(path, options).value();
  }
  void ExpectContent(uint64_t offset, uint64_t size) {
    std::vector<uint8_t> got(size);
    const auto read = disk_->ReadNow(offset, got);
    ASSERT_TRUE(read.ok()) << read.error().ToString();
    EXPECT_TRUE(std::ranges::equal(got, std::span(content_).subspan(offset, size))) << offset;
  }
  std::string LayerPath() const { return root_ + "/blobs/" + hex_ + "/layer.lsmt"; }

  static constexpr uint64_t kBytes = 8 << 20;
  os::TempDir dir_ = os::TempDir::Create("dsec-disk-").value();
  const std::string root_ = dir_.path() + "/root";
  std::vector<uint8_t> content_;
  std::string hex_;
  HeldSource* source_ = nullptr;
  std::unique_ptr<PublishedStore> store_;
  std::unique_ptr<Disk> disk_;
};

TEST_F(PublishedTest, PartialRead_FetchesItsChunksOnceAndKeepsThem) {
  OpenStore();
  OpenDisk();
  const uint64_t opened = store_->counts().fetched_bytes;
  EXPECT_LE(opened, 2 * kChunk);
  ExpectContent(3 << 20, 4096);
  const uint64_t once = store_->counts().fetched_bytes;
  EXPECT_LE(once - opened, 2 * kChunk);
  for (int i = 0; i < 10; ++i) ExpectContent(3 << 20, 4096);
  EXPECT_EQ(store_->counts().fetched_bytes, once);
  // Zeros of the image take nothing, also not from the root.
  ExpectContent((1 << 20) + 4096, 512 << 10);
  EXPECT_EQ(store_->counts().fetched_bytes, once);
  // Also after a start, without the root.
  OpenStore();
  ASSERT_EQ(::rename(root_.c_str(), (root_ + "-away").c_str()), 0);
  OpenDisk();
  ExpectContent(3 << 20, 4096);
  EXPECT_EQ(store_->counts().fetched_bytes, 0u);
  std::vector<uint8_t> other(4096);
  const auto failed = disk_->ReadNow(6 << 20, other);
  ASSERT_FALSE(failed.ok());
  ASSERT_EQ(::rename((root_ + "-away").c_str(), root_.c_str()), 0);
  ExpectContent(0, kBytes);
}

TEST_F(PublishedTest, ManyReadersOfOneChunk_FetchItOnce) {
  OpenStore();
  OpenDisk();
  const uint64_t before = store_->counts().fetches;
  const uint64_t at = 4 << 20;
  // The file has 1 MiB less, which is zero, and its header.
  source_->Hold(at - (1 << 20), at - (1 << 20) + 4 * 4096 + 4096);
  std::vector<std::future<bool>> readers;
  std::vector<std::vector<uint8_t>> buffers(32, std::vector<uint8_t>(4096));
  for (size_t i = 0; i < buffers.size(); ++i) {
    auto done = std::make_shared<std::promise<bool>>();
    readers.push_back(done->get_future());
    disk_->Read(at + 4096 * (i % 4), buffers[i],
                [done](const Result<void>& r) { done->set_value(r.ok()); });
  }
  source_->WaitHeld();
  source_->Release();
  for (size_t i = 0; i < readers.size(); ++i) {
    EXPECT_TRUE(readers[i].get());
    EXPECT_TRUE(
        std::ranges::equal(buffers[i], std::span(content_).subspan(at + 4096 * (i % 4), 4096)));
  }
  // The chunk of the data may be two of the file.
  EXPECT_LE(store_->counts().fetches - before, 2u);
}

TEST_F(PublishedTest, RootThatHangs_HoldsUpOnlyWhatIsNotHere) {
  OpenStore();
  OpenDisk();
  ExpectContent(3 << 20, 4096);
  source_->Hold(0, UINT64_MAX);
  std::vector<uint8_t> buffer(4096);
  auto done = std::make_shared<std::promise<bool>>();
  auto answered = done->get_future();
  disk_->Read(6 << 20, buffer,
              [done](const Result<void>& result) { done->set_value(result.ok()); });
  source_->WaitHeld();
  // Reads of what is here, writes, flushes and a snapshot go on.
  ExpectContent(3 << 20, 4096);
  const auto data = Fill('w', 8192);
  ASSERT_TRUE(disk_->Write(5 << 20, data).ok());
  std::ranges::copy(data, content_.begin() + (5 << 20));
  ASSERT_TRUE(disk_->Flush().ok());
  ASSERT_TRUE(disk_->Seal().ok());
  ExpectContent(5 << 20, 8192);
  EXPECT_EQ(answered.wait_for(seconds(0)), std::future_status::timeout);
  source_->Release();
  EXPECT_TRUE(answered.get());
  EXPECT_TRUE(std::ranges::equal(buffer, std::span(content_).subspan(6 << 20, 4096)));
}

TEST_F(PublishedTest, WrongBytes_AreAnErrorAndNeverRead) {
  OpenStore();
  OpenDisk();
  const auto file = os::OpenAt(AT_FDCWD, LayerPath().c_str(), O_RDWR).value();
  ASSERT_EQ(::pwrite(file.get(), "X", 1, (5 << 20) + 77), 1);
  std::vector<uint8_t> got(kBytes);
  const auto read = disk_->ReadNow(0, got);
  ASSERT_FALSE(read.ok());
  EXPECT_EQ(read.error().reason(), "layer.corrupt");
  ExpectContent(0, 512 << 10);
  EXPECT_FALSE(VerifyPublished(root_, hex_).ok());
}

TEST_F(PublishedTest, DamagedOrCutOffCopy_IsFetchedAnew) {
  OpenStore();
  OpenDisk();
  ExpectContent(0, kBytes);
  disk_.reset();
  store_.reset();
  const std::string copy = dir_.path() + "/cache/" + hex_ + "/data";
  const auto file = os::OpenAt(AT_FDCWD, copy.c_str(), O_RDWR).value();
  ASSERT_EQ(::pwrite(file.get(), "X", 1, (2 << 20) + 5), 1);
  ASSERT_EQ(
      ::fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (4 << 20) + 8192, 65536),
      0);
  OpenStore();
  OpenDisk();
  ExpectContent(0, kBytes);
  EXPECT_GE(store_->counts().damaged_chunks, 1u);
  EXPECT_LE(store_->counts().fetched_bytes, 4 * kChunk);
}

TEST_F(PublishedTest, Copy_IsBounded) {
  OpenStore(4 * kChunk);
  OpenDisk();
  for (int round = 0; round < 2; ++round) ExpectContent(0, kBytes);
  EXPECT_LE(store_->counts().cache_bytes, 4 * kChunk);
  EXPECT_GT(store_->counts().evicted, 0u);
}

TEST_F(PublishedTest, HostilePublication_IsRefused) {
  const std::string folder = root_ + "/blobs/" + hex_;
  const std::string manifest =
      os::ReadFile(AT_FDCWD, (folder + "/manifest.json").c_str(), 1 << 16).value();
  EXPECT_EQ(PublishedManifest::Parse(manifest).value().Encode(), manifest);
  for (const std::string& bad : {std::string("{}"), std::string("[1]"), manifest + " ",
                                 std::string(R"({"blob":{"size":-1}})")})
    EXPECT_FALSE(PublishedManifest::Parse(bad).ok()) << bad;
  EXPECT_TRUE(VerifyPublished(root_, hex_).ok());
  EXPECT_EQ(VerifyPublished(root_, "../x").error().reason(), "disk.bad_id");
  // Another manifest under this name, then another table.
  ::unlink((folder + "/manifest.json").c_str());
  std::string other = manifest;
  other[other.find("\"virtual_size\":") + 15] = '1';
  ASSERT_TRUE(os::CreateFile(AT_FDCWD, (folder + "/manifest.json").c_str(), other, 0600).ok());
  OpenStore();
  EXPECT_EQ(store_->Find(hex_).error().reason(), "layer.corrupt");
  ::unlink((folder + "/manifest.json").c_str());
  ASSERT_TRUE(os::CreateFile(AT_FDCWD, (folder + "/manifest.json").c_str(), manifest, 0600).ok());
  ASSERT_EQ(::truncate((folder + "/chunks.sha256").c_str(), 32), 0);
  OpenStore();
  EXPECT_EQ(store_->Find(hex_).error().reason(), "layer.corrupt");
}

TEST(ImageIo, ImportOverAParent_HasWhatDiffersOnly) {
  os::TempDir dir = os::TempDir::Create("dsec-disk-").value();
  Rng rng(5);
  auto base = RandomBytes(rng, 1 << 20);
  const auto write = [&](const char* name, const std::vector<uint8_t>& bytes) {
    ASSERT_TRUE(os::CreateFile(dir.fd(), name,
                               {reinterpret_cast<const char*>(bytes.data()), bytes.size()}, 0600)
                    .ok());
  };
  write("base", base);
  ASSERT_TRUE(ImportRaw(dir.path() + "/base", dir.path() + "/base.lsmt", {}, {}).ok());
  auto next = base;
  std::fill_n(next.begin() + 8192, 4096, uint8_t{0});
  next[100000] ^= 1;
  next.resize(next.size() + 700, 'e');  // larger, and no whole sector at the end
  write("next", next);
  std::vector<std::shared_ptr<const Layer>> chain = {OpenLayerAt(dir.fd(), "base.lsmt").value()};
  const auto info = ImportRaw(dir.path() + "/next", dir.path() + "/next.lsmt", chain, {}).value();
  EXPECT_EQ(info.virtual_bytes, (1 << 20) + 1024u);
  chain.push_back(OpenLayerAt(dir.fd(), "next.lsmt").value());
  EXPECT_EQ(chain[1]->ReadIndex().value().size(), 3u);
  EXPECT_EQ(VerifyLayer(*chain[1]).value(), 4096 + 1024u);
  ASSERT_TRUE(ExportRaw(chain, dir.path() + "/out", {}).ok());
  next.resize((1 << 20) + 1024);
  const std::string out = os::ReadFile(dir.fd(), "out", 2 << 20).value();
  EXPECT_TRUE(std::ranges::equal(out, next,
                                 [](char a, uint8_t b) { return static_cast<uint8_t>(a) == b; }));
  // What stands there is not written over, and what fails leaves nothing.
  EXPECT_FALSE(ExportRaw(chain, dir.path() + "/out", {}).ok());
  EXPECT_EQ(
      ImportRaw(dir.path() + "/next", dir.path() + "/x", chain, [](uint64_t) { return false; })
          .error()
          .reason(),
      "disk.cancelled");
  EXPECT_NE(::access((dir.path() + "/x").c_str(), F_OK), 0);
}

}  // namespace
}  // namespace dsec::disk

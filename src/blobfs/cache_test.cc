// SPDX-License-Identifier: Apache-2.0
// The local copy and the loader, over a source that a test can hold, break and count.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <future>

#include "base/fault.h"
#include "base/rng.h"
#include "blobfs/chunk_loader.h"
#include "blobfs/data_cache.h"
#include "image/digest.h"
#include "os/file.h"

namespace dsec::blobfs {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint32_t kChunk = 64 << 10;

// A blob in memory.
class FakeReader : public image::BlobReader {
 public:
  explicit FakeReader(std::shared_ptr<std::vector<uint8_t>> blob) : blob_(std::move(blob)) {}
  Result<void> ReadAt(uint64_t offset, std::span<uint8_t> out) override {
    {
      std::unique_lock lock(mutex_);
      ++calls;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !held_; });
    }
    if (fail) return Error(Code::kUnavailable, "layer.unreachable", "told to");
    std::copy_n(blob_->begin() + static_cast<ptrdiff_t>(offset), out.size(), out.begin());
    return Ok();
  }
  void Hold(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  void WaitCalls(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return calls >= count; });
  }
  int calls = 0;
  std::atomic<bool> fail = false;

 private:
  const std::shared_ptr<std::vector<uint8_t>> blob_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
};

struct TestLayer {
  std::shared_ptr<std::vector<uint8_t>> blob;
  DataCache::Proof proof;
  std::string hex;
};

TestLayer MakeLayer(uint64_t seed, size_t size) {
  TestLayer made;
  Rng rng(seed);
  made.blob = std::make_shared<std::vector<uint8_t>>(size);
  for (auto& byte : *made.blob) byte = static_cast<uint8_t>(rng.Next());
  image::BlobHasher hasher(kChunk);
  hasher.Update(*made.blob);
  auto sums = hasher.Finish();
  image::Manifest manifest;
  manifest.meta = {std::string(64, 'a'), 4096};
  manifest.blob = {sums.sha256, size};
  manifest.chunks = {kChunk, image::Sha256Hex(sums.table)};
  made.proof.manifest = manifest.Encode();
  made.proof.table = *image::ChunkTable::Parse(manifest, sums.table);
  made.hex = manifest.Id().str().substr(7);
  return made;
}

class BlobfsCacheTest : public ::testing::Test {
 protected:
  void Open(uint64_t max_bytes = 64 << 20, LoaderOptions options = {}) {
    loader_.reset();
    cache_.reset();
    cache_ = *DataCache::Open(folder_.path() + "/cache", max_bytes, false, counts_);
    MakeLoader(options);
  }
  // Of one that was there all that it was about to keep is kept.
  void MakeLoader(LoaderOptions options = {}) {
    loader_.reset();
    options.bad_pause = milliseconds(0);
    loader_ = std::make_unique<ChunkLoader>(
        cache_.get(), options, counts_,
        [this](const std::string&, uint64_t chunk) { bad_.push_back(chunk); });
  }
  // The layer as served, reading from `reader_`, which is the last made.
  std::shared_ptr<Layer> Serve(const TestLayer& layer) {
    if (!cache_->ReadProof(layer.hex)) EXPECT_TRUE(cache_->WriteProof(layer.hex, layer.proof).ok());
    auto reader = std::make_unique<FakeReader>(layer.blob);
    reader_ = reader.get();
    return std::make_shared<Layer>(layer.hex, layer.proof,
                                   *cache_->Use(layer.hex, layer.proof.table), std::move(reader));
  }
  using Answer = Result<std::vector<uint8_t>>;
  std::future<Answer> Start(const std::shared_ptr<Layer>& layer, uint64_t offset, uint32_t size,
                            std::shared_ptr<ChunkLoader::Job>* job = nullptr) {
    auto promise = std::make_shared<std::promise<Answer>>();
    auto read = loader_->Read(layer, offset, size, [promise](Result<ChunkLoader::Pieces> pieces) {
      if (!pieces.ok()) return promise->set_value(std::move(pieces).error());
      std::vector<uint8_t> all;
      for (const Piece& piece : *pieces)
        all.insert(all.end(), piece.bytes.begin(), piece.bytes.end());
      promise->set_value(std::move(all));
    });
    if (job != nullptr) *job = read;
    return promise->get_future();
  }
  Answer Read(const std::shared_ptr<Layer>& layer, uint64_t offset, uint32_t size) {
    return Start(layer, offset, size).get();
  }
  void ExpectAll(const std::shared_ptr<Layer>& layer, const TestLayer& expected) {
    for (uint64_t at = 0; at < expected.blob->size(); at += 3 * kChunk) {
      const auto size =
          static_cast<uint32_t>(std::min<uint64_t>(3 * kChunk, expected.blob->size() - at));
      auto got = Read(layer, at, size);
      ASSERT_TRUE(got.ok()) << got.error().ToString();
      ASSERT_TRUE(std::equal(got->begin(), got->end(),
                             expected.blob->begin() + static_cast<ptrdiff_t>(at)));
    }
  }
  std::string DataPath(const TestLayer& layer) const {
    return fmt::format("{}/cache/{}/data", folder_.path(), layer.hex);
  }
  uint64_t OnDisk(const TestLayer& layer) const {
    struct stat status{};
    return ::stat(DataPath(layer).c_str(), &status) == 0
               ? static_cast<uint64_t>(status.st_blocks) * 512
               : 0;
  }

  os::TempDir folder_ = *os::TempDir::Create("dsec-blobfs-");
  Counts counts_;
  std::vector<uint64_t> bad_;
  std::unique_ptr<DataCache> cache_;
  std::unique_ptr<ChunkLoader> loader_;
  FakeReader* reader_ = nullptr;
};

TEST_F(BlobfsCacheTest, AnyPart_IsThatOfTheBlob) {
  const TestLayer layer = MakeLayer(1, 40 * kChunk + 4096);
  Open(16 * kChunk, {.memory_bytes = 4 * kChunk});  // so that all three ways are gone
  const auto served = Serve(layer);
  Rng rng(2);
  for (int i = 0; i < 500; ++i) {
    const uint64_t at = rng.Below(layer.blob->size());
    const auto size = static_cast<uint32_t>(
        1 + rng.Below(std::min<uint64_t>(layer.blob->size() - at, 10 * kChunk)));
    auto got = Read(served, at, size);
    ASSERT_TRUE(got.ok()) << got.error().ToString();
    ASSERT_EQ(got->size(), size);
    ASSERT_TRUE(
        std::equal(got->begin(), got->end(), layer.blob->begin() + static_cast<ptrdiff_t>(at)));
  }
  EXPECT_GT(counts_.disk_hits, 0U);
  EXPECT_GT(counts_.memory_hits, 0U);
  EXPECT_GT(counts_.evicted, 0U);
  EXPECT_EQ(counts_.damaged_chunks, 0U);
}

TEST_F(BlobfsCacheTest, NextStart_NeedsNoSource) {
  const TestLayer layer = MakeLayer(3, 20 * kChunk + 8192);
  Open();
  ExpectAll(Serve(layer), layer);
  Open();
  ASSERT_TRUE(cache_->ReadProof(layer.hex));
  const auto served = Serve(layer);
  reader_->fail = true;
  ExpectAll(served, layer);
  EXPECT_EQ(reader_->calls, 0);
}

TEST_F(BlobfsCacheTest, DamagedCopy_IsFetchedAnewAndNeverServed) {
  const TestLayer layer = MakeLayer(4, 8 * kChunk);
  Open();
  ExpectAll(Serve(layer), layer);
  loader_.reset();
  {
    const auto file = *os::OpenAt(AT_FDCWD, DataPath(layer).c_str(), O_RDWR);
    ASSERT_EQ(::pwrite(file.get(), "damage", 6, 3 * kChunk + 100), 6);
  }
  Open();
  const auto served = Serve(layer);
  ExpectAll(served, layer);
  EXPECT_EQ(counts_.damaged_chunks, 1U);
  EXPECT_EQ(reader_->calls, 1);
  Open();
  const auto healed = Serve(layer);
  reader_->fail = true;
  ExpectAll(healed, layer);
}

TEST_F(BlobfsCacheTest, CutOffOrDamagedProof_IsNone) {
  const TestLayer layer = MakeLayer(5, 4 * kChunk);
  Open();
  ExpectAll(Serve(layer), layer);
  for (const char* name : {"manifest.json", "chunks.sha256"}) {
    const std::string path = fmt::format("{}/cache/{}/{}", folder_.path(), layer.hex, name);
    ASSERT_EQ(::truncate(path.c_str(), 10), 0);
    Open();
    EXPECT_FALSE(cache_->ReadProof(layer.hex)) << name;
    ExpectAll(Serve(layer), layer);
  }
}

// Without the fixture, whose folder a killed process would leave.
TEST(BlobfsDataCache, KilledAtEachStep_LeavesWhatIsRight) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const TestLayer layer = MakeLayer(6, 6 * kChunk);
  Counts counts;
  const std::string folder = "/tmp/dsec-blobfs-killed";
  for (const char* step :
       {"blobfs.proof.before_rename", "blobfs.chunk.before_write", "blobfs.chunk.after_write"}) {
    EXPECT_EXIT(
        {
          Counts own;
          auto cache = *DataCache::Open(folder, 64 << 20, false, own);
          ASSERT_TRUE(fault::Arm(fmt::format("{}=kill", step)).ok());
          static_cast<void>(cache->WriteProof(layer.hex, layer.proof));
          auto local = *cache->Use(layer.hex, layer.proof.table);
          Buffer chunk(kChunk);
          std::copy_n(layer.blob->begin(), kChunk, chunk.bytes().begin());
          cache->Write(*local, 0, chunk.bytes());
        },
        ::testing::KilledBySignal(SIGKILL), "")
        << step;
    auto cache = *DataCache::Open(folder, 64 << 20, false, counts);
    if (!cache->ReadProof(layer.hex)) ASSERT_TRUE(cache->WriteProof(layer.hex, layer.proof).ok());
    auto local = *cache->Use(layer.hex, layer.proof.table);
    Buffer chunk(kChunk);
    if (cache->Read(*local, 0, chunk.bytes()) != 0)
      EXPECT_TRUE(layer.proof.table.Matches(0, chunk.bytes())) << step;
    cache.reset();
    ASSERT_TRUE(os::RemoveTree(AT_FDCWD, folder.c_str()).ok());
  }
}

TEST_F(BlobfsCacheTest, Bound_HoldsOnDisk) {
  const TestLayer a = MakeLayer(7, 12 * kChunk);
  const TestLayer b = MakeLayer(8, 12 * kChunk);
  Open(8 * kChunk);
  const auto first = Serve(a);
  ExpectAll(first, a);
  MakeLoader();
  const auto second = Serve(b);
  ExpectAll(second, b);
  MakeLoader();
  EXPECT_LE(counts_.cache_bytes, 8U * kChunk);
  EXPECT_LE(OnDisk(a) + OnDisk(b), 8U * kChunk);
  EXPECT_EQ(OnDisk(a), 0U) << "the longest unused goes first";
  Open(2 * kChunk);  // a smaller one from now on
  EXPECT_LE(counts_.cache_bytes, 2U * kChunk);
  EXPECT_LE(OnDisk(a) + OnDisk(b), 2U * kChunk);
}

TEST_F(BlobfsCacheTest, NoRoom_ServesAllTheSame) {
  const TestLayer layer = MakeLayer(9, 8 * kChunk);
  Open();
  const auto served = Serve(layer);
  ASSERT_TRUE(fault::Arm("blobfs.chunk.before_write=error:ENOSPC").ok());
  ExpectAll(served, layer);
  loader_.reset();
  fault::DisarmAll();
  EXPECT_EQ(counts_.not_kept, 8U);
  EXPECT_EQ(OnDisk(layer), 0U);
  Open(0);
  ExpectAll(Serve(layer), layer);
  EXPECT_EQ(OnDisk(layer), 0U);
}

TEST_F(BlobfsCacheTest, ManyReaders_OneFetch) {
  const TestLayer layer = MakeLayer(10, 4 * kChunk);
  Open();
  const auto served = Serve(layer);
  reader_->Hold(true);
  std::vector<std::future<Answer>> answers;
  for (int i = 0; i < 64; ++i) answers.push_back(Start(served, i * 100, 3 * kChunk));
  reader_->WaitCalls(1);
  reader_->Hold(false);
  for (size_t i = 0; i < answers.size(); ++i) {
    const auto got = answers[i].get();
    ASSERT_TRUE(got.ok());
    EXPECT_TRUE(std::equal(got->begin(), got->end(),
                           layer.blob->begin() + static_cast<ptrdiff_t>(i * 100)));
  }
  // The first three chunks together, and the fourth. One that looks for a chunk in the moment in
  // which its fetch ends may fetch it again.
  EXPECT_LE(reader_->calls, 5);
  EXPECT_LE(counts_.fetched_bytes, 8U * kChunk);
}

TEST_F(BlobfsCacheTest, WrongBytes_AreNotServedAndHeal) {
  TestLayer layer = MakeLayer(11, 8 * kChunk);
  Open();
  const auto served = Serve(layer);
  const uint8_t was = (*layer.blob)[5 * kChunk + 7];
  (*layer.blob)[5 * kChunk + 7] ^= 1;
  for (int i = 0; i < 3; ++i) {
    const auto got = Read(served, 4 * kChunk, 3 * kChunk);
    ASSERT_FALSE(got.ok());
    EXPECT_EQ(got.error().reason(), "layer.corrupt");
  }
  EXPECT_THAT(bad_, ::testing::ElementsAre(5)) << "said once";
  EXPECT_GE(counts_.wrong_digests, 1U);
  EXPECT_TRUE(Read(served, 4 * kChunk, kChunk).ok());
  EXPECT_TRUE(Read(served, 6 * kChunk, 2 * kChunk).ok());
  EXPECT_THAT(loader_->Recheck(served), ::testing::ElementsAre(5));
  (*layer.blob)[5 * kChunk + 7] = was;
  EXPECT_THAT(loader_->Recheck(served), ::testing::IsEmpty());
  ExpectAll(served, layer);
}

TEST_F(BlobfsCacheTest, FailedFetch_IsTriedByTheNextRead) {
  const TestLayer layer = MakeLayer(12, 4 * kChunk);
  Open();
  const auto served = Serve(layer);
  reader_->fail = true;
  EXPECT_EQ(Read(served, 0, 10).error().reason(), "layer.unreachable");
  reader_->fail = false;
  ExpectAll(served, layer);
  EXPECT_THAT(bad_, ::testing::IsEmpty());
}

TEST_F(BlobfsCacheTest, HungSource_StallsItsReadersAlone) {
  const TestLayer a = MakeLayer(13, 64 * kChunk);
  const TestLayer b = MakeLayer(14, 8 * kChunk);
  Open();
  const auto hung = Serve(a);
  FakeReader* gate = reader_;
  ASSERT_TRUE(Read(hung, 0, 2 * kChunk).ok());
  gate->Hold(true);
  std::vector<std::future<Answer>> waiting;
  std::vector<std::shared_ptr<ChunkLoader::Job>> jobs(40);
  for (uint32_t i = 0; i < 40; ++i)
    waiting.push_back(Start(hung, (4 + i) * uint64_t{kChunk}, 100, &jobs[i]));
  gate->WaitCalls(1 + 16);  // half of the threads
  EXPECT_TRUE(Read(hung, 100, kChunk).ok()) << "what is here";
  ExpectAll(Serve(b), b);
  EXPECT_EQ(gate->calls, 1 + 16);
  EXPECT_TRUE(loader_->Cancel(jobs[3]));
  EXPECT_FALSE(loader_->Cancel(jobs[3]));
  gate->Hold(false);
  for (size_t i = 0; i < waiting.size(); ++i) {
    if (i != 3) EXPECT_TRUE(waiting[i].get().ok());
  }
}

}  // namespace
}  // namespace dsec::blobfs

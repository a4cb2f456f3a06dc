// SPDX-License-Identifier: Apache-2.0
// Disks against plain arrays, and what deaths leave of a change of the chain.
#include "disk/disk.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <thread>

#include "base/fault.h"
#include "disk/testing/model.h"
#include "image/fs.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

using testing::Content;
using testing::Fill;
using testing::kBootA;
using testing::kBootB;
using testing::OptionsOf;
using testing::RandomBytes;

class DiskTest : public ::testing::Test {
 protected:
  void TearDown() override { fault::DisarmAll(); }
  std::unique_ptr<Disk> Make(uint64_t bytes, const std::vector<LowerName>& lowers = {},
                             const std::string& name = "disk") {
    const std::string dir = dir_.path() + "/" + name;
    auto made = Disk::Create(dir, bytes, lowers, OptionsOf(kBootA));
    EXPECT_TRUE(made.ok()) << made.error().ToString();
    return Open(kBootA, name);
  }
  std::unique_ptr<Disk> Open(const char* boot, const std::string& name = "disk") {
    auto opened = Disk::Open(dir_.path() + "/" + name, OptionsOf(boot));
    EXPECT_TRUE(opened.ok()) << opened.error().ToString();
    return *std::move(opened);
  }
  std::vector<std::string> Files(const std::string& name = "disk") {
    const auto folder = os::OpenAt(dir_.fd(), name.c_str(), O_RDONLY | O_DIRECTORY).value();
    return image::ListNames(folder.get(), 1000).value();
  }
  os::TempDir dir_ = os::TempDir::Create("dsec-disk-").value();
};

// Random writes of any alignment, zeros, flushes, seals, collapses, deaths of the process and of
// the machine, against an array, and the state of each snapshot.
void Compare(const std::string& dir, uint64_t seed) {
  SCOPED_TRACE(fmt::format("seed {}", seed));
  Rng rng(seed);
  const uint64_t bytes = (1 + rng.Below(400)) * kSectorBytes;
  auto options = OptionsOf(kBootA);
  options.upper.min_journal_bytes = 1024;
  // Flushes of its own would let more outlive the machine than the model knows.
  const bool flushes = seed % 2 == 0;
  if (flushes) options.upper.max_dead_bytes = 32 << 10;
  ASSERT_TRUE(Disk::Create(dir, bytes, {}, options).ok());
  auto disk = Disk::Open(dir, options).value();
  std::vector<uint8_t> model(bytes), flushed = model;
  std::map<std::string, std::vector<uint8_t>> snapshots;
  for (int step = 0; step < 200; ++step) {
    const uint64_t offset = rng.Below(bytes);
    const uint64_t size =
        1 + rng.Below(std::min<uint64_t>(bytes - offset, rng.Below(2) == 0 ? 700 : 1 << 20));
    const auto at = static_cast<ptrdiff_t>(offset);
    switch (rng.Below(12)) {
      case 0:
      case 1:
      case 2:
      case 3: {
        const auto data = RandomBytes(rng, size);
        ASSERT_TRUE(disk->Write(offset, data).ok());
        std::ranges::copy(data, model.begin() + at);
        break;
      }
      case 4: {  // whole sectors
        const uint64_t first = offset / kSectorBytes * kSectorBytes;
        const auto data =
            RandomBytes(rng, (1 + rng.Below((bytes - first) / kSectorBytes)) * kSectorBytes);
        ASSERT_TRUE(disk->Write(first, data).ok());
        std::ranges::copy(data, model.begin() + static_cast<ptrdiff_t>(first));
        break;
      }
      case 5:
        ASSERT_TRUE(disk->Zero(offset, size).ok());
        std::fill_n(model.begin() + at, size, 0);
        break;
      case 6:
        ASSERT_TRUE(disk->Flush().ok());
        flushed = model;
        break;
      case 7: {
        const auto sealed = disk->Seal();
        ASSERT_TRUE(sealed.ok()) << sealed.error().ToString();
        flushed = model;
        snapshots[sealed->uuid] = model;
        break;
      }
      case 8: {
        const size_t layers = disk->info().layers.size();
        if (layers == 0) break;
        const size_t first = rng.Below(layers);
        const auto one = disk->Collapse(first, 1 + rng.Below(layers - first));
        ASSERT_TRUE(one.ok()) << one.error().ToString();
        break;
      }
      case 9:
        disk.reset();
        disk = Disk::Open(dir, options).value();
        break;
      case 10:
        if (flushes) break;
        disk.reset();
        options.upper.boot_id = NewUuid();
        disk = Disk::Open(dir, options).value();
        model = flushed;
        break;
      default: {
        std::vector<uint8_t> part(size);
        ASSERT_TRUE(disk->ReadNow(offset, part).ok());
        ASSERT_TRUE(std::ranges::equal(part, std::span(model).subspan(offset, size))) << step;
      }
    }
    ASSERT_EQ(Content(*disk), model) << step;
  }
  // Each state that a layer leads to is what it was.
  const auto info = disk->info();
  std::vector<LowerName> chain;
  for (size_t i = 0; i < info.layers.size(); ++i) {
    chain.push_back({dir + "/" + info.lowers[i].file, ""});
    const std::string fork = fmt::format("{}-fork-{}", dir, i);
    ASSERT_TRUE(Disk::Create(fork, bytes, chain, options).ok());
    EXPECT_EQ(Content(*Disk::Open(fork, options).value()), snapshots.at(info.layers[i].uuid)) << i;
  }
}

TEST_F(DiskTest, AnySequence_IsWhatAnArrayWouldBe) {
  uint64_t seed = 1;
  if (const char* given = std::getenv("DSEC_SEED")) seed = std::strtoull(given, nullptr, 10);
  for (uint64_t i = 0; i < 10; ++i) {
    Compare(fmt::format("{}/{}", dir_.path(), i), seed + i);
    if (HasFailure()) break;
  }
}

TEST_F(DiskTest, Overlay_IsTheNewestOfTwoArrays) {
  Rng rng(3);
  for (int round = 0; round < 2000; ++round) {
    constexpr uint64_t kSectors = 64;
    const auto make = [&](uint16_t layer) {
      std::vector<Extent> extents;
      for (uint64_t at = rng.Below(8); at < kSectors; at += rng.Below(8)) {
        const auto count =
            static_cast<uint32_t>(1 + rng.Below(std::min<uint64_t>(9, kSectors - at)));
        const bool zero = rng.Below(4) == 0;
        extents.push_back({at, zero ? 0 : 1000 * (layer + 1) + rng.Below(500), count, layer, zero});
        at += count;
      }
      return extents;
    };
    const auto spell = [&](std::span<const Extent> extents) {
      std::vector<std::tuple<int, bool, uint64_t>> sectors(kSectors, {-1, false, 0});
      uint64_t done = 0;
      for (const Extent& extent : extents) {
        EXPECT_GE(extent.first, done);
        EXPECT_GT(extent.count, 0u);
        done = extent.end();
        for (uint64_t i = 0; i < extent.count; ++i)
          sectors.at(extent.first + i) = {extent.zero ? 9 : extent.layer, extent.zero,
                                          extent.zero ? 0 : extent.place + i};
      }
      return sectors;
    };
    const auto upper = make(1), lower = make(0);
    auto expected = spell(lower);
    const auto over = spell(upper);
    for (uint64_t i = 0; i < kSectors; ++i)
      if (std::get<0>(over[i]) != -1) expected[i] = over[i];
    ASSERT_EQ(spell(Overlay(upper, lower)), expected) << round;
  }
}

TEST_F(DiskTest, OutOfRange_IsAnErrorThatSaysSo) {
  auto disk = Make(4096);
  std::vector<uint8_t> bytes(512);
  for (const uint64_t offset : {uint64_t{3585}, uint64_t{4096}, UINT64_MAX, UINT64_MAX - 100}) {
    EXPECT_EQ(disk->ReadNow(offset, bytes).error().reason(), "disk.out_of_range");
    EXPECT_EQ(disk->Write(offset, bytes).error().reason(), "disk.out_of_range");
    EXPECT_EQ(disk->Zero(offset, 512).error().reason(), "disk.out_of_range");
  }
  for (const uint64_t bad : {uint64_t{0}, uint64_t{100}, kMaxDiskBytes + 512})
    EXPECT_EQ(Disk::Create(dir_.path() + "/bad", bad, {}, {}).error().reason(), "disk.size");
}

TEST_F(DiskTest, OpenTwice_IsRefused) {
  auto disk = Make(4096);
  const auto second = Disk::Open(disk->dir(), OptionsOf(kBootA));
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().reason(), "disk.in_use");
}

TEST_F(DiskTest, KilledWhileSealing_IsTheDiskAsItWasOrSealed) {
  for (const std::string step :
       {"disk.flush.after_marker", "disk.seal.after_index", "disk.seal.sealed",
        "disk.upper.created", "disk.record.before_rename", "disk.record.after_rename"}) {
    const std::string name = "disk-" + step;
    {
      auto made = Make(1 << 20, {}, name);
    }
    const pid_t child = ::fork();
    if (child == 0) {
      auto disk = Disk::Open(dir_.path() + "/" + name, OptionsOf(kBootA)).value();
      if (!disk->Write(512, Fill('a', 8192)).ok() || !disk->Seal().ok()) ::_exit(2);
      if (!disk->Write(1024, Fill('b', 512)).ok() || !disk->Flush().ok()) ::_exit(3);
      if (!fault::Arm(step + "=kill").ok()) ::_exit(4);
      static_cast<void>(disk->Seal());
      ::_exit(5);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << step << " " << status;
    std::vector<uint8_t> model(1 << 20);
    std::fill_n(model.begin() + 512, 8192, 'a');
    std::fill_n(model.begin() + 1024, 512, 'b');
    for (const char* boot : {kBootA, kBootB}) {
      auto disk = Open(boot, name);
      EXPECT_EQ(Content(*disk), model) << step;
      const size_t layers = disk->info().layers.size();
      EXPECT_EQ(layers, step == "disk.record.after_rename" ? 2u : 1u) << step;
      EXPECT_EQ(Files(name).size(), layers + 4) << step;  // record, lock, data, journal
    }
    auto disk = Open(kBootB, name);
    ASSERT_TRUE(disk->Seal().ok());
    EXPECT_EQ(Content(*disk), model) << step;
  }
}

TEST_F(DiskTest, FailedSeal_GoesOnWithTheUpperThatItHad) {
  auto disk = Make(1 << 20);
  std::vector<uint8_t> model(1 << 20);
  int round = 0;
  for (const std::string step : {"disk.seal.after_index", "disk.seal.sealed", "disk.upper.created",
                                 "disk.record.before_rename", "disk.record.after_rename"}) {
    ASSERT_TRUE(disk->Write(4096, Fill(static_cast<uint8_t>(++round), 4096)).ok());
    std::fill_n(model.begin() + 4096, 4096, static_cast<uint8_t>(round));
    ASSERT_TRUE(fault::Arm(step + "=error:EIO*1").ok());
    EXPECT_FALSE(disk->Seal().ok()) << step;
    EXPECT_EQ(disk->info().layers.size(), 0u) << step;
    ASSERT_TRUE(disk->Write(8192 * static_cast<uint64_t>(round), Fill('x', 512)).ok()) << step;
    std::fill_n(model.begin() + 8192 * round, 512, 'x');
    ASSERT_TRUE(disk->Flush().ok()) << step;
    EXPECT_EQ(Content(*disk), model) << step;
    disk.reset();
    disk = Open(round % 2 == 0 ? kBootA : kBootB);
    EXPECT_EQ(Content(*disk), model) << step;
  }
  ASSERT_TRUE(disk->Seal().ok());
  EXPECT_EQ(Content(*disk), model);
}

TEST_F(DiskTest, KilledWhileCollapsing_IsEitherChain) {
  for (const std::string step : {"disk.collapse.before_index", "disk.collapse.after_rename",
                                 "disk.record.before_rename", "disk.record.after_rename"}) {
    const std::string name = "disk-" + step;
    std::vector<uint8_t> model;
    {
      auto disk = Make(1 << 20, {}, name);
      for (uint8_t i = 1; i < 5; ++i) {
        ASSERT_TRUE(disk->Write(4096u * i, Fill(i, 10000)).ok());
        ASSERT_TRUE(disk->Zero(4096u * i + 512, 700).ok());
        ASSERT_TRUE(disk->Seal().ok());
      }
      model = Content(*disk);
    }
    const pid_t child = ::fork();
    if (child == 0) {
      auto disk = Disk::Open(dir_.path() + "/" + name, OptionsOf(kBootA)).value();
      if (!fault::Arm(step + "=kill").ok()) ::_exit(4);
      static_cast<void>(disk->Collapse(1, 2));
      ::_exit(5);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << step << " " << status;
    auto disk = Open(kBootA, name);
    EXPECT_EQ(Content(*disk), model) << step;
    const size_t layers = disk->info().layers.size();
    EXPECT_EQ(layers, step == "disk.record.after_rename" ? 3u : 4u) << step;
    EXPECT_EQ(Files(name).size(), layers + 4) << step;
    ASSERT_TRUE(disk->Collapse(0, layers).ok());
    EXPECT_EQ(Content(*disk), model) << step;
    EXPECT_EQ(Files(name).size(), 5u) << step;
  }
}

// Each of several threads owns some sectors and writes counters into them, in parts of sectors too,
// while snapshots are made and collapsed: nothing is lost, and each snapshot has for each thread a
// state between what was acknowledged before and what was begun by its end.
TEST_F(DiskTest, SnapshotsUnderLoad_AreOneInstant) {
  auto disk = Make(1 << 20);
  constexpr size_t kThreads = 4;
  std::array<std::atomic<uint32_t>, kThreads> begun{}, done{};
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i](const std::stop_token& stop) {
      for (uint32_t n = 1; !stop.stop_requested(); ++n) {
        begun[i] = n;
        // Two places, one after the other; neighbours share the sector with other threads.
        for (const uint64_t at : {uint64_t{1000} + 4 * i, uint64_t{700000} + 4 * i}) {
          std::array<uint8_t, 4> bytes;
          std::memcpy(bytes.data(), &n, sizeof n);
          ASSERT_TRUE(disk->Write(at, bytes).ok());
        }
        done[i] = n;
      }
    });
  }
  struct Seen {
    std::string uuid;
    std::array<uint32_t, kThreads> least, most;
  };
  std::vector<Seen> seen;
  for (int round = 0; round < 20; ++round) {
    Seen one;
    for (size_t i = 0; i < kThreads; ++i) one.least[i] = done[i];
    const auto sealed = disk->Seal().value();
    for (size_t i = 0; i < kThreads; ++i) one.most[i] = begun[i];
    one.uuid = sealed.uuid;
    seen.push_back(one);
  }
  threads.clear();
  const auto info = disk->info();
  std::vector<LowerName> chain;
  for (size_t k = 0; k < seen.size(); ++k) {
    chain.push_back({disk->dir() + "/" + info.lowers[k].file, ""});
    ASSERT_EQ(info.layers[k].uuid, seen[k].uuid);
    auto fork = Make(1 << 20, chain, fmt::format("fork-{}", k));
    for (size_t i = 0; i < kThreads; ++i) {
      uint32_t first = 0, second = 0;
      std::array<uint8_t, 4> bytes;
      ASSERT_TRUE(fork->ReadNow(1000 + 4 * i, bytes).ok());
      std::memcpy(&first, bytes.data(), sizeof first);
      ASSERT_TRUE(fork->ReadNow(700000 + 4 * i, bytes).ok());
      std::memcpy(&second, bytes.data(), sizeof second);
      EXPECT_GE(second, seen[k].least[i]);
      EXPECT_LE(first, seen[k].most[i]);
      EXPECT_TRUE(first == second || first == second + 1) << first << " " << second;
    }
  }
  for (size_t i = 0; i < kThreads; ++i) {
    std::array<uint8_t, 4> bytes;
    ASSERT_TRUE(disk->ReadNow(1000 + 4 * i, bytes).ok());
    uint32_t last = 0;
    std::memcpy(&last, bytes.data(), sizeof last);
    EXPECT_EQ(last, done[i]);
  }
}

TEST_F(DiskTest, Fork_KeepsItsLayersWhenTheOtherDiskHasGone) {
  auto disk = Make(1 << 20);
  ASSERT_TRUE(disk->Write(0, Fill('a', 4096)).ok());
  const auto sealed = disk->Seal().value();
  auto fork = Make(1 << 20, {{sealed.path, ""}}, "fork");
  ASSERT_TRUE(fork->Write(512, Fill('f', 512)).ok());
  ASSERT_TRUE(disk->Write(1024, Fill('d', 512)).ok());
  disk.reset();
  ASSERT_TRUE(os::RemoveTree(dir_.fd(), "disk").ok());
  fork.reset();
  fork = Open(kBootA, "fork");
  auto content = Content(*fork);
  EXPECT_EQ(content[0], 'a');
  EXPECT_EQ(content[512], 'f');
  EXPECT_EQ(content[1024], 'a');
}

TEST_F(DiskTest, DamagedFiles_AreRefusedNotRead) {
  {
    auto disk = Make(1 << 20);
  }
  const std::string record = dir_.path() + "/disk/disk.json";
  const std::string good = os::ReadFile(AT_FDCWD, record.c_str(), 4096).value();
  for (
      const std::string& bad :
      {std::string("{"), std::string("[]"), std::string(R"({"format":2})"),
       std::string(R"({"format":1,"bytes":-5,"upper":"x","lowers":[]})"),
       std::string(R"({"format":1,"bytes":512,"upper":"../../etc/passwd","lowers":[]})"),
       std::string(
           R"({"format":1,"bytes":512,"upper":"11111111-2222-4333-8444-555555555555","lowers":[{"file":"../x"}]})"),
       std::string(
           R"({"format":1,"bytes":512,"upper":"11111111-2222-4333-8444-555555555555","lowers":[{"published":"zz"}]})")}) {
    ::unlink(record.c_str());
    ASSERT_TRUE(os::CreateFile(AT_FDCWD, record.c_str(), bad, 0600).ok());
    const auto opened = Disk::Open(dir_.path() + "/disk", OptionsOf(kBootA));
    ASSERT_FALSE(opened.ok()) << bad;
    EXPECT_EQ(opened.error().reason(), "disk.corrupt") << bad;
  }
  ::unlink(record.c_str());
  ASSERT_TRUE(os::CreateFile(AT_FDCWD, record.c_str(), good, 0600).ok());
  EXPECT_NE(Open(kBootA), nullptr);
}

}  // namespace
}  // namespace dsec::disk

// SPDX-License-Identifier: Apache-2.0
// An upper and what deaths leave of it.
#include "disk/upper.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <thread>

#include "base/fault.h"
#include "disk/testing/model.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

using testing::Fill;
using testing::kBootA;
using testing::kBootB;

constexpr uint64_t kDiskBytes = 8 << 20;

UpperOptions Boot(const char* id) {
  UpperOptions options;
  options.boot_id = id;
  return options;
}

class UpperTest : public ::testing::Test {
 protected:
  void SetUp() override {
    info_.uuid = NewUuid();
    info_.virtual_bytes = kDiskBytes;
    upper_ = Upper::Create(dir_.fd(), info_, Boot(kBootA)).value();
  }
  void TearDown() override { fault::DisarmAll(); }
  void Reopen(const char* boot) {
    upper_.reset();
    upper_ = Upper::Open(dir_.fd(), info_.uuid, Boot(boot)).value();
  }
  void Put(uint64_t sector, uint8_t byte, size_t sectors = 1) {
    ASSERT_TRUE(upper_->Write(sector, Fill(byte, sectors * kSectorBytes), {}).value());
  }
  // The first byte of a sector; -1: not here, 0: here and zero.
  int At(uint64_t sector) {
    const auto plan = upper_->Find(sector, sector + 1);
    if (plan.parts.empty()) return -1;
    if (plan.parts[0].zero) return 0;
    std::array<uint8_t, kSectorBytes> bytes;
    EXPECT_TRUE(upper_->ReadData(plan.parts[0].place * kSectorBytes, bytes).ok());
    EXPECT_TRUE(std::ranges::all_of(bytes, [&](uint8_t byte) { return byte == bytes[0]; }));
    return bytes[0];
  }
  uint64_t Blocks() const {
    struct stat status;
    EXPECT_EQ(::fstatat(dir_.fd(), DataName(info_.uuid).c_str(), &status, 0), 0);
    return static_cast<uint64_t>(status.st_blocks) * 512;
  }
  std::string JournalPath() const { return dir_.path() + "/" + info_.uuid + ".journal"; }

  os::TempDir dir_ = os::TempDir::Create("dsec-disk-").value();
  LayerInfo info_;
  std::unique_ptr<Upper> upper_;
};

TEST_F(UpperTest, Killed_SameBootKeepsAllThatWasWritten) {
  Put(1, 'a');
  ASSERT_TRUE(upper_->Flush().ok());
  Put(1, 'b', 2);
  ASSERT_TRUE(upper_->Zero(7, 3).ok());
  Reopen(kBootA);
  EXPECT_EQ(At(1), 'b');
  EXPECT_EQ(At(2), 'b');
  EXPECT_EQ(At(8), 0);
  EXPECT_EQ(At(3), -1);
}

TEST_F(UpperTest, MachineDied_KeepsWhatWasFlushedAndNothingElse) {
  Put(1, 'a');
  Put(5, 'x', 4);
  ASSERT_TRUE(upper_->Flush().ok());
  Put(1, 'b');
  Put(100, 'c');
  ASSERT_TRUE(upper_->Zero(5, 2).ok());
  Reopen(kBootB);
  EXPECT_EQ(At(1), 'a');
  EXPECT_EQ(At(5), 'x');
  EXPECT_EQ(At(100), -1);
  // What did not count then does not come back later, whatever is written and flushed meanwhile.
  Put(200, 'd');
  ASSERT_TRUE(upper_->Flush().ok());
  Reopen(kBootB);
  EXPECT_EQ(At(100), -1);
  EXPECT_EQ(At(200), 'd');
  Reopen(kBootA);
  EXPECT_EQ(At(1), 'a');
  EXPECT_EQ(At(200), 'd');
}

TEST_F(UpperTest, JournalCutAnywhere_AWriteIsThereAsAWholeOrAbsent) {
  Put(1, 'a', 3);
  ASSERT_TRUE(upper_->Flush().ok());
  const auto before = std::filesystem::file_size(JournalPath());
  Put(2, 'b', 2);
  Put(2, 'c', 1);
  upper_.reset();
  const std::string whole = os::ReadFile(AT_FDCWD, JournalPath().c_str(), 1 << 20).value();
  const std::string data = dir_.path() + "/" + DataName(info_.uuid);
  std::set<std::tuple<int, int, int>> seen;
  for (size_t size = before; size <= whole.size(); ++size) {
    for (const char tail : {'\0', '\xff'}) {
      // What the kernel has not written of a block is zero, or what was there.
      std::string bytes = whole.substr(0, size);
      bytes.resize(whole.size() + 64, tail);
      ::unlink(JournalPath().c_str());
      ASSERT_TRUE(os::CreateFile(AT_FDCWD, JournalPath().c_str(), bytes, 0600).ok());
      upper_ = Upper::Open(dir_.fd(), info_.uuid, Boot(kBootA)).value();
      seen.emplace(At(1), At(2), At(3));
      upper_.reset();
    }
  }
  EXPECT_THAT(seen,
              ::testing::UnorderedElementsAre(std::tuple('a', 'a', 'a'), std::tuple('a', 'b', 'b'),
                                              std::tuple('a', 'c', 'b')));
}

TEST_F(UpperTest, JournalOfAnotherUpper_SaysNothing) {
  Put(1, 'a');
  LayerInfo other = info_;
  other.uuid = NewUuid();
  {
    auto made = Upper::Create(dir_.fd(), other, Boot(kBootA)).value();
  }
  ASSERT_EQ(::rename(JournalPath().c_str(), (dir_.path() + "/" + other.uuid + ".journal").c_str()),
            0);
  auto opened = Upper::Open(dir_.fd(), other.uuid, Boot(kBootA)).value();
  EXPECT_TRUE(opened->Find(0, 100).parts.empty());
}

TEST_F(UpperTest, KilledAtEachStep_WhatWasAcknowledgedIsThere) {
  for (const std::string step :
       {"disk.upper.before_data", "disk.upper.after_data", "disk.journal.before_record",
        "disk.upper.after_record", "disk.flush.data_sync", "disk.flush.after_data_sync",
        "disk.flush.after_marker", "disk.journal.before_rename", "disk.journal.after_rename"}) {
    os::TempDir dir = os::TempDir::Create("dsec-disk-").value();
    const LayerInfo info = info_;
    int pipe_fds[2];
    ASSERT_EQ(::pipe2(pipe_fds, O_CLOEXEC), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      UpperOptions options = Boot(kBootA);
      options.min_journal_bytes = 1;
      auto upper = Upper::Create(dir.fd(), info, options).value();
      for (uint8_t i = 1; i < 40; ++i) {
        if (i == 20 && !fault::Arm(step + "=kill").ok()) ::_exit(2);
        if (!upper->Write(i % 7, Fill(i, kSectorBytes), {}).ok()) ::_exit(3);
        uint8_t said[2] = {i, 0};
        if (::write(pipe_fds[1], said, 2) != 2) ::_exit(4);
        if (i % 3 != 0) continue;
        if (!upper->Flush().ok()) ::_exit(5);
        said[1] = 1;
        if (::write(pipe_fds[1], said, 2) != 2) ::_exit(6);
      }
      ::_exit(0);
    }
    ::close(pipe_fds[1]);
    uint8_t said[2], written = 0, flushed = 0;
    while (::read(pipe_fds[0], said, 2) == 2) {
      written = said[0];
      if (said[1] == 1) flushed = said[0];
    }
    ::close(pipe_fds[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << step << " " << status;
    for (const char* boot : {kBootA, kBootB}) {
      // On a copy: opening changes it.
      os::TempDir copy = os::TempDir::Create("dsec-disk-").value();
      std::filesystem::copy(dir.path(), copy.path(),
                            std::filesystem::copy_options::recursive |
                                std::filesystem::copy_options::overwrite_existing);
      auto upper = Upper::Open(copy.fd(), info.uuid, Boot(boot)).value();
      const int least = boot == kBootA ? written : flushed;
      // The newest write of each sector that must be there, or one that was under way.
      for (uint64_t sector = 0; sector < 7; ++sector) {
        int must = -1;
        for (int i = 1; i <= least; ++i)
          if (i % 7 == static_cast<int>(sector)) must = i;
        const auto plan = upper->Find(sector, sector + 1);
        int is = -1;
        if (!plan.parts.empty()) {
          std::array<uint8_t, kSectorBytes> bytes;
          ASSERT_TRUE(upper->ReadData(plan.parts[0].place * kSectorBytes, bytes).ok());
          ASSERT_TRUE(std::ranges::all_of(bytes, [&](uint8_t b) { return b == bytes[0]; }));
          is = bytes[0];
        }
        const bool next = is == written + 1 && is % 7 == static_cast<int>(sector);
        const bool later = boot == kBootB && is > must && is <= written + 1;
        EXPECT_TRUE(is == must || next || later)
            << step << " boot " << boot << " sector " << sector << ": " << is << ", not " << must;
      }
    }
  }
}

TEST_F(UpperTest, NoRoom_FailsTheWriteAndLeavesWhatWasThere) {
  Put(1, 'a');
  ASSERT_TRUE(fault::Arm("disk.upper.before_data=error:ENOSPC*1").ok());
  EXPECT_FALSE(upper_->Write(1, Fill('b', kSectorBytes), {}).ok());
  ASSERT_TRUE(fault::Arm("disk.journal.before_record=error:ENOSPC*1").ok());
  EXPECT_FALSE(upper_->Write(1, Fill('c', kSectorBytes), {}).ok());
  EXPECT_EQ(At(1), 'a');
  Put(2, 'd');
  Reopen(kBootA);
  EXPECT_EQ(At(1), 'a');
  EXPECT_EQ(At(2), 'd');
}

TEST_F(UpperTest, DataCouldNotBeSynced_NothingIsAcceptedUntilItIsOpenedAgain) {
  Put(1, 'a');
  ASSERT_TRUE(upper_->Flush().ok());
  Put(1, 'b');
  ASSERT_TRUE(fault::Arm("disk.flush.data_sync=error:EIO*1").ok());
  EXPECT_FALSE(upper_->Flush().ok());
  EXPECT_FALSE(upper_->Flush().ok());
  EXPECT_FALSE(upper_->Write(1, Fill('c', kSectorBytes), {}).ok());
  EXPECT_FALSE(upper_->Zero(1, 1).ok());
  Reopen(kBootA);
  EXPECT_EQ(At(1), 'a');
  Put(1, 'd');
  EXPECT_TRUE(upper_->Flush().ok());
}

TEST_F(UpperTest, Rewritten_SpaceComesBackWithAFlush) {
  for (int round = 0; round < 20; ++round) Put(0, static_cast<uint8_t>('a' + round), 2048);
  EXPECT_GE(Blocks(), 20u << 20);
  ASSERT_TRUE(upper_->Flush().ok());
  EXPECT_LE(Blocks(), 2u << 20);
  EXPECT_EQ(At(2047), 'a' + 19);
  ASSERT_TRUE(upper_->Zero(0, 2048).ok());
  ASSERT_TRUE(upper_->Flush().ok());
  EXPECT_LE(Blocks(), 64u << 10);
  // Also without one, once there is much of it.
  UpperOptions options = Boot(kBootA);
  options.max_dead_bytes = 4 << 20;
  upper_.reset();
  upper_ = Upper::Open(dir_.fd(), info_.uuid, options).value();
  for (int round = 0; round < 30; ++round) Put(0, 'z', 2048);
  EXPECT_LE(Blocks(), 8u << 20);
  EXPECT_EQ(At(5), 'z');
}

TEST_F(UpperTest, WhatIsBeingRead_IsNotPunchedOut) {
  Put(0, 'a', 8);
  std::optional<Upper::Plan> plan(upper_->Find(0, 8));
  Put(0, 'b', 8);
  ASSERT_TRUE(upper_->Flush().ok());
  std::array<uint8_t, kSectorBytes> bytes;
  ASSERT_TRUE(upper_->ReadData(plan->parts[0].place * kSectorBytes, bytes).ok());
  EXPECT_EQ(bytes[0], 'a');
  const uint64_t place = plan->parts[0].place * kSectorBytes;
  plan.reset();
  ASSERT_TRUE(upper_->Flush().ok());
  ASSERT_TRUE(upper_->ReadData(place, bytes).ok());
  EXPECT_EQ(bytes[0], 0);
}

TEST_F(UpperTest, JournalOfManyRewrites_StaysSmall) {
  UpperOptions options = Boot(kBootA);
  options.min_journal_bytes = 4096;
  upper_.reset();
  upper_ = Upper::Open(dir_.fd(), info_.uuid, options).value();
  for (int i = 0; i < 5000; ++i) {
    Put(static_cast<uint64_t>(i % 10) * 3, static_cast<uint8_t>(i));
    if (i % 100 == 99) ASSERT_TRUE(upper_->Flush().ok());
  }
  EXPECT_LE(upper_->usage().journal_bytes, 16384u);
  for (const char* boot : {kBootA, kBootB}) {
    Reopen(boot);
    for (int i = 4990; i < 5000; ++i)
      EXPECT_EQ(At(static_cast<uint64_t>(i % 10) * 3), static_cast<uint8_t>(i)) << boot;
  }
}

TEST(Journal, AnyBytes_AreParsedWithinBounds) {
  Rng rng(7);
  for (int round = 0; round < 200; ++round) {
    const auto bytes = testing::RandomBytes(rng, rng.Below(4096));
    const auto all = Journal::Parse(bytes, "u", kBootA);
    EXPECT_EQ(all.end, 0u);
    EXPECT_TRUE(all.writes.empty());
  }
}

}  // namespace
}  // namespace dsec::disk

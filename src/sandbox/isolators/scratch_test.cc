// SPDX-License-Identifier: Apache-2.0
// Writable layers on the real kernel.

#include "sandbox/isolators/scratch.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include "os/file.h"
#include "os/mount.h"
#include "sandbox/isolators/loop_device.h"
#include "sandbox/testing/leak_check.h"

namespace dsec::sandbox {
namespace {

using ::testing::ElementsAre;
using testing::HostState;
using ::testing::IsEmpty;

constexpr uint64_t kMiB = 1 << 20;
constexpr uint32_t kOwner = 0x70010000;

class BtrfsScratchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string missing = testing::WhatIsMissing(); !missing.empty())
      GTEST_SKIP() << missing;
    before_ = HostState::Take(0x7fff0000, 0x7fff0000 + 4095);
    dir_.emplace(os::TempDir::Create("dsec-tsb-").value());
    Open();
  }
  void TearDown() override {
    if (!dir_.has_value()) return;
    scratch_.reset();
    dir_.reset();
    EXPECT_THAT(testing::Leaks(before_, HostState::Take(0x7fff0000, 0x7fff0000 + 4095)), IsEmpty());
  }
  void Open() {
    auto opened = OpenScratch({dir_->path(), 2048 * kMiB});
    ASSERT_TRUE(opened.ok()) << opened.error().ToString();
    scratch_ = std::move(*opened);
  }
  ScratchLayer Create(const std::string& name, uint64_t bytes) {
    auto layer = scratch_->Create(name, bytes, 0, kOwner);
    EXPECT_TRUE(layer.ok()) << layer.error().ToString();
    return layer.ok() ? std::move(*layer) : ScratchLayer();
  }
  // Writes until the file system refuses; bytes written.
  static uint64_t Fill(int dir, const char* name, int* error) {
    const os::UniqueFd file(::openat(dir, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    const std::string block(64 << 10, 'x');
    uint64_t total = 0;
    while (true) {
      const ssize_t size = ::write(file.get(), block.data(), block.size());
      if (size <= 0) {
        *error = errno;
        return total;
      }
      total += static_cast<uint64_t>(size);
    }
  }

  HostState before_;
  std::optional<os::TempDir> dir_;
  std::unique_ptr<Scratch> scratch_;
};

TEST_F(BtrfsScratchTest, Layer_BelongsToTheSandboxesRoot) {
  const ScratchLayer layer = Create("sb-a", 64 * kMiB);
  for (const int fd : {layer.upper.get(), layer.work.get()}) {
    struct stat info;
    ASSERT_EQ(::fstat(fd, &info), 0);
    EXPECT_EQ(info.st_uid, kOwner);
    EXPECT_EQ(info.st_gid, kOwner);
    EXPECT_EQ(info.st_mode & 07777, 0755u);
  }
  EXPECT_EQ(scratch_->Create("sb-a", 64 * kMiB, 0, kOwner).error().code(), Code::kAlreadyExists);
}

// Acceptance case 63.
TEST_F(BtrfsScratchTest, Bytes_StopAtTheLimitAndComeBack) {
  const ScratchLayer layer = Create("sb-a", 64 * kMiB);
  const ScratchLayer other = Create("sb-b", 64 * kMiB);
  int error = 0;
  const uint64_t written = Fill(layer.upper.get(), "f", &error);
  EXPECT_EQ(error, EDQUOT);
  EXPECT_LE(written, 64 * kMiB);
  EXPECT_GE(written, 63 * kMiB);
  auto usage = scratch_->Usage("sb-a");
  ASSERT_TRUE(usage.ok()) << usage.error().ToString();
  EXPECT_GE(usage->bytes, 63 * kMiB);
  EXPECT_LE(usage->bytes, 64 * kMiB);
  // The neighbour has its own room.
  EXPECT_GE(Fill(other.upper.get(), "f", &error), 63 * kMiB);
  // A sparse file writes into its holes against the limit; fallocate past it is refused.
  ASSERT_EQ(::unlinkat(layer.upper.get(), "f", 0), 0);
  const os::UniqueFd sparse(::openat(layer.upper.get(), "s", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::ftruncate(sparse.get(), 1ll << 40), 0);
  EXPECT_NE(::posix_fallocate(sparse.get(), 0, 1ll << 30), 0);
  EXPECT_GE(Fill(layer.upper.get(), "f", &error), 60 * kMiB)
      << "the room of the first file is free again";
}

TEST_F(BtrfsScratchTest, SetLimits_MoreRoom) {
  const ScratchLayer layer = Create("sb-a", 32 * kMiB);
  int error = 0;
  Fill(layer.upper.get(), "f", &error);
  ASSERT_TRUE(scratch_->SetLimits("sb-a", 96 * kMiB, 0).ok());
  EXPECT_GE(Fill(layer.upper.get(), "g", &error), 60 * kMiB);
}

// The bound on inodes that follows from bytes: as many as possible with one-byte names, and
// unlinked ones held open.
TEST_F(BtrfsScratchTest, Inodes_AreBoundedThroughBytes) {
  constexpr uint64_t kBytes = 16 * kMiB;
  const ScratchLayer layer = Create("sb-a", kBytes);
  const uint64_t bound = kBytes / scratch_->inode_cost_bytes();
  uint64_t made = 0;
  std::vector<os::UniqueFd> held;
  for (; held.size() < 8000; ++made) {
    os::UniqueFd file(::openat(layer.upper.get(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    if (!file.valid()) break;
    held.push_back(std::move(file));
  }
  std::vector<os::UniqueFd> dirs;
  dirs.push_back(os::UniqueFd(::dup(layer.upper.get())));
  int error = 0;
  for (size_t i = 0; i < dirs.size() && error == 0; ++i) {
    for (int c = 1; c < 256 && error == 0; ++c) {
      const char name[2] = {static_cast<char>(c), 0};
      if (c == '/' || c == '.') continue;
      const bool dir = c <= 40;
      const int result = dir ? ::mkdirat(dirs[i].get(), name, 0700)
                             : ::mknodat(dirs[i].get(), name, S_IFREG | 0600, 0);
      if (result != 0) error = errno;
      made += result == 0;
      if (dir && result == 0 && dirs.size() < 2000) {
        dirs.push_back(os::OpenAt(dirs[i].get(), name, O_RDONLY | O_DIRECTORY).value());
      }
    }
  }
  EXPECT_EQ(error, EDQUOT) << made;
  EXPECT_LE(made, bound);
  EXPECT_GT(made, bound / 4) << "the bound is not idle";
  RecordProperty("inodes", static_cast<int>(made));
}

TEST_F(BtrfsScratchTest, Remove_AnyTreeAndTwice) {
  const ScratchLayer layer = Create("sb-a", 64 * kMiB);
  // Acceptance case 68: a path thousands of levels deep, and a folder without permissions.
  os::UniqueFd at(::dup(layer.upper.get()));
  for (int i = 0; i < 3000; ++i) {
    ASSERT_EQ(::mkdirat(at.get(), "d", 0700), 0);
    at = os::OpenAt(at.get(), "d", O_RDONLY | O_DIRECTORY).value();
  }
  ASSERT_EQ(::mkdirat(layer.upper.get(), "closed", 0), 0);
  at.Reset();
  EXPECT_TRUE(scratch_->Remove("sb-a").ok());
  EXPECT_TRUE(scratch_->Remove("sb-a").ok());
  EXPECT_THAT(*scratch_->List(), IsEmpty());
  EXPECT_TRUE(scratch_->Create("sb-a", 64 * kMiB, 0, kOwner).ok()) << "the name is free again";
}

TEST_F(BtrfsScratchTest, Name_CannotLeaveTheFolder) {
  for (const char* name : {"", "..", "a/b", ".x"}) {
    EXPECT_EQ(scratch_->Create(name, kMiB, 0, kOwner).error().reason(), "scratch.name") << name;
    EXPECT_EQ(scratch_->Remove(name).error().reason(), "scratch.name") << name;
  }
}

TEST_F(BtrfsScratchTest, Reopened_FindsItsLayers) {
  ASSERT_TRUE(os::CreateFile(Create("sb-a", 64 * kMiB).upper.get(), "f", "kept", 0600).ok());
  scratch_.reset();
  Open();
  EXPECT_THAT(*scratch_->List(), ElementsAre("sb-a"));
  EXPECT_TRUE(scratch_->Usage("sb-a").ok());
}

// As after the death of a daemon: an overlay of a sandbox keeps the file system and its loop
// device.
TEST_F(BtrfsScratchTest, ReopenedWhileInUse_SharesTheDevice) {
  const ScratchLayer layer = Create("sb-a", 64 * kMiB);
  auto lower = std::move(*os::FsContext::Open("tmpfs")).Mount(0);
  ASSERT_TRUE(lower.ok());
  auto context = os::FsContext::Open("overlay").value();
  ASSERT_TRUE(context.SetFd("lowerdir+", lower->get()).ok());
  ASSERT_TRUE(context.SetFd("upperdir", layer.upper.get()).ok());
  ASSERT_TRUE(context.SetFd("workdir", layer.work.get()).ok());
  ASSERT_TRUE(context.SetFlag("volatile").ok());
  auto overlay = std::move(context).Mount(0);
  ASSERT_TRUE(overlay.ok()) << overlay.error().ToString();
  const size_t loops = HostState::Take(0, 0).loops.size();
  scratch_.reset();
  EXPECT_EQ(HostState::Take(0, 0).loops.size(), loops) << "still held by the overlay";
  Open();
  EXPECT_EQ(HostState::Take(0, 0).loops.size(), loops);
  ASSERT_TRUE(os::CreateFile(overlay->get(), "f", "x", 0600).ok());
  EXPECT_THAT(*scratch_->List(), ElementsAre("sb-a"));
}

TEST_F(BtrfsScratchTest, SecondDaemon_IsRefused) {
  auto second = OpenScratch({dir_->path(), 2048 * kMiB});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().reason(), "scratch.in_use");
}

TEST_F(BtrfsScratchTest, ImageOfAnotherBoot_IsMadeAnew) {
  Create("sb-a", 64 * kMiB);
  scratch_.reset();
  const std::string boot = dir_->path() + "/scratch.img.boot";
  ASSERT_EQ(::unlink(boot.c_str()), 0);
  ASSERT_TRUE(os::CreateFile(AT_FDCWD, boot.c_str(), "another boot\n", 0600).ok());
  Open();
  EXPECT_THAT(*scratch_->List(), IsEmpty());
}

TEST_F(BtrfsScratchTest, DamagedImage_IsMadeAnew) {
  scratch_.reset();
  ASSERT_EQ(::truncate((dir_->path() + "/scratch.img").c_str(), 4096), 0);
  Open();
  EXPECT_TRUE(scratch_->Create("sb-a", 64 * kMiB, 0, kOwner).ok());
}

TEST_F(BtrfsScratchTest, SpacePath_TellsTheFreeSpace) {
  struct statvfs space;
  ASSERT_EQ(::statvfs(scratch_->space_path().c_str(), &space), 0);
  EXPECT_GT(space.f_bavail * space.f_frsize, 1024 * kMiB);
  EXPECT_LE(space.f_blocks * space.f_frsize, 2048 * kMiB);
}

}  // namespace
}  // namespace dsec::sandbox

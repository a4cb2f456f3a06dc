// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/microvm/raw_disk.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "base/clock.h"
#include "os/file.h"
#include "sandbox/isolators/dir_list.h"
#include "sandbox/isolators/run_tool.h"

namespace dsec::sandbox {
namespace {

constexpr uint64_t kInodeBytes = 256;
constexpr uint64_t kSlack = 8 << 20;  // superblocks, descriptors, bitmaps
constexpr uint64_t kBlock = 1 << 20;
constexpr size_t kMaxTemplates = 32;
constexpr auto kMkfsTime = std::chrono::seconds(60);

// The data of a sparse file, holes left out.
Result<void> CopySparse(int from, int to) {
  struct stat info;
  if (::fstat(from, &info) != 0) return os::ErrnoError("vm.disk", "stat the template");
  if (::ioctl(to, FICLONE, from) == 0) return Ok();
  if (::ftruncate(to, info.st_size) != 0) return os::ErrnoError("vm.disk", "size the disk");
  for (off_t at = 0; at < info.st_size;) {
    const off_t data = ::lseek(from, at, SEEK_DATA);
    if (data < 0 && errno == ENXIO) return Ok();
    const off_t hole = data < 0 ? -1 : ::lseek(from, data, SEEK_HOLE);
    if (data < 0 || hole < 0) return os::ErrnoError("vm.disk", "find the template's data");
    off_t source = data, target = data;
    while (source < hole) {
      const ssize_t copied =
          ::copy_file_range(from, &source, to, &target, static_cast<size_t>(hole - source), 0);
      if (copied <= 0) return os::ErrnoError("vm.disk", "copy the template");
    }
    at = hole;
  }
  return Ok();
}

}  // namespace

Result<os::UniqueFd> RawDisks::Template(uint64_t bytes, uint64_t inodes) {
  const std::string name = fmt::format("{}-{}.ext4", bytes, inodes);
  const std::string path = fmt::format("{}/{}", dir_, name);
  const std::lock_guard lock(mutex_);
  auto there = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY);
  if (there.ok() || there.error().sys_errno() != ENOENT) return there;
  DSEC_TRY(const auto dir, os::OpenAt(AT_FDCWD, dir_.c_str(), O_RDONLY | O_DIRECTORY));
  DSEC_TRY(auto entries, ListDir(dir.get(), "."));
  for (size_t i = 0; entries.size() - i >= kMaxTemplates; ++i)
    ::unlinkat(dir.get(), entries[i].name.c_str(), 0);
  const std::string fresh = path + ".new";
  ::unlink(fresh.c_str());
  DSEC_TRY(auto file, os::OpenAt(AT_FDCWD, fresh.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600));
  const uint64_t size = (bytes + inodes * kInodeBytes + kSlack + kBlock - 1) / kBlock * kBlock;
  if (::ftruncate(file.get(), static_cast<off_t>(size)) != 0)
    return os::ErrnoError("vm.disk", "size the template");
  // No journal: no machine outlives its host. No root reserve, no first-boot work.
  DSEC_TRY_VOID(RunTool({"mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal",
                         "-I", fmt::format("{}", kInodeBytes), "-N", fmt::format("{}", inodes),
                         "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", fresh},
                        Clock::System().Mono() + kMkfsTime)
                    .Context("make an empty ext4 of {} bytes", size));
  if (::rename(fresh.c_str(), path.c_str()) != 0) return os::ErrnoError("vm.disk", path);
  return file;
}

Result<os::UniqueFd> RawDisks::Create(const std::string& path, uint64_t bytes, uint64_t inodes) {
  DSEC_TRY(const auto from, Template(bytes, inodes));
  DSEC_TRY(auto disk, os::OpenAt(AT_FDCWD, path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600));
  DSEC_TRY_VOID(CopySparse(from.get(), disk.get()));
  return disk;
}

Result<uint64_t> RawDisks::UsedBytes(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return os::ErrnoError("vm.disk", path);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

}  // namespace dsec::sandbox

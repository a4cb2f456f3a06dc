// SPDX-License-Identifier: Apache-2.0
#include "image/fs.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "os/file.h"

namespace dsec::image {
namespace {

constexpr uint64_t kReserveBytes = 64 << 20;

}  // namespace

Result<std::vector<std::string>> ListNames(int dirfd, uint64_t limit) {
  DSEC_TRY(auto own, os::OpenAt(dirfd, ".", O_RDONLY | O_DIRECTORY));
  std::unique_ptr<DIR, int (*)(DIR*)> dir(::fdopendir(own.get()), &::closedir);
  if (dir == nullptr) return os::ErrnoError("layer.io", "open a folder to list it");
  own.Release();
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(dir.get());
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    if (names.size() >= limit) {
      return Error(Code::kInvalidArgument, "layer.too_many_entries",
                   fmt::format("a folder holds more than {} entries", limit));
    }
    names.emplace_back(name);
  }
  if (errno != 0) return os::ErrnoError("layer.io", "list a folder");
  std::ranges::sort(names);
  return names;
}

Result<uint64_t> FreeBytes(int fd) {
  struct statvfs status;
  if (::fstatvfs(fd, &status) != 0) return os::ErrnoError("layer.io", "statvfs");
  return static_cast<uint64_t>(status.f_bavail) * status.f_frsize;
}

Result<void> RequireSpace(int fd, uint64_t bytes, std::string_view what) {
  DSEC_TRY(const uint64_t free, FreeBytes(fd));
  if (free >= kReserveBytes && free - kReserveBytes >= bytes) return Ok();
  return Error(Code::kResourceExhausted, "layer.no_space",
               fmt::format("{} needs {} bytes and {} to spare in the layer store, {} are free",
                           what, bytes, kReserveBytes, free));
}

Error StoreError(std::string_view what) {
  const int sys_errno = errno;
  switch (sys_errno) {
    case ENOSPC:
    case EDQUOT:
      return Error(Code::kResourceExhausted, "layer.no_space", std::string(what))
          .WithErrno(sys_errno);
    case ENAMETOOLONG:
    case ELOOP:
    case ENOTDIR:
    case EILSEQ:
      return Error(Code::kInvalidArgument, "layer.bad_path", std::string(what))
          .WithErrno(sys_errno);
    default:
      return Error(Code::kInternal, "layer.io", std::string(what)).WithErrno(sys_errno);
  }
}

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#include "os/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "os/file.h"

namespace dsec::os {
namespace {

constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;

Result<UniqueFd> NewMemfd(const char* name) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoError("os.memfd", fmt::format("make memfd {}", name));
  return fd;
}

Result<void> Seal(int fd) {
  if (::fcntl(fd, F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0)
    return ErrnoError("os.seal", "seal a memfd");
  return Ok();
}

}  // namespace

Result<UniqueFd> SealedMemfd(const char* name, std::span<const uint8_t> content) {
  DSEC_TRY(auto fd, NewMemfd(name));
  DSEC_TRY_VOID(
      WriteAll(fd.get(), {reinterpret_cast<const char*>(content.data()), content.size()}));
  DSEC_TRY_VOID(Seal(fd.get()));
  return fd;
}

Result<UniqueFd> SealedCopy(const char* name, int file, uint64_t limit) {
  struct stat info;
  if (::fstat(file, &info) != 0) return ErrnoError("os.stat", "stat the file to copy");
  if (!S_ISREG(info.st_mode))
    return Error(Code::kInvalidArgument, "os.not_regular", "not a regular file");
  auto size = static_cast<uint64_t>(info.st_size);
  if (size > limit) {
    return Error(Code::kResourceExhausted, "os.file_too_large",
                 fmt::format("{} bytes, at most {}", size, limit));
  }
  DSEC_TRY(auto fd, NewMemfd(name));
  off_t offset = 0;
  while (static_cast<uint64_t>(offset) < size) {
    ssize_t n = ::sendfile(fd.get(), file, &offset, size - static_cast<uint64_t>(offset));
    if (n < 0) {
      if (errno == EINTR) continue;
      return ErrnoError("os.copy", "copy a file into a memfd");
    }
    if (n == 0) return Error(Code::kUnavailable, "os.copy", "the file shrank while it was copied");
  }
  DSEC_TRY_VOID(Seal(fd.get()));
  return fd;
}

bool IsSealed(int fd) {
  int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & kSeals) == kSeals;
}

}  // namespace dsec::os

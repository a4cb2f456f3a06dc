// SPDX-License-Identifier: Apache-2.0
#include "os/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "os/syscalls.h"

namespace dsec::os {
namespace {

// The kernel gives up with EAGAIN when a rename or mount elsewhere raced with a scoped lookup.
constexpr int kLookupAttempts = 32;

Result<UniqueFd> OpenResolved(int dirfd, const char* path, int flags, mode_t mode,
                              uint64_t resolve) {
  int fd = -1;
  for (int attempt = 0; attempt < kLookupAttempts; ++attempt) {
    fd = OpenAt2(dirfd, path, static_cast<uint64_t>(flags | O_CLOEXEC), mode, resolve);
    if (fd >= 0 || (errno != EAGAIN && errno != EINTR)) break;
  }
  if (fd < 0) return ErrnoError("os.open", fmt::format("open {}", path));
  return UniqueFd(fd);
}

// Deeper trees are folded: a directory at this depth is renamed to the top first, so that neither
// descriptors nor stack grow with what a sandbox has built.
constexpr int kMaxRemoveDepth = 32;

class TreeRemover {
 public:
  explicit TreeRemover(int top) : top_(top) {}

  Result<void> Empty(int dirfd, int depth) {
    DSEC_TRY(auto own, OpenAt(dirfd, ".", O_RDONLY | O_DIRECTORY));
    std::unique_ptr<DIR, int (*)(DIR*)> dir(::fdopendir(own.get()), &::closedir);
    if (dir == nullptr) return ErrnoError("os.readdir", "open a directory to remove");
    own.Release();
    while (true) {
      errno = 0;
      const dirent* entry = ::readdir(dir.get());
      if (entry == nullptr) {
        if (errno != 0) return ErrnoError("os.readdir", "read a directory to remove");
        return Ok();
      }
      const char* name = entry->d_name;
      if (std::string_view(name) == "." || std::string_view(name) == "..") continue;
      DSEC_TRY_VOID(RemoveEntry(dirfd, name, depth));
    }
  }

 private:
  Result<void> RemoveEntry(int dirfd, const char* name, int depth) {
    if (::unlinkat(dirfd, name, 0) == 0 || errno == ENOENT) return Ok();
    if (errno == EBUSY) return Busy(name);
    if (errno != EISDIR && errno != EPERM)
      return ErrnoError("os.unlink", fmt::format("unlink {}", name));
    if (::unlinkat(dirfd, name, AT_REMOVEDIR) == 0 || errno == ENOENT) return Ok();
    if (errno == EBUSY) return Busy(name);
    if (errno != ENOTEMPTY) return ErrnoError("os.unlink", fmt::format("rmdir {}", name));
    if (depth >= kMaxRemoveDepth) return Lift(dirfd, name);
    auto child = OpenBeneath(dirfd, name, O_RDONLY | O_DIRECTORY);
    if (!child.ok()) {
      if (child.error().sys_errno() == EXDEV) return Busy(name);
      return std::move(child).error();
    }
    DSEC_TRY_VOID(Empty(child->get(), depth + 1));
    if (::unlinkat(dirfd, name, AT_REMOVEDIR) != 0 && errno != ENOENT) {
      return ErrnoError("os.unlink", fmt::format("rmdir {}", name));
    }
    return Ok();
  }

  // readdir of the top may or may not show the new name: the caller repeats until the top is empty.
  Result<void> Lift(int dirfd, const char* name) {
    for (int attempt = 0; attempt < 1000; ++attempt) {
      std::string target = fmt::format(".removing-{}", counter_++);
      if (::renameat2(dirfd, name, top_, target.c_str(), RENAME_NOREPLACE) == 0) return Ok();
      if (errno != EEXIST) return ErrnoError("os.rename", fmt::format("move {} up", name));
    }
    return Error(Code::kInternal, "os.rename", "no free name to move a deep directory to");
  }

  static Error Busy(const char* name) {
    return Error(Code::kConflict, "os.busy_mount", fmt::format("{} is a mount point", name))
        .WithErrno(EBUSY);
  }

  int top_;
  uint64_t counter_ = 0;
};

}  // namespace

Error ErrnoError(std::string_view reason, std::string message) {
  return Error::FromErrno(errno, reason, std::move(message));
}

Result<UniqueFd> OpenAt(int dirfd, const char* path, int flags, mode_t mode) {
  int fd;
  do {
    fd = ::openat(dirfd, path, flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) return ErrnoError("os.open", fmt::format("open {}", path));
  return UniqueFd(fd);
}

Result<UniqueFd> OpenInRoot(int root, const char* path, int flags, mode_t mode) {
  return OpenResolved(root, path, flags, mode, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
}

Result<UniqueFd> OpenBeneath(int dirfd, const char* path, int flags, mode_t mode) {
  return OpenResolved(
      dirfd, path, flags, mode,
      RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV);
}

Result<std::string> ReadAll(int fd, size_t limit) {
  std::string data;
  while (true) {
    size_t have = data.size();
    size_t room = std::min<size_t>(std::max<size_t>(have, 4096), limit + 1 - have);
    data.resize(have + room);
    ssize_t n = ::read(fd, data.data() + have, room);
    if (n < 0) {
      if (errno != EINTR) return ErrnoError("os.read", "read");
      n = 0;
      data.resize(have);
      continue;
    }
    data.resize(have + static_cast<size_t>(n));
    if (n == 0) return data;
    if (data.size() > limit) {
      return Error(Code::kResourceExhausted, "os.file_too_large",
                   fmt::format("more than {} bytes", limit));
    }
  }
}

Result<std::string> ReadFile(int dirfd, const char* path, size_t limit) {
  DSEC_TRY(auto fd, OpenAt(dirfd, path, O_RDONLY));
  return ReadAll(fd.get(), limit).Context("read {}", path);
}

Result<void> WriteAll(int fd, std::string_view data) {
  while (!data.empty()) {
    ssize_t n = ::write(fd, data.data(), data.size());
    if (n < 0) {
      if (errno == EINTR) continue;
      return ErrnoError("os.write", "write");
    }
    data.remove_prefix(static_cast<size_t>(n));
  }
  return Ok();
}

Result<void> WriteExisting(int dirfd, const char* path, std::string_view data) {
  DSEC_TRY(auto fd, OpenAt(dirfd, path, O_WRONLY));
  ssize_t n;
  do {
    n = ::write(fd.get(), data.data(), data.size());
  } while (n < 0 && errno == EINTR);
  if (n < 0) return ErrnoError("os.write", fmt::format("write {}", path));
  if (static_cast<size_t>(n) != data.size()) {
    return Error(Code::kInternal, "os.write",
                 fmt::format("short write to {}: {} of {}", path, n, data.size()));
  }
  return Ok();
}

Result<void> CreateFile(int dirfd, const char* path, std::string_view data, mode_t mode) {
  DSEC_TRY(auto fd, OpenAt(dirfd, path, O_WRONLY | O_CREAT | O_EXCL, mode));
  return WriteAll(fd.get(), data).Context("create {}", path);
}

Result<void> MakeDir(int dirfd, const char* path, mode_t mode) {
  if (::mkdirat(dirfd, path, mode) != 0)
    return ErrnoError("os.mkdir", fmt::format("mkdir {}", path));
  return Ok();
}

Result<void> RemoveTree(int dirfd, const char* name) {
  if (::unlinkat(dirfd, name, 0) == 0 || errno == ENOENT) return Ok();
  if (errno != EISDIR && errno != EPERM)
    return ErrnoError("os.unlink", fmt::format("unlink {}", name));
  DSEC_TRY(auto top, OpenAt(dirfd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  TreeRemover remover(top.get());
  while (true) {
    DSEC_TRY_VOID(remover.Empty(top.get(), 0).Context("remove {}", name));
    if (::unlinkat(dirfd, name, AT_REMOVEDIR) == 0 || errno == ENOENT) return Ok();
    if (errno == EBUSY) {
      return Error(Code::kConflict, "os.busy_mount", fmt::format("{} is a mount point", name))
          .WithErrno(EBUSY);
    }
    if (errno != ENOTEMPTY) return ErrnoError("os.unlink", fmt::format("rmdir {}", name));
  }
}

Result<bool> WaitReadable(int fd, MonoTime deadline) {
  while (true) {
    auto left = deadline - Clock::System().Mono();
    timespec timeout = {};
    if (left.count() > 0) {
      timeout.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(left).count();
      timeout.tv_nsec = (left % std::chrono::seconds(1)).count();
    }
    pollfd item = {fd, POLLIN, 0};
    int ready = ::ppoll(&item, 1, &timeout, nullptr);
    if (ready > 0) return true;
    if (ready == 0) return false;
    if (errno != EINTR) return ErrnoError("os.poll", "poll");
  }
}

Result<TempDir> TempDir::Create(std::string_view prefix) {
  const char* base = std::getenv("TMPDIR");
  std::string path =
      fmt::format("{}/{}XXXXXX", base != nullptr && *base != '\0' ? base : "/tmp", prefix);
  if (::mkdtemp(path.data()) == nullptr)
    return ErrnoError("os.mkdir", fmt::format("make {}", path));
  auto fd = OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY);
  if (!fd.ok()) {
    ::rmdir(path.c_str());
    return std::move(fd).error();
  }
  return TempDir(std::move(path), std::move(fd).value());
}

TempDir::TempDir(TempDir&& other) noexcept
    : path_(std::exchange(other.path_, {})), fd_(std::move(other.fd_)) {}

TempDir& TempDir::operator=(TempDir&& other) noexcept {
  if (this != &other) {
    Remove();
    path_ = std::exchange(other.path_, {});
    fd_ = std::move(other.fd_);
  }
  return *this;
}

TempDir::~TempDir() { Remove(); }

void TempDir::Remove() {
  if (path_.empty()) return;
  auto removed = RemoveTree(AT_FDCWD, path_.c_str());
  if (!removed.ok())
    std::fprintf(stderr, "temporary directory %s stays: %s\n", path_.c_str(),
                 removed.error().ToString().c_str());
  path_.clear();
}

}  // namespace dsec::os

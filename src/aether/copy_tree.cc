// SPDX-License-Identifier: Apache-2.0
#include "aether/copy_tree.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <memory>
#include <vector>

#include "aether/directory.h"
#include "aether/files.h"
#include "os/file.h"
#include "os/unique_fd.h"

namespace dsec::aether {
namespace {

constexpr size_t kMaxDepth = 128;
constexpr size_t kBufferBytes = 64 << 10;

// Owner before mode: a change of owner clears setuid and setgid.
Result<void> CopyAttributes(int fd, const struct stat& status, const std::string& name) {
  const timespec times[2] = {{0, UTIME_OMIT}, status.st_mtim};
  if (::fchown(fd, status.st_uid, status.st_gid) != 0 ||
      ::fchmod(fd, status.st_mode & 07777) != 0 || ::futimens(fd, times) != 0) {
    return FileError(errno, name);
  }
  return Ok();
}

Result<void> CopyRange(int from, int to, off_t start, off_t end, std::vector<char>& buffer) {
  while (start < end) {
    size_t wanted = static_cast<size_t>(std::min<off_t>(end - start, kBufferBytes));
    ssize_t got = ::pread(from, buffer.data(), wanted, start);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(errno, "read");
    if (got == 0) return Ok();
    for (ssize_t done = 0; done < got;) {
      ssize_t put =
          ::pwrite(to, buffer.data() + done, static_cast<size_t>(got - done), start + done);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) return FileError(errno, "write");
      done += put;
    }
    start += got;
  }
  return Ok();
}

Result<void> CopyFile(int source, const std::string& name, int target, const std::string& new_name,
                      const struct stat& status) {
  DSEC_TRY(os::UniqueFd from,
           os::OpenAt(source, name.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY));
  DSEC_TRY(os::UniqueFd to,
           os::OpenAt(target, new_name.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0600));
  std::vector<char> buffer(kBufferBytes);
  off_t position = 0;
  while (true) {
    off_t data = ::lseek(from.get(), position, SEEK_DATA);
    if (data < 0 && errno == ENXIO) break;
    off_t hole = data < 0 ? -1 : ::lseek(from.get(), data, SEEK_HOLE);
    if (data < 0 || hole < 0) {  // a file system without holes
      data = position;
      hole = status.st_size;
    }
    DSEC_TRY_VOID(CopyRange(from.get(), to.get(), data, hole, buffer));
    position = hole;
    if (position >= status.st_size) break;
  }
  if (::ftruncate(to.get(), status.st_size) != 0) return FileError(errno, name);
  return CopyAttributes(to.get(), status, name);
}

struct Level {
  os::UniqueFd from;
  os::UniqueFd to;
  struct stat status;
  std::unique_ptr<DirectoryReader> reader;
};

class TreeCopier {
 public:
  // Copies one entry; a directory is only opened, and left on the stack.
  Result<void> Copy(int source, const std::string& name, int target, const std::string& new_name) {
    struct stat status;
    if (::fstatat(source, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0)
      return FileError(errno, name);
    if (S_ISDIR(status.st_mode)) return Enter(source, name, target, new_name, status);
    if (S_ISREG(status.st_mode)) return CopyFile(source, name, target, new_name, status);
    if (S_ISLNK(status.st_mode)) {
      char link[PATH_MAX];
      ssize_t size = ::readlinkat(source, name.c_str(), link, sizeof(link) - 1);
      if (size < 0) return FileError(errno, name);
      link[size] = 0;
      if (::symlinkat(link, target, new_name.c_str()) != 0) return FileError(errno, name);
    } else if (S_ISFIFO(status.st_mode)) {
      if (::mkfifoat(target, new_name.c_str(), status.st_mode & 07777) != 0)
        return FileError(errno, name);
    } else {
      return Error(Code::kInvalidArgument, "file.special", "devices and sockets cannot be copied");
    }
    if (::fchownat(target, new_name.c_str(), status.st_uid, status.st_gid, AT_SYMLINK_NOFOLLOW) !=
        0) {
      return FileError(errno, name);
    }
    return Ok();
  }

  // Copies what is on the stack until it is empty.
  Result<void> Run() {
    while (!levels_.empty()) {
      Level& level = levels_.back();
      DSEC_TRY(std::optional<DirectoryReader::Entry> entry, level.reader->Next());
      if (entry) {
        std::string name(entry->name);
        DSEC_TRY_VOID(Copy(level.from.get(), name, level.to.get(), name));
        continue;
      }
      DSEC_TRY_VOID(CopyAttributes(level.to.get(), level.status, "directory"));
      levels_.pop_back();
    }
    return Ok();
  }

 private:
  Result<void> Enter(int source, const std::string& name, int target, const std::string& new_name,
                     const struct stat& status) {
    if (levels_.size() >= kMaxDepth) {
      return Error(Code::kInvalidArgument, "file.too_deep",
                   fmt::format("the tree has more than {} levels", kMaxDepth));
    }
    if (::mkdirat(target, new_name.c_str(), 0700) != 0) return FileError(errno, name);
    Level level;
    DSEC_TRY(level.from, os::OpenBeneath(source, name.c_str(), O_RDONLY | O_DIRECTORY));
    DSEC_TRY(level.to, os::OpenBeneath(target, new_name.c_str(), O_RDONLY | O_DIRECTORY));
    level.status = status;
    level.reader = std::make_unique<DirectoryReader>(level.from.get());
    levels_.push_back(std::move(level));
    return Ok();
  }

  std::vector<Level> levels_;
};

}  // namespace

Result<void> CopyTree(int source, const std::string& name, int target,
                      const std::string& new_name) {
  TreeCopier copier;
  DSEC_TRY_VOID(copier.Copy(source, name, target, new_name));
  return copier.Run();
}

}  // namespace dsec::aether

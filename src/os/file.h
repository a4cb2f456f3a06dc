// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::os {

// All functions: thread-safe, close-on-exec, relative paths start at `dirfd` (AT_FDCWD works).
// Reasons are "os.<call>".

// The error of the call that has just set errno.
Error ErrnoError(std::string_view reason, std::string message);

Result<UniqueFd> OpenAt(int dirfd, const char* path, int flags, mode_t mode = 0);
// Resolves `path` as a process chrooted to `root` would: absolute links and ".." stay inside. Magic
// links are refused. The only way to open a path that a sandbox may have shaped. O_NOFOLLOW refuses
// a link at the end.
Result<UniqueFd> OpenInRoot(int root, const char* path, int flags, mode_t mode = 0);
// Resolves below `dirfd` without following any symbolic link and without crossing a mount.
Result<UniqueFd> OpenBeneath(int dirfd, const char* path, int flags, mode_t mode = 0);

// The whole file; kResourceExhausted "os.file_too_large" when it holds more than `limit` bytes.
Result<std::string> ReadFile(int dirfd, const char* path, size_t limit);
Result<std::string> ReadAll(int fd, size_t limit);
Result<void> WriteAll(int fd, std::string_view data);
// One write(2) into an existing file, as the files of /proc, /sys and cgroups want it. A short
// write is an error.
Result<void> WriteExisting(int dirfd, const char* path, std::string_view data);
// Makes a new file; EEXIST is an error.
Result<void> CreateFile(int dirfd, const char* path, std::string_view data, mode_t mode);

Result<void> MakeDir(int dirfd, const char* path, mode_t mode);  // EEXIST is an error
// Removes `name` and all below it. Follows no link, crosses no mount (kConflict "os.busy_mount" if
// one is in the way). Missing: ok.
Result<void> RemoveTree(int dirfd, const char* name);

// Waits until `fd` is readable or hung up; false when the deadline came first.
Result<bool> WaitReadable(int fd, MonoTime deadline);

// A directory below $TMPDIR or /tmp that is removed with all its content by the destructor. For
// tests and builds.
class TempDir {
 public:
  static Result<TempDir> Create(std::string_view prefix);
  TempDir(TempDir&& other) noexcept;
  TempDir& operator=(TempDir&& other) noexcept;
  ~TempDir();
  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }

 private:
  TempDir(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  void Remove();
  std::string path_;
  UniqueFd fd_;
};

}  // namespace dsec::os

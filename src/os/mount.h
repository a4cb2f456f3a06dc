// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mount.h>

#include <cstdint>
#include <string>

#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::os {

// A file system that is being configured (fsopen(2), Linux 5.2). Errors carry the kernel's own
// sentence about the option.
class FsContext {
 public:
  static Result<FsContext> Open(const char* type);
  Result<void> SetFlag(const char* key);
  Result<void> SetString(const char* key, const char* value);
  // For overlayfs layers, Linux 6.13.
  Result<void> SetFd(const char* key, int fd);
  // Creates the file system and returns its detached mount: an O_PATH descriptor that is in no
  // mount table and ends with its last owner. `attributes` are MOUNT_ATTR_*.
  Result<UniqueFd> Mount(uint64_t attributes) &&;

 private:
  explicit FsContext(UniqueFd fd) : fd_(std::move(fd)) {}
  Error Fail(const char* call, const char* what);
  UniqueFd fd_;
};

// Detached copy of the mount at `path` (of `dirfd` itself when empty); `recursive` takes the mounts
// below along.
Result<UniqueFd> CloneMount(int dirfd, const char* path, bool recursive);
// Attaches a detached mount, or moves an attached one, to `path` below `dirfd` (to `dirfd` itself
// when empty). Links at the end of `path` are not followed.
Result<void> MoveMount(int mount, int dirfd, const char* path);
// Sets and clears MOUNT_ATTR_* of one mount. `user_ns` >= 0 also maps its ids through that
// namespace, once, before it is attached.
Result<void> SetMountAttributes(int mount, uint64_t set, uint64_t clear, int user_ns = -1);

}  // namespace dsec::os

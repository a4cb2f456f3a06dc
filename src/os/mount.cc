// SPDX-License-Identifier: Apache-2.0
#include "os/mount.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "os/file.h"

namespace dsec::os {

Result<FsContext> FsContext::Open(const char* type) {
  UniqueFd fd(::fsopen(type, FSOPEN_CLOEXEC));
  if (!fd.valid()) return ErrnoError("os.fsopen", fmt::format("fsopen {}", type));
  return FsContext(std::move(fd));
}

// The kernel queues one line per complaint ("e overlay: ..."); what does not fit is lost there,
// never here.
Error FsContext::Fail(const char* call, const char* what) {
  int saved = errno;
  std::string message = fmt::format("{} {}", call, what);
  char line[512];
  for (int i = 0; i < 8; ++i) {
    ssize_t n = ::read(fd_.get(), line, sizeof(line));
    if (n <= 0) break;
    message += fmt::format("; {}", std::string_view(line, static_cast<size_t>(n)));
  }
  return Error::FromErrno(saved, "os.fsconfig", std::move(message));
}

Result<void> FsContext::SetFlag(const char* key) {
  if (::fsconfig(fd_.get(), FSCONFIG_SET_FLAG, key, nullptr, 0) != 0) return Fail("set flag", key);
  return Ok();
}

Result<void> FsContext::SetString(const char* key, const char* value) {
  if (::fsconfig(fd_.get(), FSCONFIG_SET_STRING, key, value, 0) != 0) return Fail("set", key);
  return Ok();
}

Result<void> FsContext::SetFd(const char* key, int fd) {
  if (::fsconfig(fd_.get(), FSCONFIG_SET_FD, key, nullptr, fd) != 0)
    return Fail("set descriptor", key);
  return Ok();
}

Result<UniqueFd> FsContext::Mount(uint64_t attributes) && {
  if (::fsconfig(fd_.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0)
    return Fail("create", "file system");
  UniqueFd mount(::fsmount(fd_.get(), FSMOUNT_CLOEXEC, static_cast<unsigned>(attributes)));
  if (!mount.valid()) return Fail("fsmount", "file system");
  return mount;
}

Result<UniqueFd> CloneMount(int dirfd, const char* path, bool recursive) {
  unsigned flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW;
  if (recursive) flags |= AT_RECURSIVE;
  UniqueFd fd(::open_tree(dirfd, path, flags));
  if (!fd.valid()) return ErrnoError("os.open_tree", fmt::format("clone the mount at '{}'", path));
  return fd;
}

Result<void> MoveMount(int mount, int dirfd, const char* path) {
  if (::move_mount(mount, "", dirfd, path, MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) !=
      0) {
    return ErrnoError("os.move_mount", fmt::format("attach a mount at '{}'", path));
  }
  return Ok();
}

Result<void> SetMountAttributes(int mount, uint64_t set, uint64_t clear, int user_ns) {
  mount_attr attributes = {};
  attributes.attr_set = set;
  attributes.attr_clr = clear;
  if (user_ns >= 0) {
    attributes.attr_set |= MOUNT_ATTR_IDMAP;
    attributes.userns_fd = static_cast<uint64_t>(user_ns);
  }
  if (::mount_setattr(mount, "", AT_EMPTY_PATH, &attributes, sizeof(attributes)) != 0) {
    return ErrnoError("os.mount_setattr", "set attributes of a mount");
  }
  return Ok();
}

}  // namespace dsec::os

// SPDX-License-Identifier: Apache-2.0
#include "blobfs/fuse_mount.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>

#include "blobfs/fuse_session.h"
#include "blobfs/settings.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::blobfs {
namespace {

constexpr char kLimit[] = "/proc/sys/fs/fuse/max_pages_limit";
constexpr size_t kNumberBytes = 32;

Result<FuseMount> Mount(const char* source, bool writable) {
  FuseMount made;
  DSEC_TRY(made.device, os::OpenAt(AT_FDCWD, "/dev/fuse", O_RDWR));
  DSEC_TRY(auto context, os::FsContext::Open("fuse"));
  DSEC_TRY_VOID(context.SetString("source", source));
  DSEC_TRY_VOID(context.SetString("fd", std::to_string(made.device.get()).c_str()));
  DSEC_TRY_VOID(context.SetString("rootmode", "40000"));
  DSEC_TRY_VOID(context.SetString("user_id", "0"));
  DSEC_TRY_VOID(context.SetString("group_id", "0"));
  DSEC_TRY_VOID(context.SetFlag("default_permissions"));
  DSEC_TRY_VOID(context.SetFlag("allow_other"));
  DSEC_TRY(made.mount,
           std::move(context).Mount((writable ? 0 : MOUNT_ATTR_RDONLY) | MOUNT_ATTR_NODEV |
                                    MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC));
  return made;
}

}  // namespace

Result<FuseMount> MountFuse(const std::string& dir, const char* source, bool writable) {
  DSEC_TRY_VOID(RestoreLimit(dir));
  const auto was = os::ReadFile(AT_FDCWD, kLimit, kNumberBytes);
  uint32_t limit = FuseSession::kMaxPages;  // not to be set before 6.13
  if (was.ok()) std::from_chars(was->data(), was->data() + was->size(), limit);
  if (limit < FuseSession::kMaxPages) {
    const std::string record = dir + "/" + kLimitName;
    DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, record.c_str(), *was, 0600));
    DSEC_TRY_VOID(os::WriteExisting(AT_FDCWD, kLimit, std::to_string(FuseSession::kMaxPages)));
  }
  auto made = Mount(source, writable);
  DSEC_TRY_VOID(RestoreLimit(dir));
  if (made.ok()) return made;
  return Error(Code::kFailedPrecondition, "layer.no_fuse", made.error().ToString())
      .WithErrno(made.error().sys_errno());
}

Result<bool> RestoreLimit(const std::string& dir) {
  const std::string record = dir + "/" + kLimitName;
  const auto was = os::ReadFile(AT_FDCWD, record.c_str(), kNumberBytes);
  if (!was.ok() && was.error().sys_errno() == ENOENT) return false;
  if (was.ok() && !was->empty()) DSEC_TRY_VOID(os::WriteExisting(AT_FDCWD, kLimit, *was));
  if (::unlink(record.c_str()) != 0) return os::ErrnoError("layer.io", record);
  return true;
}

bool IsConnected(int device) {
  pollfd item{device, POLLIN, 0};
  return ::poll(&item, 1, 0) >= 0 && (item.revents & POLLERR) == 0;
}

}  // namespace dsec::blobfs

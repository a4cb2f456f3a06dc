// SPDX-License-Identifier: Apache-2.0
#include "image/erofs_mount.h"

#include <fcntl.h>
#include <sys/mount.h>

#include <cerrno>
#include <mutex>
#include <set>
#include <string>

#include "base/log.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "image/root_calls.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::image {
namespace {

constexpr char kBdiFolder[] = "/sys/class/bdi";

// The backing devices of file-backed EROFS mounts. Their numbers are a counter of the kernel and
// nothing leads from a mount to its own, so the ones that a mount added are found by comparing.
Result<std::set<std::string>> ErofsBackingDevices() {
  DSEC_TRY(const auto folder, os::OpenAt(AT_FDCWD, kBdiFolder, O_RDONLY | O_DIRECTORY));
  DSEC_TRY(const auto names, ListNames(folder.get(), UINT64_MAX));
  std::set<std::string> found;
  for (const std::string& name : names) {
    if (name.starts_with("erofs-")) found.insert(name);
  }
  return found;
}

// Those of mounts that are to have no readahead. The lock is held over writes to sysfs, never over
// a mount.
std::mutex apart_mutex;
std::set<std::string>& Apart() {
  static std::set<std::string> names;
  return names;
}

Result<void> WriteReadAhead(const std::string& name, uint32_t kib) {
  const std::string path = fmt::format("{}/{}/read_ahead_kb", kBdiFolder, name);
  return os::WriteExisting(AT_FDCWD, path.c_str(), std::to_string(kib));
}

// A mount that another thread or process makes at the same moment gets this readahead, too; all of
// this process but those apart want it, and others are not harmed by it.
Result<void> SetReadAhead(const std::set<std::string>& before, uint32_t kib) {
  DSEC_TRY(const auto after, ErofsBackingDevices());
  const std::lock_guard lock(apart_mutex);
  for (const std::string& name : after) {
    if (before.contains(name) || Apart().contains(name)) continue;
    auto set = WriteReadAhead(name, kib);
    // Another one's may have ended meanwhile.
    if (!set.ok() && set.error().sys_errno() != ENOENT) return set;
  }
  return Ok();
}

// False: more than one mount was made since `before`.
Result<bool> SetApart(const std::set<std::string>& before) {
  DSEC_TRY(const auto after, ErofsBackingDevices());
  std::string own;
  for (const std::string& name : after) {
    if (before.contains(name)) continue;
    if (!own.empty()) return false;
    own = name;
  }
  const std::lock_guard lock(apart_mutex);
  std::erase_if(Apart(), [&](const std::string& name) { return !after.contains(name); });
  Apart().insert(own);
  DSEC_TRY_VOID(WriteReadAhead(own, 0));
  return true;
}

Result<os::UniqueFd> MountErofs(int meta_fd, std::span<const int> content) {
  // By descriptor, so that what was checked is what is mounted.
  const std::string meta = fmt::format("/proc/self/fd/{}", meta_fd);
  DSEC_TRY(auto context, os::FsContext::Open("erofs"));
  DSEC_TRY_VOID(context.SetString("source", meta.c_str()));
  for (const int file : content) {
    const std::string device = fmt::format("/proc/self/fd/{}", file);
    DSEC_TRY_VOID(context.SetString("device", device.c_str()));
  }
  DSEC_TRY_VOID(context.SetFlag("ro"));
  return std::move(context).Mount(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID);
}

}  // namespace

Error MountRefused(int meta, const Error& cause) {
  Error error = RootError(cause);
  if (error.reason() == "layer.unreachable") return error;
  // Without EROFS_FS_ZIP: z_erofs_parse_cfgs in fs/erofs/internal.h.
  if (cause.sys_errno() == EOPNOTSUPP && HasCompressedFiles(meta)) {
    return Error(Code::kUnavailable, "layer.compression_unsupported",
                 "the layer is compressed, which this kernel cannot read (EROFS_FS_ZIP)")
        .WithErrno(EOPNOTSUPP);
  }
  return Error(Code::kInternal, "layer.mount_failed", cause.message()).WithErrno(cause.sys_errno());
}

Result<std::shared_ptr<const os::UniqueFd>> MountLayer(int meta, std::span<const int> content,
                                                       uint32_t read_ahead_kib) {
  auto before = ErofsBackingDevices();
  auto mounted = MountErofs(meta, content);  // opens the content once more: may hang
  if (!mounted.ok()) return MountRefused(meta, mounted.error());
  auto set =
      before.ok() ? SetReadAhead(*before, read_ahead_kib) : Result<void>(std::move(before).error());
  if (!set.ok()) log::Warn("layer.read_ahead_not_set", {{"error", set.error()}});
  return std::make_shared<const os::UniqueFd>(*std::move(mounted));
}

Result<std::shared_ptr<const os::UniqueFd>> MountLayerApart(int meta,
                                                            std::span<const int> content) {
  constexpr int kTries = 20;
  for (int i = 0; i < kTries; ++i) {
    DSEC_TRY(const auto before, ErofsBackingDevices());
    auto mounted = MountErofs(meta, content);
    if (!mounted.ok()) return MountRefused(meta, mounted.error());
    DSEC_TRY(const bool alone, SetApart(before));
    if (alone) return std::make_shared<const os::UniqueFd>(*std::move(mounted));
  }
  return Error(Code::kUnavailable, "layer.busy",
               "too many layers are being mounted to mount one without readahead");
}

}  // namespace dsec::image

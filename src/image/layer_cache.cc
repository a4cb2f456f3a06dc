// SPDX-License-Identifier: Apache-2.0
#include "image/layer_cache.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "base/log.h"
#include "image/digest.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "image/layer_files.h"
#include "image/root_calls.h"
#include "image/share_meta.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr std::string_view kNewPrefix = "new-";
constexpr size_t kMaxManifest = 1 << 20;
constexpr size_t kCopyBuffer = 1 << 20;

// Removed with its content by the destructor unless it has got its name.
struct NewFolder {
  int dir;
  std::string name;
  ~NewFolder() {
    if (!name.empty()) static_cast<void>(os::RemoveTree(dir, name.c_str()));
  }
};

// The digest of what was read.
Result<std::string> CopyAndHash(int from, int to) {
  std::vector<uint8_t> buffer(kCopyBuffer);
  Sha256 sha;
  off_t offset = 0;
  while (true) {
    const ssize_t got = ::pread(from, buffer.data(), buffer.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return RootError(os::ErrnoError("layer.io", "read the metadata of a layer"));
    if (got == 0) return sha.Finish();
    const auto size = static_cast<size_t>(got);
    sha.Update({buffer.data(), size});
    for (size_t done = 0; done < size;) {
      const ssize_t put = ::write(to, buffer.data() + done, size - done);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) return StoreError("write the local copy of a layer's metadata");
      done += static_cast<size_t>(put);
    }
    offset += got;
  }
}

// Linux mounts EROFS from a file only where the file system reads by folios of its own and does not
// stack on another one (fs/erofs/super.c).
Result<void> CheckFit(int dir, const std::string& path) {
  struct statfs status;
  if (::fstatfs(dir, &status) != 0) return StoreError("statfs " + path);
  const char* name = status.f_type == TMPFS_MAGIC             ? "tmpfs"
                     : status.f_type == RAMFS_MAGIC           ? "ramfs"
                     : status.f_type == OVERLAYFS_SUPER_MAGIC ? "overlayfs"
                                                              : nullptr;
  if (name == nullptr) return Ok();
  return Error(Code::kFailedPrecondition, "layer.cache_unfit",
               fmt::format("{} lies on {}, from which no EROFS can be mounted", path, name));
}

}  // namespace

bool LayerCache::Stamp::operator==(const Stamp& other) const {
  return device == other.device && inode == other.inode && size == other.size &&
         changed.tv_sec == other.changed.tv_sec && changed.tv_nsec == other.changed.tv_nsec;
}

LayerCache::Stamp LayerCache::StampOf(const struct stat& status) {
  return {status.st_dev, status.st_ino, status.st_size, status.st_ctim};
}

Result<std::unique_ptr<LayerCache>> LayerCache::Open(const std::string& dir, uint64_t max_bytes) {
  std::unique_ptr<LayerCache> cache(new LayerCache(max_bytes));
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(dir).parent_path(), error);
  if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST) return StoreError("make " + dir);
  DSEC_TRY(cache->dir_, os::OpenAt(AT_FDCWD, dir.c_str(), O_RDONLY | O_DIRECTORY));
  const int fd = cache->dir_.get();
  DSEC_TRY_VOID(CheckFit(fd, dir));
  DSEC_TRY(const auto names, ListNames(fd, UINT64_MAX));
  struct Found {
    std::string hex;
    Copy copy;
    timespec used;
  };
  std::vector<Found> found;
  for (const std::string& name : names) {
    if (name.starts_with(kNewPrefix)) DSEC_TRY_VOID(os::RemoveTree(fd, name.c_str()));
    struct stat folder;
    struct stat meta;
    struct stat shared;
    if (!IsSha256Hex(name) || ::fstatat(fd, name.c_str(), &folder, AT_SYMLINK_NOFOLLOW) != 0)
      continue;
    if (::fstatat(fd, (name + "/" + kMetaName).c_str(), &meta, AT_SYMLINK_NOFOLLOW) != 0)
      meta.st_size = 0;
    if (::fstatat(fd, (name + "/" + kSharedMetaName).c_str(), &shared, AT_SYMLINK_NOFOLLOW) != 0)
      shared.st_size = 0;
    Copy copy;
    copy.shared_bytes = static_cast<uint64_t>(shared.st_size);
    copy.bytes = static_cast<uint64_t>(meta.st_size) + copy.shared_bytes;
    found.push_back({name, std::move(copy), folder.st_mtim});
  }
  // A use sets the time of the folder.
  std::ranges::sort(found, [](const Found& a, const Found& b) {
    return std::pair(a.used.tv_sec, a.used.tv_nsec) < std::pair(b.used.tv_sec, b.used.tv_nsec);
  });
  for (Found& item : found) {
    item.copy.used = ++cache->clock_;
    cache->copies_.emplace(std::move(item.hex), item.copy);
  }
  cache->Evict([](const LayerId&) { return true; });
  return cache;
}

Result<std::optional<LocalLayer>> LayerCache::Find(const LayerId& id) {
  const std::string hex = HexOf(id);
  auto opened = OpenCopy(hex);
  if (!opened.ok()) {
    // Whatever is wrong with a copy, the store has the original.
    Drop(hex, opened.error().ToString());
    return std::optional<LocalLayer>();
  }
  return opened;
}

bool LayerCache::Unchanged(const LayerId& id) {
  const std::string hex = HexOf(id);
  struct stat manifest;
  struct stat meta;
  if (::fstatat(dir_.get(), (hex + "/" + kManifestName).c_str(), &manifest, AT_SYMLINK_NOFOLLOW) !=
          0 ||
      ::fstatat(dir_.get(), (hex + "/" + kMetaName).c_str(), &meta, AT_SYMLINK_NOFOLLOW) != 0)
    return false;
  const std::lock_guard lock(mutex_);
  const auto found = copies_.find(hex);
  if (found == copies_.end() || found->second.meta != StampOf(meta) ||
      found->second.manifest != StampOf(manifest) || !SharedUnchanged(hex, found->second))
    return false;
  found->second.used = ++clock_;
  MarkUsed(hex);
  return true;
}

Result<std::optional<LocalLayer>> LayerCache::OpenCopy(const std::string& hex) {
  auto folder = os::OpenAt(dir_.get(), hex.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!folder.ok()) {
    if (folder.error().sys_errno() == ENOENT) return std::optional<LocalLayer>();
    return std::move(folder).error();
  }
  DSEC_TRY(const auto manifest, os::OpenAt(folder->get(), kManifestName, O_RDONLY | O_NOFOLLOW));
  LocalLayer layer;
  DSEC_TRY(layer.meta, os::OpenAt(folder->get(), kMetaName, O_RDONLY | O_NOFOLLOW));
  struct stat manifest_status;
  struct stat meta_status;
  if (::fstat(manifest.get(), &manifest_status) != 0 ||
      ::fstat(layer.meta.get(), &meta_status) != 0)
    return StoreError("stat the local copy of a layer");
  bool checked = false;
  {
    const std::lock_guard lock(mutex_);
    Copy& copy = copies_[hex];
    const auto bytes = static_cast<uint64_t>(meta_status.st_size);
    copy.bytes = bytes + copy.shared_bytes;
    copy.used = ++clock_;
    if (!SharedUnchanged(hex, copy))
      return Error(Code::kInternal, "layer.corrupt", "the local shared metadata have changed");
    checked = copy.meta == StampOf(meta_status) && copy.manifest == StampOf(manifest_status);
  }
  DSEC_TRY(const std::string text, os::ReadAll(manifest.get(), kMaxManifest));
  if (!checked && Sha256Hex(text) != hex)
    return Error(Code::kInternal, "layer.corrupt", "the local manifest does not have its digest");
  DSEC_TRY(layer.manifest, Manifest::Parse(text));
  if (!checked) {
    DSEC_TRY(const std::string digest, Sha256File(layer.meta.get(), nullptr));
    if (digest != layer.manifest.meta.sha256)
      return Error(Code::kInternal, "layer.corrupt", "the local metadata do not have their digest");
    DSEC_TRY_VOID(CheckSuperblock(layer.meta.get()));
    const std::lock_guard lock(mutex_);
    Copy& copy = copies_[hex];
    copy.meta = StampOf(meta_status);
    copy.manifest = StampOf(manifest_status);
  }
  MarkUsed(hex);
  return std::optional(std::move(layer));
}

// With the lock.
bool LayerCache::SharedUnchanged(const std::string& hex, const Copy& copy) const {
  if (!copy.shared) return true;
  struct stat status;
  return ::fstatat(dir_.get(), (hex + "/" + kSharedMetaName).c_str(), &status,
                   AT_SYMLINK_NOFOLLOW) == 0 &&
         copy.shared == StampOf(status);
}

Result<os::UniqueFd> LayerCache::SharedMeta(const LayerId& id, const LocalLayer& local,
                                            const StoredForm& form,
                                            const std::function<bool(const LayerId&)>& release) {
  const std::string hex = HexOf(id);
  const std::string digest = Sha256Hex(form.Encode());
  DSEC_TRY(const auto folder,
           os::OpenAt(dir_.get(), hex.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  const auto is_made = [&](const struct stat& status) {
    const std::lock_guard lock(mutex_);
    const auto found = copies_.find(hex);
    return found != copies_.end() && found->second.form == digest &&
           found->second.shared == StampOf(status);
  };
  struct stat status;
  auto file = os::OpenAt(folder.get(), kSharedMetaName, O_RDONLY | O_NOFOLLOW);
  if (file.ok() && ::fstat(file->get(), &status) == 0 && is_made(status)) return file;
  std::optional<MetaTurn> turn;
  turn.emplace();
  DSEC_TRY(auto meta, ReadMeta(local.meta.get(), local.manifest.meta.size));
  DSEC_TRY_VOID(ShareMeta(meta, form));
  // What a mount has open stays as it is.
  constexpr char kMaking[] = "shared.erofs.new";
  ::unlinkat(folder.get(), kMaking, 0);
  DSEC_TRY_VOID(os::CreateFile(folder.get(), kMaking,
                               {reinterpret_cast<const char*>(meta.data()), meta.size()}, 0600));
  if (::renameat(folder.get(), kMaking, folder.get(), kSharedMetaName) != 0)
    return StoreError("name the local shared metadata");
  DSEC_TRY(auto made, os::OpenAt(folder.get(), kSharedMetaName, O_RDONLY | O_NOFOLLOW));
  if (::fstat(made.get(), &status) != 0) return StoreError("stat the local shared metadata");
  {
    const std::lock_guard lock(mutex_);
    Copy& copy = copies_[hex];
    copy.bytes += meta.size() - copy.shared_bytes;
    copy.shared_bytes = meta.size();
    copy.shared = StampOf(status);
    copy.form = digest;
  }
  meta = {};
  turn.reset();
  Evict([&](const LayerId& other) { return other != id && release(other); });
  return made;
}

void LayerCache::DropSharedMeta(const LayerId& id) {
  const std::string hex = HexOf(id);
  const std::string path = hex + "/" + kSharedMetaName;
  if (::unlinkat(dir_.get(), path.c_str(), 0) != 0 && errno != ENOENT) return;
  const std::lock_guard lock(mutex_);
  const auto found = copies_.find(hex);
  if (found == copies_.end()) return;
  found->second.bytes -= found->second.shared_bytes;
  found->second.shared_bytes = 0;
  found->second.shared.reset();
  found->second.form.clear();
}

void LayerCache::MarkUsed(const std::string& hex) const {
  // The kernel's own "now" of a file stands still for up to a tick, in which several are used.
  timespec now = {};
  if (::clock_gettime(CLOCK_REALTIME, &now) != 0) return;
  const timespec times[] = {now, now};
  static_cast<void>(::utimensat(dir_.get(), hex.c_str(), times, 0));
}

Result<LocalLayer> LayerCache::Add(const LayerId& id, const Manifest& manifest, int meta,
                                   const std::function<bool(const LayerId&)>& release) {
  const std::string hex = HexOf(id);
  NewFolder fresh{dir_.get(), std::string(kNewPrefix) + NewUlid(Clock::System())};
  DSEC_TRY_VOID(os::MakeDir(dir_.get(), fresh.name.c_str(), 0700));
  DSEC_TRY(const auto folder, os::OpenAt(dir_.get(), fresh.name.c_str(), O_RDONLY | O_DIRECTORY));
  {
    DSEC_TRY(const auto copy,
             os::OpenAt(folder.get(), kMetaName, O_WRONLY | O_CREAT | O_EXCL, 0600));
    DSEC_TRY(const std::string digest, CopyAndHash(meta, copy.get()));
    if (digest != manifest.meta.sha256)
      return WrongDigest(id, kMetaName, digest, manifest.meta.sha256);
    if (::fsync(copy.get()) != 0) return StoreError("fsync the local copy of a layer");
  }
  DSEC_FAULT_POINT("layer.cache.before_rename");
  DSEC_TRY_VOID(os::CreateFile(folder.get(), kManifestName, manifest.Encode(), 0600));
  {
    DSEC_TRY(const auto copy, os::OpenAt(folder.get(), kManifestName, O_RDONLY));
    if (::fsync(copy.get()) != 0 || ::fsync(folder.get()) != 0)
      return StoreError("fsync the local copy of a layer");
  }
  if (::renameat(dir_.get(), fresh.name.c_str(), dir_.get(), hex.c_str()) != 0)
    return StoreError("publish the local copy of a layer");
  fresh.name.clear();
  if (::fsync(dir_.get()) != 0) return StoreError("fsync the folder of local copies");
  DSEC_TRY(auto opened, OpenCopy(hex));
  if (!opened) return Error(Code::kInternal, "layer.io", "a local copy went while it was made");
  Evict([&](const LayerId& other) { return other != id && release(other); });
  return *std::move(opened);
}

void LayerCache::Evict(const std::function<bool(const LayerId&)>& release) {
  std::vector<std::pair<uint64_t, std::string>> order;
  uint64_t total = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [hex, copy] : copies_) {
      order.emplace_back(copy.used, hex);
      total += copy.bytes;
    }
  }
  std::ranges::sort(order);
  for (const auto& [used, hex] : order) {
    if (total <= max_bytes_) return;
    if (!release(LayerId("sha256:" + hex))) continue;
    {
      const std::lock_guard lock(mutex_);
      const auto found = copies_.find(hex);
      if (found == copies_.end() || found->second.used != used) continue;
      total -= found->second.bytes;
    }
    Drop(hex, "");
  }
}

void LayerCache::Drop(const std::string& hex, std::string_view why) {
  if (!why.empty()) log::Warn("layer.local_copy_damaged", {{"layer", hex}, {"why", why}});
  {
    const std::lock_guard lock(mutex_);
    copies_.erase(hex);
  }
  // A mount of it goes on: it has the file open.
  auto removed = os::RemoveTree(dir_.get(), hex.c_str());
  if (!removed.ok())
    log::Warn("layer.local_copy_stays", {{"layer", hex}, {"error", removed.error()}});
}

uint64_t LayerCache::bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t total = 0;
  for (const auto& [hex, copy] : copies_) total += copy.bytes;
  return total;
}

}  // namespace dsec::image

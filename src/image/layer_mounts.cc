// SPDX-License-Identifier: Apache-2.0
#include "image/layer_mounts.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <string>

#include "base/log.h"
#include "image/digest.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::image {
namespace {

constexpr std::chrono::minutes kTrimPeriod{1};
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

// A mount by another process at the same moment may get the larger readahead, too; that harms
// nothing.
Result<void> SetReadAhead(const std::set<std::string>& before, uint32_t kib) {
  DSEC_TRY(const auto after, ErofsBackingDevices());
  for (const std::string& name : after) {
    if (before.contains(name)) continue;
    const std::string path = fmt::format("{}/{}/read_ahead_kb", kBdiFolder, name);
    DSEC_TRY_VOID(os::WriteExisting(AT_FDCWD, path.c_str(), std::to_string(kib)));
  }
  return Ok();
}

Result<os::UniqueFd> MountErofs(const LayerFiles& files) {
  // By descriptor, so that what was checked is what is mounted.
  const std::string meta = fmt::format("/proc/self/fd/{}", files.meta.get());
  const std::string blob = fmt::format("/proc/self/fd/{}", files.blob.get());
  DSEC_TRY(auto context, os::FsContext::Open("erofs"));
  DSEC_TRY_VOID(context.SetString("source", meta.c_str()));
  DSEC_TRY_VOID(context.SetString("device", blob.c_str()));
  DSEC_TRY_VOID(context.SetFlag("ro"));
  return std::move(context).Mount(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID);
}

}  // namespace

LayerMounts::LayerMounts(const LayerStore& store, LayerMountOptions options)
    : store_(store), options_(options), trimmer_([this](const std::stop_token& stop) {
        while (true) {
          {
            std::unique_lock lock(mutex_);
            wake_.wait_for(lock, stop, kTrimPeriod, [] { return false; });
          }
          if (stop.stop_requested()) return;
          Trim();
        }
      }) {
  idle_->keep = options_.keep_idle;
}

LayerMounts::~LayerMounts() {
  std::list<Kept> ended;
  const std::lock_guard lock(idle_->mutex);
  idle_->keep = 0;
  ended.swap(idle_->kept);
}

Result<std::shared_ptr<const MountedLayer>> LayerMounts::Acquire(const LayerId& id) {
  std::shared_ptr<Slot> slot;
  {
    const std::lock_guard lock(mutex_);
    auto& entry = slots_[id];
    if (entry == nullptr) entry = std::make_shared<Slot>();
    slot = entry;
  }
  const std::lock_guard lock(slot->mutex);
  if (auto mounted = slot->mount.lock()) return mounted;
  return Mount(id, *slot).Context("mount layer {}", id.str());
}

Result<std::shared_ptr<const MountedLayer>> LayerMounts::Mount(const LayerId& id, Slot& slot) {
  DSEC_TRY(LayerFiles files, store_.OpenFiles(id));
  struct stat status;
  if (::fstat(files.meta.get(), &status) != 0) return StoreError("stat the metadata");
  if (!slot.verified.Is(status)) {
    DSEC_TRY(const std::string digest, Sha256File(files.meta.get(), nullptr));
    if (digest != files.manifest.meta.sha256) {
      return Error(Code::kInternal, "layer.corrupt", "meta.erofs does not have its digest");
    }
    DSEC_TRY_VOID(CheckSuperblock(files.meta.get()));
    slot.verified = Verified{status.st_dev, status.st_ino, status.st_size, status.st_ctim};
  }
  auto mount = TakeKept(id, slot.verified);
  if (mount == nullptr) {
    static std::mutex bdi_mutex;
    // Held over the mount alone: metadata is local, so it does not hang.
    const std::lock_guard lock(bdi_mutex);
    auto before = ErofsBackingDevices();
    auto mounted = MountErofs(files);
    if (!mounted.ok()) {
      return Error(Code::kInternal, "layer.mount_failed", mounted.error().message())
          .WithErrno(mounted.error().sys_errno());
    }
    mount = std::make_shared<const os::UniqueFd>(*std::move(mounted));
    auto set = before.ok() ? SetReadAhead(*before, options_.read_ahead_kib)
                           : Result<void>(std::move(before).error());
    if (!set.ok()) log::Warn("layer.read_ahead_not_set", {{"layer", id}, {"error", set.error()}});
  }
  // The slot's weak pointer keeps this function object: what it holds must leave it.
  auto give_back = [idle = idle_,
                    used = Kept{id, slot.verified, mount}](const MountedLayer* layer) mutable {
    delete layer;
    idle->Add(std::move(used));
    idle.reset();
  };
  std::shared_ptr<const MountedLayer> layer(new MountedLayer(std::move(files), std::move(mount)),
                                            std::move(give_back));
  slot.mount = layer;
  return layer;
}

bool LayerMounts::Verified::Is(const struct stat& status) const {
  return inode == status.st_ino && device == status.st_dev && size == status.st_size &&
         changed.tv_sec == status.st_ctim.tv_sec && changed.tv_nsec == status.st_ctim.tv_nsec;
}

std::shared_ptr<const os::UniqueFd> LayerMounts::TakeKept(const LayerId& id, const Verified& meta) {
  const std::lock_guard lock(idle_->mutex);
  const auto found = std::ranges::find_if(idle_->kept, [&](const Kept& kept) {
    return kept.id == id && kept.meta.inode == meta.inode && kept.meta.device == meta.device;
  });
  if (found == idle_->kept.end()) return nullptr;
  auto mount = std::move(found->mount);
  idle_->kept.erase(found);
  return mount;
}

void LayerMounts::Idle::Add(Kept used) {
  std::list<Kept> ended;  // unmounted after the lock is gone
  const std::lock_guard lock(mutex);
  kept.push_front(std::move(used));
  while (kept.size() > keep) ended.splice(ended.end(), kept, std::prev(kept.end()));
}

size_t LayerMounts::idle() const {
  const std::lock_guard lock(idle_->mutex);
  return idle_->kept.size();
}

void LayerMounts::Trim() {
  std::set<LayerId> ids;
  {
    const std::lock_guard lock(idle_->mutex);
    for (const Kept& kept : idle_->kept) ids.insert(kept.id);
  }
  // The store is asked without the lock, since it may hang.
  std::erase_if(ids, [&](const LayerId& id) { return store_.OpenFiles(id).ok(); });
  std::list<Kept> ended;
  const std::lock_guard lock(idle_->mutex);
  for (auto it = idle_->kept.begin(); it != idle_->kept.end();) {
    const auto next = std::next(it);
    if (ids.contains(it->id)) ended.splice(ended.end(), idle_->kept, it);
    it = next;
  }
}

size_t LayerMounts::mounted() const {
  const std::lock_guard lock(mutex_);
  return static_cast<size_t>(std::ranges::count_if(
      slots_, [](const auto& item) { return !item.second->mount.expired(); }));
}

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "image/layer_files.h"
#include "image/layer_mounts.h"
#include "image/node_lease.h"
#include "image/root_calls.h"
#include "os/file.h"

// What the parts of LayerMounts share (layer_mounts*.cc).
namespace dsec::image {

// The layers' folder, found by its path each time: a mount that went and came back is another one.
Result<os::UniqueFd> OpenBlobs(const std::string& root);
// What the copies on the node are checked for, of the store's own file.
Result<void> CheckMeta(const LayerId& id, const LayerFiles& files);

inline const MountedLayer::Blob kNoBlob;

// A mount without a use.
struct LayerMounts::Kept {
  NodeLease::Pin pin;  // first: it goes last
  LayerInfo info;
  MountedLayer::Blob blob;
  std::shared_ptr<const os::UniqueFd> mount;
  std::shared_ptr<LayerHold> hold;  // of the last use that had one
  MonoTime since = {};
};

struct LayerMounts::Slot {
  std::mutex mutex;
  std::weak_ptr<const MountedLayer> mount;
  std::shared_ptr<Pending<Mounted>> mounting;  // the call under way
  MonoTime mounting_since;
  std::shared_ptr<Pending<bool>> looking;  // the look under way
  MonoTime looked;
  MonoTime hold_wanted;
};

// A use that somebody should have and could not get.
struct LayerMounts::Owed {
  explicit Owed(LayerId layer) : id(std::move(layer)) {}
  const LayerId id;
  Mounted mounted;  // of the trimmer, until the last owner goes
};

// A layer that a call of Acquire wants.
struct LayerMounts::Wanted {
  LayerId id;
  std::shared_ptr<Slot> slot;
  std::shared_ptr<Pending<Mounted>> pending = nullptr;  // joined, unless `mounted`
  Mounted mounted = nullptr;
  std::chrono::milliseconds wait{0};
};

struct LayerMounts::State {
  State(std::string root_path, LayerMountOptions with)
      : root(std::move(root_path)),
        options(std::move(with)),
        threads(options.calls_at_once),
        closers(options.calls_at_once),
        prefetcher(PrefetchOf(options)),
        keep(options.keep_idle) {
    std::string folder = options.cache_dir;
    if (folder.empty()) {
      auto own = os::TempDir::Create("dsec-layer-copies-");
      if (own.ok()) folder = own_folder.emplace(*std::move(own)).path();
    }
    cache = LayerCache::Open(folder, options.cache_bytes);
    if (!cache.ok() && cache.error().reason() == "layer.cache_unfit") {
      copies = false;
      log::Warn("layer.no_local_copies", {{"error", cache.error()}});
    }
    if (!options.node.empty()) lease.emplace(root, options.node);
  }

  static PrefetchOptions PrefetchOf(const LayerMountOptions& with) {
    PrefetchOptions prefetch = with.prefetch;
    prefetch.request_bytes =
        std::min(prefetch.request_bytes, std::max<uint64_t>(with.read_ahead_kib, 4) * 1024);
    return prefetch;
  }

  std::shared_ptr<Slot> SlotOf(const LayerId& id) {
    const std::lock_guard lock(mutex);
    ever_used = true;
    auto& entry = slots[id];
    if (entry == nullptr) entry = std::make_shared<Slot>();
    return entry;
  }
  // Forgets layers that are not in use: nobody can get at a slot of which this has the only hold.
  void DropIdleSlots() {
    const std::lock_guard lock(mutex);
    std::erase_if(slots, [](const auto& item) {
      if (item.second.use_count() != 1) return false;
      const std::unique_lock idle(item.second->mutex,
                                  std::try_to_lock);  // others lock the slot first
      return idle.owns_lock() && item.second->mount.expired();
    });
  }

  // nullopt: there is none. With `blob` one of another file has become useless, and goes, as does
  // one that reads from a server that is no more.
  std::optional<Kept> TakeKept(const LayerId& id, const MountedLayer::Blob* blob) {
    std::list<Kept> taken;
    {
      const std::lock_guard lock(mutex);
      const auto found =
          std::ranges::find_if(kept, [&](const Kept& item) { return item.info.id == id; });
      if (found == kept.end()) return std::nullopt;
      taken.splice(taken.end(), kept, found);
    }
    const MountedLayer::Blob& found = taken.front().blob;
    const bool stale = options.server != nullptr && found.session != options.server->session();
    if (!stale && (blob == nullptr || found == *blob)) return std::move(taken.front());
    End(std::move(taken));
    return std::nullopt;
  }
  bool HasKept(const LayerId& id) {
    const std::lock_guard lock(mutex);
    return std::ranges::any_of(kept, [&](const Kept& item) { return item.info.id == id; });
  }
  void Keep(Kept used) {
    used.since = Clock::System().Mono();
    std::list<Kept> ended;
    {
      const std::lock_guard lock(mutex);
      kept.push_front(std::move(used));
      while (kept.size() > keep) ended.splice(ended.end(), kept, std::prev(kept.end()));
    }
    End(std::move(ended));
  }
  // An unmount throws the pages of the layer away, which takes its time, and close(2) on a cluster
  // file system may hang like all else.
  void End(std::list<Kept> ended) {
    if (ended.empty()) return;
    auto held = std::make_shared<std::list<Kept>>(std::move(ended));
    if (closers.Start([held] { held->clear(); })) return;
    // So many hang already that these wait for the end of the process.
    const std::lock_guard lock(mutex);
    left.splice(left.end(), *held);
  }
  // Whether the copy on this node may go; then nothing is kept mounted of it.
  bool Release(const LayerId& id) {
    const auto slot = SlotOf(id);
    const std::lock_guard lock(slot->mutex);
    if (!slot->mount.expired() || slot->mounting != nullptr) return false;
    static_cast<void>(TakeKept(id, &kNoBlob));
    return true;
  }
  // The hold of the mount that is kept, if it has one.
  std::shared_ptr<LayerHold> KeptHold(const LayerId& id) {
    const std::lock_guard lock(mutex);
    const auto found =
        std::ranges::find_if(kept, [&](const Kept& item) { return item.info.id == id; });
    return found == kept.end() ? nullptr : found->hold;
  }
  bool remote() const { return options.server != nullptr && options.server->remote(); }
  bool Damaged(const LayerId& id) const {
    return options.server != nullptr && options.server->Damaged(id);
  }
  std::string FolderOf(const LayerId& id) const {
    return fmt::format("{}/blobs/{}", root, HexOf(id));
  }
  // The lock of a slot is taken before that of this object.
  std::vector<std::shared_ptr<Slot>> AllSlots() {
    std::vector<std::shared_ptr<Slot>> all;
    const std::lock_guard lock(mutex);
    for (const auto& [id, slot] : slots) all.push_back(slot);
    return all;
  }
  bool Troubled(MonoTime now) {
    return std::ranges::any_of(AllSlots(), [&](const auto& slot) {
      const std::lock_guard lock(slot->mutex);
      return slot->mounting != nullptr && now - slot->mounting_since > options.patience;
    });
  }

  const std::string root;
  const LayerMountOptions options;
  std::optional<os::TempDir> own_folder;
  Result<std::unique_ptr<LayerCache>> cache = Unreachable("");
  bool copies = true;  // false: the metadata are those of the store
  std::optional<NodeLease> lease;
  std::atomic<bool> renewing = false;
  RootThreads threads;
  RootThreads closers;
  RootLane releases;  // of holds
  Prefetcher prefetcher;
  mutable std::mutex mutex;
  std::map<LayerId, std::shared_ptr<Slot>> slots;  // of layers in use or asked for lately
  bool ever_used = false;                          // so the store is or was there
  std::list<Kept> kept;                            // most recently used first
  std::list<Kept> left;
  std::list<std::shared_ptr<void>> left_apart;  // mounts of AcquireApart
  std::vector<std::weak_ptr<Owed>> owed;
  size_t keep;
};

}  // namespace dsec::image

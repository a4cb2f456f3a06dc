// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/id.h"
#include "base/result.h"
#include "image/blob_server.h"
#include "image/layer_cache.h"
#include "image/layer_hold.h"
#include "image/layer_store.h"
#include "image/prefetcher.h"
#include "image/shared_catalog.h"
#include "os/unique_fd.h"

namespace dsec::image {

// One layer, mounted on this node. The mount is detached: no path leads to it and no mount table
// shows it; it ends with the last of this object, clones of it and overlays above it. While this
// lives no process of the node removes the layer.
//
// Flags: read-only, nodev, nosuid. For what an overlay shows, the flags of the overlay's own mount
// decide, so programs with setuid work in a sandbox; whoever mounts the overlay sets nodev there.
class MountedLayer {
 public:
  // Which file of the store the mount reads its content from, and as which layer it was published:
  // the content may all be that of other layers, which a layer that is built anew shares again.
  struct Blob {
    dev_t device = 0;  // of the folder of layers
    ino_t inode = 0;
    ino_t manifest = 0;                      // 0: the layer is not in the store
    std::shared_ptr<const os::UniqueFd> fd;  // O_PATH, so that closing it asks nobody
    uint64_t session = 0;                    // of the server that the mount reads from, if any
    bool operator==(const Blob& other) const {
      return device == other.device && inode == other.inode && manifest == other.manifest &&
             session == other.session;
    }
  };
  MountedLayer(LayerInfo info, Blob blob, std::shared_ptr<const os::UniqueFd> mount,
               std::shared_ptr<LayerHold> hold)
      : info_(std::move(info)),
        blob_(std::move(blob)),
        mount_(std::move(mount)),
        hold_(std::move(hold)) {}
  int fd() const { return mount_->get(); }  // O_PATH
  const LayerInfo& info() const { return info_; }

 private:
  friend class LayerMounts;
  const LayerInfo info_;
  const Blob blob_;
  const std::shared_ptr<const os::UniqueFd> mount_;
  // May come late (LayerMounts::Acquire), under the lock of the slot.
  mutable std::shared_ptr<LayerHold> hold_;
};

struct LayerMountOptions {
  // Readahead of each mount. What reads run into decides: the kernel's 128 KiB make a cluster file
  // system do small reads.
  uint32_t read_ahead_kib = 1024;
  // Mounts kept after their last use, the least recently used going first: the next sandbox of the
  // layer finds its page cache warm and spares the mount. A kept mount does not count as a use of
  // the layer.
  size_t keep_idle = 64;
  // And no longer than this, lest a node keep layers from being removed that it does not use.
  std::chrono::minutes keep_for{60};
  // Where the copies of manifests and metadata are (LayerCache). Empty: in a temporary folder that
  // ends with this object. On a file system that cannot back EROFS (tmpfs) there are none, and
  // mounts take the metadata from the store.
  std::string cache_dir = {};
  uint64_t cache_bytes = 4ull << 30;
  // The node in whose lease (NodeLease) layers are listed before they are opened. Empty: locks
  // alone keep them in the store.
  std::string node = {};
  // Checks what mounts read, and may bring layers from elsewhere. Null: mounts read the store.
  std::shared_ptr<BlobServer> server = nullptr;
  // How long a call waits for the file system of the store.
  std::chrono::milliseconds patience = std::chrono::seconds(10);
  // Calls on that file system that may be under way, hanging ones included.
  size_t calls_at_once = 256;
  // What a layer's trace names is read ahead when the layer is mounted. `request_bytes` is bounded
  // by the readahead.
  PrefetchOptions prefetch = {};
};

// The mounts of one store on this node: one EROFS mount a layer however many sandboxes use it,
// which is what shares the page cache among them. Needs Linux 6.12 (file-backed EROFS).
//
// Manifest and metadata are copied to this node and checked; the content stays in the store and is
// read by the kernel as it is needed, with a BlobServer through that. The root of the store may
// hang, fail and come back: calls on it have threads of their own, at most one a layer, and no lock
// that others need is held over them. Thread-safe.
//
// A kept mount of a layer that was removed holds its files, and so their room on disk, until a
// thread of this object finds that out: it looks each minute.
class LayerMounts {
 public:
  explicit LayerMounts(const LayerStore& store, LayerMountOptions options = {})
      : LayerMounts(store.root(), std::move(options)) {}
  explicit LayerMounts(std::string root, LayerMountOptions options = {});
  // Waits a moment for calls under way and leaves behind what hangs.
  ~LayerMounts();
  LayerMounts(const LayerMounts&) = delete;
  LayerMounts& operator=(const LayerMounts&) = delete;

  // Why no layer can be mounted at all (the folder of the copies cannot be made).
  Result<void> Check() const;
  SharedCatalog& catalog() { return catalog_; }

  // The mount that exists, or a new one. Blocks for `patience` at most, and not at all on the store
  // for a layer that is mounted, unless its file system has gone away under it; a kept mount is
  // used, after a short wait, without an answer from the store, and gets its hold there as soon as
  // there is one. kNotFound "layer.not_found", kInternal "layer.corrupt", "layer.mount_failed",
  // kUnavailable "layer.unreachable" (at once while an earlier call for this layer hangs).
  Result<std::shared_ptr<const MountedLayer>> Acquire(const LayerId& id);
  // Several at once, in the order of `ids`, within one `patience`; the first error if any fails.
  // kUnavailable "layer.lease_lost": this node was declared gone (ForgetNode).
  Result<std::vector<std::shared_ptr<const MountedLayer>>> Acquire(const std::vector<LayerId>& ids);
  // The same layers on mounts of their own, which nobody else uses and that read nothing ahead: for
  // recording what is read (TouchRecorder). Their page cache is their own too. The shared mounts
  // are held meanwhile. Waits for the store longer than Acquire, at most two `patience`.
  Result<std::vector<std::shared_ptr<const MountedLayer>>> AcquireApart(
      const std::vector<LayerId>& ids);
  // The files of layers that the caller has acquired, for readers that are not this node's kernel:
  // a virtual machine. What they read is checked as what mounts read is. Waits as Acquire does.
  struct Files {
    os::UniqueFd meta;
    std::vector<os::UniqueFd> content;  // the devices of `meta`, in order; at least one
  };
  Result<std::vector<Files>> OpenFiles(const std::vector<LayerId>& ids);
  // For a use that exists already, of a sandbox that was adopted, after Acquire has failed: it is
  // tried again each minute for as long as what this returns lives.
  std::shared_ptr<const void> AcquireLater(const LayerId& id);
  // Layers in use through this object now.
  size_t mounted() const;
  // Layers that it has notes of: those in use, and those asked for since the last Trim.
  size_t known() const;
  // Mounts that are kept without a use.
  size_t idle() const;
  Prefetcher::Figures prefetched() const;
  // What the thread does: ends what is kept of layers that have been removed or were not used for
  // `keep_for`, and renews the lease.
  void Trim();
  // Waits until no call on the store is under way and what ended uses held there is given back;
  // false: not within the patience.
  bool Settle() const;

 private:
  using Mounted = std::shared_ptr<const MountedLayer>;
  struct State;  // outlives this object as long as a layer is in use or a call hangs
  struct Slot;
  struct Kept;

  struct Wanted;
  struct Owed;
  using Reuses = std::vector<Wanted>;

  Result<std::vector<Mounted>> AcquireAll(const std::vector<LayerId>& ids);
  Mounted InUse(const Wanted& wanted);
  void LookForHold(const Wanted& wanted);
  void Begin(Wanted& wanted, bool troubled, Reuses& reuses);
  Result<Mounted> Finish(const Wanted& wanted, MonoTime begun);
  static void StartReuse(const std::shared_ptr<State>& state, Reuses reuses);
  static bool StartMount(const std::shared_ptr<State>& state, const Wanted& wanted);
  static void Conclude(const Wanted& wanted, Result<Mounted> result);
  static Result<Mounted> UseAgain(const std::shared_ptr<State>& state, const Wanted& wanted);
  static Result<Mounted> MountNow(const std::shared_ptr<State>& state, const Wanted& wanted,
                                  bool& made);
  static void MountAndConclude(const std::shared_ptr<State>& state, const Wanted& wanted);
  static void ReadAhead(const std::shared_ptr<State>& state, const LayerId& id,
                        std::weak_ptr<const os::UniqueFd> layer);
  static Result<Files> OpenFilesNow(const std::shared_ptr<State>& state, const LayerId& id);
  static Result<std::shared_ptr<const os::UniqueFd>> MountApart(const std::shared_ptr<State>& state,
                                                                const LayerId& id);
  static Result<Mounted> MountRemote(const std::shared_ptr<State>& state, const Wanted& wanted,
                                     std::optional<LocalLayer> local);
  struct Parts {
    int meta = -1;
    std::vector<int> content;
    os::UniqueFd shared_meta;  // what `meta` is, if it was made for the mount
  };
  static Result<Parts> PartsOf(State& state, const LayerId& id, const LayerFiles& files,
                               const std::optional<LocalLayer>& local,
                               const BlobServer::Served& served);
  static Mounted MakeUse(const std::shared_ptr<State>& state, Kept kept,
                         std::shared_ptr<LayerHold> hold);
  void RenewLease();
  void GiveOwed();
  Result<bool> StillThere(const std::shared_ptr<Slot>& slot, const Mounted& mounted);

  const std::shared_ptr<State> state_;
  SharedCatalog catalog_;
  std::mutex mutex_;  // of wake_
  std::condition_variable_any wake_;
  std::jthread trimmer_;  // last: it uses all of the above
};

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/stat.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "base/id.h"
#include "base/result.h"
#include "image/layer_store.h"
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
  MountedLayer(LayerFiles files, std::shared_ptr<const os::UniqueFd> mount)
      : files_(std::move(files)), mount_(std::move(mount)) {}
  int fd() const { return mount_->get(); }  // O_PATH
  const LayerInfo& info() const { return files_.info; }

 private:
  LayerFiles files_;
  std::shared_ptr<const os::UniqueFd> mount_;
};

struct LayerMountOptions {
  // Readahead of each mount. What reads run into decides: the kernel's 128 KiB make a cluster file
  // system do small reads.
  uint32_t read_ahead_kib = 1024;
  // Mounts kept after their last use, the least recently used going first: the next sandbox of the
  // layer finds its page cache warm and spares the mount. A kept mount does not count as a use of
  // the layer.
  size_t keep_idle = 64;
};

// The mounts of one store on this node: one EROFS mount a layer however many sandboxes use it,
// which is what shares the page cache among them. Needs Linux 6.12 (file-backed EROFS).
// Thread-safe; blocks on the file system of the store, calls for different layers do not wait for
// one another.
//
// A kept mount of a layer that was removed holds its files, and so their room on disk, until a
// thread of this object finds that out: it looks each minute.
class LayerMounts {
 public:
  // `store` must outlive this object.
  explicit LayerMounts(const LayerStore& store, LayerMountOptions options = {});
  ~LayerMounts();
  LayerMounts(const LayerMounts&) = delete;
  LayerMounts& operator=(const LayerMounts&) = delete;

  // The mount that exists, or a new one after the digest of its metadata has been checked (again
  // only when the file has changed since). kNotFound "layer.not_found", kInternal "layer.corrupt",
  // "layer.mount_failed".
  Result<std::shared_ptr<const MountedLayer>> Acquire(const LayerId& id);
  // Layers in use through this object now.
  size_t mounted() const;
  // Mounts that are kept without a use.
  size_t idle() const;
  // What the thread does: ends what is kept of layers that have been removed.
  void Trim();

 private:
  // What identified the metadata file when its digest was found right.
  struct Verified {
    dev_t device = 0;
    ino_t inode = 0;
    off_t size = 0;
    timespec changed = {};
    bool Is(const struct stat& status) const;
  };
  // A mount without a use, and what it shows.
  struct Kept {
    LayerId id;
    Verified meta;
    std::shared_ptr<const os::UniqueFd> mount;
  };
  // Outlives this object as long as a layer is in use.
  struct Idle {
    std::mutex mutex;
    size_t keep = 0;
    std::list<Kept> kept;  // most recently used first
    void Add(Kept used);
  };
  struct Slot {
    std::mutex mutex;
    std::weak_ptr<const MountedLayer> mount;
    Verified verified;
  };

  Result<std::shared_ptr<const MountedLayer>> Mount(const LayerId& id, Slot& slot);
  // Takes the kept mount of this very file; null: there is none.
  std::shared_ptr<const os::UniqueFd> TakeKept(const LayerId& id, const Verified& meta);

  const LayerStore& store_;
  LayerMountOptions options_;
  mutable std::mutex mutex_;
  std::map<LayerId, std::shared_ptr<Slot>> slots_;
  const std::shared_ptr<Idle> idle_ = std::make_shared<Idle>();
  std::condition_variable_any wake_;
  std::jthread trimmer_;  // last: it uses all of the above
};

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/id.h"
#include "base/result.h"
#include "image/layer.h"
#include "image/stored_form.h"
#include "os/unique_fd.h"

namespace dsec::image {

// Manifest and metadata of a layer, on a local file system and checked against its id.
struct LocalLayer {
  Manifest manifest;
  os::UniqueFd meta;
};

// Copies of what is small in a layer, in a folder of this node, so that mounts and path lookups of
// sandboxes do not depend on the file system of the store:
//
//   <dir>/<hex>/{manifest.json,meta.erofs}   complete as soon as it has this name
//   <dir>/<hex>/shared.erofs                 for a layer that shares content (StoredForm)
//   <dir>/new-<ulid>/                        being copied; Open removes what a death has left
//
// One process has a folder open (the daemon, which holds its lock). Thread-safe; does no more than
// local work except where it says so. Errors: "layer.no_space", "layer.io".
class LayerCache {
 public:
  // Makes the folder (0700) and those above it. Copies beyond `max_bytes` go, the longest unused
  // first. kFailedPrecondition "layer.cache_unfit": nothing there can be mounted.
  static Result<std::unique_ptr<LayerCache>> Open(const std::string& dir, uint64_t max_bytes);

  // nullopt: there is no copy. The digests are checked at the first use by this object and when a
  // file has changed since; a copy that fails that is removed, and so counts as none.
  Result<std::optional<LocalLayer>> Find(const LayerId& id);

  // Whether there is a copy that is as it was when its digests were right. Cheap.
  bool Unchanged(const LayerId& id);

  // Copies `meta` (a file of the store, read from its start: may hang) and keeps it together with
  // the manifest. kInternal "layer.corrupt" when the bytes do not have the digest of the manifest,
  // kUnavailable "layer.unreachable". What is to go for it is asked for with `release`; false:
  // it is in use. One call a layer at a time.
  Result<LocalLayer> Add(const LayerId& id, const Manifest& manifest, int meta,
                         const std::function<bool(const LayerId&)>& release);

  // The metadata of the layer for a mount over the files of `form` (ShareMeta), made of the copy
  // at the first use by this object, and when the form is another one. A change of that file is
  // found as one of the copy. `release` as of Add.
  Result<os::UniqueFd> SharedMeta(const LayerId& id, const LocalLayer& local,
                                  const StoredForm& form,
                                  const std::function<bool(const LayerId&)>& release);
  // The layer shares nothing (any more): removes what SharedMeta has made for it.
  void DropSharedMeta(const LayerId& id);

  uint64_t bytes() const;

 private:
  struct Stamp {
    dev_t device = 0;
    ino_t inode = 0;
    off_t size = 0;
    timespec changed = {};
    bool operator==(const Stamp& other) const;
  };
  struct Copy {
    uint64_t bytes = 0;                   // of both files
    uint64_t shared_bytes = 0;            // of shared.erofs
    uint64_t used = 0;                    // of clock_
    std::optional<Stamp> meta, manifest;  // as they were when the digests were right
    std::optional<Stamp> shared;          // as SharedMeta has written it
    std::string form;                     // its digest then
  };
  explicit LayerCache(uint64_t max_bytes) : max_bytes_(max_bytes) {}
  static Stamp StampOf(const struct stat& status);
  bool SharedUnchanged(const std::string& hex, const Copy& copy) const;
  Result<std::optional<LocalLayer>> OpenCopy(const std::string& hex);
  // The order of use that the next Open finds: the time of the folder. Best effort.
  void MarkUsed(const std::string& hex) const;
  void Evict(const std::function<bool(const LayerId&)>& release);
  void Drop(const std::string& hex, std::string_view why);

  const uint64_t max_bytes_;
  os::UniqueFd dir_;
  mutable std::mutex mutex_;
  std::map<std::string, Copy> copies_;  // by hex
  uint64_t clock_ = 0;                  // counts uses
};

}  // namespace dsec::image

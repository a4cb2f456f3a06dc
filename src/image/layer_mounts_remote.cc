// SPDX-License-Identifier: Apache-2.0
// Mounts of layers that a BlobServer brings from elsewhere, and what mounts of others are made of.
#include <sys/stat.h>

#include "image/digest.h"
#include "image/erofs_mount.h"
#include "image/layer_mounts_state.h"

namespace dsec::image {

// The store has no part in it: no lease, no lock, and nothing there that could be removed.
Result<LayerMounts::Mounted> LayerMounts::MountRemote(const std::shared_ptr<State>& state,
                                                      const Wanted& wanted,
                                                      std::optional<LocalLayer> local) {
  DSEC_TRY(auto served, state->options.server->Open(wanted.id, !local.has_value()));
  struct stat status;
  if (::fstat(served.blob.get(), &status) != 0)
    return RootError(os::ErrnoError("layer.io", "stat the content of a layer"));
  const MountedLayer::Blob blob{status.st_dev, status.st_ino, 0, nullptr, served.session};
  {
    const std::lock_guard lock(wanted.slot->mutex);
    auto mounted = wanted.slot->mount.lock();
    if (mounted != nullptr && mounted->blob_ == blob) return mounted;
  }
  auto kept = state->TakeKept(wanted.id, local ? &blob : &kNoBlob);
  if (!kept) {
    if (!local) {
      if (Sha256Hex(served.manifest) != HexOf(wanted.id))
        return WrongDigest(wanted.id, kManifestName, Sha256Hex(served.manifest), HexOf(wanted.id));
      DSEC_TRY(const auto manifest, Manifest::Parse(served.manifest));
      const auto release = [&](const LayerId& other) { return state->Release(other); };
      DSEC_TRY(local, (*state->cache)->Add(wanted.id, manifest, served.meta.get(), release));
    }
    DSEC_TRY(auto mount,
             MountLayer(local->meta.get(), {{served.blob.get()}}, state->options.read_ahead_kib));
    kept = Kept{{}, InfoOf(wanted.id, local->manifest), blob, std::move(mount), nullptr, {}};
  }
  auto mounted = MakeUse(state, *std::move(kept), nullptr);
  const std::lock_guard lock(wanted.slot->mutex);
  wanted.slot->mount = mounted;
  return mounted;
}

// What a mount of the layer is made of. Content that is checked comes as one file; else a layer
// that shares content needs metadata of its own for the files that have it.
Result<LayerMounts::Parts> LayerMounts::PartsOf(State& state, const LayerId& id,
                                                const LayerFiles& files,
                                                const std::optional<LocalLayer>& local,
                                                const BlobServer::Served& served) {
  Parts parts;
  parts.meta = local ? local->meta.get() : files.meta.get();
  if (served.blob.valid()) {
    parts.content = {served.blob.get()};
    return parts;
  }
  parts.content = ContentOf(files);
  if (!files.form) {
    if (local) (*state.cache)->DropSharedMeta(id);
    return parts;
  }
  if (!local) {
    parts.meta = files.shared_meta.get();
    return parts;
  }
  const auto release = [&](const LayerId& other) { return state.Release(other); };
  DSEC_TRY(parts.shared_meta, (*state.cache)->SharedMeta(id, *local, *files.form, release));
  parts.meta = parts.shared_meta.get();
  return parts;
}

}  // namespace dsec::image

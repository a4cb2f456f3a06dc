// SPDX-License-Identifier: Apache-2.0
// What LayerMounts does with traces of first reads: it has those of layers read ahead, and mounts
// layers apart for recording new ones.
#include <fcntl.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "base/log.h"
#include "image/erofs_mount.h"
#include "image/layer_mounts_state.h"
#include "image/layer_trace.h"

namespace dsec::image {

// On a thread that may hang, after the mount has been handed out.
void LayerMounts::ReadAhead(const std::shared_ptr<State>& state, const LayerId& id,
                            std::weak_ptr<const os::UniqueFd> layer) {
  if (!state->prefetcher.wanted()) return;
  const auto read = [&]() -> Result<std::optional<LayerTrace>> {
    DSEC_FAULT_POINT("layer.trace.before_read");
    return ReadTrace(state->FolderOf(id));
  }();
  if (!read.ok()) {
    log::Warn("layer.trace_not_used", {{"layer", id}, {"error", read.error()}});
  } else if (*read) {
    state->prefetcher.Add(std::move(layer), **read);
  }
}

Prefetcher::Figures LayerMounts::prefetched() const { return state_->prefetcher.figures(); }

// On a thread that may hang.
Result<LayerMounts::Files> LayerMounts::OpenFilesNow(const std::shared_ptr<State>& state,
                                                     const LayerId& id) {
  std::optional<LocalLayer> local;
  if (state->copies) {
    DSEC_TRY(local, (*state->cache)->Find(id));
  }
  BlobServer::Served served;
  if (state->options.server != nullptr) {
    DSEC_TRY(served, state->options.server->Open(id, false));
  }
  if (state->remote()) {
    // The use that the shared mount has keeps the copy.
    if (!local) return Error(Code::kUnavailable, "layer.unreachable", "its copy is gone");
    std::vector<os::UniqueFd> content;
    content.push_back(std::move(served.blob));
    return Files{std::move(local->meta), std::move(content)};
  }
  DSEC_TRY(const auto blobs, OpenBlobs(state->root));
  DSEC_TRY(LayerFiles files, OpenLayer(blobs.get(), id, !local.has_value()));
  if (!local) DSEC_TRY_VOID(CheckMeta(id, files));
  DSEC_TRY(auto parts, PartsOf(*state, id, files, local, served));
  Files out;
  if (served.blob.valid()) {
    out.content.push_back(std::move(served.blob));
  } else {
    out.content = std::move(files.content);
  }
  if (parts.shared_meta.valid()) {
    out.meta = std::move(parts.shared_meta);
  } else if (local && parts.meta == local->meta.get()) {
    out.meta = std::move(local->meta);
  } else {
    out.meta = std::move(parts.meta == files.meta.get() ? files.meta : files.shared_meta);
  }
  return out;
}

Result<std::vector<LayerMounts::Files>> LayerMounts::OpenFiles(const std::vector<LayerId>& ids) {
  using All = std::shared_ptr<std::vector<Files>>;
  const auto pending = std::make_shared<Pending<All>>();
  pending->Join();
  const bool started = state_->threads.Start([state = state_, ids, pending] {
    pending->Set([&]() -> Result<All> {
      auto all = std::make_shared<std::vector<Files>>();
      for (const LayerId& id : ids) {
        DSEC_TRY(auto files, OpenFilesNow(state, id));
        all->push_back(std::move(files));
      }
      return all;
    }());
  });
  if (!started) return Unreachable("too many calls on it hang").WithErrno(EAGAIN);
  auto opened = pending->Wait(state_->options.patience);
  if (!opened) return Unreachable("no answer in time");
  if (!opened->ok()) return std::move(*opened).error();
  return std::move(***opened);
}

// On a thread that may hang.
Result<std::shared_ptr<const os::UniqueFd>> LayerMounts::MountApart(
    const std::shared_ptr<State>& state, const LayerId& id) {
  DSEC_TRY(const Files files, OpenFilesNow(state, id));
  std::vector<int> content;
  for (const os::UniqueFd& file : files.content) content.push_back(file.get());
  return MountLayerApart(files.meta.get(), content);
}

Result<std::vector<std::shared_ptr<const MountedLayer>>> LayerMounts::AcquireApart(
    const std::vector<LayerId>& ids) {
  DSEC_TRY(auto shared, Acquire(ids));
  using Mounts = std::vector<std::shared_ptr<const os::UniqueFd>>;
  const auto pending = std::make_shared<Pending<Mounts>>();
  pending->Join();
  const bool started = state_->threads.Start([state = state_, ids, pending] {
    pending->Set([&]() -> Result<Mounts> {
      Mounts mounts;
      for (const LayerId& id : ids) {
        DSEC_TRY(auto mount, MountApart(state, id));
        mounts.push_back(std::move(mount));
      }
      return mounts;
    }());
  });
  if (!started) return Unreachable("too many calls on it hang").WithErrno(EAGAIN);
  auto mounts = pending->Wait(state_->options.patience);
  if (!mounts) return Unreachable("no answer in time");
  if (!mounts->ok()) return std::move(*mounts).error();
  std::vector<Mounted> apart;
  for (size_t i = 0; i < ids.size(); ++i) {
    auto* layer =
        new MountedLayer(shared[i]->info(), shared[i]->blob_, std::move((**mounts)[i]), nullptr);
    // The unmount first, where it may hang; until then the layer is in use.
    auto end = [state = state_, held = std::move(shared[i])](const MountedLayer* used) mutable {
      std::shared_ptr<const MountedLayer> own(used);
      auto both = std::make_shared<std::pair<Mounted, Mounted>>(std::move(held), std::move(own));
      const auto close = [both] {
        both->second.reset();
        both->first.reset();
      };
      if (!state->closers.Start(close)) {
        // So many hang already that it waits for the next Trim, or the end of the process.
        const std::lock_guard lock(state->mutex);
        state->left_apart.push_back(both);
      }
      state.reset();
    };
    apart.push_back(Mounted(layer, std::move(end)));
  }
  return apart;
}

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/container/rootfs.h"

#include <sys/mount.h>

#include <ranges>

#include "os/mount.h"

namespace dsec::sandbox {

Result<os::UniqueFd> BuildRoot(
    const std::vector<std::shared_ptr<const image::MountedLayer>>& layers,
    const ScratchLayer& scratch, int user_ns) {
  DSEC_TRY(auto overlay, os::FsContext::Open("overlay"));
  DSEC_TRY_VOID(overlay.SetString("source", "overlay"));
  // A detached mount ends with its descriptor, and the overlay takes its own hold only when it is
  // made.
  std::vector<os::UniqueFd> lowers;
  for (const auto& layer : layers | std::views::reverse) {  // the first one added is the topmost
    DSEC_TRY(auto lower, os::CloneMount(layer->fd(), "", false));
    DSEC_TRY_VOID(os::SetMountAttributes(lower.get(), MOUNT_ATTR_RDONLY, 0, user_ns)
                      .Context("map the ids of layer {}", layer->info().id.str()));
    DSEC_TRY_VOID(
        overlay.SetFd("lowerdir+", lower.get()).Context("layer {}", layer->info().id.str()));
    lowers.push_back(std::move(lower));
  }
  DSEC_TRY_VOID(overlay.SetFd("upperdir", scratch.upper.get()));
  DSEC_TRY_VOID(overlay.SetFd("workdir", scratch.work.get()));
  // Layers are built by users: an xattr in one must not point elsewhere in the stack.
  DSEC_TRY_VOID(overlay.SetString("redirect_dir", "nofollow"));
  DSEC_TRY_VOID(overlay.SetString("metacopy", "off"));
  DSEC_TRY_VOID(overlay.SetString("index", "off"));
  DSEC_TRY_VOID(overlay.SetString("xino", "auto"));
  DSEC_TRY_VOID(overlay.SetString("uuid", "null"));
  // No sandbox outlives its host, so nothing of it needs to reach a disk.
  DSEC_TRY_VOID(overlay.SetFlag("volatile"));
  return std::move(overlay).Mount(MOUNT_ATTR_NODEV | MOUNT_ATTR_NOATIME);
}

}  // namespace dsec::sandbox

// SPDX-License-Identifier: Apache-2.0
#include "sandbox/rootfs.h"

#include <sys/mount.h>

#include <ranges>

#include "base/log.h"
#include "os/mount.h"

namespace dsec::sandbox {

Result<std::vector<image::LayerInfo>> FindLayers(image::SharedCatalog& catalog,
                                                 const LayerRefs& refs) {
  struct Reference {
    const std::string& text;
    image::LayerKind kind;
    std::string field;
  };
  std::vector<Reference> references = {{refs.base, image::LayerKind::kBase, "base"}};
  if (!refs.workspace.empty())
    references.push_back({refs.workspace, image::LayerKind::kWorkspace, "workspace"});
  for (size_t i = 0; i < refs.toolkits.size(); ++i) {
    references.push_back(
        {refs.toolkits[i], image::LayerKind::kToolkit, fmt::format("toolkits[{}]", i)});
  }
  std::vector<std::string> texts;
  for (const Reference& reference : references) texts.push_back(reference.text);
  auto found = catalog.FindForUse(texts);
  std::vector<image::LayerInfo> layers;
  for (size_t i = 0; i < references.size(); ++i) {
    const Reference& reference = references[i];
    if (!found[i].ok()) return std::move(found[i]).error().WithField(reference.field);
    auto right = image::CheckKind(*found[i], reference.text, reference.kind);
    if (!right.ok()) return std::move(right).error().WithField(reference.field);
    layers.push_back(*std::move(found[i]));
  }
  return layers;
}

Result<std::vector<LayerId>> ResolveLayers(image::SharedCatalog& catalog, const LayerRefs& refs) {
  DSEC_TRY(const auto layers, FindLayers(catalog, refs));
  std::vector<LayerId> ids;
  for (const image::LayerInfo& layer : layers) {
    ids.insert(ids.end(), layer.lower.begin(), layer.lower.end());
    ids.push_back(layer.id);
  }
  return ids;
}

Result<HeldLayers> AcquireLayers(image::LayerMounts& mounts, const std::vector<LayerId>& ids) {
  return mounts.Acquire(ids);
}

std::shared_ptr<const HeldLayers> HoldLayers(image::LayerMounts& mounts,
                                             const v1::SandboxRecord& record) {
  struct Adopted {
    HeldLayers held;
    std::vector<std::shared_ptr<const void>> later;
  };
  auto adopted = std::make_shared<Adopted>();
  for (const std::string& text : record.layer_ids()) {
    auto id = ParseLayerId(text);
    auto mounted = id.ok() ? mounts.Acquire(*id)
                           : Result<std::shared_ptr<const image::MountedLayer>>(id.error());
    if (mounted.ok()) {
      adopted->held.push_back(*std::move(mounted));
    } else {
      if (id.ok()) adopted->later.push_back(mounts.AcquireLater(*id));
      log::Warn("sandbox.layer_not_held",
                {{"sandbox_id", record.id()}, {"error", mounted.error()}});
    }
  }
  return std::shared_ptr<const HeldLayers>(adopted, &adopted->held);
}

Result<std::vector<os::UniqueFd>> MapLayers(const HeldLayers& layers, int user_ns) {
  std::vector<os::UniqueFd> lowers;
  for (const auto& layer : layers) {
    DSEC_TRY(auto lower, os::CloneMount(layer->fd(), "", false));
    DSEC_TRY_VOID(os::SetMountAttributes(lower.get(), MOUNT_ATTR_RDONLY, 0, user_ns)
                      .Context("map the ids of layer {}", layer->info().id.str()));
    lowers.push_back(std::move(lower));
  }
  return lowers;
}

Result<os::UniqueFd> BuildRoot(const std::vector<os::UniqueFd>& lowers,
                               const ScratchLayer& scratch) {
  DSEC_TRY(auto overlay, os::FsContext::Open("overlay"));
  DSEC_TRY_VOID(overlay.SetString("source", "overlay"));
  // The first one added is the topmost. The overlay takes its own hold of each.
  for (const os::UniqueFd& lower : lowers | std::views::reverse)
    DSEC_TRY_VOID(overlay.SetFd("lowerdir+", lower.get()));
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

// SPDX-License-Identifier: Apache-2.0
#include "image/flatten.h"

#include <fcntl.h>

#include <memory>

#include "image/dir_source.h"
#include "os/file.h"

namespace dsec::image {
namespace {

Error BadStack(std::string field, std::string message) {
  return Error(Code::kInvalidArgument, "layer.bad_stack", std::move(message))
      .WithField(std::move(field));
}

using HeldLayers = std::vector<std::shared_ptr<const MountedLayer>>;

// Reads the layers, lowest first, as the kernel shows them; `held` outlives the build.
void ReadFrom(const HeldLayers& held, const ImageConfig& config, BuildRequest& build) {
  const ImportLimits limits = build.limits;
  build.open = [&held, config, limits](Warnings& warnings) -> Result<std::unique_ptr<ImageReader>> {
    OverlayFolders stack;
    for (const auto& layer : held) {
      DSEC_TRY(auto root, os::OpenAt(layer->fd(), ".", O_RDONLY | O_DIRECTORY));
      stack.folders.push_back(std::move(root));
    }
    stack.config = config;
    return OpenOverlayFolders(std::move(stack), limits, warnings);
  };
}

}  // namespace

Result<BuildReport> Flatten(LayerStore& store, LayerMounts& mounts, const FlattenRequest& request,
                            const ProgressFn& progress) {
  if (request.refs.empty()) return BadStack("refs", "give at least one layer");
  HeldLayers held;
  ImageConfig config;  // of the base
  std::string ids;
  for (size_t i = 0; i < request.refs.size(); ++i) {
    DSEC_TRY(const LayerInfo info, store.Find(request.refs[i]));
    if (info.kind == LayerKind::kBase && i > 0) {
      return BadStack(fmt::format("refs[{}]", i),
                      fmt::format("{} is a base, which can only be the lowest", request.refs[i]));
    }
    std::vector<LayerId> all = info.lower;
    all.push_back(info.id);
    for (const LayerId& id : all) {
      DSEC_TRY(auto mounted, mounts.Acquire(id));
      held.push_back(std::move(mounted));
      ids += (ids.empty() ? "" : ",") + id.str();
    }
    config = i == 0 ? info.config : config;
  }
  const LayerInfo& lowest = held.front()->info();
  if ((lowest.kind == LayerKind::kBase) != (request.kind == LayerKind::kBase)) {
    return BadStack(
        "kind", fmt::format("over a {} as the lowest the result is {}a base", KindName(lowest.kind),
                            lowest.kind == LayerKind::kBase ? "" : "not "));
  }
  BuildRequest build;
  build.kind = request.kind;
  build.name = request.name;
  build.path = "flattened layers";
  build.labels = request.labels;
  build.labels["dsec.flatten.layers"] = ids;
  build.compression = request.compression;
  ReadFrom(held, config, build);
  return store.Build(build, progress);
}

Result<BuildReport> CompressLayer(LayerStore& store, LayerMounts& mounts,
                                  const CompressRequest& request, const ProgressFn& progress) {
  DSEC_TRY(const LayerInfo info, store.Find(request.ref));
  DSEC_TRY(auto mounted, mounts.Acquire(info.id));
  const HeldLayers held = {std::move(mounted)};
  BuildRequest build;
  build.kind = info.kind;
  build.name = request.name;
  build.path = "layer " + info.id.str();
  build.labels = info.labels;
  build.labels.erase(kCompressedLabel);
  for (const auto& [key, value] : request.labels) build.labels[key] = value;
  build.labels["dsec.compress.layer"] = info.id.str();
  build.first_touch = request.first_touch;
  build.lower = info.lower;
  build.compression = request.compression;
  ReadFrom(held, info.config, build);
  if (!progress) return store.Build(build, nullptr);
  return store.Build(build, [&](Progress state) {
    if (state.phase == Progress::Phase::kRead) state.total_bytes = info.content_bytes;
    return progress(state);
  });
}

}  // namespace dsec::image

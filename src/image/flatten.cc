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

}  // namespace

Result<BuildReport> Flatten(LayerStore& store, LayerMounts& mounts, const FlattenRequest& request,
                            const ProgressFn& progress) {
  if (request.refs.size() < 2) return BadStack("refs", "give at least two layers");
  std::vector<std::shared_ptr<const MountedLayer>> held;
  std::string ids;
  for (size_t i = 0; i < request.refs.size(); ++i) {
    DSEC_TRY(const LayerInfo info, store.Find(request.refs[i]));
    if (info.kind == LayerKind::kBase && i > 0) {
      return BadStack(fmt::format("refs[{}]", i),
                      fmt::format("{} is a base, which can only be the lowest", request.refs[i]));
    }
    DSEC_TRY(auto mounted, mounts.Acquire(info.id));
    held.push_back(std::move(mounted));
    ids += (i == 0 ? "" : ",") + info.id.str();
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
  build.open = [&](Warnings& warnings) -> Result<std::unique_ptr<ImageReader>> {
    OverlayFolders stack;
    for (const auto& layer : held) {
      DSEC_TRY(auto root, os::OpenAt(layer->fd(), ".", O_RDONLY | O_DIRECTORY));
      stack.folders.push_back(std::move(root));
    }
    stack.config = lowest.config;
    return OpenOverlayFolders(std::move(stack), build.limits, warnings);
  };
  return store.Build(build, progress);
}

}  // namespace dsec::image

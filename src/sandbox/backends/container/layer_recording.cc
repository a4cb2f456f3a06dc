// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/container/layer_recording.h"

#include <sys/stat.h>

#include <utility>
#include <vector>

#include "os/file.h"

namespace dsec::sandbox {

Result<std::unique_ptr<LayerRecording>> LayerRecording::Begin(
    const SandboxId& sandbox, std::shared_ptr<const HeldLayers> layers) {
  std::vector<dev_t> devices;
  for (const auto& layer : *layers) {
    struct stat status;
    if (::fstat(layer->fd(), &status) != 0)
      return os::ErrnoError("layer.io", "stat the root of a layer");
    devices.push_back(status.st_dev);
  }
  std::unique_ptr<LayerRecording> recording(new LayerRecording(std::move(layers)));
  DSEC_TRY(recording->recorder_, image::TouchRecorder::Begin(sandbox, devices));
  return recording;
}

Result<v1::FirstTouchReply> LayerRecording::Take(const v1::FirstTouchRequest& request,
                                                 image::LayerStore& store) {
  if (request.stop()) DSEC_TRY_VOID(recorder_->Stop());
  DSEC_TRY(const auto touches, recorder_->Read());
  v1::FirstTouchReply reply;
  reply.set_lost(touches.lost);
  reply.set_truncated(touches.truncated);
  reply.set_stopped(recorder_->stopped());
  for (size_t i = 0; i < layers_->size(); ++i) {
    const image::MountedLayer& layer = *(*layers_)[i];
    DSEC_TRY(image::LayerTrace trace, image::NameTouches(layer.fd(), touches.devices[i]));
    v1::LayerTouch& touch = *reply.add_layers();
    touch.set_layer_id(layer.info().id.str());
    touch.set_parts(trace.parts.size());
    touch.set_bytes(trace.bytes());
    if (trace.Bound()) reply.set_truncated(true);
    if (!request.save() || trace.parts.empty()) continue;
    DSEC_TRY(const image::LayerTrace saved,
             store.SaveTrace(layer.info().id, std::move(trace), request.merge())
                 .Context("save the trace of {}", layer.info().id.str()));
    touch.set_saved(true);
    touch.set_saved_parts(saved.parts.size());
    touch.set_saved_bytes(saved.bytes());
  }
  return reply;
}

}  // namespace dsec::sandbox

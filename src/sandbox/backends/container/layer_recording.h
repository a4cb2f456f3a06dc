// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/id.h"
#include "base/result.h"
#include "dsec/v1/pack.pb.h"
#include "image/layer_store.h"
#include "image/touch_recorder.h"
#include "sandbox/rootfs.h"

namespace dsec::sandbox {

// What a sandbox reads first of its layers, from its creation on. Ends with this object or the
// process: a sandbox that is adopted is not recorded any more. Its calls and its end block for
// milliseconds. Thread-safe.
class LayerRecording {
 public:
  // `layers` are mounted apart (LayerMounts::AcquireApart). Errors: as TouchRecorder::Begin.
  static Result<std::unique_ptr<LayerRecording>> Begin(const SandboxId& sandbox,
                                                       std::shared_ptr<const HeldLayers> layers);
  // What has been read until now, saved in `store` if asked: then it waits for the store.
  // kUnavailable or kInternal "layer.*".
  Result<v1::FirstTouchReply> Take(const v1::FirstTouchRequest& request, image::LayerStore& store);

 private:
  explicit LayerRecording(std::shared_ptr<const HeldLayers> layers) : layers_(std::move(layers)) {}
  const std::shared_ptr<const HeldLayers> layers_;
  std::unique_ptr<image::TouchRecorder> recorder_;
};

}  // namespace dsec::sandbox

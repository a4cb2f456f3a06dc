// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::image {

// What keeps the store from removing a layer that this node uses: the layer's manifest, open, with
// a shared flock(2) while a use lasts. Between uses the file stays open, so that the next use costs
// no more than the lock and a look whether the layer is still the same one. Thread-safe. All but
// End touch the file system of the store and may hang.
class LayerHold {
 public:
  // `locked`: the manifest, with the lock; a use lasts. `content`: a file of the layer's content,
  // which is called `name` in its folder.
  static Result<std::shared_ptr<LayerHold>> Make(os::UniqueFd locked, int content,
                                                 std::string name);
  // Begins a use again. False: the layer of `folder` (<root>/blobs/<hex>) is gone, is being removed
  // or is not what it was.
  bool Again(const std::string& folder);
  // The use is over; the lock stays until GiveBack.
  void End() { used_ = false; }
  // Takes the lock away unless another use has begun.
  void GiveBack();

 private:
  LayerHold(os::UniqueFd locked, const struct stat& manifest, const struct stat& content,
            std::string name)
      : file_(std::move(locked)), manifest_(manifest), content_(content), name_(std::move(name)) {}

  const os::UniqueFd file_;
  const struct stat manifest_;
  const struct stat content_;
  const std::string name_;
  std::atomic<bool> used_ = true;
  std::mutex mutex_;  // of the lock; held over calls that may hang, by those alone
};

}  // namespace dsec::image

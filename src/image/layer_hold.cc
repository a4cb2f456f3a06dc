// SPDX-License-Identifier: Apache-2.0
#include "image/layer_hold.h"

#include <sys/file.h>

#include <utility>

#include "image/layer_files.h"
#include "image/root_calls.h"
#include "os/file.h"

namespace dsec::image {
namespace {

bool SameFile(const std::string& path, const struct stat& as) {
  struct stat now;
  return ::lstat(path.c_str(), &now) == 0 && now.st_dev == as.st_dev && now.st_ino == as.st_ino &&
         now.st_size == as.st_size;
}

}  // namespace

Result<std::shared_ptr<LayerHold>> LayerHold::Make(os::UniqueFd locked, int file,
                                                   std::string name) {
  struct stat manifest;
  struct stat content;
  if (::fstat(locked.get(), &manifest) != 0 || ::fstat(file, &content) != 0)
    return RootError(os::ErrnoError("layer.io", "stat a layer"));
  return std::shared_ptr<LayerHold>(
      new LayerHold(std::move(locked), manifest, content, std::move(name)));
}

bool LayerHold::Again(const std::string& folder) {
  const std::lock_guard lock(mutex_);
  used_ = true;
  // The lock first: a removal that has it takes the layer away from its path before it lets go.
  if (::flock(file_.get(), LOCK_SH | LOCK_NB) == 0 &&
      SameFile(folder + "/" + kManifestName, manifest_) &&
      SameFile(folder + "/" + name_, content_)) {
    return true;
  }
  used_ = false;
  static_cast<void>(::flock(file_.get(), LOCK_UN));
  return false;
}

void LayerHold::GiveBack() {
  const std::lock_guard lock(mutex_);
  if (!used_) static_cast<void>(::flock(file_.get(), LOCK_UN));
}

}  // namespace dsec::image

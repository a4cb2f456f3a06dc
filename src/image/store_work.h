// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "base/id.h"
#include "base/result.h"
#include "image/layer_store.h"
#include "os/unique_fd.h"

// What the parts of LayerStore share (layer_store.cc, layer_build.cc, layer_sharing.cc,
// collect.cc).
namespace dsec::image {

// In a work folder: the layer whose files are being moved into or out of blobs/ right now.
inline constexpr char kMovingName[] = "moving";
// Below the root: files of removed layers that a node may have mounted, <hex>.<ulid>.
inline constexpr char kCondemnedName[] = "condemned";

inline constexpr char kOriginName[] = "origin.json";
inline constexpr char kCacheName[] = "cache";  // blobs from registries

Result<os::UniqueFd> MakeAndOpenDir(int dirfd, const char* name, mode_t mode);
// kConflict "layer.in_use".
Error LayerInUse(const LayerId& id, std::string_view by);

// A folder tmp/<ulid> with an exclusive flock for as long as it is worked in. Removed with all its
// content by the destructor.
struct LayerStore::WorkDir {
  int tmp = -1;
  std::string name;
  os::UniqueFd fd;

  WorkDir(int tmp_fd, std::string dir, os::UniqueFd lock)
      : tmp(tmp_fd), name(std::move(dir)), fd(std::move(lock)) {}
  WorkDir(WorkDir&&) = default;
  WorkDir& operator=(WorkDir&&) = delete;
  ~WorkDir();
};

}  // namespace dsec::image

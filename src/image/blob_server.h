// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "base/id.h"
#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::image {

// Serves the content of layers as files of which each byte was checked against the layer's id, for
// stores that are not trusted or are no file system. Implemented by blobfs::Client. Thread-safe.
class BlobServer {
 public:
  struct Served {
    os::UniqueFd blob;     // to be mounted; reads as long as the session lasts
    std::string manifest;  // its text; not checked by the caller's store
    os::UniqueFd meta;     // if asked for: the metadata from its start, not checked
    uint64_t session = 0;
  };

  virtual ~BlobServer() = default;
  // Whether layers come from elsewhere and their folders in the store are not asked for.
  virtual bool remote() const = 0;
  // Another number: files served before are lost, and mounts of them with it.
  virtual uint64_t session() const = 0;
  // Whether a wrong digest was met in the layer since the last Open that succeeded. Cheap.
  virtual bool Damaged(const LayerId& id) const = 0;
  // Blocks in bounded time. kNotFound "layer.not_found", kFailedPrecondition "layer.unverifiable",
  // kInternal "layer.corrupt", kUnavailable "layer.unreachable".
  virtual Result<Served> Open(const LayerId& id, bool with_meta) = 0;
};

}  // namespace dsec::image

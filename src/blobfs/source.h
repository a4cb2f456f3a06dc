// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "blobfs/http_client.h"
#include "image/blob_reader.h"

namespace dsec::blobfs {

// Where the files of layers come from. Their bytes are not trusted. Thread-safe, blocking; may hang
// with what it reads from. `hex` are the 64 digits of a layer's id.
class LayerSource {
 public:
  virtual ~LayerSource() = default;
  // The whole of a small file, of at most `limit` bytes. kNotFound "layer.not_found", kUnavailable
  // "layer.unreachable", kInternal "layer.corrupt" when it is larger.
  virtual Result<std::string> ReadAll(const std::string& hex, const char* name, size_t limit) = 0;
  // Touches nothing yet. A reader opens its file when it is read, and anew after a failure.
  virtual std::unique_ptr<image::BlobReader> Open(const std::string& hex, const char* name,
                                                  uint64_t size) = 0;
  // Reads under way fail soon where they can; for the end of the process.
  virtual void Stop() {}
};

// <root>/blobs/<hex>/<name>.
std::unique_ptr<LayerSource> FolderSource(std::string root);
// <url>/blobs/<hex>/<name>.
std::unique_ptr<LayerSource> HttpSource(HttpOptions options);

}  // namespace dsec::blobfs

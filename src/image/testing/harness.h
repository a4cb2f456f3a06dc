// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "image/byte_source.h"
#include "image/content_order.h"
#include "image/entry.h"
#include "image/erofs_writer.h"
#include "image/layer_store.h"
#include "image/tree_builder.h"
#include "os/unique_fd.h"

namespace dsec::image::testing {

// Bytes in memory as a source, in pieces of at most `piece`.
class TextSource : public ByteSource {
 public:
  explicit TextSource(std::string data, size_t piece = 4096)
      : data_(std::move(data)), piece_(piece) {}
  Result<std::span<const uint8_t>> Read() override;

 private:
  std::string data_;
  size_t piece_;
  size_t at_ = 0;
};

// A base with one file, called "file", in the store.
Result<LayerId> BuildOneFile(LayerStore& store, const std::string& content,
                             const std::string& name = "");

struct BuiltImage {
  MetaImage meta;
  ChunkStore::Blob blob;
};

// Builds <folder>/meta.erofs and <folder>/data.blob from tars, lowest layer first, as the layer
// store does; files of that name are replaced.
Result<BuiltImage> BuildImage(const std::string& folder, const std::vector<std::string>& tars,
                              const TreeOptions& options, Warnings& warnings,
                              const std::vector<FirstTouch>& first = {},
                              const Compression& compression = {});

// The same tars unpacked by the kernel's file system into the empty folder `tree`: another
// implementation of the same rules, in which the kernel resolves the names.
Result<uint64_t> UnpackTars(const std::string& tree, const std::vector<std::string>& tars,
                            const TreeOptions& options, Warnings& warnings);

// A detached mount of the pair in `folder`.
Result<os::UniqueFd> MountImage(const std::string& folder);

// What fsck.erofs complains about; empty when it finds the pair in `folder` good.
std::string FsckImage(const std::string& folder);

}  // namespace dsec::image::testing

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include "base/result.h"
#include "image/chunk_store.h"
#include "image/layer.h"
#include "image/tree.h"

namespace dsec::image {

inline constexpr char kMetaName[] = "meta.erofs";
inline constexpr char kBlobName[] = "data.blob";

struct MetaImage {
  FileDigest digest;
  uint64_t entries = 0;        // names in the tree, its root not counted
  uint64_t content_bytes = 0;  // sum of the file sizes, each file once
  bool compressed = false;     // a file is: HasCompressedFiles
};

// Writes the tree as an EROFS image of inodes, folders, xattrs and maps of content; that lies in
// the blob, at the places that `chunks` has given, chunked or in compressed clusters. The bytes are
// a function of the tree and those places alone. `fd`: an empty file; synced on return. `proceed`
// (may be empty) is asked now and then with the bytes done; false: kCancelled "layer.cancelled".
// More metadata than EROFS can address: kInvalidArgument "layer.too_large".
Result<MetaImage> WriteErofs(const Tree& tree, const ChunkStore& chunks, int fd,
                             const std::function<bool(uint64_t)>& proceed);

// Checks what a mount would rely on: magic, block size, one extra device, no feature but chunks,
// devices and LZ4 in clusters of at most a chunk. kInternal "layer.corrupt".
Result<void> CheckSuperblock(int meta_fd);
// Whether a mount needs a kernel that can decompress. False for what is no image.
bool HasCompressedFiles(int meta_fd);

}  // namespace dsec::image

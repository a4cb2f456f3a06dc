// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "image/entry.h"
#include "os/unique_fd.h"

namespace dsec::image {

// Each opens one kind of input. Nothing of an image is executed or mounted. `warnings` must outlive
// the reader, which must outlive the sources that it opens. An input that cannot be opened:
// kInvalidArgument "layer.source".

// A tar archive, plain or compressed by gzip, bzip2, xz or zstd; "-" is standard input.
Result<std::unique_ptr<ImageReader>> OpenTar(const std::string& path, const ImportLimits& limits,
                                             Warnings& warnings);

// An OCI image layout folder. `ref` picks an image by its ref.name annotation; empty: the only one
// for this host's platform. The digest and size of every document and layer are checked. `blobs`:
// the folder of the blobs where it is not the layout's own; blobs used get the present time.
Result<std::unique_ptr<ImageReader>> OpenOciLayout(const std::string& path, const std::string& ref,
                                                   const ImportLimits& limits, Warnings& warnings,
                                                   const std::string& blobs = "");

// What `docker save` writes, of both generations. `ref` picks an image by its tag. Layers are
// checked against the diff_ids of the image config. A compressed archive is first inflated into an
// unnamed file in `scratch`, as members are read in the image's order and not the archive's.
Result<std::unique_ptr<ImageReader>> OpenDockerArchive(const std::string& path,
                                                       const std::string& ref, int scratch,
                                                       const ImportLimits& limits,
                                                       Warnings& warnings);

// Opens a file to import: regular or pipe, never a terminal, device or folder.
Result<os::UniqueFd> OpenSource(const std::string& path);

}  // namespace dsec::image

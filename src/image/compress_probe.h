// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/result.h"

namespace dsec::image {

// Makes a small compressed layer in `dir`, mounts it and reads it; leaves nothing there. Ok: this
// kernel reads compressed layers from files of that file system. kUnavailable
// "layer.compression_unsupported"; else why it could not be tried.
Result<void> ProbeCompressedLayers(const std::string& dir);

}  // namespace dsec::image

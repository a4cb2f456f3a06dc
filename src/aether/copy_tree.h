// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/result.h"

namespace dsec::aether {

// Copies source/name to target/new_name, which must not exist: files with their holes, directories,
// links and FIFOs, with owner, mode and time of change. Follows no link, crosses no mount. Hard
// links become files of their own, extended attributes are not taken along. Refused: devices and
// sockets ("file.special"), more than 128 levels ("file.too_deep"). After an error a part of the
// copy is there.
Result<void> CopyTree(int source, const std::string& name, int target, const std::string& new_name);

}  // namespace dsec::aether

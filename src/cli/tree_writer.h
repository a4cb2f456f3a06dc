// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::cli {

// Unpacks a tar (an open file, at its start) below the folder `root`. The archive is hostile:
// absolute names, "..", hard links to outside and names that pass through a link are refused
// ("archive.hostile"); devices, FIFOs and sockets are left out (one line each in the result);
// setuid and setgid bits are dropped; links are made last.
Result<std::vector<std::string>> UnpackTree(os::UniqueFd tar, int root);

}  // namespace dsec::cli

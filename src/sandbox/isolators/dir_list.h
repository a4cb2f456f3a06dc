// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/result.h"

namespace dsec::sandbox {

struct DirEntry {
  std::string name;
  bool is_dir = false;
};

// The entries of the directory `path` below `dirfd` ("." for itself), without "." and "..", in
// order of name. kNotFound when it is not there.
Result<std::vector<DirEntry>> ListDir(int dirfd, const char* path);

}  // namespace dsec::sandbox

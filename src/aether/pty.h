// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "aether/identity.h"
#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::aether {

struct Pty {
  os::UniqueFd master;  // non-blocking
  os::UniqueFd slave;
};

// A terminal of the sandbox's own devpts, owned by `identity`. `root` is the sandbox's root
// directory. Zero rows or columns become 24 or 80. Errors: "exec.tty".
Result<Pty> OpenPty(int root, const Identity& identity, uint32_t rows, uint32_t cols);
Result<void> ResizePty(int master, uint32_t rows, uint32_t cols);

}  // namespace dsec::aether

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"

namespace dsec::sandbox {

// Runs a program of the host, searched in the system's directories, with no input and a minimal
// environment, and waits for it. kInternal "tool.failed" carries the end of what it wrote to
// stderr; past the deadline it is killed (kDeadlineExceeded "tool.timeout"); kFailedPrecondition
// "tool.missing". Only for the start of a node, never on the way of a sandbox.
Result<void> RunTool(const std::vector<std::string>& argv, MonoTime deadline);

}  // namespace dsec::sandbox

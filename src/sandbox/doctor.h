// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "dsec/v1/edge.pb.h"

namespace dsec::sandbox {

struct HostProbe {
  v1::Capability capability;
  bool required = false;  // without it no container sandbox can be made
};

// Mechanisms of the kernel, each found out by doing it and not by version: what is used, what is
// missing, what replaces it and what that costs. Leaves nothing behind; some tens of milliseconds.
// What depends on the node's settings (cgroups, quota, device rules, ids) is reported by the
// isolators. `dir` is a folder on a local file system where a file can be made.
std::vector<HostProbe> ProbeHost(const std::string& dir);

}  // namespace dsec::sandbox

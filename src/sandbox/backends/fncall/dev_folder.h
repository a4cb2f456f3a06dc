// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "os/unique_fd.h"
#include "sandbox/isolators/devices.h"

namespace dsec::sandbox {

// A device of the node that a call may open.
struct DeviceNode {
  std::string path;  // below /dev inside, e.g. "nvidia0" or "nvidia-caps/nvidia-cap1"
  DeviceNumber number;
};

// Looks at device files of the node. One outside of /dev is put directly below it. kInvalidArgument
// "fn.bad_device" for what is no device.
Result<std::vector<DeviceNode>> FindDevices(const std::vector<std::string>& paths);
std::vector<DeviceNumber> NumbersOf(const std::vector<DeviceNode>& nodes);

// A /dev with the usual nodes and these, owned by the root of the sandbox with that host id, as a
// detached read-only mount with folders for pts and shm.
Result<os::UniqueFd> MakeDevFolder(const std::vector<DeviceNode>& nodes, uint32_t owner);

}  // namespace dsec::sandbox

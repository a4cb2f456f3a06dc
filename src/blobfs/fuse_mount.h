// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::blobfs {

struct FuseMount {
  os::UniqueFd device;  // /dev/fuse; nobody has answered INIT yet
  os::UniqueFd mount;   // O_PATH, detached
};

// A FUSE file system that is in no mount table, for requests of up to FuseSession::kMaxPages: where
// the kernel allows fewer, its limit (Linux 6.13) is raised for the moment of the mount. `dir`: for
// the record of what it was. kFailedPrecondition "layer.no_fuse".
Result<FuseMount> MountFuse(const std::string& dir, const char* source, bool writable);
// After a death in that moment. True: the limit was put back.
Result<bool> RestoreLimit(const std::string& dir);

// Whether the session of a device has not ended.
bool IsConnected(int device);

}  // namespace dsec::blobfs

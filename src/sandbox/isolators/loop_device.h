// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::sandbox {

// A loop device (loop(4)) over a regular file that frees itself with its last user: the descriptor
// here, and any mount made of it. So it outlives a daemon that is killed while sandboxes live on
// it, and nothing has to remember it.
class LoopDevice {
 public:
  // The device that has this very file attached, if there is one.
  static Result<std::optional<LoopDevice>> Find(int image);
  // Attaches a free device with LOOP_CONFIGURE (Linux 5.8) and direct I/O. The device keeps `image`
  // open.
  static Result<LoopDevice> Attach(int image);

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }

 private:
  LoopDevice(os::UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  os::UniqueFd fd_;
  std::string path_;
};

}  // namespace dsec::sandbox

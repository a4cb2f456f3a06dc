// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"
#include "os/process.h"
#include "os/unique_fd.h"
#include "sandbox/isolators/cgroup_tree.h"
#include "vmm/boot_config.h"

namespace dsec::guest {

// The kernel's own file systems, and a root that pivot_root(2) can leave: the initramfs, bound to
// itself and moved over the first root. First of all; pid 1 only.
Result<void> PrepareRoot();
// The files that `/modules/order` lists, one a line, in that order.
Result<void> LoadModules();
// Device files by the serial numbers that the host gave (vmm/boot_config.h).
Result<std::string> FindDisk(std::string_view serial);
Result<vmm::BootConfig> ReadBootConfig();
// /dev/vportNpM of the port that the host named so, non-blocking. Waits for it up to ten seconds.
Result<os::UniqueFd> OpenPort(std::string_view name);

// A sandbox that runs: what the container backend has after Create, made the same way.
struct Standing {
  std::unique_ptr<sandbox::CgroupTree> tree;
  os::PidFd agent;
  std::string socket_path;  // its listening socket
  // Whether the memory limit has killed anything in it.
  bool OomKilled() const;
};
// Mounts the layers and the disk, makes a slot and launches it.
Result<Standing> Launch(const vmm::BootConfig& config);

// One line on the console, with the time since the kernel began.
void Say(std::string_view line);

}  // namespace dsec::guest

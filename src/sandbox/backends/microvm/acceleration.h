// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/result.h"
#include "vmm/machine.h"

namespace dsec::sandbox {

struct GuestImage {
  std::string kernel;  // paths
  std::string initrd;
};

struct AccelerationProbe {
  vmm::Acceleration acceleration = vmm::Acceleration::kEmulated;
  std::string detail;  // why it is not KVM
};

// Boots the guest image under KVM, without disks: its first process says that it has begun and
// powers off. That /dev/kvm opens says nothing: a host in a cloud may have it and not run a stock
// kernel on it. At most `patience`; where there is no /dev/kvm, nothing is started. As root, in a
// cgroup of the caller's, with the caller's keeper.
AccelerationProbe ProbeAcceleration(const std::string& keeper, const std::string& qemu,
                                    const GuestImage& guest, uint32_t uid,
                                    std::chrono::milliseconds patience);

}  // namespace dsec::sandbox

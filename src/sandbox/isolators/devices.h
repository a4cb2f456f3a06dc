// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "dsec/v1/edge.pb.h"

namespace dsec::sandbox {

// The devices that processes below a cgroup may open: null, zero, full, random, urandom, tty, ptmx
// and terminals. A BPF program of type cgroup_device on the v2 directory `cgroup`; it stays when
// this process ends and goes with the directory. One that is there already and does the same is
// kept, any other of ours is replaced. Errors: kFailedPrecondition "devices.bpf".
//
// A second line: mounts inside are nodev except /dev, and a user namespace can make no device
// nodes.
//
// A directory below may be given more with AllowDevices.
Result<void> EnforceDeviceRules(int cgroup);

struct DeviceNumber {
  bool block = false;
  uint32_t major = 0;
  uint32_t minor = 0;
};
// What processes below the v2 directory `cgroup` may open beyond the rules of the node; takes the
// place of what was said before. Empty: nothing beyond.
Result<void> AllowDevices(int cgroup, const std::vector<DeviceNumber>& devices);

// How it went, for doctor.
v1::Capability DeviceCapability(const Result<void>& enforced);

}  // namespace dsec::sandbox

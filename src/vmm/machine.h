// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace dsec::vmm {

// How the instructions of the guest are run.
enum class Acceleration { kKvm, kEmulated };

struct Disk {
  std::string serial;  // what the guest knows it by: [a-z0-9]{1,20}
  int fd = -1;         // borrowed; open for reading, or for both when it is writable
  bool read_only = true;
};

// A machine as a value, checked and turned into a command line without any effect.
struct Machine {
  Acceleration acceleration = Acceleration::kEmulated;
  uint32_t vcpus = 1;
  uint64_t memory_mib = 0;
  int kernel_fd = -1;  // borrowed, as all of them
  int initrd_fd = -1;
  int port_fd = -1;  // listening Unix socket of the port to the agent
  int qmp_fd = -1;   // listening Unix socket of the monitor
  std::vector<Disk> disks;
  bool incoming = false;  // does not start, but waits for a snapshot of a machine like it

  // kInvalidArgument "vm.machine" names the field and the rule.
  Result<void> Validate() const;
};

// Most disks of one machine: 24 virtio-mmio transports (QEMU's hw/i386/microvm.c, with the second
// I/O APIC that ACPI brings), of which the port's controller and the balloon take two.
inline constexpr size_t kMaxDisks = 22;
// QEMU's name for it, and the first argument.
inline constexpr char kQemuProgram[] = "qemu-system-x86_64";

// What QEMU is started with, and the descriptors that it is to have, the first of them as
// kFirstQemuFd and so on. Requires Validate().
struct QemuCommand {
  std::vector<std::string> arguments;
  std::vector<int> fds;  // borrowed
};
inline constexpr int kFirstQemuFd = 32;
QemuCommand MakeQemuCommand(const Machine& machine);

}  // namespace dsec::vmm

// SPDX-License-Identifier: Apache-2.0
#include "vmm/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "vmm/boot_config.h"

namespace dsec::vmm {
namespace {

Error Bad(std::string message) {
  return Error(Code::kInvalidArgument, "vm.machine", std::move(message));
}

constexpr uint32_t kMaxVcpus = 64;
constexpr uint64_t kMinMemoryMib = 96;  // Debian's kernel and the agent
constexpr uint64_t kMaxMemoryMib = 1 << 20;

// `quiet`: the console of an emulated machine is slow. `panic`, `reboot`: a panic resets the
// machine, which ends it. Under emulation the kernel cannot calibrate its clock in the time it
// gives itself.
std::string CommandLine(const Machine& machine) {
  std::string line = "console=ttyS0 quiet reboot=t panic=-1 random.trust_cpu=on";
  if (machine.acceleration == Acceleration::kEmulated) line += " tsc_early_khz=2000000";
  return line;
}

}  // namespace

Result<void> Machine::Validate() const {
  if (vcpus < 1 || vcpus > kMaxVcpus)
    return Bad(fmt::format("vcpus is {}, not 1..{}", vcpus, kMaxVcpus));
  if (memory_mib < kMinMemoryMib || memory_mib > kMaxMemoryMib) {
    return Bad(
        fmt::format("memory_mib is {}, not {}..{}", memory_mib, kMinMemoryMib, kMaxMemoryMib));
  }
  for (const auto& [name, fd] :
       {std::pair("kernel_fd", kernel_fd), std::pair("initrd_fd", initrd_fd),
        std::pair("port_fd", port_fd), std::pair("qmp_fd", qmp_fd)}) {
    if (fd < 0) return Bad(fmt::format("{} is not open", name));
  }
  if (disks.size() > kMaxDisks)
    return Bad(fmt::format("{} disks, at most {}", disks.size(), kMaxDisks));
  std::set<std::string> serials;
  for (const Disk& disk : disks) {
    const bool plain = std::ranges::all_of(
        disk.serial, [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); });
    if (disk.serial.empty() || disk.serial.size() > 20 || !plain)
      return Bad(fmt::format("disk serial \"{}\" is not [a-z0-9]{{1,20}}", disk.serial));
    if (!serials.insert(disk.serial).second)
      return Bad(fmt::format("two disks have the serial {}", disk.serial));
    if (disk.fd < 0) return Bad(fmt::format("disk {} is not open", disk.serial));
  }
  return Ok();
}

QemuCommand MakeQemuCommand(const Machine& machine) {
  QemuCommand command;
  auto pass = [&command](int fd) {
    command.fds.push_back(fd);
    return kFirstQemuFd + static_cast<int>(command.fds.size()) - 1;
  };
  std::vector<std::string>& out = command.arguments;
  const bool kvm = machine.acceleration == Acceleration::kKvm;
  // Its own translations are what an emulating QEMU takes most memory for.
  out = {kQemuProgram,
         "-M",
         "microvm,acpi=on,rtc=on,pit=off,pic=off",
         "-accel",
         kvm ? "kvm" : "tcg,tb-size=64",
         "-cpu",
         kvm ? "host" : "max",
         "-smp",
         fmt::format("{}", machine.vcpus),
         "-m",
         fmt::format("{}", machine.memory_mib),
         "-nodefaults",
         "-no-user-config",
         "-display",
         "none",
         "-no-reboot",
         "-sandbox",
         "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
         "-chardev",
         "stdio,id=console,signal=off",
         "-serial",
         "chardev:console"};
  auto add = [&out](std::string option, std::string value) {
    out.push_back(std::move(option));
    out.push_back(std::move(value));
  };
  // By /proc, so that they need not be found by name by an unprivileged process.
  add("-kernel", fmt::format("/proc/self/fd/{}", pass(machine.kernel_fd)));
  add("-initrd", fmt::format("/proc/self/fd/{}", pass(machine.initrd_fd)));
  add("-append", CommandLine(machine));
  add("-device", "virtio-serial-device,max_ports=2");
  add("-chardev", fmt::format("socket,id=port,fd={},server=on,wait=off", pass(machine.port_fd)));
  add("-device", fmt::format("virtserialport,chardev=port,name={}", kPortName));
  add("-chardev", fmt::format("socket,id=qmp,fd={},server=on,wait=off", pass(machine.qmp_fd)));
  add("-mon", "chardev=qmp,mode=control");
  add("-device", "virtio-balloon-device,id=balloon,free-page-reporting=on,deflate-on-oom=on");
  for (size_t i = 0; i < machine.disks.size(); ++i) {
    const Disk& disk = machine.disks[i];
    add("-add-fd", fmt::format("fd={},set={}", pass(disk.fd), i + 1));
    add("-blockdev",
        fmt::format("driver=raw,node-name={},read-only={},discard=unmap,file.driver=file,"
                    "file.filename=/dev/fdset/{},file.locking=off",
                    disk.serial, disk.read_only ? "on" : "off", i + 1));
    add("-device", fmt::format("virtio-blk-device,drive={},serial={}", disk.serial, disk.serial));
  }
  if (machine.incoming) add("-incoming", "defer");
  return command;
}

}  // namespace dsec::vmm

// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/microvm/acceleration.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "os/file.h"
#include "os/unique_fd.h"
#include "vmm/keeper.h"

namespace dsec::sandbox {
namespace {

constexpr char kDevice[] = "/dev/kvm";
constexpr std::string_view kBegun = "dsec-guest: [";

// Bound to a name of the kernel's choice: nobody connects.
Result<os::UniqueFd> Listen() {
  os::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (!socket.valid() ||
      ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(sa_family_t)) != 0 ||
      ::listen(socket.get(), 1) != 0) {
    return os::ErrnoError("vm.probe", "listen");
  }
  return socket;
}

Result<std::string> BootUnderKvm(const std::string& keeper, const std::string& qemu,
                                 const GuestImage& guest, uint32_t uid, uint32_t gid,
                                 std::chrono::milliseconds patience) {
  DSEC_TRY(const auto kernel, os::OpenAt(AT_FDCWD, guest.kernel.c_str(), O_RDONLY));
  DSEC_TRY(const auto initrd, os::OpenAt(AT_FDCWD, guest.initrd.c_str(), O_RDONLY));
  DSEC_TRY(const auto port, Listen());
  DSEC_TRY(const auto qmp, Listen());
  const os::UniqueFd console(::memfd_create("dsec-vm-probe", MFD_CLOEXEC));
  const os::UniqueFd exit(::memfd_create("dsec-vm-probe", MFD_CLOEXEC));
  if (!console.valid() || !exit.valid()) return os::ErrnoError("vm.probe", "memfd");
  vmm::Machine machine;
  machine.acceleration = vmm::Acceleration::kKvm;
  machine.memory_mib = 128;
  machine.kernel_fd = kernel.get();
  machine.initrd_fd = initrd.get();
  machine.port_fd = port.get();
  machine.qmp_fd = qmp.get();
  vmm::KeeperPlan plan;
  plan.program = keeper;
  plan.qemu = qemu;
  plan.uid = uid;
  plan.kvm_gid = gid;
  plan.console_fd = console.get();
  plan.exit_fd = exit.get();
  DSEC_TRY(const auto process, vmm::StartKeeper(plan, machine));
  const auto ended = process.WaitExit(Clock::System().Mono() + patience);
  if (!ended.ok() || !*ended) {
    static_cast<void>(process.Signal(SIGKILL));
    static_cast<void>(process.WaitExit(Clock::System().Mono() + std::chrono::seconds(5)));
  }
  vmm::ReapKeeper(process);
  std::string said(vmm::kConsoleBytes, '\0');
  const ssize_t size = ::pread(console.get(), said.data(), said.size(), 0);
  said.resize(size > 0 ? static_cast<size_t>(size) : 0);
  return said;
}

}  // namespace

AccelerationProbe ProbeAcceleration(const std::string& keeper, const std::string& qemu,
                                    const GuestImage& guest, uint32_t uid,
                                    std::chrono::milliseconds patience) {
  AccelerationProbe probe;
  struct stat device = {};
  if (::stat(kDevice, &device) != 0) {
    probe.detail = "the host has no /dev/kvm";
    return probe;
  }
  const uint32_t gid = (device.st_mode & 060) == 060 ? device.st_gid : 0;
  const auto said = BootUnderKvm(keeper, qemu, guest, uid, gid, patience);
  if (!said.ok()) {
    probe.detail = said.error().ToString();
  } else if (said->find(kBegun) == std::string::npos) {
    std::string tail = said->substr(said->size() - std::min<size_t>(said->size(), 160));
    for (char& c : tail) c = c >= ' ' && c <= '~' ? c : ' ';
    probe.detail = fmt::format("a guest does not boot on /dev/kvm here: {}", tail);
  } else {
    probe.acceleration = vmm::Acceleration::kKvm;
  }
  return probe;
}

}  // namespace dsec::sandbox

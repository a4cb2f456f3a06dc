// SPDX-License-Identifier: Apache-2.0
// pid 1 of a guest that has been taken over: what it does to its host is the first label of the
// host name that the boot configuration gives.
#include <fcntl.h>
#include <poll.h>
#include <sys/reboot.h>
#include <unistd.h>

#include <string>

#include "guest/boot.h"
#include "vmm/boot_config.h"
#include "vmm/port_sync.h"

namespace {

using namespace dsec;  // NOLINT(google-build-using-namespace)

// All of it; the port takes what the host reads.
void Write(int port, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t size = ::write(port, bytes.data(), std::min<size_t>(bytes.size(), 32 << 10));
    if (size > 0) {
      bytes.remove_prefix(static_cast<size_t>(size));
      continue;
    }
    pollfd item = {port, POLLOUT, 0};
    ::poll(&item, 1, 1000);
  }
}

std::string ReadSync(int port) {
  std::string sync;
  while (sync.size() < vmm::kPortSecretBytes + vmm::kNonceBytes) {
    char byte;
    if (::read(port, &byte, 1) == 1) {
      sync += byte;
      continue;
    }
    pollfd item = {port, POLLIN, 0};
    ::poll(&item, 1, 100);
  }
  return sync;
}

Result<void> Run() {
  DSEC_TRY_VOID(guest::PrepareRoot());
  DSEC_TRY_VOID(guest::LoadModules());
  DSEC_TRY(const auto config, guest::ReadBootConfig());
  const std::string what = config.hostname;
  if (what == "poweroff") ::reboot(RB_POWER_OFF);
  if (what == "panic") ::_exit(1);  // the end of pid 1 is a panic
  DSEC_TRY(const auto port, guest::OpenPort(vmm::kPortName));
  const std::string noise(1 << 20, 'n');
  if (what == "garbage") {
    const std::string sync = ReadSync(port.get());
    Write(port.get(), vmm::SyncAnswer(sync.substr(0, vmm::kPortSecretBytes),
                                      sync.substr(vmm::kPortSecretBytes)));
  }
  if (what == "console") {
    for (int i = 0; i < 200; ++i) guest::Say(noise.substr(0, 1000));
    ::reboot(RB_POWER_OFF);
  }
  while (true) Write(port.get(), noise);
}

}  // namespace

int main() {
  guest::Say("begun");
  const auto done = Run();
  guest::Say(done.ok() ? "done" : done.error().ToString());
  return 1;
}

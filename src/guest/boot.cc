// SPDX-License-Identifier: Apache-2.0
#include "guest/boot.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <vector>

#include "os/file.h"

namespace dsec::guest {
namespace {

constexpr size_t kMaxSmallFile = 64 << 10;

Result<void> Mount(const char* source, const char* target, const char* type, unsigned long flags,
                   const char* options) {
  if (::mkdir(target, 0755) != 0 && errno != EEXIST) return os::ErrnoError("guest.mkdir", target);
  if (::mount(source, target, type, flags, options) != 0)
    return os::ErrnoError("guest.mount", fmt::format("{} on {}", type, target));
  return Ok();
}

Result<std::vector<std::string>> Entries(const char* path) {
  DIR* const dir = ::opendir(path);
  if (dir == nullptr) return os::ErrnoError("guest.list", path);
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(dir)) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  ::closedir(dir);
  return names;
}

std::string Trimmed(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '\0')) text.pop_back();
  return text;
}

// Of a character device whose number sysfs tells, when devtmpfs has not made its file.
Result<std::string> PortFile(std::string_view name) {
  constexpr char kPorts[] = "/sys/class/virtio-ports";
  DSEC_TRY(const auto ports, Entries(kPorts));
  for (const std::string& port : ports) {
    auto given = os::ReadFile(AT_FDCWD, fmt::format("{}/{}/name", kPorts, port).c_str(), 256);
    if (given.ok() && Trimmed(*std::move(given)) == name) return "/dev/" + port;
  }
  return Error(Code::kNotFound, "guest.no_port", fmt::format("the machine has no port {}", name));
}

}  // namespace

void Say(std::string_view line) {
  timespec now = {};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  const std::string text =
      fmt::format("dsec-guest: [{}.{:03}] {}\n", now.tv_sec, now.tv_nsec / 1'000'000, line);
  (void)!::write(2, text.data(), text.size());
}

Result<void> PrepareRoot() {
  // The first root of a machine has no mount above it, and pivot_root(2) refuses to leave it.
  if (::mkdir("/root", 0755) != 0 && errno != EEXIST) return os::ErrnoError("guest.mkdir", "/root");
  if (::mount("/", "/root", nullptr, MS_BIND, nullptr) != 0 || ::chdir("/root") != 0 ||
      ::mount(".", "/", nullptr, MS_MOVE, nullptr) != 0 || ::chroot(".") != 0 ||
      ::chdir("/") != 0) {
    return os::ErrnoError("guest.root", "bind the initramfs over the first root");
  }
  DSEC_TRY_VOID(Mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr));
  DSEC_TRY_VOID(Mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr));
  DSEC_TRY_VOID(Mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755"));
  DSEC_TRY_VOID(
      Mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "mode=0620,ptmxmode=0666"));
  DSEC_TRY_VOID(
      Mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr));
  DSEC_TRY_VOID(Mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0700,size=1m"));
  return Mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0700,size=1m");
}

Result<void> LoadModules() {
  DSEC_TRY(const std::string order, os::ReadFile(AT_FDCWD, "/modules/order", kMaxSmallFile));
  for (std::string_view rest = order; !rest.empty();) {
    const size_t end = rest.find('\n');
    const std::string path = "/modules/" + std::string(rest.substr(0, end));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    DSEC_TRY(const auto file, os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY));
    if (::syscall(SYS_finit_module, file.get(), "", 0) != 0 && errno != EEXIST)
      return os::ErrnoError("guest.module", path);
  }
  return Ok();
}

Result<std::string> FindDisk(std::string_view serial) {
  DSEC_TRY(const auto disks, Entries("/sys/block"));
  for (const std::string& disk : disks) {
    auto given = os::ReadFile(AT_FDCWD, fmt::format("/sys/block/{}/serial", disk).c_str(), 256);
    if (given.ok() && Trimmed(*std::move(given)) == serial) return "/dev/" + disk;
  }
  return Error(Code::kNotFound, "guest.no_disk", fmt::format("the machine has no disk {}", serial));
}

Result<vmm::BootConfig> ReadBootConfig() {
  DSEC_TRY(const std::string disk, FindDisk(vmm::kConfigSerial));
  DSEC_TRY(const std::string bytes, os::ReadFile(AT_FDCWD, disk.c_str(), vmm::kBootConfigBytes));
  return vmm::BootConfig::Parse(bytes);
}

Result<os::UniqueFd> OpenPort(std::string_view name) {
  constexpr int kSteps = 1000;
  // The host names its ports in messages of their own, after the device is there, and no event of
  // sysfs's comes with them.
  for (int step = 0;; ++step) {
    auto file = PortFile(name);
    if (file.ok()) return os::OpenAt(AT_FDCWD, file->c_str(), O_RDWR | O_NONBLOCK);
    if (step == kSteps) return std::move(file).error();
    ::poll(nullptr, 0, 10);
  }
}

}  // namespace dsec::guest

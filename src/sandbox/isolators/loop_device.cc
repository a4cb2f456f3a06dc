// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/loop_device.h"

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <cerrno>

#include "os/file.h"
#include "sandbox/isolators/dir_list.h"

namespace dsec::sandbox {
namespace {

// Between the question for a free device and its configuration others may take it.
constexpr int kAttempts = 64;
constexpr uint32_t kBlockSize = 4096;

}  // namespace

Result<std::optional<LoopDevice>> LoopDevice::Find(int image) {
  struct stat file;
  if (::fstat(image, &file) != 0) return os::ErrnoError("loop.stat", "image");
  DSEC_TRY(const auto devices, ListDir(AT_FDCWD, "/sys/block"));
  for (const DirEntry& device : devices) {
    if (!device.name.starts_with("loop")) continue;
    const std::string backing = "/sys/block/" + device.name + "/loop/backing_file";
    if (::faccessat(AT_FDCWD, backing.c_str(), F_OK, 0) != 0) continue;  // not attached
    std::string path = "/dev/" + device.name;
    auto fd = os::OpenAt(AT_FDCWD, path.c_str(), O_RDWR);
    if (!fd.ok()) continue;  // its node is not here: not one of ours
    loop_info64 info = {};
    // What is asked of the open device holds: it cannot free itself before this descriptor closes.
    if (::ioctl(fd->get(), LOOP_GET_STATUS64, &info) != 0) continue;
    if (info.lo_device == file.st_dev && info.lo_inode == file.st_ino) {
      return std::optional<LoopDevice>(LoopDevice(std::move(*fd), std::move(path)));
    }
  }
  return std::optional<LoopDevice>();
}

Result<LoopDevice> LoopDevice::Attach(int image) {
  DSEC_TRY(const auto control, os::OpenAt(AT_FDCWD, "/dev/loop-control", O_RDWR));
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
    if (number < 0) return os::ErrnoError("loop.get_free", "/dev/loop-control");
    std::string path = fmt::format("/dev/loop{}", number);
    DSEC_TRY(auto fd, os::OpenAt(AT_FDCWD, path.c_str(), O_RDWR));
    loop_config config = {};
    config.fd = static_cast<uint32_t>(image);
    config.block_size = kBlockSize;
    // Without direct I/O every written page would be cached twice.
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
    if (::ioctl(fd.get(), LOOP_CONFIGURE, &config) == 0)
      return LoopDevice(std::move(fd), std::move(path));
    if (errno != EBUSY) return os::ErrnoError("loop.configure", path);
  }
  return Error(Code::kResourceExhausted, "loop.busy",
               fmt::format("others took the free loop device {} times", kAttempts));
}

}  // namespace dsec::sandbox

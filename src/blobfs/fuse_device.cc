// SPDX-License-Identifier: Apache-2.0
#include "blobfs/fuse_device.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <string>
#include <vector>

#include "base/log.h"
#include "os/file.h"

namespace dsec::blobfs {
namespace {

constexpr int32_t kNotifyResend = 7;  // include/uapi/linux/fuse.h of Linux 6.9

uint64_t MaskOf(std::string_view status, std::string_view key) {
  const size_t at = status.find(key);
  if (at == status.npos) return 0;
  const size_t from = status.find_first_not_of(" \t", at + key.size());
  uint64_t mask = 0;
  if (from != status.npos)
    std::from_chars(status.data() + from, status.data() + status.size(), mask, 16);
  return mask;
}

}  // namespace

void FuseDevice::Resend() const {
  fuse_out_header header{};
  header.len = sizeof header;
  header.error = kNotifyResend;
  if (::write(fd_, &header, sizeof header) != sizeof header)
    log::Warn("blobfs.no_resend", {{"error", ::strerror(errno)}});
}

Result<void> FuseDevice::Run(
    size_t most,
    const std::function<void(const fuse_in_header&, std::span<const uint8_t> request)>& handle)
    const {
  std::vector<uint8_t> buffer(most);
  while (true) {
    const ssize_t got = ::read(fd_, buffer.data(), buffer.size());
    if (got >= 0) {
      const std::span<const uint8_t> request(buffer.data(), static_cast<size_t>(got));
      fuse_in_header header;
      if (TakeFront(request, header) && header.len == request.size()) handle(header, request);
    } else if (errno == ENODEV) {
      return Ok();
    } else if (errno != EINTR && errno != EAGAIN && errno != ENOENT) {
      return os::ErrnoError("layer.io", "read /dev/fuse");
    }
  }
}

void FuseDevice::Reply(uint64_t unique, int error,
                       std::span<const std::span<const uint8_t>> parts) const {
  fuse_out_header header{};
  header.unique = unique;
  header.error = -error;
  std::vector<iovec> all{{&header, sizeof header}};
  size_t size = sizeof header;
  for (const auto& part : parts) {
    all.push_back({const_cast<uint8_t*>(part.data()), part.size()});
    size += part.size();
  }
  header.len = static_cast<uint32_t>(size);
  // ENOENT: whoever asked has gone.
  if (::writev(fd_, all.data(), static_cast<int>(all.size())) < 0 && errno != ENOENT &&
      errno != ENODEV)
    log::Warn("blobfs.reply_failed", {{"error", ::strerror(errno)}});
}

bool IsKilled(uint32_t thread) {
  const std::string path = fmt::format("/proc/{}/status", thread);
  const auto status = os::ReadFile(AT_FDCWD, path.c_str(), 64 << 10);
  if (!status.ok()) return true;
  const uint64_t pending = MaskOf(*status, "SigPnd:") | MaskOf(*status, "ShdPnd:");
  return (pending & (uint64_t{1} << (SIGKILL - 1))) != 0;
}

}  // namespace dsec::blobfs

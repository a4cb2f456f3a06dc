// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

// Above every number that descriptors are placed at.
constexpr int kScratchFd = 64;
constexpr size_t kMaxPlaced = 32;
constexpr int kLastCapability = 63;

}  // namespace

int NewFileSystem(const char* type, std::span<const FsOption> options, uint64_t attributes,
                  os::UniqueFd* mount) {
  os::UniqueFd context(::fsopen(type, FSOPEN_CLOEXEC));
  if (!context.valid()) return -errno;
  for (const FsOption& option : options) {
    if (::fsconfig(context.get(), FSCONFIG_SET_STRING, option.key, option.value, 0) != 0)
      return -errno;
  }
  if (::fsconfig(context.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0) return -errno;
  mount->Reset(::fsmount(context.get(), FSMOUNT_CLOEXEC, static_cast<unsigned>(attributes)));
  return mount->valid() ? 0 : -errno;
}

void ResetSignals() {
  // struct sigaction of the kernel: handler, flags, restorer, mask; all zero is SIG_DFL.
  const uint64_t action[4] = {};
  for (int signal = 1; signal <= 64; ++signal)
    ::syscall(SYS_rt_sigaction, signal, action, nullptr, sizeof(uint64_t));
}

int WriteExisting(int dirfd, const char* path, const char* data, size_t size) {
  int fd = ::openat(dirfd, path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return -errno;
  ssize_t n = ::write(fd, data, size);
  int error = n < 0 ? -errno : (static_cast<size_t>(n) == size ? 0 : -EIO);
  ::close(fd);
  return error;
}

int PlaceFds(const int* src, const int* dst, size_t count, bool close_on_exec) {
  int moved[kMaxPlaced];
  if (count > kMaxPlaced) return -E2BIG;
  for (size_t i = 0; i < count; ++i) {
    moved[i] = ::fcntl(src[i], F_DUPFD_CLOEXEC, kScratchFd);
    if (moved[i] < 0) return -errno;
  }
  for (size_t i = 0; i < count; ++i) {
    if (::dup3(moved[i], dst[i], close_on_exec ? O_CLOEXEC : 0) < 0) return -errno;
  }
  for (size_t i = 0; i < count; ++i) ::close(moved[i]);
  return 0;
}

uint64_t MonotonicUsec() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000u + static_cast<uint64_t>(now.tv_nsec) / 1000u;
}

int WaitReadable(int fd, uint64_t deadline_usec) {
  while (true) {
    uint64_t now = MonotonicUsec();
    uint64_t left = deadline_usec > now ? deadline_usec - now : 0;
    timespec timeout = {static_cast<time_t>(left / 1000000u),
                        static_cast<long>(left % 1000000u) * 1000};
    pollfd item = {fd, POLLIN, 0};
    int ready = ::ppoll(&item, 1, &timeout, nullptr);
    if (ready >= 0) return ready;
    if (errno != EINTR) return -errno;
  }
}

int SetCapabilities(uint64_t mask, uint64_t inheritable) {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  data[0].effective = data[0].permitted = static_cast<uint32_t>(mask);
  data[1].effective = data[1].permitted = static_cast<uint32_t>(mask >> 32);
  data[0].inheritable = static_cast<uint32_t>(inheritable);
  data[1].inheritable = static_cast<uint32_t>(inheritable >> 32);
  return ::syscall(SYS_capset, &header, data) == 0 ? 0 : -errno;
}

int LimitBoundingSet(uint64_t keep) {
  for (int capability = 0; capability <= kLastCapability; ++capability) {
    if ((keep >> capability & 1) != 0) continue;
    if (::prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0) {
      if (errno == EINVAL) return 0;  // past the kernel's last capability
      return -errno;
    }
  }
  return 0;
}

}  // namespace dsec::spawn::stage

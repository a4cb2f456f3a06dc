// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <linux/fuse.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <span>

#include "base/result.h"

namespace dsec::blobfs {

// One end of /dev/fuse: requests in, answers out. Shared by the sessions of this project.
// Thread-safe.
class FuseDevice {
 public:
  // Linux 6.9; in fuse_init_*::flags2.
  static constexpr uint32_t kHasResend2 = 1u << (39 - 32);

  // Borrowed.
  explicit FuseDevice(int fd) : fd_(fd) {}
  // Asks the kernel for what an earlier process took and did not answer (Linux 6.9).
  void Resend() const;
  // Reads requests of at most `most` bytes until the session has ended. ENODEV of the device is
  // success. Several threads may run it.
  Result<void> Run(size_t most,
                   const std::function<void(const fuse_in_header&,
                                            std::span<const uint8_t> request)>& handle) const;
  void Reply(uint64_t unique, int error, std::span<const std::span<const uint8_t>> parts) const;
  void ReplyError(uint64_t unique, int error) const { Reply(unique, error, {}); }
  template <typename T>
  void ReplyWith(uint64_t unique, const T& value) const {
    const std::span<const uint8_t> part(reinterpret_cast<const uint8_t*>(&value), sizeof value);
    Reply(unique, 0, {&part, 1});
  }

 private:
  const int fd_;
};

// The front of a request's body.
template <typename T>
bool TakeFront(std::span<const uint8_t> body, T& out) {
  if (body.size() < sizeof(T)) return false;
  std::memcpy(&out, body.data(), sizeof(T));
  return true;
}

// Whether a thread waits for nothing but its end. One that is gone does not wait.
bool IsKilled(uint32_t thread);

}  // namespace dsec::blobfs

// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>

#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

// What a call can leave in a network namespace shows here: packets of the loopback device (so
// anything that TCP keeps for a while, too), requests that went nowhere, named sockets that are
// still on their way out. Not sockstat: parts of it count over all namespaces of the host.
constexpr const char* kWatched[] = {"/proc/self/net/dev", "/proc/self/net/snmp",
                                    "/proc/self/net/snmp6", "/proc/self/net/unix"};
static_assert(std::size(kWatched) == NetworkWatch::kFiles);

// FNV-1a, 64 bits.
uint64_t Mix(uint64_t hash, const char* data, size_t size) {
  for (size_t i = 0; i < size; ++i)
    hash = (hash ^ static_cast<unsigned char>(data[i])) * 0x100000001b3ull;
  return hash;
}

int Digest(int fd, uint64_t* digest) {
  char part[8192];
  uint64_t hash = 0xcbf29ce484222325ull;
  off_t at = 0;
  while (true) {
    ssize_t n = ::pread(fd, part, sizeof(part), at);
    if (n < 0) return -errno;
    if (n == 0) break;
    hash = Mix(hash, part, static_cast<size_t>(n));
    at += n;
  }
  *digest = hash;
  return 0;
}

}  // namespace

int NetworkWatch::Begin() {
  int error = ConfigureNetwork();
  for (size_t i = 0; i < kFiles && error == 0; ++i) {
    files_[i].Reset(::open(kWatched[i], O_RDONLY | O_CLOEXEC));
    // A kernel without IPv6 has no snmp6.
    if (!files_[i].valid() && errno != ENOENT) return -errno;
    if (files_[i].valid()) error = Digest(files_[i].get(), &digests_[i]);
  }
  return error;
}

int NetworkWatch::Check(bool* renewed) {
  *renewed = false;
  bool same = true;
  for (size_t i = 0; i < kFiles && same; ++i) {
    if (!files_[i].valid()) continue;
    uint64_t digest = 0;
    int error = Digest(files_[i].get(), &digest);
    if (error != 0) return error;
    same = digest == digests_[i];
  }
  if (same) return 0;
  // Whoever still held the old namespace is gone, so it goes with the descriptors into it.
  if (::unshare(CLONE_NEWNET) != 0) return -errno;
  int error = Begin();
  *renewed = error == 0;
  return error;
}

}  // namespace dsec::spawn::stage

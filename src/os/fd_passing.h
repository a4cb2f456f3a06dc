// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::os {

inline constexpr size_t kMaxPassedFds = 64;

// One packet with descriptors over a Unix socket. Raw forms: no allocation, 0 or -errno, never
// SIGPIPE.
int SendPacketRaw(int socket, const void* data, size_t size, const int* fds, size_t fd_count,
                  int flags);

// Receives one packet into data[0..capacity) and its descriptors (close-on-exec) into
// fds[0..*fd_count), where *fd_count is the room on entry and the number on return. Returns the
// size; 0 at end of file; -errno on failure. A packet or set of descriptors that does not fit is
// -EMSGSIZE, with all its descriptors closed.
ssize_t ReceivePacketRaw(int socket, void* data, size_t capacity, int* fds, size_t* fd_count,
                         int flags);

struct Packet {
  std::string data;
  std::vector<UniqueFd> fds;
};
Result<void> SendPacket(int socket, std::span<const uint8_t> data, std::span<const int> fds);
// kUnavailable "os.peer_closed" at end of file.
Result<Packet> ReceivePacket(int socket, size_t capacity);

// Connected SOCK_SEQPACKET sockets.
Result<std::pair<UniqueFd, UniqueFd>> PacketPair();

}  // namespace dsec::os

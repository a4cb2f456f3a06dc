// SPDX-License-Identifier: Apache-2.0
#include "os/fd_passing.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "os/file.h"

namespace dsec::os {
namespace {

union ControlBuffer {
  cmsghdr align;
  char bytes[CMSG_SPACE(sizeof(int) * kMaxPassedFds)];
};

}  // namespace

int SendPacketRaw(int socket, const void* data, size_t size, const int* fds, size_t fd_count,
                  int flags) {
  if (fd_count > kMaxPassedFds) return -E2BIG;
  iovec part = {const_cast<void*>(data), size};
  ControlBuffer control;
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd_count > 0) {
    std::memset(&control, 0, sizeof(control));
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
    std::memcpy(CMSG_DATA(header), fds, sizeof(int) * fd_count);
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | flags);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return -errno;
  return static_cast<size_t>(sent) == size ? 0 : -EMSGSIZE;
}

ssize_t ReceivePacketRaw(int socket, void* data, size_t capacity, int* fds, size_t* fd_count,
                         int flags) {
  size_t room = *fd_count;
  *fd_count = 0;
  iovec part = {data, capacity};
  ControlBuffer control;
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control);
  ssize_t size;
  do {
    size = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | flags);
  } while (size < 0 && errno == EINTR);
  if (size < 0) return -errno;
  bool overflow = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      if (*fd_count < room) {
        fds[(*fd_count)++] = fd;
      } else {
        overflow = true;
        ::close(fd);
      }
    }
  }
  if (!overflow) return size;
  for (size_t i = 0; i < *fd_count; ++i) ::close(fds[i]);
  *fd_count = 0;
  return -EMSGSIZE;
}

Result<void> SendPacket(int socket, std::span<const uint8_t> data, std::span<const int> fds) {
  int result = SendPacketRaw(socket, data.data(), data.size(), fds.data(), fds.size(), 0);
  if (result == -EPIPE || result == -ECONNRESET) {
    return Error(Code::kUnavailable, "os.peer_closed", "send: the peer has closed the socket")
        .WithErrno(-result);
  }
  if (result != 0)
    return Error::FromErrno(-result, "os.send", fmt::format("send {} bytes", data.size()));
  return Ok();
}

Result<Packet> ReceivePacket(int socket, size_t capacity) {
  Packet packet;
  packet.data.resize(capacity);
  int fds[kMaxPassedFds];
  size_t count = kMaxPassedFds;
  ssize_t size = ReceivePacketRaw(socket, packet.data.data(), capacity, fds, &count, 0);
  for (size_t i = 0; i < count; ++i) packet.fds.emplace_back(fds[i]);
  if (size == 0 || size == -ECONNRESET) {
    return Error(Code::kUnavailable, "os.peer_closed", "receive: the peer has closed the socket");
  }
  if (size < 0) return Error::FromErrno(static_cast<int>(-size), "os.receive", "receive a packet");
  packet.data.resize(static_cast<size_t>(size));
  return packet;
}

Result<std::pair<UniqueFd, UniqueFd>> PacketPair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoError("os.socketpair", "make a socket pair");
  }
  return std::pair(UniqueFd(ends[0]), UniqueFd(ends[1]));
}

}  // namespace dsec::os

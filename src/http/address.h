// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/socket.h>

#include <string>
#include <string_view>

#include "base/result.h"

namespace dsec::http {

// "127.0.0.1:7878", "[::1]:7878" or "unix:/path": where a server listens or a client connects,
// without name resolution.
struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  bool is_unix() const { return storage.ss_family == AF_UNIX; }
};

// kInvalidArgument "listen.address".
Result<Address> ParseAddress(std::string_view text);
// The same form back; of a Unix socket "unix:/path".
std::string FormatAddress(const sockaddr_storage& storage);

// A listening socket, non-blocking, close-on-exec. A Unix socket file gets mode 0666, since every
// request carries the key; one that nobody answers on is replaced. errno with "listen.bind";
// kAlreadyExists "listen.in_use".
Result<int> Listen(const Address& address);

}  // namespace dsec::http

// SPDX-License-Identifier: Apache-2.0
#include "http/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>

namespace dsec::http {
namespace {

constexpr std::string_view kUnix = "unix:";
constexpr int kBacklog = 4096;  // cut to net.core.somaxconn

Error Bad(std::string_view text, std::string_view rule) {
  return Error(Code::kInvalidArgument, "listen.address", fmt::format("\"{}\": {}", text, rule))
      .WithField("listen");
}

// Whether somebody accepts on a Unix socket file.
bool IsAnswered(const Address& address) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return true;
  const bool answered =
      ::connect(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.size) == 0 ||
      (errno != ECONNREFUSED && errno != ENOENT);
  ::close(fd);
  return answered;
}

}  // namespace

Result<Address> ParseAddress(std::string_view text) {
  Address address;
  if (text.starts_with(kUnix)) {
    const std::string_view path = text.substr(kUnix.size());
    sockaddr_un un{};
    if (!path.starts_with('/')) return Bad(text, "a Unix socket needs an absolute path");
    if (path.size() >= sizeof(un.sun_path))
      return Bad(text, "the path of a Unix socket is at most 107 bytes");
    un.sun_family = AF_UNIX;
    std::memcpy(un.sun_path, path.data(), path.size());
    std::memcpy(&address.storage, &un, sizeof(un));
    address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
    return address;
  }
  constexpr std::string_view kForm = "must be IPv4:port, [IPv6]:port or unix:/path";
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return Bad(text, kForm);
  const std::string_view digits = text.substr(colon + 1);
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || end != digits.data() + digits.size())
    return Bad(text, "the port must be 0..65535");
  std::string host(text.substr(0, colon));
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
    auto* in6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons(port);
    address.size = sizeof(*in6);
    if (inet_pton(AF_INET6, host.c_str(), &in6->sin6_addr) != 1) return Bad(text, kForm);
    return address;
  }
  if (host == "localhost") host = "127.0.0.1";
  auto* in = reinterpret_cast<sockaddr_in*>(&address.storage);
  in->sin_family = AF_INET;
  in->sin_port = htons(port);
  address.size = sizeof(*in);
  if (inet_pton(AF_INET, host.c_str(), &in->sin_addr) != 1) return Bad(text, kForm);
  return address;
}

std::string FormatAddress(const sockaddr_storage& storage) {
  char text[INET6_ADDRSTRLEN] = "";
  switch (storage.ss_family) {
    case AF_UNIX:
      return std::string(kUnix) + reinterpret_cast<const sockaddr_un&>(storage).sun_path;
    case AF_INET: {
      const auto& in = reinterpret_cast<const sockaddr_in&>(storage);
      inet_ntop(AF_INET, &in.sin_addr, text, sizeof(text));
      return fmt::format("{}:{}", text, ntohs(in.sin_port));
    }
    case AF_INET6: {
      const auto& in6 = reinterpret_cast<const sockaddr_in6&>(storage);
      inet_ntop(AF_INET6, &in6.sin6_addr, text, sizeof(text));
      return fmt::format("[{}]:{}", text, ntohs(in6.sin6_port));
    }
    default:
      return "unknown";
  }
}

Result<int> Listen(const Address& address) {
  const std::string name = FormatAddress(address.storage);
  const int fd = ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return Error::FromErrno(errno, "listen.bind", "socket for " + name);
  const auto fail = [&](std::string_view call) -> Error {
    const int number = errno;
    ::close(fd);
    if (number == EADDRINUSE) {
      return Error(Code::kAlreadyExists, "listen.in_use", name + " is in use by another process");
    }
    return Error::FromErrno(number, "listen.bind", fmt::format("{} {}", call, name));
  };
  const auto* where = reinterpret_cast<const sockaddr*>(&address.storage);
  if (address.is_unix()) {
    const char* path = reinterpret_cast<const sockaddr_un&>(address.storage).sun_path;
    struct stat info{};
    if (::lstat(path, &info) == 0 && S_ISSOCK(info.st_mode) && !IsAnswered(address) &&
        ::unlink(path) != 0) {
      return fail("unlink");
    }
    if (::bind(fd, where, address.size) != 0) return fail("bind");
    if (::chmod(path, 0666) != 0) return fail("chmod");
  } else {
    const int on = 1;
    if (::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0) return fail("setsockopt");
    if (::bind(fd, where, address.size) != 0) return fail("bind");
  }
  if (::listen(fd, kBacklog) != 0) return fail("listen");
  return fd;
}

}  // namespace dsec::http

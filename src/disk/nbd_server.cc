// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <vector>

#include "base/log.h"
#include "disk/layer.h"
#include "disk/nbd.h"

namespace dsec::disk {
namespace {

constexpr int kHandshakeMillis = 10'000;
constexpr int kStopLookMillis = 200;

class SocketStream : public NbdStream {
 public:
  explicit SocketStream(int fd) : fd_(fd) { SetTimeout(kHandshakeMillis); }
  bool ReadExact(std::span<uint8_t> out) override {
    while (!out.empty()) {
      const ssize_t got = ::recv(fd_, out.data(), out.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      out = out.subspan(static_cast<size_t>(got));
    }
    return true;
  }
  bool Write(std::span<const std::span<const uint8_t>> parts) override {
    std::vector<iovec> all;
    for (const auto& part : parts) all.push_back({const_cast<uint8_t*>(part.data()), part.size()});
    const std::lock_guard lock(mutex_);
    msghdr message{};
    message.msg_iov = all.data();
    message.msg_iovlen = all.size();
    while (message.msg_iovlen > 0) {
      ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) {
        ::shutdown(fd_, SHUT_RDWR);  // a part of a message may be out
        return false;
      }
      while (message.msg_iovlen > 0 && static_cast<size_t>(sent) >= message.msg_iov->iov_len) {
        sent -= static_cast<ssize_t>(message.msg_iov->iov_len);
        ++message.msg_iov;
        --message.msg_iovlen;
      }
      if (message.msg_iovlen > 0) {
        message.msg_iov->iov_base = static_cast<uint8_t*>(message.msg_iov->iov_base) + sent;
        message.msg_iov->iov_len -= static_cast<size_t>(sent);
      }
    }
    return true;
  }
  void NoTimeout() override { SetTimeout(0); }

 private:
  void SetTimeout(int millis) const {
    const timeval time{millis / 1000, millis % 1000 * 1000};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
    ::setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
  }
  const int fd_;
  std::mutex mutex_;
};

}  // namespace

Result<std::unique_ptr<NbdServer>> NbdServer::Start(const std::string& path,
                                                    std::shared_ptr<NbdTarget> target) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Error(Code::kInvalidArgument, "disk.bad_socket",
                 fmt::format("the path of a socket has 1 to {} bytes, this one {}",
                             sizeof address.sun_path - 1, path.size()))
        .WithField("socket");
  }
  path.copy(address.sun_path, path.size());
  os::UniqueFd listen(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listen.valid()) return DiskError("make a socket");
  struct stat status;
  if (::lstat(path.c_str(), &status) == 0 && S_ISSOCK(status.st_mode))
    static_cast<void>(::unlink(path.c_str()));
  // Nobody connects before listen(2), by when the mode is right.
  if (::bind(listen.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::chmod(path.c_str(), 0600) != 0 || ::listen(listen.get(), 16) != 0)
    return DiskError("listen at " + path);
  return std::unique_ptr<NbdServer>(new NbdServer(path, std::move(target), std::move(listen)));
}

NbdServer::NbdServer(std::string path, std::shared_ptr<NbdTarget> target, os::UniqueFd listen)
    : path_(std::move(path)),
      target_(std::move(target)),
      listen_(std::move(listen)),
      accept_([this](const std::stop_token& stop) { Accept(stop); }) {}

NbdServer::~NbdServer() {
  accept_.request_stop();
  ::shutdown(listen_.get(), SHUT_RDWR);  // ends accept(2)
  accept_.join();
  static_cast<void>(::unlink(path_.c_str()));
  {
    const std::lock_guard lock(mutex_);
    for (const auto& connection : connections_) ::shutdown(connection.socket.get(), SHUT_RDWR);
  }
  connections_.clear();  // joins; nobody adds any more
}

void NbdServer::Accept(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    os::UniqueFd socket(::accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (stop.stop_requested()) return;
    if (!socket.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      log::Error("disk.nbd_accept", {{"path", path_}, {"error", errno}});
      pollfd none{-1, 0, 0};
      ::poll(&none, 1, kStopLookMillis);  // no descriptors: others may close some
      continue;
    }
    const std::lock_guard lock(mutex_);
    connections_.remove_if([](const Connection& connection) { return connection.ended; });
    if (connections_.size() >= kMaxConnections) continue;
    Connection& connection = connections_.emplace_back();
    connection.socket = std::move(socket);
    connection.thread = std::jthread([this, &connection] {
      const auto stream = std::make_shared<SocketStream>(connection.socket.get());
      const std::string end = ServeNbd(stream, *target_);
      log::Info("disk.nbd_ended", {{"path", path_}, {"why", end}});
      const std::lock_guard ended(mutex_);
      ::shutdown(connection.socket.get(), SHUT_RDWR);
      connection.ended = true;
    });
  }
}

}  // namespace dsec::disk

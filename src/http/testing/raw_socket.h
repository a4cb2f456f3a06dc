// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/check.h"
#include "http/address.h"
#include "http/parser.h"

// For tests: a client that says exactly what it is told, right or wrong.
namespace dsec::http::testing {

struct RawReply {
  int status = 0;  // 0: closed before a whole reply
  Fields fields;
  std::string body;
  bool whole = false;  // the body came to its end
};

class RawSocket {
 public:
  // As Server::addresses gives it.
  explicit RawSocket(std::string_view address, int receive_buffer = 0) {
    if (address.starts_with("http://")) address.remove_prefix(7);
    const Address where = ParseAddress(address).value();
    fd_ = ::socket(where.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (receive_buffer > 0)
      (void)::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    DSEC_CHECK(::connect(fd_, reinterpret_cast<const sockaddr*>(&where.storage), where.size) == 0);
  }
  RawSocket(const RawSocket&) = delete;
  RawSocket& operator=(const RawSocket&) = delete;
  ~RawSocket() { Close(); }

  int fd() const { return fd_; }
  void Close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  // Closes with RST.
  void Reset() {
    const linger now{1, 0};
    (void)::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    Close();
  }
  void ShutdownWrite() { (void)::shutdown(fd_, SHUT_WR); }

  // False once the peer refuses more.
  bool Send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(count));
    }
    return true;
  }
  // Bytes that come within `patience`; empty at the end of the connection or after that time.
  std::string Receive(std::chrono::milliseconds patience = std::chrono::seconds(10)) {
    pollfd wait{fd_, POLLIN, 0};
    if (::poll(&wait, 1, static_cast<int>(patience.count())) <= 0) return "";
    char data[65536];
    const ssize_t count = ::recv(fd_, data, sizeof(data), 0);
    closed_ = count <= 0;
    return std::string(data, count > 0 ? static_cast<size_t>(count) : 0);
  }
  bool closed() const { return closed_; }

  // One reply; what follows it is kept for the next.
  RawReply ReadReply() {
    ResponseParser parser(64 << 10);
    RawReply reply;
    bool end = false;
    while (!end && !parser.body_done()) {
      auto used =
          parser.head_done() ? parser.Body(pending_, 1 << 30, reply.body) : parser.Head(pending_);
      if (!used.ok()) return reply;
      pending_.erase(0, *used);
      if (parser.head_done() && parser.head().status == 100) {
        parser.Reset();
        continue;
      }
      if (parser.body_done() || *used > 0) continue;
      const std::string more = Receive();
      end = more.empty();
      pending_ += more;
      if (end && parser.head_done() && parser.End().ok()) break;
    }
    if (!parser.head_done()) return reply;
    reply.status = parser.head().status;
    reply.fields = parser.head().fields;
    reply.whole = parser.body_done();
    return reply;
  }
  RawReply Ask(std::string_view request) {
    (void)Send(request);
    return ReadReply();
  }
  // True when the peer closes (or resets) within `patience`; data on the way is dropped.
  bool WaitClosed(std::chrono::milliseconds patience = std::chrono::seconds(10)) {
    while (!closed_) {
      if (Receive(patience).empty()) break;
    }
    return closed_;
  }

 private:
  int fd_ = -1;
  bool closed_ = false;
  std::string pending_;
};

}  // namespace dsec::http::testing

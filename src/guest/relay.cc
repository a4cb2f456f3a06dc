// SPDX-License-Identifier: Apache-2.0
#include "guest/relay.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "os/file.h"
#include "vmm/boot_config.h"
#include "vmm/port_sync.h"

namespace dsec::guest {
namespace {

constexpr size_t kChunk = 32 << 10;  // what one write to a virtio port takes (virtio_console.c)
constexpr size_t kMaxHeld = 256 << 10;

bool Again(int error) { return error == EAGAIN || error == EINTR; }

}  // namespace

SyncFinder::Step SyncFinder::Feed(std::string_view bytes) {
  Step step;
  size_t taken = 0;
  while (taken < bytes.size()) {
    if (held_.empty()) {
      // Up to the next byte that may begin a secret.
      const size_t next = bytes.find(secret_[0], taken);
      step.data.append(bytes.substr(taken, next - taken));
      if (next == std::string_view::npos) {
        taken = bytes.size();
        break;
      }
      taken = next;
    }
    held_ += bytes[taken++];
    // The longest end of `held_` that a secret could begin with stays.
    while (held_.size() <= secret_.size() && !held_.empty() &&
           secret_.compare(0, held_.size(), held_) != 0) {
      step.data += held_[0];
      held_.erase(0, 1);
    }
    if (held_.size() == secret_.size() + vmm::kNonceBytes) {
      step.synced = true;
      step.nonce = held_.substr(secret_.size());
      held_.clear();
      break;
    }
  }
  step.rest = bytes.substr(taken);
  return step;
}

Relay::Relay(int port, std::string secret, std::function<Result<os::UniqueFd>()> connect)
    : port_(port), secret_(secret), connect_(std::move(connect)), finder_(std::move(secret)) {}

short Relay::AgentEvents() const {
  short events = 0;
  if (to_port_.size() < kMaxHeld) events |= POLLIN;
  if (!to_agent_.empty()) events |= POLLOUT;
  return events;
}

void Relay::DropAgent() {
  agent_.Reset();
  to_agent_.clear();
}

void Relay::Begin(const std::string& nonce) {
  DropAgent();
  to_port_.clear();
  auto connected = connect_();
  // Without an agent there is no answer, and the host gives up.
  if (!connected.ok()) return;
  agent_ = std::move(*connected);
  to_port_ = vmm::SyncAnswer(secret_, nonce);
}

void Relay::Take(std::string_view bytes) {
  while (!bytes.empty()) {
    SyncFinder::Step step = finder_.Feed(bytes);
    bytes = step.rest;
    // Without a connection it is what is left of an earlier one.
    if (agent_.valid()) to_agent_ += step.data;
    if (step.synced) Begin(step.nonce);
  }
}

Result<bool> Relay::ReadPort() {
  if (to_agent_.size() >= kMaxHeld) return false;
  std::array<char, kChunk> buffer;
  const ssize_t size = ::read(port_, buffer.data(), buffer.size());
  if (size < 0 && !Again(errno)) return os::ErrnoError("guest.port", "read from the port");
  // 0: no host at the other end.
  if (size <= 0) return false;
  Take({buffer.data(), static_cast<size_t>(size)});
  return true;
}

bool Relay::WriteAgent() {
  if (!agent_.valid() || to_agent_.empty()) return false;
  const ssize_t size = ::send(agent_.get(), to_agent_.data(), to_agent_.size(), MSG_NOSIGNAL);
  if (size < 0) {
    if (!Again(errno)) DropAgent();
    return false;
  }
  to_agent_.erase(0, static_cast<size_t>(size));
  return size > 0;
}

bool Relay::ReadAgent() {
  if (!agent_.valid() || to_port_.size() >= kMaxHeld) return false;
  std::array<char, kChunk> buffer;
  const ssize_t size = ::read(agent_.get(), buffer.data(), buffer.size());
  if (size < 0 && Again(errno)) return false;
  if (size <= 0) {
    DropAgent();
    return false;
  }
  to_port_.append(buffer.data(), static_cast<size_t>(size));
  return true;
}

Result<bool> Relay::WritePort() {
  if (to_port_.empty()) return false;
  const ssize_t size = ::write(port_, to_port_.data(), std::min(to_port_.size(), kChunk));
  if (size < 0) {
    if (Again(errno)) return false;
    return os::ErrnoError("guest.port", "write to the port");
  }
  to_port_.erase(0, static_cast<size_t>(size));
  return size > 0;
}

Result<void> Relay::Pump() {
  for (bool moved = true; moved;) {
    DSEC_TRY(const bool read, ReadPort());
    const bool given = WriteAgent();
    const bool said = ReadAgent();
    DSEC_TRY(const bool written, WritePort());
    moved = read || given || said || written;
  }
  return Ok();
}

}  // namespace dsec::guest

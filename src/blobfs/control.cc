// SPDX-License-Identifier: Apache-2.0
#include "blobfs/control.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "blobfs/settings.h"
#include "os/fd_passing.h"

namespace dsec::blobfs {
namespace {

using nlohmann::json;

constexpr size_t kCalls = 64;
constexpr size_t kPeers = 8;

std::span<const uint8_t> BytesOf(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

bool IsRoot(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == 0;
}

}  // namespace

Control::Control(int listen, Handler handler)
    : listen_(listen), handler_(std::move(handler)), threads_(kCalls) {}

void Control::Start() {
  std::thread([this] { Accept(); }).detach();
}

void Control::Accept() {
  while (true) {
    os::UniqueFd socket(::accept4(listen_, nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      log::Error("blobfs.accept", {{"error", ::strerror(errno)}});
      return;
    }
    if (!IsRoot(socket.get())) continue;
    auto peer = std::make_shared<Peer>(std::move(socket));
    {
      const std::lock_guard lock(mutex_);
      if (peers_.size() >= kPeers) continue;
      peers_.push_back(peer);
    }
    std::thread([this, peer] { Serve(peer); }).detach();
  }
}

void Control::Serve(const std::shared_ptr<Peer>& peer) {
  while (true) {
    auto packet = os::ReceivePacket(peer->socket.get(), kMaxPacket);
    if (!packet.ok() || packet->data.empty()) break;
    const bool started =
        threads_.Start([this, peer, data = std::move(packet->data)] { Handle(peer, data); });
    if (!started) break;  // so many hang that this one may ask again
  }
  const std::lock_guard lock(mutex_);
  peers_.remove(peer);
  ::shutdown(peer->socket.get(), SHUT_RDWR);
}

void Control::Handle(const std::shared_ptr<Peer>& peer, const std::string& packet) {
  const json request = json::parse(packet, nullptr, false);
  const json id = request.is_object() ? request.value("id", json()) : json();
  auto answer = handler_(packet);
  std::string text;
  std::vector<int> fds;
  if (answer.ok()) {
    text = fmt::format(R"({{"id":{}{}{}}})", id.dump(), answer->members.empty() ? "" : ",",
                       answer->members);
    for (const auto& fd : answer->fds) fds.push_back(fd.get());
  } else {
    text =
        json{{"id", id}, {"reason", answer.error().reason()}, {"message", answer.error().message()}}
            .dump(-1, ' ', false, json::error_handler_t::replace);
  }
  auto sent = os::SendPacket(peer->socket.get(), BytesOf(text), fds);
  if (!sent.ok()) log::Warn("blobfs.answer_lost", {{"error", sent.error()}});
}

void Control::Tell(const std::string& object) {
  const std::lock_guard lock(mutex_);
  for (const auto& peer : peers_) {
    static_cast<void>(os::SendPacketRaw(peer->socket.get(), object.data(), object.size(), nullptr,
                                        0, MSG_DONTWAIT));
  }
}

}  // namespace dsec::blobfs

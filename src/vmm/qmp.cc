// SPDX-License-Identifier: Apache-2.0
#include "vmm/qmp.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "os/fd_passing.h"
#include "os/file.h"

namespace dsec::vmm {
namespace {

using nlohmann::json;

Error Broken(std::string message) {
  return Error(Code::kUnavailable, "vm.qmp", std::move(message));
}

// Text of QEMU's for a message.
std::string Text(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return "";
  std::string text = found->get<std::string>().substr(0, 400);
  for (char& c : text) c = c >= ' ' && c <= '~' ? c : '?';
  return text;
}

}  // namespace

Result<std::optional<QmpMessage>> QmpParser::Next() {
  const size_t end = buffer_.find('\n');
  if (end == std::string::npos) {
    if (buffer_.size() > kMaxLine) return Broken("a line is too long");
    return std::optional<QmpMessage>();
  }
  if (end > kMaxLine) return Broken("a line is too long");
  bool too_deep = false;
  const json::parser_callback_t check = [&too_deep](int depth, json::parse_event_t, json&) {
    too_deep |= depth > kMaxDepth;
    return !too_deep;
  };
  const json line = json::parse(buffer_.begin(), buffer_.begin() + static_cast<ptrdiff_t>(end),
                                check, /*allow_exceptions=*/false);
  buffer_.erase(0, end + 1);
  if (too_deep) return Broken("a line is too deep");
  if (!line.is_object()) return Broken("a line is no JSON object");
  QmpMessage message;
  message.id = Text(line, "id");
  if (line.contains("QMP")) {
    message.kind = QmpMessage::Kind::kGreeting;
  } else if (line.contains("event")) {
    message.kind = QmpMessage::Kind::kEvent;
    message.name = Text(line, "event");
    if (line.contains("data")) message.data = line["data"];
  } else if (line.contains("return")) {
    message.kind = QmpMessage::Kind::kReturn;
    message.data = line["return"];
  } else if (line.contains("error") && line["error"].is_object()) {
    message.kind = QmpMessage::Kind::kError;
    message.name = Text(line["error"], "class");
    message.text = Text(line["error"], "desc");
  } else {
    return Broken("a line is neither answer nor event");
  }
  return std::optional<QmpMessage>(std::move(message));
}

Result<QmpClient> QmpClient::Connect(const std::string& path, runtime::Deadline deadline) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return Error(Code::kInvalidArgument, "vm.qmp",
                 fmt::format("{} is longer than a socket path may be", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  os::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return os::ErrnoError("vm.qmp", "socket");
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    return Broken(fmt::format("connect to {}: {}", path, strerrordesc_np(errno))).WithErrno(errno);
  QmpClient client(std::move(socket), deadline);
  DSEC_TRY(const QmpMessage greeting, client.Receive());
  if (greeting.kind != QmpMessage::Kind::kGreeting) return Broken("it does not greet");
  DSEC_TRY_VOID(client.Execute("qmp_capabilities"));
  return client;
}

Result<QmpMessage> QmpClient::Receive() {
  while (true) {
    DSEC_TRY(auto message, parser_.Next());
    if (message.has_value()) return *std::move(message);
    DSEC_TRY(const bool readable, os::WaitReadable(socket_.get(), deadline_.at()));
    if (!readable) return Error(Code::kDeadlineExceeded, "vm.qmp_timeout", "QEMU does not answer");
    std::array<char, 65536> buffer;
    const ssize_t size = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return Broken("QEMU has closed its monitor");
    parser_.Feed({buffer.data(), static_cast<size_t>(size)});
  }
}

Result<json> QmpClient::Execute(std::string_view command, const json& arguments, int fd) {
  const std::string id = fmt::format("{}", next_id_++);
  const std::string line =
      json{{"execute", command}, {"arguments", arguments}, {"id", id}}.dump() + "\n";
  const int sent =
      os::SendPacketRaw(socket_.get(), line.data(), line.size(), &fd, fd >= 0 ? 1 : 0, 0);
  if (sent < 0) return Broken(fmt::format("send {}", command)).WithErrno(-sent);
  while (true) {
    DSEC_TRY(QmpMessage message, Receive());
    // Answers to others and events are of no interest.
    if (message.id != id) continue;
    if (message.kind == QmpMessage::Kind::kReturn) return std::move(message.data);
    if (message.kind == QmpMessage::Kind::kError) {
      return Error(Code::kInternal, "vm.qmp_refused",
                   fmt::format("{}: {} ({})", command, message.text, message.name));
    }
  }
}

}  // namespace dsec::vmm

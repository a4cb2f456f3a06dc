// SPDX-License-Identifier: Apache-2.0
#include "disk/client.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/log.h"
#include "base/rng.h"
#include "blobfs/fuse_mount.h"
#include "blobfs/json.h"
#include "blobfs/supervise.h"
#include "disk/layer.h"
#include "disk/served.h"
#include "image/digest.h"
#include "image/root_calls.h"
#include "os/fd_passing.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

using blobfs::NumberIn;
using blobfs::ProcessOf;
using blobfs::TextIn;
using image::Unreachable;
using nlohmann::json;
using std::chrono::milliseconds;

constexpr milliseconds kStartPatience{5000};
constexpr milliseconds kHelloPatience{5000};
constexpr milliseconds kRetryPause{50};
constexpr milliseconds kEndPatience{5000};
constexpr milliseconds kKeeperPatience{1500};  // its first pause and a start of the program

Result<void> SendText(int socket, const std::string& text) {
  return os::SendPacket(socket, {reinterpret_cast<const uint8_t*>(text.data()), text.size()}, {});
}

// The answer that is no event.
Result<os::Packet> ReceiveAnswer(int socket, MonoTime deadline) {
  while (true) {
    DSEC_TRY(const bool ready, os::WaitReadable(socket, deadline));
    if (!ready) return Unreachable("dsec-diskfs does not answer");
    auto packet = os::ReceivePacket(socket, blobfs::kMaxPacket);
    if (!packet.ok()) return Unreachable("dsec-diskfs has ended");
    const json answer = json::parse(packet->data, nullptr, false);
    if (!answer.is_object()) return Unreachable("dsec-diskfs has ended");
    if (!answer.contains("event")) return packet;
  }
}

Result<os::UniqueFd> Duplicate(int fd) {
  os::UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!copy.valid()) return DiskError("keep a descriptor");
  return copy;
}

}  // namespace

Result<std::unique_ptr<Client>> Client::Start(ClientOptions options) {
  std::unique_ptr<Client> client(new Client(std::move(options)));
  const blobfs::Settings& settings = client->options_.settings;
  for (const std::string& folder : {settings.dir, client->options_.run_dir}) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) return Error(Code::kInternal, "disk.io", folder + ": " + error.message());
    if (::chmod(folder.c_str(), 0700) != 0) return DiskError(folder);
  }
  const std::string config = settings.dir + "/" + blobfs::kConfigName;
  const std::string fresh = config + ".new";
  static_cast<void>(::unlink(fresh.c_str()));
  DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, fresh.c_str(), settings.Encode(), 0600));
  if (::rename(fresh.c_str(), config.c_str()) != 0) return DiskError("replace " + config);
  DSEC_TRY(auto socket, client->Restore());
  client->watched_ = socket.get();
  client->monitor_ = std::jthread(
      [raw = client.get(), socket = std::move(socket)](const std::stop_token& stop) mutable {
        raw->Monitor(stop, std::move(socket));
      });
  return client;
}

Client::~Client() {
  monitor_.request_stop();
  {
    const std::lock_guard lock(mutex_);
    if (watched_ >= 0) ::shutdown(watched_, SHUT_RDWR);
  }
  restored_.notify_all();
  if (monitor_.joinable()) monitor_.join();
}

uint64_t Client::session() const {
  const std::lock_guard lock(mutex_);
  return session_;
}

// A connection to the process that there is, or to one that is started: with the session that we
// hold, if it has not ended, else with a new one.
Result<os::UniqueFd> Client::Restore() {
  const MonoTime begun = Clock::System().Mono();
  while (true) {
    auto socket = Hello();
    if (socket.ok()) return socket;
    // The keeper starts its worker again.
    const bool kept = ProcessOf(options_.settings.dir, blobfs::kKeeperName).valid();
    if (!kept || Clock::System().Mono() - begun > kKeeperPatience) break;
    std::this_thread::sleep_for(kRetryPause);
  }
  bool ours = false;
  {
    const std::lock_guard lock(mutex_);
    ours = fuse_.valid() && blobfs::IsConnected(fuse_.get());
    if (fuse_.valid() && !ours) log::Error("disk.session_lost");
  }
  DSEC_TRY_VOID(StartProcess(!ours));
  while (true) {
    auto socket = Hello();
    if (socket.ok() || Clock::System().Mono() - begun > kStartPatience + kKeeperPatience)
      return socket;
    std::this_thread::sleep_for(kRetryPause);
  }
}

// With other settings the worker ends, and the keeper starts one that has read the new ones.
Result<os::UniqueFd> Client::Hello() {
  DSEC_TRY(auto socket, blobfs::ConnectTo(SocketPath()));
  DSEC_TRY_VOID(SendText(socket.get(), R"({"id":0,"op":"hello"})"));
  DSEC_TRY(auto packet, ReceiveAnswer(socket.get(), Clock::System().Mono() + kHelloPatience));
  const json answer = json::parse(packet.data, nullptr, false);
  const std::string number = TextIn(answer, "session");
  if (packet.fds.size() != 2 || number.empty())
    return Unreachable("dsec-diskfs answers something else");
  if (TextIn(answer, "settings") != image::Sha256Hex(options_.settings.Encode())) {
    const auto worker = ProcessOf(options_.settings.dir, blobfs::kWorkerName);
    if (worker.valid()) DSEC_TRY_VOID(worker.Signal(SIGTERM));
    return Unreachable("dsec-diskfs has other settings");
  }
  const std::lock_guard lock(mutex_);
  session_ = 0;
  std::from_chars(number.data(), number.data() + number.size(), session_);
  fuse_ = std::move(packet.fds[0]);
  mount_ = std::move(packet.fds[1]);
  watched_ = socket.get();
  restored_.notify_all();
  return socket;
}

// `fresh`: a new session. Whoever holds the lock is ended first, so a disk is never open twice.
Result<void> Client::StartProcess(bool fresh) {
  const blobfs::Settings& settings = options_.settings;
  DSEC_TRY(const auto lock,
           blobfs::TakeLock(settings.dir, Clock::System().Mono() + kEndPatience, nullptr));
  blobfs::KeeperStart start;
  const std::lock_guard guard(mutex_);
  if (fresh) {
    static_cast<void>(::unlink((settings.dir + "/" + blobfs::kServedName).c_str()));
    DSEC_TRY(auto made, blobfs::MountFuse(settings.dir, "dsec-diskfs", true));
    std::array<uint8_t, 8> random{};
    SecureRandom(random);
    std::memcpy(&session_, random.data(), random.size());
    fuse_ = std::move(made.device);
    mount_ = std::move(made.mount);
  }
  DSEC_TRY(const auto listen, blobfs::ListenAt(SocketPath()));
  start.program = options_.program;
  start.name = "dsec-diskfs";
  start.config = settings.dir + "/" + blobfs::kConfigName;
  start.session = std::to_string(session_);
  start.fuse = fuse_.get();
  start.mount = mount_.get();
  start.listen = listen.get();
  start.lock = lock.get();
  DSEC_TRY(keeper_, blobfs::StartKeeper(start));
  return Ok();
}

// Nothing comes over its connection but the end of the process.
void Client::Monitor(const std::stop_token& stop, os::UniqueFd socket) {
  while (!stop.stop_requested()) {
    if (socket.valid()) {
      while (os::ReceivePacket(socket.get(), blobfs::kMaxPacket).ok()) {
      }
    }
    {
      const std::lock_guard lock(mutex_);
      watched_ = -1;
    }
    if (keeper_.valid()) {  // no zombie of it
      siginfo_t info;
      static_cast<void>(
          ::waitid(P_PIDFD, static_cast<id_t>(keeper_.fd()), &info, WEXITED | WNOHANG));
    }
    if (stop.stop_requested()) return;
    auto again = Restore();
    if (again.ok()) {
      socket = *std::move(again);
      continue;
    }
    socket.Reset();
    log::Error("disk.no_process", {{"error", again.error()}});
    std::unique_lock lock(mutex_);
    restored_.wait_for(lock, stop, kRetryPause, [] { return false; });
  }
}

Result<std::string> Client::Ask(const std::string& request) {
  const MonoTime deadline = Clock::System().Mono() + options_.patience;
  if (!calls_.try_acquire_until(deadline)) return Unreachable("dsec-diskfs is busy");
  const auto ask = [&]() -> Result<std::string> {
    // Between a death and the next worker the socket is there, and its backlog.
    DSEC_TRY(const auto socket, blobfs::ConnectTo(SocketPath()));
    DSEC_TRY_VOID(SendText(socket.get(), request));
    DSEC_TRY(auto packet, ReceiveAnswer(socket.get(), deadline));
    const json answer = json::parse(packet.data, nullptr, false);
    if (answer.contains("reason"))
      return DiskErrorOf(TextIn(answer, "reason"), TextIn(answer, "message"));
    return std::move(packet.data);
  };
  auto answer = ask();
  calls_.release();
  return answer;
}

Result<Client::Opened> Client::Open(const std::string& dir) {
  DSEC_TRY(const std::string text, Ask(json{{"id", 1}, {"op", "open"}, {"dir", dir}}.dump()));
  const json answer = json::parse(text, nullptr, false);
  return Opened{NumberIn(answer, "node"), NumberIn(answer, "bytes")};
}

Result<os::UniqueFd> Client::Mount() const {
  const std::lock_guard lock(mutex_);
  return Duplicate(mount_.get());
}

Result<os::UniqueFd> Client::OpenFile(uint64_t node, int flags) const {
  DSEC_TRY(const auto mount, Mount());
  return os::OpenAt(mount.get(), std::to_string(node).c_str(), flags);
}

Result<void> Client::ServeNbd(uint64_t node, const std::string& socket) {
  DSEC_TRY_VOID(Ask(json{{"id", 1}, {"op", "nbd"}, {"node", node}, {"socket", socket}}.dump()));
  return Ok();
}

Result<Client::Sealed> Client::Seal(uint64_t node) {
  DSEC_TRY(const std::string text, Ask(json{{"id", 1}, {"op", "seal"}, {"node", node}}.dump()));
  const json answer = json::parse(text, nullptr, false);
  return Sealed{TextIn(answer, "path"), TextIn(answer, "uuid"), answer.value("took_ms", 0.0)};
}

Result<Client::Sealed> Client::Collapse(uint64_t node, uint64_t first, uint64_t count) {
  DSEC_TRY(
      const std::string text,
      Ask(json{{"id", 1}, {"op", "collapse"}, {"node", node}, {"first", first}, {"count", count}}
              .dump()));
  const json answer = json::parse(text, nullptr, false);
  return Sealed{TextIn(answer, "path"), TextIn(answer, "uuid"), answer.value("took_ms", 0.0)};
}

Result<std::string> Client::Info(uint64_t node) {
  return Ask(json{{"id", 1}, {"op", "info"}, {"node", node}}.dump());
}

Result<void> Client::Close(uint64_t node, bool force) {
  DSEC_TRY_VOID(Ask(json{{"id", 1}, {"op", "close"}, {"node", node}, {"force", force}}.dump()));
  return Ok();
}

Result<std::vector<std::string>> Client::Purge(const std::string& dir, const std::string& run_dir,
                                               MonoTime deadline) {
  std::vector<std::string> done;
  if (::access(dir.c_str(), F_OK) != 0) return done;
  bool killed = false;
  DSEC_TRY(const auto lock, blobfs::TakeLock(dir, deadline, &killed));
  if (killed) done.emplace_back("ended dsec-diskfs");
  DSEC_TRY(const bool restored, blobfs::RestoreLimit(dir));
  if (restored) done.emplace_back("put fs.fuse.max_pages_limit back");
  static_cast<void>(::unlink((run_dir + "/" + kDiskSocketName).c_str()));
  DSEC_TRY_VOID(os::RemoveTree(AT_FDCWD, dir.c_str()));
  return done;
}

}  // namespace dsec::disk

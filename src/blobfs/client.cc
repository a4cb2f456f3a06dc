// SPDX-License-Identifier: Apache-2.0
#include "blobfs/client.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/log.h"
#include "base/rng.h"
#include "blobfs/fuse_mount.h"
#include "blobfs/json.h"
#include "blobfs/supervise.h"
#include "image/digest.h"
#include "image/layer_files.h"
#include "image/root_calls.h"
#include "os/fd_passing.h"
#include "os/file.h"

namespace dsec::blobfs {
namespace {

using image::Unreachable;
using nlohmann::json;
using std::chrono::milliseconds;

constexpr milliseconds kStartPatience{5000};
constexpr milliseconds kHelloPatience{5000};
constexpr milliseconds kRetryPause{50};
constexpr milliseconds kEndPatience{5000};
// The keeper's first pause and a start of the program fit in easily.
constexpr milliseconds kKeeperPatience{1500};

std::string SocketPath(const std::string& run_dir) { return run_dir + "/" + kSocketName; }

}  // namespace

Result<std::unique_ptr<Client>> Client::Start(ClientOptions options) {
  std::unique_ptr<Client> client(new Client(std::move(options)));
  const Settings& settings = client->options_.settings;
  for (const std::string& folder : {settings.dir, client->options_.run_dir}) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) return Error(Code::kInternal, "layer.io", folder + ": " + error.message());
    if (::chmod(folder.c_str(), 0700) != 0) return os::ErrnoError("layer.io", folder);
  }
  const std::string config = settings.dir + "/" + kConfigName;
  const std::string fresh = config + ".new";
  static_cast<void>(::unlink(fresh.c_str()));
  DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, fresh.c_str(), settings.Encode(), 0600));
  if (::rename(fresh.c_str(), config.c_str()) != 0) return os::ErrnoError("layer.io", config);
  DSEC_TRY_VOID(client->Restore());
  client->monitor_ =
      std::jthread([raw = client.get()](const std::stop_token& stop) { raw->Monitor(stop); });
  return client;
}

Client::~Client() {
  monitor_.request_stop();
  {
    const std::lock_guard lock(mutex_);
    if (socket_ != nullptr) ::shutdown(socket_->get(), SHUT_RDWR);
  }
  changed_.notify_all();
  if (monitor_.joinable()) monitor_.join();
}

uint64_t Client::session() const {
  const std::lock_guard lock(mutex_);
  return session_.number;
}

bool Client::Damaged(const LayerId& id) const {
  const std::lock_guard lock(mutex_);
  return damaged_.contains(image::HexOf(id));
}

// Connects to the process that there is, or starts one: with the session that we hold, if it has
// not ended, else with a new one.
Result<void> Client::Restore() {
  const MonoTime begun = Clock::System().Mono();
  while (true) {
    auto connected = Connect();
    if (connected.ok()) connected = Hello();
    if (connected.ok()) return connected;
    // The keeper starts its worker again.
    const bool kept = ProcessOf(options_.settings.dir, kKeeperName).valid();
    if (!kept || Clock::System().Mono() - begun > kKeeperPatience) break;
    std::this_thread::sleep_for(kRetryPause);
  }
  const bool ours = session_.fuse.valid() && IsConnected(session_.fuse.get());
  if (session_.fuse.valid() && !ours) log::Error("blobfs.session_lost");
  DSEC_TRY_VOID(StartProcess(!ours));
  while (true) {
    auto connected = Connect();
    if (connected.ok()) connected = Hello();
    if (connected.ok() || Clock::System().Mono() - begun > kStartPatience + kKeeperPatience)
      return connected;
    std::this_thread::sleep_for(kRetryPause);
  }
}

Result<void> Client::Connect() {
  DSEC_TRY(auto connected, ConnectTo(SocketPath(options_.run_dir)));
  auto socket = std::make_shared<os::UniqueFd>(std::move(connected));
  const std::lock_guard lock(mutex_);
  socket_ = std::move(socket);
  counted_.clear();
  return Ok();
}

// The only user of the connection yet. With other settings the worker ends, and the keeper starts
// one that has read the new ones.
Result<void> Client::Hello() {
  const std::string hello = R"({"id":0,"op":"hello"})";
  const int socket = socket_->get();
  DSEC_TRY_VOID(
      os::SendPacket(socket, {reinterpret_cast<const uint8_t*>(hello.data()), hello.size()}, {}));
  const MonoTime deadline = Clock::System().Mono() + kHelloPatience;
  while (true) {
    DSEC_TRY(const bool ready, os::WaitReadable(socket, deadline));
    if (!ready) return Unreachable("dsec-blobfs does not answer");
    DSEC_TRY(auto packet, os::ReceivePacket(socket, kMaxPacket));
    const json answer = json::parse(packet.data, nullptr, false);
    if (!answer.is_object()) return Unreachable("dsec-blobfs has ended");
    if (answer.contains("event")) continue;
    if (packet.fds.size() != 2 || TextIn(answer, "session").empty())
      return Unreachable("dsec-blobfs answers something else");
    if (TextIn(answer, "settings") != image::Sha256Hex(options_.settings.Encode())) {
      const auto worker = ProcessOf(options_.settings.dir, kWorkerName);
      if (worker.valid()) DSEC_TRY_VOID(worker.Signal(SIGTERM));
      return Unreachable("dsec-blobfs has other settings");
    }
    const std::string number = TextIn(answer, "session");
    const std::lock_guard lock(mutex_);
    session_.number = 0;
    std::from_chars(number.data(), number.data() + number.size(), session_.number);
    session_.fuse = std::move(packet.fds[0]);
    session_.mount = std::move(packet.fds[1]);
    changed_.notify_all();
    return Ok();
  }
}

// `fresh`: a new session. Everything it makes is named by <dir> before it exists: whoever holds the
// lock there is to be ended.
Result<void> Client::StartProcess(bool fresh) {
  const Settings& settings = options_.settings;
  DSEC_TRY(const auto lock, TakeLock(settings.dir, Clock::System().Mono() + kEndPatience, nullptr));
  if (fresh) {
    static_cast<void>(::unlink((settings.dir + "/" + kServedName).c_str()));
    DSEC_TRY(auto made, MountFuse(settings.dir, "dsec-blobfs", false));
    const std::lock_guard guard(mutex_);
    std::array<uint8_t, 8> random{};
    SecureRandom(random);
    std::memcpy(&session_.number, random.data(), random.size());
    session_.fuse = std::move(made.device);
    session_.mount = std::move(made.mount);
    damaged_.clear();
  }
  DSEC_TRY(const auto listen, ListenAt(SocketPath(options_.run_dir)));
  KeeperStart start;
  start.program = options_.program;
  start.name = "dsec-blobfs";
  start.config = settings.dir + "/" + kConfigName;
  start.session = std::to_string(session_.number);
  start.fuse = session_.fuse.get();
  start.mount = session_.mount.get();
  start.listen = listen.get();
  start.lock = lock.get();
  DSEC_TRY(keeper_, StartKeeper(start));
  return Ok();
}

void Client::Monitor(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    Receive(stop);
    Lost();
    if (keeper_.valid()) {  // no zombie of it
      siginfo_t info;
      static_cast<void>(
          ::waitid(P_PIDFD, static_cast<id_t>(keeper_.fd()), &info, WEXITED | WNOHANG));
    }
    while (!stop.stop_requested()) {
      const auto restored = Restore();
      if (restored.ok()) break;
      log::Error("blobfs.not_restored", {{"error", restored.error()}});
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, stop, std::chrono::seconds(1), [] { return false; });
    }
  }
}

void Client::Receive(const std::stop_token& stop) {
  const auto socket = socket_;
  while (!stop.stop_requested()) {
    auto packet = os::ReceivePacket(socket->get(), kMaxPacket);
    if (!packet.ok() || packet->data.empty()) return;
    Take(packet->data, std::move(packet->fds));
  }
}

void Client::Take(const std::string& text, std::vector<os::UniqueFd> fds) {
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) return;
  const std::string event = TextIn(object, "event");
  if (event == "stats") return Count(text);
  const std::lock_guard lock(mutex_);
  if (event == "bad") {
    const std::string hex = TextIn(object, "layer");
    log::Error("layer.wrong_digest", {{"layer", hex}, {"chunk", NumberIn(object, "chunk")}});
    if (damaged_.size() < 10'000) damaged_.insert(hex);
    return;
  }
  const auto found = calls_.find(NumberIn(object, "id"));
  if (found == calls_.end()) return;
  found->second->done = true;
  found->second->answer = {text, std::move(fds)};
  calls_.erase(found);
  changed_.notify_all();
}

void Client::Lost() {
  const std::lock_guard lock(mutex_);
  socket_.reset();
  for (auto& [id, call] : calls_) call->done = true;  // without an answer
  calls_.clear();
  changed_.notify_all();
}

Result<Client::Answer> Client::Ask(const std::string& members, milliseconds patience) {
  auto call = std::make_shared<Call>();
  const MonoTime deadline = Clock::System().Mono() + patience;
  std::unique_lock lock(mutex_);
  // The one before may have just died.
  if (!changed_.wait_until(lock, deadline, [&] { return socket_ != nullptr; }))
    return Unreachable("dsec-blobfs does not run");
  const uint64_t id = next_call_++;
  calls_[id] = call;
  const auto socket = socket_;
  lock.unlock();
  const std::string text = fmt::format(R"({{"id":{},{}}})", id, members);
  auto sent = os::SendPacket(socket->get(),
                             {reinterpret_cast<const uint8_t*>(text.data()), text.size()}, {});
  lock.lock();
  const bool done = sent.ok() && changed_.wait_until(lock, deadline, [&] { return call->done; });
  calls_.erase(id);
  if (!done || call->answer.text.empty()) return Unreachable("dsec-blobfs gives no answer");
  Answer answer = std::move(call->answer);
  lock.unlock();
  const json object = json::parse(answer.text, nullptr, false);
  if (!object.is_object()) return Unreachable("dsec-blobfs answers something else");
  if (object.contains("reason"))
    return ErrorOf(TextIn(object, "reason"), TextIn(object, "message"));
  return answer;
}

Result<image::BlobServer::Served> Client::Open(const LayerId& id, bool with_meta) {
  const std::string hex = image::HexOf(id);
  DSEC_TRY(auto answer, Ask(fmt::format(R"("op":"open","layer":"{}","meta":{})", hex, with_meta),
                            options_.patience));
  if (answer.fds.size() != (with_meta ? 2u : 1u))
    return Unreachable("dsec-blobfs answers something else");
  Served served;
  for (const auto& fd : answer.fds) {  // where its writer has left it
    if (::lseek(fd.get(), 0, SEEK_SET) != 0) return os::ErrnoError("layer.io", "rewind");
  }
  DSEC_TRY(served.manifest, os::ReadAll(answer.fds[0].get(), kMaxManifest));
  if (with_meta) served.meta = std::move(answer.fds[1]);
  os::UniqueFd mount;
  {
    const std::lock_guard lock(mutex_);
    damaged_.erase(hex);
    served.session = session_.number;
    mount = os::UniqueFd(::fcntl(session_.mount.get(), F_DUPFD_CLOEXEC, 3));
  }
  auto blob = os::OpenAt(mount.get(), hex.c_str(), O_RDONLY);
  if (!blob.ok()) return Unreachable("open what dsec-blobfs serves: " + blob.error().ToString());
  served.blob = *std::move(blob);
  return served;
}

void Client::Leave() {
  monitor_.request_stop();  // no new one for the one that ends
  static_cast<void>(Ask(R"("op":"leave")", kEndPatience));
  if (!keeper_.valid()) return;
  static_cast<void>(keeper_.WaitExit(Clock::System().Mono() + milliseconds(200)));
  siginfo_t info;
  static_cast<void>(::waitid(P_PIDFD, static_cast<id_t>(keeper_.fd()), &info, WEXITED | WNOHANG));
}

void Client::Count(const std::string& text) {
  struct Metric {
    const char* key;
    const char* name;
    const char* help;
  };
  constexpr Metric kCounters[] = {
      {"fetched_bytes", "dsec_layers_fetched_bytes_total",
       "Bytes of layers read from the store or object store in verified mode"},
      {"fetches", "dsec_layers_fetches_total", "Reads of the store or object store"},
      {"fetch_failures", "dsec_layers_fetch_failures_total", "Such reads that failed"},
      {"wrong_digests", "dsec_layers_wrong_digests_total",
       "Chunks that came with a wrong digest and were not served"},
      {"damaged_chunks", "dsec_layers_damaged_chunks_total",
       "Chunks of the local copy that were damaged and fetched anew"},
      {"memory_hits", "dsec_layers_memory_hits_total", "Chunks served from memory"},
      {"disk_hits", "dsec_layers_disk_hits_total", "Chunks served from the local copy"},
      {"not_kept", "dsec_layers_not_kept_total",
       "Chunks that were served without being kept, for want of disk"},
      {"evicted", "dsec_layers_evicted_total",
       "Chunks and unused layers removed from the local copy"},
  };
  const json object = json::parse(text, nullptr, false);  // an object: Take has looked
  for (const Metric& metric : kCounters) {
    const uint64_t now = NumberIn(object, metric.key);
    const uint64_t before = std::exchange(counted_[metric.key], now);
    // A worker that has been started anew counts from zero.
    options_.registry->GetCounter(metric.name, metric.help).Add(now >= before ? now - before : now);
  }
  options_.registry->GetGauge("dsec_layers_cache_bytes", "Size of the local copy of content")
      .Set(static_cast<double>(NumberIn(object, "cache_bytes")));
}

Result<std::vector<std::string>> Client::Purge(const std::string& dir, const std::string& run_dir,
                                               MonoTime deadline) {
  std::vector<std::string> done;
  std::error_code error;
  if (!std::filesystem::exists(dir, error)) return done;
  bool killed = false;
  DSEC_TRY(const auto lock, TakeLock(dir, deadline, &killed));
  if (killed) done.emplace_back("dsec-blobfs");
  DSEC_TRY(const bool restored, RestoreLimit(dir));
  if (restored) done.emplace_back("the raised limit of FUSE requests");
  static_cast<void>(::unlink(SocketPath(run_dir).c_str()));
  std::filesystem::remove_all(dir, error);
  if (error) return Error(Code::kInternal, "layer.io", dir + ": " + error.message());
  return done;
}

}  // namespace dsec::blobfs

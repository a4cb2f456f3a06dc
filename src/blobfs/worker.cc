// SPDX-License-Identifier: Apache-2.0
#include "blobfs/worker.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string_view>

#include "base/fault.h"
#include "base/log.h"
#include "blobfs/control.h"
#include "blobfs/fuse_session.h"
#include "blobfs/json.h"
#include "blobfs/keeper.h"
#include "blobfs/layers.h"
#include "blobfs/settings.h"
#include "blobfs/supervise.h"
#include "image/digest.h"
#include "os/file.h"
#include "os/memfd.h"

namespace dsec::blobfs {
namespace {

using nlohmann::json;

constexpr size_t kMaxConfig = 64 << 10;
constexpr size_t kMaxServed = 64 << 20;
constexpr auto kStatsPeriod = std::chrono::seconds(1);
constexpr auto kLeavePatience = std::chrono::seconds(2);

Result<Settings> ReadSettings(const char* path) {
  DSEC_TRY(const std::string text, os::ReadFile(AT_FDCWD, path, kMaxConfig));
  return Settings::Parse(text);
}

class Worker {
 public:
  Worker(Settings settings, std::string session)
      : settings_(std::move(settings)), session_number_(std::move(session)) {}

  Result<void> Run() {
    DSEC_TRY(served_, os::OpenAt(AT_FDCWD, (settings_.dir + "/" + kServedName).c_str(),
                                 O_RDWR | O_CREAT | O_APPEND, 0600));
    DSEC_TRY(const std::string served, os::ReadAll(served_.get(), kMaxServed));
    adopted_ = !served.empty();
    auto cache = DataCache::Open(settings_.cache_dir, settings_.cache_bytes, adopted_, counts_);
    if (cache.ok()) {
      cache_ = *std::move(cache);
    } else {
      log::Error("blobfs.no_cache", {{"error", cache.error()}});
    }
    source_ = settings_.url.empty()
                  ? FolderSource(settings_.root)
                  : HttpSource({settings_.url, settings_.headers_file, settings_.ca_file});
    layers_.emplace(*source_, cache_.get());
    loader_.emplace(cache_.get(), LoaderOptions(), counts_,
                    [this](const std::string& hex, uint64_t chunk) { TellBad(hex, chunk); });
    session_.emplace(
        kFuseFd, *loader_, [this](const std::string& hex) { return layers_->Peek(hex); },
        [this](const std::string& hex) -> std::shared_ptr<Layer> {
          auto found = layers_->Find(hex);
          if (found.ok()) return *std::move(found);
          log::Warn("blobfs.layer_not_found", {{"layer", hex}, {"error", found.error()}});
          return nullptr;
        });
    std::istringstream lines(served);
    for (std::string hex; std::getline(lines, hex);) {
      if (image::IsSha256Hex(hex)) DSEC_TRY_VOID(session_->Add(hex));
    }
    control_.emplace(kListenFd, [this](const std::string& request) { return Handle(request); });
    session_->Resend();
    control_->Start();
    std::thread([this] { TellStats(); }).detach();
    log::Info("blobfs.started", {{"session", session_number_}, {"adopted", adopted_}});
    return session_->Run();
  }

 private:
  Result<Control::Answer> Handle(const std::string& text) {
    const json request = json::parse(text, nullptr, false);
    const Error bad(Code::kInvalidArgument, "layer.source", "not a request");
    if (!request.is_object()) return bad;
    const std::string op = TextIn(request, "op");
    if (op == "hello") return Hello();
    if (op == "leave") return Leave();
    const std::string hex = TextIn(request, "layer");
    if (op != "open" || !image::IsSha256Hex(hex)) return bad;
    return OpenLayer(hex, FlagIn(request, "meta"));
  }

  Result<Control::Answer> Hello() {
    Control::Answer answer;
    answer.members = fmt::format(R"("session":"{}","pid":{},"settings":"{}")", session_number_,
                                 ::getpid(), image::Sha256Hex(settings_.Encode()));
    for (const int fd : {kFuseFd, kMountFd}) {
      answer.fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
      if (!answer.fds.back().valid()) return os::ErrnoError("layer.io", "keep a descriptor");
    }
    return answer;
  }

  // Ends the process when nobody reads; a session that was taken over may have files open of which
  // this process does not know.
  Result<Control::Answer> Leave() {
    if (!adopted_ && session_->WaitClosed(kLeavePatience)) {
      log::Info("blobfs.left");
      std::_Exit(0);
    }
    log::Info("blobfs.stays", {{"open", session_->open_files()}, {"adopted", adopted_}});
    return Control::Answer();
  }

  Result<Control::Answer> OpenLayer(const std::string& hex, bool with_meta) {
    DSEC_TRY(const auto layer, layers_->Find(hex));
    if (const auto chunks = loader_->Recheck(layer); !chunks.empty()) {
      return Error(Code::kInternal, "layer.corrupt",
                   fmt::format("sha256:{}: chunk {} of data.blob has a wrong digest ({} are known)",
                               hex, chunks.front(), chunks.size()));
    }
    DSEC_TRY_VOID(Record(hex));
    Control::Answer answer;
    const std::string& manifest = layer->proof.manifest;
    DSEC_TRY(auto file,
             os::SealedMemfd("manifest",
                             {reinterpret_cast<const uint8_t*>(manifest.data()), manifest.size()}));
    answer.fds.push_back(std::move(file));
    if (with_meta) {
      DSEC_TRY(auto meta, layers_->FetchMeta(*layer, settings_.cache_dir));
      answer.fds.push_back(std::move(meta));
    }
    return answer;
  }

  // On record before the kernel can have it open.
  Result<void> Record(const std::string& hex) {
    const std::lock_guard lock(mutex_);
    if (!recorded_.insert(hex).second) return Ok();
    auto added = session_->Add(hex);
    if (added.ok()) added = os::WriteAll(served_.get(), hex + "\n");
    if (!added.ok()) recorded_.erase(hex);
    return added;
  }

  void TellBad(const std::string& hex, uint64_t chunk) {
    control_->Tell(fmt::format(R"({{"event":"bad","layer":"{}","chunk":{}}})", hex, chunk));
  }

  void TellStats() {
    std::string told;
    while (true) {
      const std::string text = json{{"event", "stats"},
                                    {"fetched_bytes", counts_.fetched_bytes.load()},
                                    {"fetches", counts_.fetches.load()},
                                    {"fetch_failures", counts_.fetch_failures.load()},
                                    {"wrong_digests", counts_.wrong_digests.load()},
                                    {"damaged_chunks", counts_.damaged_chunks.load()},
                                    {"memory_hits", counts_.memory_hits.load()},
                                    {"disk_hits", counts_.disk_hits.load()},
                                    {"not_kept", counts_.not_kept.load()},
                                    {"evicted", counts_.evicted.load()},
                                    {"cache_bytes", counts_.cache_bytes.load()}}
                                   .dump();
      control_->Tell(text);
      std::this_thread::sleep_for(kStatsPeriod);
    }
  }

  const Settings settings_;
  const std::string session_number_;
  bool adopted_ = false;  // the session had files before this process
  os::UniqueFd served_;
  Counts counts_;
  std::unique_ptr<DataCache> cache_;
  std::unique_ptr<LayerSource> source_;
  std::optional<Layers> layers_;
  std::optional<ChunkLoader> loader_;
  std::optional<FuseSession> session_;
  std::optional<Control> control_;
  std::mutex mutex_;
  std::set<std::string> recorded_;
};

int Fail(const Error& error) {
  std::fprintf(stderr, "dsec-blobfs: %s\n", error.ToString().c_str());
  return 1;
}

}  // namespace

int BlobfsMain(int argc, char** argv) {
  const std::string_view role = argc == 4 ? argv[1] : "";
  if (role != "keeper" && role != "worker") {
    std::fprintf(stderr, "dsec-blobfs is started by `dsec up` (layers_verify)\n");
    return 2;
  }
  std::signal(SIGPIPE, SIG_IGN);
  auto settings = ReadSettings(argv[2]);
  if (!settings.ok()) return Fail(settings.error());
  log::Configure(settings->log);
  auto written = WritePidFile(settings->dir, role == "keeper" ? kKeeperName : kWorkerName);
  if (!written.ok()) return Fail(written.error());
  if (role == "keeper") return KeepWorker(argv);
  if (auto armed = fault::ArmFromEnv(); !armed.ok()) return Fail(armed.error());
  if (auto dropped = DropRights(); !dropped.ok()) return Fail(dropped.error());
  // Never destroyed: its threads end with the process.
  auto* worker = new Worker(*std::move(settings), argv[3]);
  auto done = worker->Run();
  if (!done.ok()) return Fail(done.error());
  std::_Exit(0);
}

}  // namespace dsec::blobfs

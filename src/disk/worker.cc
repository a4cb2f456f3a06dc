// SPDX-License-Identifier: Apache-2.0
#include "disk/worker.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "base/fault.h"
#include "base/log.h"
#include "blobfs/control.h"
#include "blobfs/json.h"
#include "blobfs/keeper.h"
#include "blobfs/settings.h"
#include "blobfs/supervise.h"
#include "disk/fuse_disks.h"
#include "disk/nbd.h"
#include "disk/published.h"
#include "disk/served.h"
#include "image/digest.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

using blobfs::Control;
using blobfs::NumberIn;
using blobfs::Settings;
using blobfs::TextIn;
using nlohmann::json;

constexpr size_t kMaxConfig = 64 << 10;
constexpr size_t kMaxRecord = 16 << 20;
constexpr size_t kThreads = 8;  // that serve the kernel

// The members of an object as an answer has them.
Control::Answer AnswerOf(const json& object) {
  const std::string text = object.dump(-1, ' ', false, json::error_handler_t::replace);
  Control::Answer answer;
  answer.members = text.substr(1, text.size() - 2);
  return answer;
}

class Worker {
 public:
  Worker(Settings settings, std::string session)
      : settings_(std::move(settings)), session_(std::move(session)) {}

  Result<void> Run() {
    const std::string path = ServedPath();
    auto text = os::ReadFile(AT_FDCWD, path.c_str(), kMaxRecord);
    if (!text.ok() && text.error().sys_errno() != ENOENT) return std::move(text).error();
    DSEC_TRY(served_, ParseServed(text.ok() ? *text : ""));
    PublishedStore::Options options;
    options.root = settings_.root;
    options.cache_dir = settings_.cache_dir;
    options.cache_bytes = settings_.cache_bytes;
    options.keep_proofs = !served_.empty();
    auto source =
        settings_.url.empty()
            ? blobfs::FolderSource(settings_.root)
            : blobfs::HttpSource({settings_.url, settings_.headers_file, settings_.ca_file});
    DSEC_TRY(store_, PublishedStore::Open(std::move(options), std::move(source)));
    disks_.emplace(blobfs::kFuseFd);
    for (const Served& one : served_) {
      next_node_ = std::max(next_node_, one.node + 1);
      disks_->AddLater(
          one.node, one.bytes, [this, dir = one.dir] { return OpenDisk(dir); },
          [this, one](const std::shared_ptr<Disk>& disk) {
            if (one.nbd.empty()) return;
            if (auto nbd = StartNbd(one.node, one.nbd, disk); !nbd.ok())
              log::Error("disk.nbd_lost", {{"socket", one.nbd}, {"error", nbd.error()}});
          });
    }
    control_.emplace(blobfs::kListenFd,
                     [this](const std::string& request) { return Handle(request); });
    disks_->Resend();
    control_->Start();
    log::Info("disk.started", {{"session", session_}, {"served", served_.size()}});
    return disks_->Run(kThreads);
  }

 private:
  std::string ServedPath() const { return settings_.dir + "/" + blobfs::kServedName; }

  Result<std::shared_ptr<Disk>> OpenDisk(const std::string& dir) {
    DiskOptions options;
    options.find_published = [this](const std::string& hex) { return store_->Find(hex); };
    DSEC_TRY(auto disk, Disk::Open(dir, std::move(options)));
    return std::shared_ptr<Disk>(std::move(disk));
  }

  Result<void> StartNbd(uint64_t node, const std::string& path, const std::shared_ptr<Disk>& disk) {
    DSEC_TRY(auto server, NbdServer::Start(path, NbdTargetOf(disk)));
    const std::lock_guard lock(mutex_);
    nbd_[node] = std::move(server);
    return Ok();
  }

  // With the lock. As the record will be, or as it was.
  Result<void> Record(const std::vector<Served>& served) {
    const std::string path = ServedPath();
    const std::string fresh = path + ".new";
    static_cast<void>(::unlink(fresh.c_str()));
    DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, fresh.c_str(), EncodeServed(served), 0600));
    if (::rename(fresh.c_str(), path.c_str()) != 0) return DiskError("replace " + path);
    served_ = served;
    return Ok();
  }

  Result<Control::Answer> Handle(const std::string& text) {
    const json request = json::parse(text, nullptr, false);
    const Error bad(Code::kInvalidArgument, "disk.bad_request", "not a request");
    if (!request.is_object()) return bad;
    const std::string op = TextIn(request, "op");
    if (op == "hello") return Hello();
    if (op == "open") return Open(TextIn(request, "dir"));
    const uint64_t node = NumberIn(request, "node");
    if (op == "close") return Close(node, blobfs::FlagIn(request, "force"));
    const auto disk = disks_->Find(node);
    if (disk == nullptr)
      return Error(Code::kNotFound, "disk.not_served", fmt::format("no disk is number {}", node));
    if (op == "nbd") return ServeNbdAt(node, TextIn(request, "socket"), disk);
    if (op == "seal" || op == "collapse") {
      const auto begun = std::chrono::steady_clock::now();
      DSEC_TRY(const auto sealed, op == "seal" ? disk->Seal()
                                               : disk->Collapse(NumberIn(request, "first"),
                                                                NumberIn(request, "count")));
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - begun;
      return AnswerOf({{"path", sealed.path},
                       {"uuid", sealed.uuid},
                       {"extents", sealed.extents},
                       {"data_bytes", sealed.data_bytes},
                       {"took_ms", took.count()}});
    }
    if (op == "info") return Info(*disk);
    return bad;
  }

  Result<Control::Answer> Hello() {
    auto answer = AnswerOf({{"session", session_},
                            {"pid", ::getpid()},
                            {"settings", image::Sha256Hex(settings_.Encode())}});
    for (const int fd : {blobfs::kFuseFd, blobfs::kMountFd}) {
      answer.fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
      if (!answer.fds.back().valid()) return DiskError("keep a descriptor");
    }
    return answer;
  }

  Result<Control::Answer> Open(const std::string& dir) {
    {
      const std::lock_guard lock(mutex_);
      for (const Served& one : served_) {
        if (one.dir == dir) return AnswerOf({{"node", one.node}, {"bytes", one.bytes}});
      }
      if (served_.size() >= kMaxServed) {
        return Error(Code::kResourceExhausted, "disk.too_many_served",
                     fmt::format("{} disks are served", served_.size()));
      }
    }
    DSEC_TRY(auto disk, OpenDisk(dir));
    Served one;
    one.bytes = disk->bytes();
    one.dir = dir;
    const std::lock_guard lock(mutex_);
    one.node = next_node_++;
    auto all = served_;
    all.push_back(one);
    DSEC_TRY_VOID(Record(all));
    disks_->Add(one.node, std::move(disk));
    return AnswerOf({{"node", one.node}, {"bytes", one.bytes}});
  }

  Result<Control::Answer> ServeNbdAt(uint64_t node, const std::string& socket,
                                     const std::shared_ptr<Disk>& disk) {
    {
      const std::lock_guard lock(mutex_);
      auto all = served_;
      for (Served& one : all) {
        if (one.node == node) one.nbd = socket;
      }
      nbd_.erase(node);
      DSEC_TRY_VOID(Record(all));
    }
    DSEC_TRY_VOID(StartNbd(node, socket, disk));
    return Control::Answer();
  }

  // Flushed; from then on neither the kernel nor a client reaches it.
  Result<Control::Answer> Close(uint64_t node, bool force) {
    if (const auto disk = disks_->Find(node); disk != nullptr) DSEC_TRY_VOID(disk->Flush());
    std::unique_ptr<NbdServer> server;
    DSEC_TRY(const auto disk, disks_->Remove(node, force));
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = nbd_.find(node); found != nbd_.end()) {
        server = std::move(found->second);
        nbd_.erase(found);
      }
    }
    server.reset();  // its clients may have written since
    if (disk != nullptr) DSEC_TRY_VOID(disk->Flush());
    const std::lock_guard lock(mutex_);
    auto all = served_;
    std::erase_if(all, [&](const Served& one) { return one.node == node; });
    DSEC_TRY_VOID(Record(all));
    return Control::Answer();
  }

  Result<Control::Answer> Info(const Disk& disk) {
    const auto info = disk.info();
    return AnswerOf({{"bytes", info.bytes},
                     {"layers", info.layers.size()},
                     {"extents", info.extents},
                     {"upper_live_bytes", info.upper.live_bytes},
                     {"upper_dead_bytes", info.upper.dead_bytes},
                     {"journal_bytes", info.upper.journal_bytes},
                     {"fetched_bytes", store_->counts().fetched_bytes.load()},
                     {"fetches", store_->counts().fetches.load()}});
  }

  const Settings settings_;
  const std::string session_;
  std::unique_ptr<PublishedStore> store_;
  std::optional<FuseDisks> disks_;
  std::optional<Control> control_;
  std::mutex mutex_;  // of all below
  std::vector<Served> served_;
  uint64_t next_node_ = FuseDisks::kFirstNode;
  std::map<uint64_t, std::unique_ptr<NbdServer>> nbd_;
};

int Fail(const Error& error) {
  std::fprintf(stderr, "dsec-diskfs: %s\n", error.ToString().c_str());
  return 1;
}

}  // namespace

int DiskfsMain(int argc, char** argv) {
  const std::string_view role = argc == 4 ? argv[1] : "";
  if (role != "keeper" && role != "worker") {
    std::fprintf(stderr, "dsec-diskfs is started by whoever serves disks (disk/client.h)\n");
    return 2;
  }
  std::signal(SIGPIPE, SIG_IGN);
  auto text = os::ReadFile(AT_FDCWD, argv[2], kMaxConfig);
  if (!text.ok()) return Fail(text.error());
  auto settings = Settings::Parse(*text);
  if (!settings.ok()) return Fail(settings.error());
  log::Configure(settings->log);
  auto written = blobfs::WritePidFile(settings->dir,
                                      role == "keeper" ? blobfs::kKeeperName : blobfs::kWorkerName);
  if (!written.ok()) return Fail(written.error());
  if (role == "keeper") return blobfs::KeepWorker(argv);
  if (auto armed = fault::ArmFromEnv(); !armed.ok()) return Fail(armed.error());
  if (auto dropped = blobfs::DropRights(); !dropped.ok()) return Fail(dropped.error());
  // Never destroyed: its threads end with the process.
  auto* worker = new Worker(*std::move(settings), argv[3]);
  auto done = worker->Run();
  if (!done.ok()) return Fail(done.error());
  std::_Exit(0);
}

}  // namespace dsec::disk

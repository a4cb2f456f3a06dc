// SPDX-License-Identifier: Apache-2.0
#include "up/up.h"

#include <fcntl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "apiserver/api_server.h"
#include "base/fault.h"
#include "base/log.h"
#include "blobfs/client.h"
#include "config/node_config.h"
#include "edge/edge.h"
#include "fn/fn_service.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "image/node_lease.h"
#include "image/root_calls.h"
#include "runtime/shards.h"
#include "sandbox/backends/container/container_backend.h"
#include "sandbox/backends/fncall/fncall_backend.h"
#include "sandbox/backends/microvm/microvm_backend.h"
#include "up/control.h"
#include "up/layer_catalog.h"
#include "up/node.h"

namespace dsec::up {
namespace {

using runtime::Deadline;
using std::chrono::seconds;

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

struct Flags {
  std::string config_file, node_id, listen, state_dir, run_dir, layers_dir, fn_types_dir;
  bool check = false, dump = false, reference = false, stop_sandboxes = false;

  void AddTo(CLI::App& app) {
    app.add_option("--config", config_file, "TOML file; docs/config.md lists the keys");
    app.add_option("--node-id", node_id, "Overrides the key node_id");
    app.add_option("--listen", listen, "Overrides the key listen");
    app.add_option("--state-dir", state_dir, "Overrides the key state_dir");
    app.add_option("--run-dir", run_dir, "Overrides the key run_dir");
    app.add_option("--layers", layers_dir, "Overrides the key layers_dir");
    app.add_option("--fn-types", fn_types_dir, "Overrides the key fn_types_dir");
  }
  Result<config::NodeConfig> Load() const {
    config::NodeConfig config;
    if (!config_file.empty()) {
      DSEC_TRY(config, config::LoadNodeConfig(config_file));
    }
    for (const auto& [flag, key] :
         {std::pair{&node_id, &config.node_id}, std::pair{&listen, &config.listen},
          std::pair{&state_dir, &config.state_dir}, std::pair{&run_dir, &config.run_dir},
          std::pair{&layers_dir, &config.layers_dir},
          std::pair{&fn_types_dir, &config.fn_types_dir}}) {
      if (!flag->empty()) *key = *flag;
    }
    DSEC_TRY_VOID(config::CheckNodeConfig(config));
    return config;
  }
};

int Fail(const Error& error) {
  std::fprintf(stderr, "dsec: %s\n", error.ToString().c_str());
  return kExitFailure;
}

void SetUpLog(const config::NodeConfig& config) { log::Configure(LogOptionsOf(config)); }

runtime::Task<void> StopAll(edge::Edge* edge, fn::FnService* fn, apiserver::ApiServer* server,
                            Control* control, bool stop_sandboxes) {
  if (stop_sandboxes) {
    auto stopped =
        co_await edge->StopSandboxes(std::chrono::milliseconds(0), Deadline::After(seconds(60)));
    if (!stopped.ok()) log::Warn("node.stop_sandboxes", {{"error", stopped.error()}});
  }
  // First: the requests of calls that wait would hold the server up.
  auto ended = co_await fn->Stop(Deadline::After(seconds(10)));
  if (!ended.ok()) log::Warn("node.stop_calls", {{"error", ended.error()}});
  const Deadline deadline = Deadline::After(seconds(15));
  auto closed = co_await server->Stop(deadline);
  if (!closed.ok()) log::Warn("node.stop", {{"error", closed.error()}});
  auto stopped = co_await edge->Stop(deadline);
  (void)co_await control->Stop();
  co_return stopped;
}

struct Blobs {
  std::shared_ptr<blobfs::Client> client;  // null: content is not checked
  ~Blobs() {
    if (client != nullptr) client->Leave();
  }
};

// Runs until a signal. What is declared first ends last.
Result<void> Serve(const config::NodeConfig& config, bool stop_sandboxes, int signals) {
  DSEC_TRY_VOID(fault::ArmFromEnv());
  DSEC_TRY(const os::UniqueFd lock, LockState(config.state_dir));
  DSEC_TRY(const std::string key, LoadApiKey(config.state_dir));
  if (auto raised = RaiseOpenFiles(); !raised.ok())
    log::Warn("node.rlimit", {{"error", raised.error()}});
  // Touches nothing of the layers' root, which may hang.
  const auto store = image::LayerStore::At(LayersDir(config));
  Blobs blobs;  // lets the process end after the mounts have ended
  image::LayerMountOptions mount_options = LayerMountOptionsOf(config);
  if (WantsBlobfs(config)) {
    DSEC_TRY(auto blobfs_options, BlobfsOptionsOf(config));
    DSEC_TRY(blobs.client, blobfs::Client::Start(std::move(blobfs_options)));
    mount_options.server = blobs.client;
  }
  image::LayerMounts mounts(*store, std::move(mount_options));
  DSEC_TRY_VOID(mounts.Check());
  DSEC_TRY(const sandbox::ContainerOptions container, ContainerOptionsOf(config));
  DSEC_TRY(const auto backend, sandbox::ContainerBackend::Open(container, *store, mounts));
  DSEC_TRY(const sandbox::MicroVmOptions vm_options, MicroVmOptionsOf(config));
  DSEC_TRY(const auto vms, sandbox::MicroVmBackend::Open(vm_options, backend->parts(), mounts));
  DSEC_TRY(const auto fn_backend,
           sandbox::FnCallBackend::Open(FnCallOptionsOf(config), backend->parts(), mounts));
  DSEC_TRY(fn::FnOptions fn_options, FnOptionsOf(config));
  LayerCatalog catalog(mounts.catalog());

  auto shards = std::make_unique<runtime::Shards>(ShardCount(config));
  DSEC_TRY(auto control, Control::Open(config, key, *shards));
  edge::EdgeOptions edge_options = EdgeOptionsOf(config, backend->ScratchPath());
  edge_options.quota = &control->quota();
  auto opened =
      edge::Edge::Open(std::move(edge_options), *shards,
                       {{v1::BACKEND_CONTAINER, backend.get()}, {v1::BACKEND_MICROVM, vms.get()}});
  if (!opened.ok()) {
    control->Close(*shards);
    return std::move(opened).error();
  }
  const auto edge = *std::move(opened);
  control->Tell(edge.get());
  auto opened_fn = fn::FnService::Open(std::move(fn_options), *shards, *fn_backend);
  if (!opened_fn.ok()) {
    control->Tell(nullptr);
    control->Close(*shards);
    return std::move(opened_fn).error();
  }
  const auto fn = *std::move(opened_fn);
  const auto end_shards = [&] {
    control->Close(*shards);
    shards->Stop();
    edge->LetGo();
    fn->LetGo();
    control->Tell(nullptr);
    control.reset();
    shards.reset();
  };
  auto started = edge->Start();
  if (!started.ok()) {
    end_shards();
    return std::move(started).error();
  }
  auto swept = fn->Start();
  if (!swept.ok()) {
    end_shards();
    return std::move(swept).error();
  }
  control->Settle(*shards);
  for (const std::string& line : *swept) log::Info("fn.swept", {{"what", line}});
  log::Info("node.started", {{"node_id", config.node_id},
                             {"adopted", started->adopted},
                             {"ended", started->ended},
                             {"unanswered", started->unanswered},
                             {"repairs", started->repairs}});
  apiserver::ApiServerOptions options;
  options.listen = {config.listen};
  options.api_key = key;
  options.fn = fn.get();
  options.iam = &control->directory();
  options.audit = &control->audit();
  options.quota = &control->quota();
  options.fn_max_cpu_ms = config.fn_max_wall_ms;
  options.default_exec_timeout = std::chrono::milliseconds(config.default_exec_timeout_ms);
  auto server = apiserver::ApiServer::Start(*shards, *edge, catalog, options);
  if (!server.ok()) {
    end_shards();
    return std::move(server).error();
  }
  std::printf("dsec is ready at %s\n", (*server)->addresses().front().c_str());
  std::fflush(stdout);
  NotifyReady();

  signalfd_siginfo info{};
  while (read(signals, &info, sizeof info) != sizeof info) {
  }
  log::Info("node.stopping", {{"signal", info.ssi_signo}});
  auto stopped = runtime::BlockOn(
      shards->at(0), StopAll(edge.get(), fn.get(), server->get(), control.get(), stop_sandboxes));
  server->reset();  // posts to the shards once more
  end_shards();
  return stopped;
}

}  // namespace

int UpMain(int argc, char** argv) {
  Flags flags;
  CLI::App app("Runs apiserver and edge of this machine", "dsec up");
  flags.AddTo(app);
  app.add_flag("--check-config", flags.check, "Only check the settings");
  app.add_flag("--dump-config", flags.dump, "Print the settings that hold");
  app.add_flag("--config-reference", flags.reference, "Print docs/config.md");
  app.add_flag("--stop-sandboxes", flags.stop_sandboxes, "End all sandboxes at a graceful stop");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (flags.reference) {
    std::fputs(config::NodeConfigReference().c_str(), stdout);
    return 0;
  }
  auto config = flags.Load();
  if (!config.ok()) return Fail(config.error());
  if (flags.dump) std::fputs(config::DumpNodeConfig(*config).c_str(), stdout);
  if (flags.check || flags.dump) return 0;
  if (geteuid() != 0) {
    return Fail(Error(Code::kPermissionDenied, "node.root",
                      "dsec up needs root: namespaces, mounts and cgroups"));
  }
  SetUpLog(*config);
  // Before any thread exists, so that all inherit the mask and only the descriptor sees the
  // signals.
  sigset_t wanted;
  sigemptyset(&wanted);
  for (const int number : {SIGINT, SIGTERM}) sigaddset(&wanted, number);
  pthread_sigmask(SIG_BLOCK, &wanted, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  const os::UniqueFd signals(signalfd(-1, &wanted, SFD_CLOEXEC));
  auto done = Serve(*config, flags.stop_sandboxes, signals.get());
  return done.ok() ? 0 : Fail(done.error());
}

int PurgeMain(int argc, char** argv) {
  Flags flags;
  CLI::App app("Ends and removes everything of this node, whatever its records say", "dsec purge");
  flags.AddTo(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  const auto purge = [&]() -> Result<void> {
    DSEC_TRY(const config::NodeConfig config, flags.Load());
    SetUpLog(config);
    DSEC_TRY(const os::UniqueFd lock, LockState(config.state_dir));
    DSEC_TRY(const sandbox::ContainerOptions container, ContainerOptionsOf(config));
    DSEC_TRY(const std::vector<std::string> removed,
             sandbox::ContainerBackend::Purge(container, Clock::System().Mono() + seconds(60)));
    for (const std::string& line : removed) std::printf("removed %s\n", line.c_str());
    // After their processes.
    DSEC_TRY(const sandbox::MicroVmOptions vms, MicroVmOptionsOf(config));
    DSEC_TRY(const std::vector<std::string> machines, sandbox::MicroVmBackend::Purge(vms));
    for (const std::string& line : machines) std::printf("removed %s\n", line.c_str());
    // After the sandboxes, which read through it.
    DSEC_TRY(const std::vector<std::string> served,
             blobfs::Client::Purge(BlobfsDir(config), config.run_dir,
                                   Clock::System().Mono() + seconds(10)));
    for (const std::string& line : served) std::printf("removed %s\n", line.c_str());
    // The records name nothing that exists any more, and nobody asks for artefacts.
    for (const char* name :
         {"edge.db", "edge.db-wal", "edge.db-shm", "fn_artifacts", "layers_cache", "layers_data"}) {
      std::error_code error;
      std::filesystem::remove_all(config.state_dir + "/" + name, error);
      if (error)
        return Error(Code::kInternal, "node.purge", std::string(name) + ": " + error.message());
    }
    // The root of the layers may hang.
    image::RootLane lane;
    const auto dropped = lane.Run<void>(
        [root = LayersDir(config), node = config.node_id] { return image::DropLease(root, node); },
        std::chrono::milliseconds(config.layers_patience_ms));
    if (!dropped.ok()) {
      std::fprintf(stderr, "dsec: the lease of layers stays (`dsec layer forget %s`): %s\n",
                   config.node_id.c_str(), dropped.error().ToString().c_str());
    }
    return {};
  };
  auto done = purge();
  return done.ok() ? 0 : Fail(done.error());
}

}  // namespace dsec::up

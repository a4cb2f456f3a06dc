// SPDX-License-Identifier: Apache-2.0
#include "up/up.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>

#include "apiserver/api_server.h"
#include "base/log.h"
#include "image/node_lease.h"
#include "image/root_calls.h"
#include "runtime/shards.h"
#include "up/control.h"
#include "up/node.h"
#include "up/node_parts.h"
#include "up/process.h"

namespace dsec::up {
namespace {

using runtime::Deadline;
using std::chrono::seconds;

const std::vector<ConfigFlags::Override> kOverrides = {
    {"--node-id", &config::NodeConfig::node_id},
    {"--listen", &config::NodeConfig::listen},
    {"--state-dir", &config::NodeConfig::state_dir},
    {"--run-dir", &config::NodeConfig::run_dir},
    {"--layers", &config::NodeConfig::layers_dir},
    {"--fn-types", &config::NodeConfig::fn_types_dir},
};

runtime::Task<void> StopAll(NodeParts* parts, apiserver::ApiServer* server, Control* control,
                            bool stop_sandboxes) {
  // First: the requests of calls that wait would hold the server up.
  (void)co_await parts->StopCalls(stop_sandboxes);
  const Deadline deadline = Deadline::After(seconds(15));
  auto closed = co_await server->Stop(deadline);
  if (!closed.ok()) log::Warn("node.stop", {{"error", closed.error()}});
  auto stopped = co_await parts->StopEdge(deadline);
  (void)co_await control->Stop();
  co_return stopped;
}

// Runs until a signal. What is declared first ends last.
Result<void> Serve(const config::NodeConfig& config, bool stop_sandboxes, int signals) {
  DSEC_TRY(const os::UniqueFd lock, LockState(config.state_dir));
  DSEC_TRY(const std::string key, LoadApiKey(config.state_dir));
  if (auto raised = RaiseOpenFiles(); !raised.ok())
    log::Warn("node.rlimit", {{"error", raised.error()}});
  std::unique_ptr<NodeParts> parts;
  auto shards = std::make_unique<runtime::Shards>(ShardCount(config));
  DSEC_TRY(auto control, Control::Open(config, key, *shards));
  auto opened = NodeParts::Open(config, *shards, &control->quota());
  if (!opened.ok()) {
    control->Close(*shards);
    return std::move(opened).error();
  }
  parts = *std::move(opened);
  control->Tell(&parts->edge());
  const auto end_shards = [&] {
    control->Close(*shards);
    shards->Stop();
    parts->LetGo();
    control->Tell(nullptr);
    control.reset();
    shards.reset();
  };
  if (auto started = parts->Start(config); !started.ok()) {
    end_shards();
    return started;
  }
  control->Settle(*shards);
  apiserver::ApiServerOptions options;
  options.listen = {config.listen};
  options.api_key = key;
  options.fn = &parts->fn();
  options.iam = &control->directory();
  options.audit = &control->audit();
  options.quota = &control->quota();
  options.fn_max_cpu_ms = config.fn_max_wall_ms;
  options.default_exec_timeout = std::chrono::milliseconds(config.default_exec_timeout_ms);
  auto server = apiserver::ApiServer::Start(*shards, parts->edge(), parts->catalog(), options);
  if (!server.ok()) {
    end_shards();
    return std::move(server).error();
  }
  std::printf("dsec is ready at %s\n", (*server)->addresses().front().c_str());
  std::fflush(stdout);
  NotifyReady();
  AwaitSignal(signals);
  auto stopped = runtime::BlockOn(
      shards->at(0), StopAll(parts.get(), server->get(), control.get(), stop_sandboxes));
  server->reset();  // posts to the shards once more
  end_shards();
  return stopped;
}

}  // namespace

int UpMain(int argc, char** argv) {
  bool stop_sandboxes = false;
  Daemon daemon;
  daemon.command = "dsec up";
  daemon.description = "Runs apiserver and edge of this machine";
  daemon.overrides = kOverrides;
  daemon.add_flags = [&](CLI::App& app) {
    app.add_flag("--stop-sandboxes", stop_sandboxes, "End all sandboxes at a graceful stop");
  };
  daemon.serve = [&](const config::NodeConfig& config, int signals) {
    return Serve(config, stop_sandboxes, signals);
  };
  return RunDaemon(daemon, argc, argv);
}

int PurgeMain(int argc, char** argv) {
  ConfigFlags flags(kOverrides);
  CLI::App app("Ends and removes everything of this node, whatever its records say", "dsec purge");
  flags.AddTo(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  const auto purge = [&]() -> Result<void> {
    DSEC_TRY(const config::NodeConfig config, flags.Load());
    log::Configure(LogOptionsOf(config));
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
    for (const char* name : {"edge.db", "edge.db-wal", "edge.db-shm", "epoch", "fn_artifacts",
                             "layers_cache", "layers_data"}) {
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

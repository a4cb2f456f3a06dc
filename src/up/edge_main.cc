// SPDX-License-Identifier: Apache-2.0
// `dsec edge`: the node agent of a cluster.
#include <fcntl.h>

#include <cstdio>
#include <optional>

#include "base/log.h"
#include "cluster/edge_server.h"
#include "cluster/epoch_gate.h"
#include "cluster/member.h"
#include "cluster/node_record.h"
#include "os/file.h"
#include "placement/snapshot.h"
#include "rpc/server.h"
#include "runtime/shards.h"
#include "up/control.h"
#include "up/node.h"
#include "up/node_parts.h"
#include "up/process.h"
#include "up/up.h"

namespace dsec::up {
namespace {

using runtime::Deadline;
using runtime::Task;
using std::chrono::seconds;

constexpr seconds kJoinTime{60};
constexpr seconds kResumeTime{300};

Result<std::string> BootId() {
  DSEC_TRY(std::string text, os::ReadFile(AT_FDCWD, "/proc/sys/kernel/random/boot_id", 128));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// What the settings say about the node.
Result<v1::NodeRecord> RecordOf(const config::NodeConfig& config) {
  v1::NodeRecord record;
  record.set_node_id(config.node_id);
  record.set_pool(config.node_pool);
  record.set_build(DSEC_VERSION);
  record.set_backends(placement::kContainer);
  for (const std::string& item : config::SplitList(config.node_labels)) {
    const size_t equals = item.find('=');
    if (equals == std::string::npos) {
      return Error(Code::kInvalidArgument, "config.value",
                   fmt::format("node_labels: {} is not KEY=VALUE", item))
          .WithField("node_labels");
    }
    (*record.mutable_labels())[item.substr(0, equals)] = item.substr(equals + 1);
  }
  DSEC_TRY(std::string boot_id, BootId());
  record.set_boot_id(std::move(boot_id));
  record.set_address(config.cluster_address.empty() ? config.cluster_listen
                                                    : config.cluster_address);
  record.set_epoch(1);
  record.set_state(v1::NODE_JOINED);
  // The rules of what is announced, before anything is started.
  DSEC_TRY_VOID(cluster::CheckNodeRecord(record));
  return record;
}

// The parts that speak to other daemons; on shard 0.
struct Links {
  std::unique_ptr<cluster::Member> member;
  std::unique_ptr<cluster::FencingGate> gate;
  std::unique_ptr<cluster::EdgeServer> served;
  std::unique_ptr<rpc::Server> server;
  std::string address;  // where it listens
};

// With what the edge finds out about itself.
Task<v1::NodeRecord> Describe(edge::Edge* edge, std::shared_ptr<const v1::NodeRecord> base) {
  v1::NodeRecord record = *base;
  auto info = co_await edge->Node(Deadline::After(seconds(10)));
  if (!info.ok()) co_return std::move(info).error();
  record.set_capacity(info->capacity());
  record.set_memory_total_bytes(info->memory_total_bytes());
  *record.mutable_capabilities() = info->capabilities();
  co_return record;
}

Task<void> Connect(Links* links, const config::NodeConfig* config, runtime::Executor home,
                   edge::Edge* edge, std::shared_ptr<v1::NodeRecord> record) {
  cluster::MemberOptions options;
  options.folder = config->state_dir + "/tls";
  options.role = "edge";
  options.id = config->node_id;
  options.apiservers = config::SplitList(config->apiservers);
  options.join_token = config->join_token;
  auto member = co_await cluster::Member::Open(
      home, std::move(options), [edge, record] { return Describe(edge, record); },
      Deadline::After(kJoinTime));
  if (!member.ok()) co_return std::move(member).error();
  links->member = *std::move(member);
  auto resumed = co_await links->gate->Resume(Deadline::After(kResumeTime));
  // It serves nobody until that has succeeded; each call tries again.
  if (!resumed.ok()) log::Error("edge.fencing_failed", {{"error", resumed.error()}});
  links->served = std::make_unique<cluster::EdgeServer>(*edge, *links->gate);
  links->server = std::make_unique<rpc::Server>(home, cluster::EdgeServerOptions());
  links->served->Register(*links->server);
  DSEC_CO_TRY(const cluster::HostPort place,
              cluster::ParseHostPort(config->cluster_listen, "cluster_listen"));
  DSEC_CO_TRY(const uint16_t port,
              links->server->ListenTls(place.host, place.port, links->member->holder(),
                                       {.roles = {"apiserver", "watcher"}}));
  const bool six = place.host.find(':') != std::string::npos;
  links->address = fmt::format("{}{}{}:{}", six ? "[" : "", place.host, six ? "]" : "", port);
  if (config->cluster_address.empty()) record->set_address(links->address);
  links->member->Start(links->gate.get());
  co_return Ok();
}

Task<void> Disconnect(Links* links, StopLimit* limit) {
  limit->Step("member");
  if (links->member != nullptr) co_await links->member->Stop();
  limit->Step("server");
  if (links->server != nullptr) {
    // Followers never end by themselves; their clients attach again at the next start.
    co_await links->server->Stop(Deadline::After(seconds(1)));
    limit->Step("packs");
    co_await links->served->Stop();
  }
  limit->Step("fence");
  if (links->gate != nullptr) co_await links->gate->Stop();
  co_return Ok();
}

Task<void> StopAll(Links* links, NodeParts* parts, Control* control, bool stop_sandboxes,
                   StopLimit* limit) {
  limit->Step("calls");
  (void)co_await parts->StopCalls(stop_sandboxes);
  (void)co_await Disconnect(links, limit);
  limit->Step("edge");
  auto stopped = co_await parts->StopEdge(Deadline::After(seconds(15)));
  limit->Step("control");
  if (control != nullptr) (void)co_await control->Stop();
  limit->Step("shards");
  co_return stopped;
}

// Runs until a signal. What is declared first ends last.
Result<void> Serve(const config::NodeConfig& config, bool stop_sandboxes, int signals) {
  DSEC_TRY(auto described, RecordOf(config));
  const auto record = std::make_shared<v1::NodeRecord>(std::move(described));
  DSEC_TRY(const os::UniqueFd lock, LockState(config.state_dir));
  if (auto raised = RaiseOpenFiles(); !raised.ok()) {
    log::Warn("node.rlimit", {{"error", raised.error()}});
  }
  std::optional<StopLimit> limit;  // once the end has begun; until all of this is gone
  std::unique_ptr<NodeParts> parts;
  auto shards = std::make_unique<runtime::Shards>(ShardCount(config));
  std::unique_ptr<Control> control;
  if (config.etcd.empty()) {
    log::Warn("node.no_quotas", {{"why", "the key etcd is empty"}});
  } else {
    DSEC_TRY(control, Control::OpenForEdge(config, *shards));
  }
  auto opened = NodeParts::Open(config, *shards, control ? &control->quota() : nullptr);
  if (!opened.ok()) {
    if (control) control->Close(*shards);
    return std::move(opened).error();
  }
  parts = *std::move(opened);
  edge::Edge* const edge = &parts->edge();
  if (control) control->Tell(edge);
  Links links;
  const auto end_shards = [&] {
    if (control) control->Close(*shards);
    shards->Stop();
    links = {};
    parts->LetGo();
    if (control) control->Tell(nullptr);
    control.reset();
    shards.reset();
  };
  // Before the sandboxes of a fence that was interrupted are adopted: a damaged file stops here.
  auto gate = cluster::FencingGate::Open(config.state_dir + "/epoch", shards->at(0),
                                         [edge](std::string message, Deadline deadline) {
                                           return edge->Fence(std::move(message), deadline);
                                         });
  Result<void> started = gate.ok() ? parts->Start(config) : Result<void>(gate.error());
  if (started.ok()) {
    links.gate = *std::move(gate);
    if (control) control->Settle(*shards);
    started =
        runtime::BlockOn(shards->at(0), Connect(&links, &config, shards->at(0), edge, record));
  }
  if (!started.ok()) {
    limit.emplace(kStopTime);
    (void)runtime::BlockOn(shards->at(0), Disconnect(&links, &*limit));
    end_shards();
    return started;
  }
  std::printf("dsec edge %s is ready at %s\n", config.node_id.c_str(), links.address.c_str());
  std::fflush(stdout);
  NotifyReady();
  AwaitSignal(signals);
  limit.emplace(stop_sandboxes ? 2 * kStopTime : kStopTime);
  auto stopped = runtime::BlockOn(
      shards->at(0), StopAll(&links, parts.get(), control.get(), stop_sandboxes, &*limit));
  end_shards();
  return stopped;
}

}  // namespace

int EdgeMain(int argc, char** argv) {
  bool stop_sandboxes = false;
  Daemon daemon;
  daemon.command = "dsec edge";
  daemon.description = "Runs sandboxes on this machine for the apiservers of a cluster";
  daemon.overrides = {
      {"--node-id", &config::NodeConfig::node_id},
      {"--cluster-listen", &config::NodeConfig::cluster_listen},
      {"--apiservers", &config::NodeConfig::apiservers},
      {"--join-token", &config::NodeConfig::join_token},
      {"--state-dir", &config::NodeConfig::state_dir},
      {"--run-dir", &config::NodeConfig::run_dir},
      {"--layers", &config::NodeConfig::layers_dir},
      {"--fn-types", &config::NodeConfig::fn_types_dir},
  };
  daemon.add_flags = [&](CLI::App& app) {
    app.add_flag("--stop-sandboxes", stop_sandboxes, "End all sandboxes at a graceful stop");
  };
  daemon.serve = [&](const config::NodeConfig& config, int signals) {
    return Serve(config, stop_sandboxes, signals);
  };
  return RunDaemon(daemon, argc, argv);
}

}  // namespace dsec::up

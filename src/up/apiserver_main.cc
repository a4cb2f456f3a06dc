// SPDX-License-Identifier: Apache-2.0
// `dsec apiserver`: the HTTP API of a cluster.
#include <cstdio>
#include <optional>

#include "apiserver/api_server.h"
#include "base/log.h"
#include "ca/key_files.h"
#include "cluster/membership.h"
#include "cluster/node_record.h"
#include "image/shared_catalog.h"
#include "rpc/server.h"
#include "runtime/blocking_pool.h"
#include "runtime/periodic.h"
#include "runtime/shards.h"
#include "up/cluster_edge.h"
#include "up/control.h"
#include "up/layer_catalog.h"
#include "up/node.h"
#include "up/process.h"
#include "up/up.h"

namespace dsec::up {
namespace {

using runtime::Deadline;
using runtime::Task;
using std::chrono::seconds;

constexpr seconds kLookPeriod{60};

// The files of the CA as they are now, and this apiserver's own name, which it certifies itself.
// Looks at both each minute: the CA may have been replaced, and certificates end. On shard 0.
class OwnName {
 public:
  OwnName(std::string folder, std::string id, store::Store& store)
      : folder_(std::move(folder)), id_(std::move(id)), store_(store), disk_("ca", 1, 4) {}

  Task<void> Open(runtime::Executor home) {
    auto looked = co_await Look();
    if (!looked.ok()) co_return std::move(looked).error();
    periodic_ = std::make_unique<runtime::Periodic>(
        // NOLINTNEXTLINE(cppcoreguidelines-avoid-capturing-lambda-coroutines): periodic_ keeps it
        home, "ca", kLookPeriod, [this]() -> boost::asio::awaitable<void> {
          auto again = co_await Look();
          if (!again.ok()) log::Error("cluster.ca_not_read", {{"error", again.error()}});
        });
    co_return Ok();
  }
  boost::asio::awaitable<void> Stop() {
    if (periodic_ != nullptr) co_await periodic_->Join();
  }
  const cluster::Issuer& issuer() const { return *issuer_; }
  std::shared_ptr<const rpc::TlsHolder> holder() const { return holder_; }

 private:
  Task<void> Look() {
    auto read = [folder = folder_] { return ca::LoadAuthority(folder); };
    auto files = co_await disk_.Run(std::move(read), Deadline::After(seconds(20)));
    if (!files.ok()) co_return std::move(files).error();
    const std::string seen = files->authority.certificate + files->trusted;
    const bool changed = seen != seen_;
    const int64_t now_ms = UnixMillis(Clock::System().Wall());
    if (!changed && now_ms < renew_ms_) co_return Ok();
    DSEC_CO_TRY(const auto authority, ca::Authority::Load(files->authority));
    const rpc::TlsName name{authority->cluster(), "apiserver", id_};
    DSEC_CO_TRY(const ca::KeyAndRequest made, ca::MakeRequest(name));
    DSEC_CO_TRY(const ca::SigningRequest request, ca::ParseRequest(made.request));
    v1::CertificateRecord record;
    record.set_name(name.Uri());
    record.set_principal(name.Uri());
    record.set_ends_unix_ms(UnixMillis(Clock::System().Wall() + ca::kCertificateLife));
    const Deadline deadline = Deadline::After(seconds(20));
    auto serial = co_await ca::NewSerial(store_, std::move(record), Clock::System(), deadline);
    if (!serial.ok()) co_return std::move(serial).error();
    std::vector<store::Condition> conditions = {serial->condition};
    std::vector<store::Write> writes = {serial->write};
    auto noted = co_await store_.Commit(std::move(conditions), std::move(writes), deadline);
    if (!noted.ok()) {
      (void)co_await store_.Revoke(serial->lease, Deadline::After(seconds(5)));
      co_return std::move(noted).error();
    }
    DSEC_CO_TRY(const ca::Issued issued,
                authority->Issue(request, serial->serial, Clock::System().Wall()));
    DSEC_CO_TRY(const ca::CertificateView view, ca::LookAt(issued.certificate));
    DSEC_CO_TRY(auto context, rpc::TlsContext::Create({issued.certificate, made.key, files->trusted,
                                                       authority->cluster()}));
    cluster::Issuer::State state{authority, files->trusted};
    if (issuer_ == nullptr) {
      issuer_ = std::make_unique<cluster::Issuer>(std::move(state));
      holder_ = std::make_shared<rpc::TlsHolder>(std::move(context));
    } else {
      issuer_->Replace(std::move(state));
      holder_->Replace(std::move(context));
    }
    seen_ = seen;
    renew_ms_ = view.RenewUnixMs();
    log::Info("cluster.certificate",
              {{"name", name.Uri()}, {"ca", authority->fingerprint()}, {"sha256", issued.sha256}});
    co_return Ok();
  }

  const std::string folder_;
  const std::string id_;
  store::Store& store_;
  std::string seen_;
  int64_t renew_ms_ = 0;
  std::unique_ptr<cluster::Issuer> issuer_;
  std::shared_ptr<rpc::TlsHolder> holder_;
  std::unique_ptr<runtime::Periodic> periodic_;
  runtime::BlockingPool disk_;
};

struct Links {
  std::unique_ptr<OwnName> name;
  std::unique_ptr<cluster::Membership> membership;
  std::unique_ptr<rpc::Server> server;
  std::unique_ptr<ClusterEdges> edges;
  std::string address;
};

Task<void> Connect(Links* links, const config::NodeConfig* config, runtime::Shards* shards,
                   store::Store* store) {
  links->name = std::make_unique<OwnName>(config->ca_dir, config->node_id, *store);
  auto named = co_await links->name->Open(shards->at(0));
  if (!named.ok()) co_return std::move(named).error();
  links->membership =
      std::make_unique<cluster::Membership>(*store, links->name->issuer(), Clock::System());
  links->server = std::make_unique<rpc::Server>(shards->at(0));
  links->membership->Register(*links->server);
  DSEC_CO_TRY(const cluster::HostPort place,
              cluster::ParseHostPort(config->cluster_listen, "cluster_listen"));
  // Who joins has no certificate yet; each method says whom it serves.
  DSEC_CO_TRY(
      const uint16_t port,
      links->server->ListenTls(place.host, place.port, links->name->holder(),
                               {.roles = {"edge", "watcher", "operator"}, .anonymous = true}));
  links->address = fmt::format("{}:{}", place.host, port);
  auto edges = co_await OpenClusterEdges(*store, *shards, links->name->holder());
  if (!edges.ok()) co_return std::move(edges).error();
  links->edges = *std::move(edges);
  co_return Ok();
}

Task<void> Disconnect(Links* links, StopLimit* limit) {
  limit->Step("server");
  if (links->server != nullptr) co_await links->server->Stop(Deadline::After(seconds(2)));
  limit->Step("edges");
  if (links->edges != nullptr) (void)co_await links->edges->Stop();
  limit->Step("name");
  if (links->name != nullptr) co_await links->name->Stop();
  co_return Ok();
}

Task<void> StopAll(Links* links, apiserver::ApiServer* server, Control* control, StopLimit* limit) {
  limit->Step("http");
  auto closed = co_await server->Stop(Deadline::After(seconds(15)));
  (void)co_await Disconnect(links, limit);
  limit->Step("control");
  (void)co_await control->Stop();
  limit->Step("shards");
  co_return closed;
}

// Runs until a signal. What is declared first ends last.
Result<void> Serve(const config::NodeConfig& config, int signals) {
  DSEC_TRY(const os::UniqueFd lock, LockState(config.state_dir));
  DSEC_TRY(const std::string key, LoadApiKey(config.state_dir));
  if (auto raised = RaiseOpenFiles(); !raised.ok()) {
    log::Warn("node.rlimit", {{"error", raised.error()}});
  }
  std::optional<StopLimit> limit;  // once the end has begun; until all of this is gone
  // The root of the layers is shared with the nodes; it may hang.
  image::SharedCatalog shared(LayersDir(config),
                              std::chrono::milliseconds(config.layers_patience_ms));
  auto shards = std::make_unique<runtime::Shards>(ShardCount(config));
  LayerCatalog catalog(shared);
  DSEC_TRY(auto control, Control::Open(config, key, *shards));
  Links links;
  const auto end_shards = [&] {
    control->Close(*shards);
    shards->Stop();
    links = {};
    control.reset();
  };
  auto connected =
      runtime::BlockOn(shards->at(0), Connect(&links, &config, shards.get(), &control->store()));
  if (!connected.ok()) {
    limit.emplace(kStopTime);
    (void)runtime::BlockOn(shards->at(0), Disconnect(&links, &*limit));
    end_shards();
    return connected;
  }
  apiserver::ApiServerOptions options;
  options.listen = {config.listen};
  options.api_key = key;
  options.iam = &control->directory();
  options.audit = &control->audit();
  options.quota = &control->quota();
  options.default_exec_timeout = std::chrono::milliseconds(config.default_exec_timeout_ms);
  auto server = apiserver::ApiServer::Start(*shards, links.edges->api(), catalog, options);
  if (!server.ok()) {
    limit.emplace(kStopTime);
    (void)runtime::BlockOn(shards->at(0), Disconnect(&links, &*limit));
    end_shards();
    return std::move(server).error();
  }
  std::printf("dsec apiserver is ready at %s and %s\n", (*server)->addresses().front().c_str(),
              links.address.c_str());
  std::fflush(stdout);
  NotifyReady();
  AwaitSignal(signals);
  limit.emplace(kStopTime);
  auto stopped =
      runtime::BlockOn(shards->at(0), StopAll(&links, server->get(), control.get(), &*limit));
  server->reset();  // posts to the shards once more
  end_shards();
  return stopped;
}

}  // namespace

int ApiserverMain(int argc, char** argv) {
  Daemon daemon;
  daemon.command = "dsec apiserver";
  daemon.description = "Serves the HTTP API of a cluster; runs no sandboxes itself";
  daemon.needs_root = false;
  daemon.overrides = {
      {"--node-id", &config::NodeConfig::node_id},
      {"--listen", &config::NodeConfig::listen},
      {"--cluster-listen", &config::NodeConfig::cluster_listen},
      {"--etcd", &config::NodeConfig::etcd},
      {"--ca-dir", &config::NodeConfig::ca_dir},
      {"--state-dir", &config::NodeConfig::state_dir},
      {"--layers", &config::NodeConfig::layers_dir},
  };
  daemon.serve = [](const config::NodeConfig& config, int signals) {
    return Serve(config, signals);
  };
  return RunDaemon(daemon, argc, argv);
}

}  // namespace dsec::up

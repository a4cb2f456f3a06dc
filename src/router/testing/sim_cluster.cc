// SPDX-License-Identifier: Apache-2.0
#include "router/testing/sim_cluster.h"

#include <utility>

#include "base/check.h"
#include "cluster/node_record.h"

namespace dsec::router::testing {

using runtime::Deadline;
using runtime::Task;
using std::chrono::seconds;

namespace {

// A watcher of another process as an apiserver reaches it.
class WayToWatcher final : public watcher::SnapshotApi {
 public:
  explicit WayToWatcher(std::function<watcher::Watcher*()> find) : find_(std::move(find)) {}
  Task<v1::SnapshotReply> Snapshot(v1::SnapshotRequest request, Deadline deadline) override {
    watcher::Watcher* const found = find_();
    if (found == nullptr)
      co_return Error(Code::kUnavailable, "rpc.connect", "no such watcher any more");
    // A process that is stopped or dies on the way does not answer: the wait is on this side.
    auto delivery = std::make_shared<runtime::internal::Delivery<v1::SnapshotReply>>(
        co_await boost::asio::this_coro::executor);
    runtime::internal::StartDetached(delivery->home,
                                     runtime::internal::RunInto<v1::SnapshotReply>(
                                         found->Snapshot(std::move(request), deadline), delivery));
    auto waited = co_await delivery->done.Wait(deadline);
    if (!waited.ok()) co_return std::move(waited).error();
    co_return *std::move(delivery->value);
  }

 private:
  const std::function<watcher::Watcher*()> find_;
};

}  // namespace

SimCluster::SimCluster(SimClusterOptions options)
    : options_(std::move(options)),
      world_(options_.step),
      main_(world_.Add()),
      machines_(world_.Add()),
      store_({.latency = options_.store_latency}) {
  for (size_t i = 0; i < options_.nodes; ++i) {
    SimNodeOptions one = options_.node;
    one.id = NodeIdOf(i);
    one.seed = options_.seed * 1'000'003 + i;
    if (options_.quota) one.store = &store_;
    nodes_.push_back(std::make_unique<SimNode>(std::move(one), world_.at(machines_)));
    by_id_.emplace(nodes_.back()->id(), nodes_.back().get());
    v1::NodeRecord record;
    record.set_node_id(NodeIdOf(i));
    record.set_address("127.0.0.1:1");
    record.set_epoch(1);
    record.set_state(v1::NODE_JOINED);
    record.set_backends(placement::kContainer);
    record.set_capacity(options_.node.capacity);
    PutRecord(record);
  }
  for (size_t i = 0; i < options_.watchers; ++i) AddWatcher();
  for (size_t i = 0; i < options_.apiservers; ++i) AddApi();
}

SimCluster::~SimCluster() {
  for (size_t i = 0; i < apis_.size(); ++i) KillApi(i);
  for (size_t i = 0; i < watches_.size(); ++i) KillWatcher(i);
  world_.Kill(main_);
  world_.Kill(machines_);
}

std::string SimCluster::NodeIdOf(size_t index) { return fmt::format("n{:05}", index); }

std::shared_ptr<edge::EdgeApi> SimCluster::WayTo(const v1::NodeRecord& record) {
  return by_id_.at(record.node_id())->Way(record.epoch());
}

void SimCluster::PutRecord(const v1::NodeRecord& record) {
  const auto value = cluster::EncodeNodeRecord(record);
  DSEC_CHECK(value.ok());
  const auto put = world_.Await(main_, store_.Put(cluster::NodeKey(record.node_id()), *value,
                                                  std::nullopt, 0, Deadline::Never()));
  DSEC_CHECK(put.ok());
}

v1::NodeRecord SimCluster::Record(const std::string& id) {
  const auto entry = world_.Await(main_, store_.Get(cluster::NodeKey(id), Deadline::Never()));
  DSEC_CHECK(entry.ok() && entry->has_value());
  return *cluster::ParseNodeRecord((*entry)->value);
}

void SimCluster::Rejoin(const std::string& id) {
  v1::NodeRecord record = Record(id);
  DSEC_CHECK(record.state() == v1::NODE_DEAD);
  // It ends what it had before it announces itself.
  auto info = world_.Await(main_, WayTo(record)->Node(Deadline::After(seconds(5))));
  DSEC_CHECK(info.ok());
  record.set_state(v1::NODE_JOINED);
  PutRecord(record);
}

size_t SimCluster::AddWatcher() {
  auto one = std::make_unique<Watch>();
  one->process = world_.Add();
  one->store = std::make_unique<iam::testing::AwayStore>(store_);
  one->probe =
      std::make_unique<EdgeProbe>([this](const v1::NodeRecord& record) { return WayTo(record); });
  watcher::WatcherOptions options;
  options.id = fmt::format("w{}", watches_.size());
  options.address = "127.0.0.1:2";
  options.metrics = &metrics_;
  if (options_.change_watcher) options_.change_watcher(options);
  one->watcher = std::make_unique<watcher::Watcher>(*one->store, world_.at(one->process),
                                                    *one->probe, std::move(options));
  one->watcher->Start();
  watches_.push_back(std::move(one));
  return watches_.size() - 1;
}

size_t SimCluster::AddApi() {
  const size_t index = apis_.size();
  auto one = std::make_unique<Api>();
  one->process = world_.Add();
  one->store = std::make_unique<iam::testing::AwayStore>(store_);
  ClusterOptions options;
  options.instance = fmt::format("a{}", index);
  options.cluster = "sim";
  options.edge_of = [this](const v1::NodeRecord& record) { return WayTo(record); };
  options.watcher_of =
      [this](const v1::WatcherTestimony& testimony) -> std::shared_ptr<watcher::SnapshotApi> {
    const size_t which = std::strtoul(testimony.watcher().c_str() + 1, nullptr, 10);
    return std::make_shared<WayToWatcher>([this, which]() -> watcher::Watcher* {
      return which < watches_.size() ? watches_[which]->watcher.get() : nullptr;
    });
  };
  options.load.seed = options_.seed * 7'919 + index + 1;
  options.load.metrics = &metrics_;
  options.requests.metrics = &metrics_;
  options.metrics = &metrics_;
  if (options_.change) options_.change(options);
  one->edge =
      std::make_unique<ClusterEdge>(*one->store, world_.at(one->process), std::move(options));
  one->edge->Start();
  apis_.push_back(std::move(one));
  return index;
}

void SimCluster::KillApi(size_t index) {
  world_.Kill(apis_[index]->process);
  apis_[index]->edge.reset();
}

void SimCluster::KillWatcher(size_t index) {
  world_.Kill(watches_[index]->process);
  watches_[index]->watcher.reset();
}

bool SimCluster::RunUntilReady() {
  return world_.RunUntil(
      [this] {
        for (const auto& api : apis_) {
          if (api->edge == nullptr) continue;
          if (api->edge->load().without_watcher() && options_.watchers > 0) return false;
          if (api->edge->load().Now()->size() < nodes_.size()) return false;
          if (api->edge->load().Now()->instances() < apis_.size()) return false;
          if (options_.watchers == 0) continue;
          for (const auto& status : api->edge->load().Statuses()) {
            if (!status.measured() && status.state() != v1::NODE_DEAD) return false;
          }
        }
        return true;
      },
      seconds(30));
}

v1::CreateRequest SimCluster::Request(const std::string& request_id, const std::string& project) {
  v1::CreateRequest request;
  request.set_request_id(request_id);
  request.set_project(project);
  request.mutable_spec()->set_backend(v1::BACKEND_CONTAINER);
  request.mutable_spec()->set_base("base:1");
  return request;
}

Task<v1::SandboxView> SimCluster::CreateAndDeliver(edge::EdgeApi& edge, v1::CreateRequest request,
                                                   Deadline deadline) {
  auto made = co_await edge.Create(std::move(request), deadline);
  if (!made.ok()) co_return std::move(made).error();
  if (made->claim) made->claim->Delivered();
  co_return std::move(made->view);
}

Result<v1::SandboxView> SimCluster::Create(size_t api, v1::CreateRequest request,
                                           std::chrono::nanoseconds time) {
  Api& one = *apis_.at(api);
  return world_.Await(one.process,
                      CreateAndDeliver(*one.edge, std::move(request), Deadline::After(time)));
}

}  // namespace dsec::router::testing

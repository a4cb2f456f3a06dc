// SPDX-License-Identifier: Apache-2.0
// cluster_rate: the figure `apiserver_rate` as a JSON line (bench/README.md says what it is), in
// real time: one apiserver's way of a create (placement, two records in a store that
// takes a millisecond, the call) over 160 simulated nodes, all on one thread. Without HTTP and
// without a watcher: what that would say is taken from the nodes.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "base/log.h"
#include "cluster/node_record.h"
#include "router/cluster_edge.h"
#include "router/testing/sim_node.h"
#include "runtime/shards.h"
#include "store/testing/memory_store.h"
#include "watcher/layout.h"

namespace dsec::router {
namespace {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::SimNode;

constexpr size_t kNodes = 160;
constexpr uint64_t kCapacity = 100'000;
constexpr milliseconds kCreate{20};
constexpr std::chrono::microseconds kRtt{500};

struct Tally {
  std::vector<double> ms;
  size_t failed = 0;
  size_t open = 0;
};

// Says of the nodes what a watcher would.
class Figures final : public watcher::SnapshotApi {
 public:
  explicit Figures(const std::vector<std::unique_ptr<SimNode>>& nodes) : nodes_(nodes) {}
  Task<v1::SnapshotReply> Snapshot(v1::SnapshotRequest request, Deadline) override {
    v1::SnapshotReply reply;
    reply.set_run("1");
    reply.set_reset(request.run().empty());
    reply.set_version(request.after_version() + 1);
    for (const auto& node : nodes_) {
      v1::NodeStatus& status = *reply.add_nodes();
      status.set_node_id(node->id());
      status.set_epoch(1);
      status.set_state(v1::NODE_JOINED);
      status.set_measured(true);
      status.set_live(node->live());
      status.set_capacity(kCapacity);
    }
    co_return reply;
  }

 private:
  const std::vector<std::unique_ptr<SimNode>>& nodes_;
};

class Bench {
 public:
  Bench() : store_({.latency = milliseconds(1)}) {
    for (size_t i = 0; i < kNodes; ++i) {
      testing::SimNodeOptions options;
      options.id = fmt::format("n{:03}", i);
      options.capacity = kCapacity;
      options.rtt = kRtt;
      options.create_time = kCreate;
      options.create_jitter = milliseconds(0);
      nodes_.push_back(std::make_unique<SimNode>(std::move(options), shards_->at(0)));
      by_id_[nodes_.back()->id()] = nodes_.back().get();
      v1::NodeRecord record;
      record.set_node_id(nodes_.back()->id());
      record.set_address("127.0.0.1:1");
      record.set_epoch(1);
      record.set_state(v1::NODE_JOINED);
      record.set_backends(placement::kContainer);
      record.set_capacity(kCapacity);
      const auto put = runtime::BlockOn(
          shards_->at(0), store_.Put(cluster::NodeKey(record.node_id()),
                                     *cluster::EncodeNodeRecord(record), 0, 0, Deadline::Never()));
      if (!put.ok()) std::abort();
    }
    const auto edge_of = [this](const v1::NodeRecord& record) {
      return by_id_.at(record.node_id())->Way(record.epoch());
    };
    figures_ = std::make_shared<Figures>(nodes_);
    v1::WatcherTestimony testimony;
    testimony.set_watcher("w0");
    const auto put = runtime::BlockOn(
        shards_->at(0), store_.Put(watcher::layout::Seen("w0"), testimony.SerializeAsString(), 0, 0,
                                   Deadline::Never()));
    if (!put.ok()) std::abort();
    ClusterOptions options;
    options.instance = "a0";
    options.cluster = "bench";
    options.edge_of = edge_of;
    options.watcher_of = [this](const v1::WatcherTestimony&) { return figures_; };
    edge_ = std::make_unique<ClusterEdge>(store_, shards_->at(0), std::move(options));
    runtime::internal::StartDetached(shards_->at(0), StartAll());
  }
  // What is under way ends before what it uses.
  ~Bench() { shards_.reset(); }

  // So many creates a second, evenly, for so long.
  Tally Open(double rate, milliseconds time) {
    return *runtime::BlockOn(shards_->at(0), RunOpen(rate, time));
  }
  bool Ready() {
    for (int i = 0; i < 200 && edge_->load().without_watcher(); ++i)
      (void)runtime::BlockOn(shards_->at(0),
                             runtime::SleepUntil(Deadline::After(milliseconds(50))));
    (void)runtime::BlockOn(shards_->at(0), runtime::SleepUntil(Deadline::After(seconds(2))));
    return !edge_->load().without_watcher();
  }

 private:
  boost::asio::awaitable<void> StartAll() {
    edge_->Start();
    co_return;
  }
  boost::asio::awaitable<void> One(std::shared_ptr<Tally> tally) {
    const auto begun = std::chrono::steady_clock::now();
    v1::CreateRequest request;
    request.set_request_id(fmt::format("r{}", next_++));
    request.set_project("root/p");
    request.mutable_spec()->set_base("base:1");
    auto made = co_await edge_->Create(std::move(request), Deadline::After(seconds(30)));
    if (made.ok() && made->claim) made->claim->Delivered();
    tally->failed += made.ok() ? 0 : 1;
    tally->ms.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun)
            .count());
    --tally->open;
  }
  Task<Tally> RunOpen(double rate, milliseconds time) {
    auto tally = std::make_shared<Tally>();
    const auto begun = std::chrono::steady_clock::now();
    uint64_t sent = 0;
    while (true) {
      const auto passed = std::chrono::steady_clock::now() - begun;
      if (passed >= time) break;
      const auto due = static_cast<uint64_t>(rate * std::chrono::duration<double>(passed).count());
      for (; sent < due; ++sent) {
        ++tally->open;
        runtime::internal::StartDetached(shards_->at(0), One(tally));
      }
      (void)co_await runtime::SleepUntil(Deadline::After(milliseconds(1)));
    }
    while (tally->open > 0) (void)co_await runtime::SleepUntil(Deadline::After(milliseconds(5)));
    co_return std::move(*tally);
  }

  std::unique_ptr<runtime::Shards> shards_ = std::make_unique<runtime::Shards>(1);
  store::testing::MemoryStore store_;
  std::vector<std::unique_ptr<SimNode>> nodes_;
  std::map<std::string, SimNode*> by_id_;
  std::shared_ptr<Figures> figures_;
  std::unique_ptr<ClusterEdge> edge_;
  uint64_t next_ = 0;
};

int Main() {
  log::Options quiet;
  quiet.level = log::Level::kError;
  log::Configure(std::move(quiet));
  constexpr seconds kTime{5};
  double best = 0;
  double p99_at_5000 = 0;
  std::string runs;
  for (const double rate : {1'000.0, 5'000.0, 7'500.0, 10'000.0, 15'000.0, 20'000.0, 30'000.0}) {
    // A new one each time: what an earlier rate has piled up is not this one's.
    Bench bench;
    if (!bench.Ready()) return 1;
    Tally tally = bench.Open(rate, kTime);
    std::sort(tally.ms.begin(), tally.ms.end());
    const double base = std::chrono::duration<double, std::milli>(kCreate).count() +
                        std::chrono::duration<double, std::milli>(kRtt).count();
    const double p50 = tally.ms[tally.ms.size() / 2] - base;
    const double p99 = tally.ms[tally.ms.size() * 99 / 100] - base;
    runs += fmt::format(
        "{}{{\"rate\":{},\"made\":{},\"failed\":{},\"added_p50_ms\":{:.1f},\"added_p99_ms\":{:.1f}}"
        "}",
        runs.empty() ? "" : ",", rate, tally.ms.size() - tally.failed, tally.failed, p50, p99);
    if (rate == 5'000.0) p99_at_5000 = p99;
    // Reached: all made, and no line that only grows.
    if (tally.failed == 0 && p99 <= 50) best = rate;
    if (tally.failed > 0 || p99 > 1'000) break;
  }
  fmt::print(
      "{{\"name\":\"apiserver_rate\",\"value\":{},\"unit\":\"creates/s\",\"baseline\":null,"
      "\"ratio\":null,\"detail\":{{\"added_p99_ms_at_5000\":{:.1f},\"nodes\":{},\"runs\":[{}]}}}}"
      "\n",
      best, p99_at_5000, kNodes, runs);
  return 0;
}

}  // namespace
}  // namespace dsec::router

int main() { return dsec::router::Main(); }

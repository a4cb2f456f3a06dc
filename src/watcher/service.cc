// SPDX-License-Identifier: Apache-2.0
#include "watcher/service.h"

#include <algorithm>
#include <utility>

#include "base/id.h"
#include "base/log.h"
#include "cluster/node_record.h"
#include "runtime/shards.h"
#include "watcher/layout.h"
#include "watcher/metrics.h"

namespace dsec::watcher {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;

namespace {

constexpr size_t kReplyNodes = 2'000;
constexpr size_t kReplyBytes = 1 << 20;
constexpr size_t kGoneKept = 10'000;
constexpr size_t kProbesOfOne = 8;

bool Probed(const v1::NodeRecord& record) { return record.state() != v1::NODE_DEAD; }

uint64_t AgeMs(MonoTime since, MonoTime now) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<milliseconds>(std::max(now, since) - since).count());
}

}  // namespace

Watcher::Watcher(store::Store& store, runtime::Executor executor, NodeProbe& probe,
                 WatcherOptions options)
    : store_(store),
      executor_(std::move(executor)),
      probe_(probe),
      options_(std::move(options)),
      run_(NewUlid(*options_.clock)),
      health_(options_.health),
      metrics_(std::make_unique<Metrics>(*options_.metrics)) {}

Watcher::~Watcher() = default;

void Watcher::Start() {
  const auto run = [this](boost::asio::awaitable<void> work) {
    running_.push_back(runtime::SpawnCancellable(gate_, executor_, std::move(work)));
  };
  run(store::Follow(store_, store::KeyRange::Prefix(std::string(cluster::kNodePrefix)), "node/",
                    [this](store::Update update) { OnNodes(std::move(update)); }));
  run(store::Follow(store_, store::KeyRange::Prefix(std::string(layout::kWatch)), "watch/",
                    [this](store::Update update) { OnWatch(std::move(update)); }));
  run(Run());
  run(Lead());
}

Task<void> Watcher::Stop() {
  stopping_ = true;
  for (const runtime::Running& one : running_) one.Cancel();
  // Nobody hears of the leader any more; what goes on by itself asks whether this one leads.
  leader_version_ = 0;
  stopped_.Set();
  news_.Set();
  // Before the wait for probes, so that another one leads meanwhile.
  Result<void> revoked = Ok();
  if (lease_ != 0)
    revoked = co_await store_.Revoke(lease_, Deadline::After(std::chrono::seconds(2)));
  co_await gate_.Close();
  co_return revoked;
}

// --- nodes ---

// NOLINTNEXTLINE(performance-unnecessary-value-param): as store::Follow gives it
void Watcher::OnNodes(store::Update update) {
  if (update.whole) {
    std::map<std::string, const store::Entry*> there;
    for (const store::Entry& entry : update.set)
      there.emplace(entry.key.substr(cluster::kNodePrefix.size()), &entry);
    std::vector<std::string> lost;
    for (const auto& [id, node] : nodes_) {
      if (!there.contains(id)) lost.push_back(id);
    }
    for (const std::string& id : lost) DropNode(id);
  }
  for (const store::Entry& entry : update.set) SetNode(entry);
  for (const std::string& key : update.removed) DropNode(key.substr(cluster::kNodePrefix.size()));
  if (!update.whole && update.set.empty() && update.removed.empty()) return;
  std::vector<std::string> probed;
  for (const auto& [id, node] : nodes_) {
    if (Probed(node->record)) probed.push_back(id);
  }
  health_.SetNodes(probed, options_.clock->Mono());
  news_.Set();
  if (!stopping_) news_.Reset();
}

void Watcher::SetNode(const store::Entry& entry) {
  const std::string id = entry.key.substr(cluster::kNodePrefix.size());
  auto record = cluster::ParseNodeRecord(entry.value);
  if (!record.ok() || record->node_id() != id) {
    log::Error("watcher.node_record", {{"node", id}, {"bytes", entry.value.size()}});
    return;
  }
  NodePtr& node = nodes_[id];
  if (node == nullptr || node->record.epoch() != record->epoch() ||
      node->record.address() != record->address()) {
    // Another life of it, or another machine: what was known of it is no longer true.
    const uint64_t changed = node == nullptr ? 0 : node->changed;
    node = std::make_shared<Node>(id);
    node->changed = changed;
  }
  if (node->version > entry.version) return;
  node->record = *std::move(record);
  node->version = entry.version;
  if (!Probed(node->record)) {
    node->suspect = false;
    if (leads() && quota_returned_.emplace(id, node->record.epoch()).second)
      runtime::Spawn(gate_, executor_, ReturnQuota(id));
  }
  Changed(*node);
}

void Watcher::DropNode(const std::string& id) {
  const auto it = nodes_.find(id);
  if (it == nodes_.end()) return;
  changes_.erase(it->second->changed);
  nodes_.erase(it);
  gone_.emplace(++version_, id);
  if (gone_.size() > kGoneKept) {
    gone_before_ = gone_.begin()->first;
    gone_.erase(gone_.begin());
  }
}

void Watcher::Changed(Node& node) {
  changes_.erase(node.changed);
  node.changed = ++version_;
  changes_.emplace(node.changed, node.record.node_id());
}

// --- probes ---

boost::asio::awaitable<void> Watcher::Run() {
  MonoTime next = std::chrono::steady_clock::now();
  while (true) {
    next = std::max(next + options_.tick, std::chrono::steady_clock::now());
    auto slept = co_await runtime::SleepUntil(Deadline::At(next));
    if (!slept.ok()) co_return;
    Tick();
  }
}

void Watcher::Tick() {
  const MonoTime now = options_.clock->Mono();
  if (!health_.Tick(now)) {
    ++awake_;
    metrics_->slept.Add();
    log::Warn("watcher.slept", {{"watcher", options_.id}});
  }
  for (const auto& [id, node] : nodes_) {
    const bool suspect =
        Probed(node->record) && health_.StateOf(id, now) == Health::State::kSuspect;
    if (suspect == node->suspect) continue;
    node->suspect = suspect;
    log::Info("watcher.node", {{"node", id}, {"suspect", suspect}});
    Changed(*node);
  }
  StartProbes(now);
  LookForDeaths(now);
  SetGauges();
  news_.Set();
  if (!stopping_) news_.Reset();
}

void Watcher::StartProbes(MonoTime now) {
  for (const auto& [id, node] : nodes_) {
    if (probing_ >= options_.probes_at_once) return;
    if (!Probed(node->record) || now < node->next_probe || node->probing >= kProbesOfOne) continue;
    // Ticks are not exact; a node is not to miss every other one for that.
    node->next_probe = now + options_.probe_every - options_.tick / 2;
    ++node->probing;
    ++probing_;
    if (!runtime::Spawn(gate_, executor_, ProbeOne(id))) {
      --node->probing;
      --probing_;
    }
  }
}

boost::asio::awaitable<void> Watcher::ProbeOne(std::string id) {
  const NodePtr node = nodes_.at(id);
  const uint64_t awake = awake_;
  const MonoTime asked = options_.clock->Mono();
  const uint64_t after = node->mirror.place();
  auto seen = co_await probe_.Probe(node->record, after, Deadline::After(options_.probe_timeout));
  --node->probing;
  --probing_;
  const auto now_there = nodes_.find(id);
  if (now_there == nodes_.end() || now_there->second != node || !Probed(node->record)) co_return;
  if (!seen.ok()) {
    const Code code = seen.error().code();
    metrics_->probe_failures.Add();
    // One that ends what it had before it serves says so.
    const bool silent = (code == Code::kUnavailable && seen.error().reason() != "edge.fencing") ||
                        code == Code::kDeadlineExceeded || code == Code::kCancelled;
    log::Debug("watcher.probe", {{"node", id}, {"error", seen.error()}});
    if (!silent && awake == awake_) health_.Heard(id, options_.clock->Mono());
    co_return;
  }
  // An answer to a question from before a sleep may be as old as that.
  if (awake == awake_) health_.Heard(id, options_.clock->Mono());
  // Older than what another probe has brought: it was only a sign of life.
  if (node->measured && asked <= node->measured_at) co_return;
  node->info = seen->info;
  node->measured = true;
  node->measured_at = asked;
  if (!node->mirror.Apply(*std::move(seen), after)) {
    metrics_->not_mirrored.Add();
    log::Warn("watcher.not_mirrored", {{"node", id}});
  }
  Changed(*node);
}

// --- what apiservers ask ---

v1::NodeStatus Watcher::StatusOf(const Node& node, MonoTime now) const {
  const v1::NodeRecord& record = node.record;
  v1::NodeStatus status;
  status.set_node_id(record.node_id());
  status.set_epoch(record.epoch());
  status.set_state(record.state());
  status.set_suspect(node.suspect);
  status.set_backends(record.backends());
  status.set_pool(record.pool());
  *status.mutable_labels() = record.labels();
  status.set_capacity(record.capacity());
  status.set_memory_total_bytes(record.memory_total_bytes());
  status.set_measured(node.measured);
  if (!node.measured) return status;
  status.set_live(node.info.live());
  if (node.info.capacity() != 0) status.set_capacity(node.info.capacity());
  if (node.info.memory_total_bytes() != 0)
    status.set_memory_total_bytes(node.info.memory_total_bytes());
  status.set_memory_available_bytes(node.info.memory_available_bytes());
  status.set_scratch_free_bytes(node.info.scratch_free_bytes());
  status.set_age_ms(AgeMs(node.measured_at, now));
  return status;
}

Task<v1::SnapshotReply> Watcher::Snapshot(v1::SnapshotRequest request, Deadline deadline) {
  return runtime::On(executor_, SnapshotHere(std::move(request), deadline));
}

Task<v1::SnapshotReply> Watcher::SnapshotHere(v1::SnapshotRequest request, Deadline deadline) {
  runtime::GatePass pass(gate_);
  if (!pass) co_return Error(Code::kUnavailable, "watcher.stopping", "this watcher is stopping");
  v1::SnapshotReply reply;
  reply.set_watcher(options_.id);
  reply.set_run(run_);
  uint64_t after = request.after_version();
  if (request.run() != run_ || after > version_ || after < gone_before_) {
    after = 0;
    reply.set_reset(true);
  }
  const Deadline until =
      deadline.Sooner(Deadline::After(milliseconds(std::min<uint64_t>(request.wait_ms(), 60'000))));
  while (version_ <= after && !until.Expired() && !stopping_) {
    auto woken = co_await news_.Wait(until);
    if (!woken.ok() && woken.error().code() == Code::kCancelled) co_return std::move(woken).error();
  }
  const MonoTime now = options_.clock->Mono();
  reply.set_leads(leads());
  size_t bytes = 0;
  auto changed = changes_.upper_bound(after);
  auto gone = gone_.upper_bound(after);
  reply.set_version(after);
  while (changed != changes_.end() || gone != gone_.end()) {
    const size_t count = static_cast<size_t>(reply.nodes_size()) + reply.gone_size();
    if (count >= kReplyNodes || bytes >= kReplyBytes) {
      reply.set_more(true);
      break;
    }
    if (gone == gone_.end() || (changed != changes_.end() && changed->first < gone->first)) {
      *reply.add_nodes() = StatusOf(*nodes_.at(changed->second), now);
      bytes += reply.nodes().rbegin()->ByteSizeLong();
      reply.set_version(changed->first);
      ++changed;
    } else {
      // One that has come again since is told after this.
      reply.add_gone(gone->second);
      reply.set_version(gone->first);
      ++gone;
    }
  }
  co_return reply;
}

Task<Watcher::Status> Watcher::GetStatus() { return runtime::On(executor_, StatusHere()); }

Task<Watcher::Status> Watcher::StatusHere() {
  Status status;
  status.leads = leads();
  status.leader = leader_name_;
  status.watchers = Registered();
  status.deaths = deaths_;
  for (const auto& [id, node] : nodes_) {
    if (!Probed(node->record)) continue;
    ++status.nodes;
    status.suspect += node->suspect ? 1 : 0;
    status.mirrored += node->mirror.size();
  }
  co_return status;
}

void Watcher::SetGauges() {
  double suspect = 0;
  double alive = 0;
  double dead = 0;
  double mirrored = 0;
  for (const auto& [id, node] : nodes_) {
    if (!Probed(node->record)) {
      ++dead;
      continue;
    }
    ++(node->suspect ? suspect : alive);
    mirrored += static_cast<double>(node->mirror.size());
  }
  metrics_->alive.Set(alive);
  metrics_->suspect.Set(suspect);
  metrics_->dead.Set(dead);
  metrics_->mirrored.Set(mirrored);
  metrics_->leads.Set(leads() ? 1 : 0);
}

}  // namespace dsec::watcher

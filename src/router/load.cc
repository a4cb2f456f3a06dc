// SPDX-License-Identifier: Apache-2.0
#include "router/load.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/log.h"
#include "runtime/async_event.h"
#include "watcher/layout.h"

namespace dsec::router {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;

namespace {

constexpr std::string_view kPlaces = "place/";
constexpr auto kAskTime = std::chrono::milliseconds(1'500);
constexpr std::string_view kCloudPool = "cloud";

constexpr std::array<std::string_view, static_cast<size_t>(placement::Refusal::kCount)> kWhy = {
    "not ready",          "of the other pool", "owned by another",
    "without the labels", "refused it",        "full"};

placement::NodeState StateOf(const v1::NodeRecord& record, bool suspect) {
  if (record.state() == v1::NODE_CORDONED) return placement::NodeState::kCordoned;
  if (record.state() == v1::NODE_DRAINING) return placement::NodeState::kDraining;
  return suspect ? placement::NodeState::kSuspect : placement::NodeState::kReady;
}

std::shared_ptr<const placement::Snapshot> Nothing() {
  return std::make_shared<placement::Snapshot>(std::vector<placement::NodeView>(), MonoTime(), 1);
}

}  // namespace

Load::Load(const NodeTable& nodes, WatcherOf watcher_of, Options options,
           std::function<void()> changed)
    : nodes_(nodes),
      watcher_of_(std::move(watcher_of)),
      options_(options),
      changed_(std::move(changed)),
      without_gauge_(options_.metrics->GetGauge("dsec_router_without_watcher",
                                                "1 while placement goes by what it knew before")),
      age_gauge_(options_.metrics->GetGauge("dsec_router_snapshot_age_seconds",
                                            "Since a watcher has answered")),
      overlay_(options_.overlay, Nothing()),
      rng_(options_.seed == 0 ? Rng::FromSystem() : Rng(options_.seed)) {}

void Load::OnWatch(const store::Update& update) {
  if (update.whole) {
    watchers_.clear();
    leader_.clear();
  }
  for (const store::Entry& entry : update.set) {
    if (entry.key == watcher::layout::kLeader) {
      v1::WatcherLeader leader;
      leader_ = leader.ParseFromString(entry.value) ? leader.watcher() : std::string();
    } else if (entry.key.starts_with(watcher::layout::kSeen)) {
      const std::string name = entry.key.substr(watcher::layout::kSeen.size());
      v1::WatcherTestimony testimony;
      if (!testimony.ParseFromString(entry.value)) continue;
      const auto known = watchers_.find(name);
      // Another life of it, or elsewhere.
      if (known == watchers_.end() || known->second.run() != testimony.run()) ways_.erase(name);
      testimony.clear_silent_ms();
      watchers_.insert_or_assign(name, std::move(testimony));
    }
  }
  for (const std::string& key : update.removed) {
    if (key == watcher::layout::kLeader) leader_.clear();
    if (key.starts_with(watcher::layout::kSeen)) {
      const std::string name = key.substr(watcher::layout::kSeen.size());
      watchers_.erase(name);
      ways_.erase(name);
    }
  }
}

void Load::OnPlaces(const store::Update& update) {
  const size_t before = places_.size();
  if (update.whole) places_.clear();
  for (const store::Entry& entry : update.set) places_[entry.key.substr(kPlaces.size())] = true;
  for (const std::string& key : update.removed) places_.erase(key.substr(kPlaces.size()));
  if (places_.size() != before) OnNodes();
}

void Load::OnNodes() { Rebuild(); }

std::vector<std::string> Load::Turn() const {
  std::vector<std::string> turn;
  if (watchers_.contains(leader_)) turn.push_back(leader_);
  for (const auto& [name, testimony] : watchers_) {
    if (name != leader_) turn.push_back(name);
  }
  return turn;
}

boost::asio::awaitable<void> Load::Follow() {
  answered_ = options_.clock->Mono();
  while (true) {
    const MonoTime begun = options_.clock->Mono();
    auto done = co_await Ask();
    if (!done.ok() && done.error().code() == Code::kCancelled) co_return;
    const MonoTime now = options_.clock->Mono();
    if (done.ok()) answered_ = now;
    const auto age = now - answered_;
    age_gauge_.Set(std::chrono::duration<double>(age).count());
    SetWithout(age > options_.patience || (!done.ok() && Now()->size() == 0));
    Rebuild();
    const auto wait = done.ok() ? options_.every : options_.every / 4;
    auto slept = co_await runtime::SleepUntil(
        Deadline::After(wait - std::min<std::chrono::nanoseconds>(now - begun, wait / 2)));
    if (!slept.ok()) co_return;
  }
}

Task<void> Load::Ask() {
  Error last(Code::kUnavailable, "watcher.none", "no watcher is known");
  for (const std::string& name : Turn()) {
    auto& way = ways_[name];
    if (way == nullptr) way = watcher_of_(watchers_.at(name));
    if (way == nullptr) continue;
    const std::shared_ptr<watcher::SnapshotApi> api = way;
    for (bool more = true; more;) {
      v1::SnapshotRequest request;
      if (asked_ == name) {
        request.set_run(run_);
        request.set_after_version(version_);
      }
      auto reply = co_await api->Snapshot(std::move(request), Deadline::After(kAskTime));
      if (!reply.ok()) {
        last = std::move(reply).error();
        if (last.code() == Code::kCancelled) co_return last;
        ways_.erase(name);
        break;
      }
      more = reply->more();
      asked_ = name;
      run_ = reply->run();
      version_ = reply->version();
      Take(*std::move(reply));
      if (!more) co_return Ok();
    }
  }
  co_return last;
}

void Load::Take(v1::SnapshotReply reply) {
  const MonoTime now = options_.clock->Mono();
  std::lock_guard lock(mutex_);
  if (reply.reset()) known_.clear();
  for (const std::string& id : reply.gone()) known_.erase(id);
  for (v1::NodeStatus& status : *reply.mutable_nodes()) {
    const auto age =
        milliseconds(static_cast<int64_t>(std::min<uint64_t>(status.age_ms(), 3'600'000)));
    std::string id = status.node_id();
    known_.insert_or_assign(std::move(id), Known{std::move(status), now - age});
  }
}

// The table says which nodes there are and what may be asked of them; a watcher how full they are.
void Load::Rebuild() {
  const MonoTime now = options_.clock->Mono();
  const auto all = nodes_.All();
  {
    std::lock_guard lock(mutex_);
    std::vector<placement::NodeView> views;
    views.reserve(all.size());
    MonoTime taken = now;
    for (const NodePtr& node : all) {
      if (node->dead()) continue;
      const v1::NodeRecord& record = node->record;
      placement::NodeView view;
      view.id = node->id();
      view.backends = record.backends();
      view.cloud = record.pool() == kCloudPool;
      view.labels = {record.labels().begin(), record.labels().end()};
      view.capacity = {static_cast<uint32_t>(std::min<uint64_t>(record.capacity(), UINT32_MAX)),
                       record.memory_total_bytes(), 0};
      const auto known = known_.find(node->id());
      const bool of_this_life =
          known != known_.end() && known->second.status.epoch() == record.epoch();
      view.state = StateOf(record, of_this_life && known->second.status.suspect());
      if (of_this_life && known->second.status.measured()) {
        const v1::NodeStatus& status = known->second.status;
        view.capacity = {static_cast<uint32_t>(std::min<uint64_t>(status.capacity(), UINT32_MAX)),
                         status.memory_total_bytes(), 0};
        view.used = {static_cast<uint32_t>(std::min<uint64_t>(status.live(), UINT32_MAX)),
                     status.memory_total_bytes() -
                         std::min(status.memory_available_bytes(), status.memory_total_bytes()),
                     0};
        // Nodes that say nothing take nothing: how old their figures are does not matter.
        if (view.state == placement::NodeState::kReady)
          taken = std::min(taken, known->second.measured_at);
      }
      views.push_back(std::move(view));
    }
    const auto instances = static_cast<uint32_t>(std::max<size_t>(places_.size(), 1));
    overlay_.Use(std::make_shared<placement::Snapshot>(std::move(views), taken, instances), now);
  }
  if (changed_) changed_();
}

Result<Load::Choice> Load::Choose(placement::Request request,
                                  const std::vector<std::string>& excluded) {
  std::string id;
  Choice choice;
  {
    std::lock_guard lock(mutex_);
    const placement::Snapshot& snapshot = overlay_.snapshot();
    for (const std::string& name : excluded) {
      if (const auto index = snapshot.Find(name)) request.excluded.push_back(*index);
    }
    const placement::Decision decision =
        placement::Choose(overlay_, request, options_.placement, rng_);
    if (decision.placed.empty()) {
      std::string why;
      for (size_t i = 0; i < kWhy.size(); ++i) {
        if (decision.refused[i] == 0) continue;
        why += fmt::format("{}{} {}", why.empty() ? "" : ", ", decision.refused[i], kWhy[i]);
      }
      if (snapshot.size() == 0 ||
          decision.refused[static_cast<size_t>(placement::Refusal::kState)] == snapshot.size()) {
        return Error(
            Code::kUnavailable, "cluster.no_nodes",
            fmt::format("no node takes sandboxes of this kind ({} nodes)", snapshot.size()));
      }
      return Error(Code::kResourceExhausted, "capacity.cluster",
                   fmt::format("no node has room: {}", why));
    }
    const size_t index = decision.placed.front().node;
    id = snapshot.node(index).id;
    choice.ticket = overlay_.Add(index, request.each, options_.clock->Mono());
  }
  choice.node = nodes_.Find(id);
  if (choice.node == nullptr || choice.node->dead()) {
    Fail(choice.ticket);
    return Error(Code::kResourceExhausted, "capacity.cluster",
                 fmt::format("node {} has just gone", id));
  }
  return choice;
}

void Load::Fail(placement::Overlay::Ticket ticket) {
  std::lock_guard lock(mutex_);
  overlay_.Fail(ticket);
}

std::shared_ptr<const placement::Snapshot> Load::Now() const {
  std::lock_guard lock(mutex_);
  return overlay_.shared();
}

std::vector<v1::NodeStatus> Load::Statuses() const {
  const MonoTime now = options_.clock->Mono();
  std::lock_guard lock(mutex_);
  std::vector<v1::NodeStatus> all;
  for (const auto& [id, known] : known_) {
    all.push_back(known.status);
    all.back().set_age_ms(static_cast<uint64_t>(
        std::chrono::duration_cast<milliseconds>(now - known.measured_at).count()));
  }
  return all;
}

bool Load::without_watcher() const {
  std::lock_guard lock(mutex_);
  return without_;
}

void Load::SetWithout(bool without) {
  bool before = false;
  {
    std::lock_guard lock(mutex_);
    before = std::exchange(without_, without);
  }
  without_gauge_.Set(without ? 1 : 0);
  if (before == without) return;
  if (without) {
    log::Warn("router.without_watcher", {{"watchers", watchers_.size()}});
  } else {
    log::Info("router.watcher_back", {{"watcher", asked_}});
  }
}

}  // namespace dsec::router

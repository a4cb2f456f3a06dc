// SPDX-License-Identifier: Apache-2.0
// Leadership, testimony, and the declaration of deaths.
#include <algorithm>
#include <utility>

#include "base/id.h"
#include "base/log.h"
#include "cluster/node_record.h"
#include "iam/quota_keeper.h"
#include "runtime/shards.h"
#include "watcher/layout.h"
#include "watcher/metrics.h"
#include "watcher/service.h"

namespace dsec::watcher {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;

namespace {

constexpr auto kStoreTime = std::chrono::seconds(5);
constexpr auto kPulse = std::chrono::milliseconds(1'000);  // of lease and testimony
constexpr auto kQuotaRetry = std::chrono::seconds(5);

Deadline Soon() { return Deadline::After(kStoreTime); }

}  // namespace

// NOLINTNEXTLINE(performance-unnecessary-value-param): as store::Follow gives it
void Watcher::OnWatch(store::Update update) {
  watch_known_ = true;
  if (update.whole) {
    leader_run_.clear();
    leader_name_.clear();
    leader_version_ = 0;
    others_.clear();
    seen_known_ = false;
  }
  const std::string own = layout::Seen(options_.id);
  for (const store::Entry& entry : update.set) {
    if (entry.key == layout::kLeader) {
      v1::WatcherLeader leader;
      if (!leader.ParseFromString(entry.value)) leader.set_run("unreadable");
      leader_run_ = leader.run();
      leader_name_ = leader.watcher();
      leader_version_ = leader_run_ == run_ ? entry.version : 0;
    } else if (entry.key == own) {
      v1::WatcherTestimony testimony;
      seen_known_ = testimony.ParseFromString(entry.value) && testimony.run() == run_;
    } else if (entry.key.starts_with(layout::kSeen)) {
      Other& other = others_[entry.key.substr(layout::kSeen.size())];
      other.testimony.Clear();
      if (!other.testimony.ParseFromString(entry.value)) other.testimony.Clear();
      // When it was heard here: clocks of machines differ.
      other.heard = options_.clock->Mono();
    }
  }
  for (const std::string& key : update.removed) {
    if (key == layout::kLeader) {
      leader_run_.clear();
      leader_name_.clear();
      leader_version_ = 0;
    } else if (key == own) {
      seen_known_ = false;
    } else if (key.starts_with(layout::kSeen)) {
      others_.erase(key.substr(layout::kSeen.size()));
    }
  }
  if (leader_run_.empty()) leader_gone_.Set();
}

boost::asio::awaitable<void> Watcher::Lead() {
  while (true) {
    auto done = co_await LeadOnce();
    if (!done.ok()) {
      if (done.error().code() == Code::kCancelled) co_return;
      log::Debug("watcher.lease", {{"error", done.error()}});
    }
    leader_gone_.Reset();
    auto woken = co_await leader_gone_.Wait(Deadline::After(kPulse));
    if (!woken.ok() && woken.error().code() == Code::kCancelled) co_return;
  }
}

Task<void> Watcher::LeadOnce() {
  if (lease_ != 0) {
    auto kept = co_await store_.KeepAlive(lease_, Soon());
    if (!kept.ok() && kept.error().reason() == "store.lease") {
      // All that was under it is gone; the watch tells so, too, a moment later.
      lease_ = 0;
      leader_version_ = 0;
      seen_known_ = false;
    } else if (!kept.ok()) {
      co_return std::move(kept).error();
    }
  }
  if (lease_ == 0) {
    DSEC_CO_TRY(lease_, co_await store_.Grant(options_.lease, Soon()));
  }
  DSEC_CO_TRY_VOID(co_await Testify());
  if (!watch_known_ || !leader_run_.empty() || options_.clock->Mono() < no_lead_before_)
    co_return Ok();
  v1::WatcherLeader leader;
  leader.set_watcher(options_.id);
  leader.set_run(run_);
  auto put = co_await store_.Put(std::string(layout::kLeader), leader.SerializeAsString(), 0,
                                 lease_, Soon());
  if (!put.ok()) {
    // Somebody else was first: the watch says who.
    if (put.error().reason() == "store.version") co_return Ok();
    co_return std::move(put).error();
  }
  leader_run_ = run_;
  leader_name_ = options_.id;
  leader_version_ = *put;
  log::Info("watcher.leads", {{"watcher", options_.id}});
  for (const auto& [id, node] : nodes_) {
    if (node->record.state() != v1::NODE_DEAD) continue;
    if (quota_returned_.emplace(id, node->record.epoch()).second)
      runtime::Spawn(gate_, executor_, ReturnQuota(id));
  }
  co_return Ok();
}

// Each second while any node is silent, and once when none is any more; who says nothing is there
// all the same, and finds nobody silent.
Task<void> Watcher::Testify() {
  const auto silent = health_.Silent(options_.clock->Mono());
  if (silent.empty() && !testified_silence_ && seen_known_) co_return Ok();
  v1::WatcherTestimony testimony;
  testimony.set_watcher(options_.id);
  testimony.set_run(run_);
  testimony.set_address(options_.address);
  testimony.set_tick(++testimonies_);
  for (const auto& [node, time] : silent) {
    (*testimony.mutable_silent_ms())[node] = static_cast<uint64_t>(time.count());
    const auto known = nodes_.find(node);
    if (known != nodes_.end() && known->second->mirror.known()) testimony.add_mirrored(node);
  }
  auto put = co_await store_.Put(layout::Seen(options_.id), testimony.SerializeAsString(),
                                 std::nullopt, lease_, Soon());
  if (!put.ok()) co_return std::move(put).error();
  testified_silence_ = !silent.empty();
  seen_known_ = true;
  co_return Ok();
}

std::vector<Testimony> Watcher::Others(MonoTime now) const {
  std::vector<Testimony> testimonies;
  for (const auto& [name, other] : others_) {
    if (now - other.heard > options_.health.heard_within) continue;
    Testimony testimony;
    testimony.watcher = name;
    for (const auto& [node, ms] : other.testimony.silent_ms()) {
      testimony.silent.emplace(
          node, milliseconds(static_cast<int64_t>(std::min<uint64_t>(ms, 86'400'000))));
    }
    testimonies.push_back(std::move(testimony));
  }
  return testimonies;
}

size_t Watcher::Registered() const { return others_.size() + 1; }

void Watcher::LookForDeaths(MonoTime now) {
  if (!leads()) return;
  const auto others = Others(now);
  for (const std::string& id : health_.Dead(others, Registered(), now)) {
    const NodePtr node = nodes_.at(id);
    if (node->declaring || now < node->declare_after) continue;
    if (OthersKnowMore(*node, now)) {
      runtime::Spawn(gate_, executor_, Yield());
      return;
    }
    node->declaring = true;  // before it starts, since it may end at once
    if (!runtime::Spawn(gate_, executor_, Bury(id))) node->declaring = false;
  }
}

bool Watcher::OthersKnowMore(const Node& node, MonoTime now) const {
  if (node.mirror.known()) return false;
  return std::any_of(others_.begin(), others_.end(), [&](const auto& other) {
    const auto& mirrored = other.second.testimony.mirrored();
    return now - other.second.heard <= options_.health.heard_within &&
           std::find(mirrored.begin(), mirrored.end(), node.record.node_id()) != mirrored.end();
  });
}

// Lets another one lead, for which a few seconds are left before this one tries again.
boost::asio::awaitable<void> Watcher::Yield() {
  const store::Revision version = std::exchange(leader_version_, 0);
  no_lead_before_ = options_.clock->Mono() + options_.lease;
  log::Info("watcher.yields", {{"watcher", options_.id}});
  std::vector<store::Condition> conditions = {{std::string(layout::kLeader), version}};
  std::vector<store::Write> writes = {{std::string(layout::kLeader), std::nullopt, 0}};
  auto done = co_await store_.Commit(std::move(conditions), std::move(writes), Soon());
  // Should that be lost, it leads on paper alone until its lease ends: the lease is given up.
  if (!done.ok() && done.error().reason() != "store.version" && lease_ != 0)
    (void)co_await store_.Revoke(std::exchange(lease_, 0), Soon());
}

bool Watcher::StillDead(const std::string& id) {
  const MonoTime now = options_.clock->Mono();
  // Asleep since the last tick: nothing that was counted then holds.
  if (!health_.Tick(now)) {
    ++awake_;
    return false;
  }
  const auto others = Others(now);
  const auto dead = health_.Dead(others, Registered(), now);
  return std::find(dead.begin(), dead.end(), id) != dead.end();
}

boost::asio::awaitable<void> Watcher::Bury(std::string id) {
  const NodePtr node = nodes_.at(id);
  auto done = co_await Declare(node, options_.id, true);
  node->declaring = false;
  if (done.ok()) co_return;
  node->declare_after = options_.clock->Mono() + kPulse;
  log::Warn("watcher.not_declared", {{"node", id}, {"error", done.error()}});
}

Task<void> Watcher::Declare(NodePtr node, std::string who, bool by_rule) {
  const std::string id = node->record.node_id();
  if (!leads()) co_return Error(Code::kConflict, "watcher.not_leading", "another watcher leads");
  // What does not hold at each of the transactions that follow ends this.
  const std::vector<store::Condition> conditions = {{std::string(layout::kLeader), leader_version_},
                                                    {cluster::NodeKey(id), node->version}};
  const uint64_t epoch = node->record.epoch();
  std::vector<v1::LostPart> parts = node->mirror.Parts();
  parts[0].set_unknown(!node->mirror.known());
  for (size_t i = parts.size() - 1; i > 0; --i) {
    if (stopping_) co_return Error(Code::kUnavailable, "watcher.stopping", "this watcher stops");
    std::vector<store::Write> writes = {
        {layout::LostPart(id, epoch, static_cast<uint32_t>(i)), parts[i].SerializeAsString(), 0}};
    auto written = co_await store_.Commit(conditions, std::move(writes), Soon());
    if (!written.ok()) co_return std::move(written).error();
  }
  if (by_rule && !StillDead(id))
    co_return Error(Code::kConflict, "node.answers", fmt::format("{} is not silent any more", id));
  const int64_t now = UnixMillis(options_.clock->Wall());
  v1::NodeRecord record = node->record;
  record.set_state(v1::NODE_DEAD);
  record.set_epoch(epoch + 1);
  record.set_changed_unix_ms(now);
  parts[0].set_parts(static_cast<uint32_t>(parts.size()));
  parts[0].set_died_unix_ms(now);
  parts[0].set_declared_by(who);
  DSEC_CO_TRY(std::string value, cluster::EncodeNodeRecord(record));
  std::vector<store::Write> writes = {
      {cluster::NodeKey(id), std::move(value), 0},
      {layout::LostPart(id, epoch, 0), parts[0].SerializeAsString(), 0}};
  auto committed = co_await store_.Commit(conditions, std::move(writes), Soon());
  if (!committed.ok()) co_return std::move(committed).error();
  ++deaths_;
  metrics_->deaths.Add();
  metrics_->lost.Add(node->mirror.size());
  log::Error("watcher.node_dead",
             {{"node", id}, {"epoch", epoch}, {"sandboxes", node->mirror.size()}, {"by", who}});
  co_return Ok();
}

Task<void> Watcher::DeclareDead(std::string node, std::string who) {
  return runtime::On(executor_, DeclareHere(std::move(node), std::move(who)));
}

Task<void> Watcher::DeclareHere(std::string id, std::string who) {
  const auto it = nodes_.find(id);
  if (it == nodes_.end() || it->second->record.state() == v1::NODE_DEAD)
    co_return Error(Code::kNotFound, "node.unknown", fmt::format("no node {} is joined", id));
  if (!it->second->suspect) {
    co_return Error(Code::kConflict, "node.answers",
                    fmt::format("{} answers: stop it before it is declared dead", id));
  }
  const NodePtr node = it->second;
  if (node->declaring) {
    co_return Error(Code::kConflict, "node.being_declared",
                    fmt::format("the death of {} is being declared", id));
  }
  node->declaring = true;
  auto done = co_await Declare(node, std::move(who), false);
  node->declaring = false;
  co_return done;
}

// Until it is done, it is no longer for us to do, or the node has come back.
boost::asio::awaitable<void> Watcher::ReturnQuota(std::string id) {
  while (leads()) {
    const auto it = nodes_.find(id);
    if (it == nodes_.end() || it->second->record.state() != v1::NODE_DEAD) break;
    // A node that has come back, or another leader, ends it: what it holds then is its own.
    auto done = co_await iam::ReturnSlices(store_, id,
                                           {{std::string(layout::kLeader), leader_version_},
                                            {cluster::NodeKey(id), it->second->version}});
    if (done.ok() || done.error().code() == Code::kCancelled) co_return;
    log::Warn("watcher.quota_not_returned", {{"node", id}, {"error", done.error()}});
    auto stopped = co_await stopped_.Wait(Deadline::After(kQuotaRetry));
    if (stopped.ok() || stopped.error().code() == Code::kCancelled) co_return;
  }
  // The next leader does it.
  std::erase_if(quota_returned_, [&](const auto& entry) { return entry.first == id; });
}

}  // namespace dsec::watcher

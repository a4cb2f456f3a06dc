// SPDX-License-Identifier: Apache-2.0
#include "router/jobs.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/log.h"
#include "cluster/node_record.h"
#include "model/lifecycle.h"
#include "store/rules.h"

namespace dsec::router {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;

namespace {

constexpr std::string_view kJobs = "job/";
constexpr std::string_view kHolds = "held/";
constexpr std::string_view kDrains = "drain/";
constexpr milliseconds kMaxGrace{86'400'000};
constexpr size_t kMaxJob = 63;
constexpr int kRaces = 20;
constexpr uint32_t kPage = 200;
constexpr auto kEndTime = std::chrono::seconds(30);
constexpr auto kStoreTime = std::chrono::seconds(5);

Deadline Soon() { return Deadline::After(kStoreTime); }

Result<std::string> JobName(const iam::ProjectPath& project, const std::string& job) {
  const bool good =
      !job.empty() && job.size() <= kMaxJob && std::all_of(job.begin(), job.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '.' || c == '_' || c == '-';
      });
  if (!good) {
    return Error(Code::kInvalidArgument, "job.name",
                 fmt::format("job: 1 to {} of letters, digits, '.', '_' and '-'", kMaxJob))
        .WithField("job");
  }
  return fmt::format("{}/{}", project.Key(), job);
}

std::string JobKey(std::string_view name) { return fmt::format("{}{}", kJobs, name); }
std::string HoldKey(std::string_view name) { return fmt::format("{}{}", kHolds, name); }
std::string DrainKey(std::string_view node) { return fmt::format("{}{}", kDrains, node); }

// Changes the state of a node by put-if-version; `also` goes with it.
Task<v1::NodeRecord> SetState(store::Store& store, std::string node, v1::NodeState state,
                              std::vector<store::Write> also, const Clock& clock,
                              Deadline deadline) {
  const auto id = ParseNodeId(node);
  if (!id.ok()) co_return Error(Code::kNotFound, "node.unknown", "no such node").WithField("node");
  for (int i = 0; i < kRaces; ++i) {
    auto entry = co_await store.Get(cluster::NodeKey(node), deadline);
    if (!entry.ok()) co_return std::move(entry).error();
    if (!entry->has_value()) {
      co_return Error(Code::kNotFound, "node.unknown", fmt::format("there is no node {}", node))
          .WithField("node");
    }
    DSEC_CO_TRY(v1::NodeRecord record, cluster::ParseNodeRecord((*entry)->value));
    if (record.state() == v1::NODE_DEAD) {
      co_return Error(Code::kConflict, "node.dead",
                      fmt::format("{} is dead; it has to join again first", node));
    }
    record.set_state(state);
    record.set_changed_unix_ms(UnixMillis(clock.Wall()));
    DSEC_CO_TRY(std::string value, cluster::EncodeNodeRecord(record));
    std::vector<store::Write> writes = also;
    writes.push_back({cluster::NodeKey(node), std::move(value), 0});
    std::vector<store::Condition> conditions = {{cluster::NodeKey(node), (*entry)->version}};
    auto done = co_await store.Commit(std::move(conditions), std::move(writes), deadline);
    if (done.ok()) co_return record;
    if (done.error().reason() != "store.version") co_return std::move(done).error();
  }
  co_return Error(Code::kConflict, "node.raced",
                  fmt::format("the record of {} changes all the time", node));
}

}  // namespace

Task<JobLease> BeginJob(store::Store& store, iam::ProjectPath project, std::string job,
                        v1::JobRecord record, milliseconds ttl, Deadline deadline) {
  DSEC_CO_TRY(const std::string name, JobName(project, job));
  if (ttl < store::kMinTtl || ttl > store::kMaxTtl) {
    co_return Error(Code::kInvalidArgument, "job.ttl",
                    fmt::format("{} ms is not in {}..{}", ttl.count(), store::kMinTtl.count(),
                                store::kMaxTtl.count()))
        .WithField("ttl_ms");
  }
  if (record.grace_ms() > static_cast<uint64_t>(kMaxGrace.count())) {
    co_return Error(Code::kInvalidArgument, "job.grace",
                    fmt::format("{} ms is more than {}", record.grace_ms(), kMaxGrace.count()))
        .WithField("grace_ms");
  }
  JobLease held;
  held.ttl = ttl;
  DSEC_CO_TRY(held.lease, co_await store.Grant(ttl, deadline));
  v1::JobHold hold;
  hold.set_holder(record.owner());
  std::vector<store::Condition> conditions = {{HoldKey(name), 0}};
  std::vector<store::Write> writes = {{JobKey(name), record.SerializeAsString(), 0},
                                      {HoldKey(name), hold.SerializeAsString(), held.lease}};
  auto done = co_await store.Commit(std::move(conditions), std::move(writes), deadline);
  if (done.ok()) co_return held;
  // What nobody knows of ends by itself; this only does it sooner.
  (void)co_await store.Revoke(held.lease, deadline);
  if (done.error().reason() == "store.version") {
    co_return Error(Code::kConflict, "job.held", fmt::format("another lease holds job {}", job));
  }
  co_return std::move(done).error();
}

Task<void> RenewJob(store::Store& store, store::LeaseId lease, Deadline deadline) {
  auto kept = co_await store.KeepAlive(lease, deadline);
  if (!kept.ok() && kept.error().reason() == "store.lease") {
    co_return Error(Code::kGone, "job.ended",
                    "the lease has ended, and what the job has made ends after its grace");
  }
  co_return kept;
}

Task<void> EndJob(store::Store& store, store::LeaseId lease, Deadline deadline) {
  auto revoked = co_await store.Revoke(lease, deadline);
  if (!revoked.ok() && revoked.error().reason() == "store.lease") co_return Ok();
  co_return revoked;
}

Task<v1::NodeRecord> Cordon(store::Store& store, std::string node, Deadline deadline) {
  return SetState(store, std::move(node), v1::NODE_CORDONED, {}, Clock::System(), deadline);
}

Task<v1::NodeRecord> Uncordon(store::Store& store, std::string node, Deadline deadline) {
  std::vector<store::Write> also = {{DrainKey(node), std::nullopt, 0}};
  return SetState(store, std::move(node), v1::NODE_JOINED, std::move(also), Clock::System(),
                  deadline);
}

Task<v1::NodeRecord> Drain(store::Store& store, std::string node, milliseconds time,
                           std::string who, const Clock& clock, Deadline deadline) {
  v1::DrainRecord record;
  record.set_deadline_unix_ms(UnixMillis(clock.Wall()) + std::max<int64_t>(time.count(), 0));
  record.set_who(std::move(who));
  std::vector<store::Write> also = {{DrainKey(node), record.SerializeAsString(), 0}};
  return SetState(store, std::move(node), v1::NODE_DRAINING, std::move(also), clock, deadline);
}

Reaper::Reaper(store::Store& store, runtime::Executor executor, ClusterEdge& edge,
               ReaperOptions options)
    : store_(store),
      executor_(std::move(executor)),
      edge_(edge),
      options_(options),
      ended_(options_.metrics->GetCounter("dsec_router_reaped_total",
                                          "Sandboxes ended with their job or by a drain")) {}

Reaper::~Reaper() = default;

void Reaper::Start() {
  const auto run = [this](boost::asio::awaitable<void> work) {
    running_.push_back(runtime::SpawnCancellable(gate_, executor_, std::move(work)));
  };
  const auto follow = [&](std::string_view prefix, std::function<void(store::Update)> apply) {
    run(store::Follow(store_, store::KeyRange::Prefix(std::string(prefix)), std::string(prefix),
                      std::move(apply)));
  };
  follow(kJobs, [this](const store::Update& update) { OnJobs(update); });
  follow(kHolds, [this](const store::Update& update) { OnHolds(update); });
  follow(kDrains, [this](const store::Update& update) { OnDrains(update); });
  run(Run());
}

Task<void> Reaper::Stop() {
  for (const runtime::Running& one : running_) one.Cancel();
  co_await gate_.Close();
  co_return Ok();
}

void Reaper::OnJobs(const store::Update& update) {
  if (update.whole) {
    std::set<std::string> there;
    for (const store::Entry& entry : update.set) there.insert(entry.key.substr(kJobs.size()));
    std::erase_if(jobs_, [&](const auto& job) { return !there.contains(job.first); });
  }
  for (const store::Entry& entry : update.set) {
    v1::JobRecord record;
    if (!record.ParseFromString(entry.value)) {
      log::Error("router.job_damaged", {{"key", entry.key}});
      continue;
    }
    Job& job = jobs_[entry.key.substr(kJobs.size())];
    job.record = std::move(record);
    job.version = entry.version;
  }
  for (const std::string& key : update.removed) jobs_.erase(key.substr(kJobs.size()));
}

void Reaper::OnHolds(const store::Update& update) {
  holds_known_ = true;
  if (update.whole) holds_.clear();
  for (const store::Entry& entry : update.set) holds_[entry.key.substr(kHolds.size())] = true;
  for (const std::string& key : update.removed) holds_.erase(key.substr(kHolds.size()));
}

void Reaper::OnDrains(const store::Update& update) {
  if (update.whole) drains_.clear();
  for (const store::Entry& entry : update.set) {
    Draining& drain = drains_[entry.key.substr(kDrains.size())];
    drain.version = entry.version;
    if (!drain.record.ParseFromString(entry.value)) drain.record.set_deadline_unix_ms(INT64_MAX);
  }
  for (const std::string& key : update.removed) drains_.erase(key.substr(kDrains.size()));
}

boost::asio::awaitable<void> Reaper::Run() {
  while (true) {
    auto slept = co_await runtime::SleepUntil(Deadline::After(options_.look));
    if (!slept.ok()) co_return;
    Look();
  }
}

void Reaper::Look() {
  const MonoTime now = options_.clock->Mono();
  for (auto& [name, job] : jobs_) {
    const bool free = holds_known_ && !holds_.contains(name);
    if (free && !job.free) job.free_since = now;
    job.free = free;
    const milliseconds grace(
        static_cast<int64_t>(std::min<uint64_t>(job.record.grace_ms(), kMaxGrace.count())));
    if (!free || job.ending || now - job.free_since < grace) continue;
    job.ending = runtime::Spawn(gate_, executor_, FinishJob(name));
  }
  const int64_t wall = UnixMillis(options_.clock->Wall());
  for (auto& [node, drain] : drains_) {
    if (drain.ending || wall < drain.record.deadline_unix_ms()) continue;
    drain.ending = runtime::Spawn(gate_, executor_, FinishDrain(node));
  }
}

boost::asio::awaitable<void> Reaper::FinishJob(std::string name) {
  const size_t slash = name.rfind('/');
  const auto project = iam::ProjectPath::FromKey(std::string_view(name).substr(0, slash));
  const store::Revision version = jobs_.at(name).version;
  if (project.ok()) {
    v1::ListRequestAll request;
    (*request.mutable_labels())[std::string(kJobLabel)] = name.substr(slash + 1);
    request.add_within(project->ForRecord());
    auto none_left =
        co_await EndAll(request, "", std::string(model::cause::kJobEnded), project->ForRecord());
    if (none_left.ok() && *none_left) {
      // Nobody has taken it over meanwhile.
      std::vector<store::Condition> conditions = {{JobKey(name), version}, {HoldKey(name), 0}};
      std::vector<store::Write> writes = {{JobKey(name), std::nullopt, 0}};
      auto done = co_await store_.Commit(std::move(conditions), std::move(writes), Soon());
      if (done.ok()) log::Info("router.job_ended", {{"job", name}});
    }
  }
  if (const auto it = jobs_.find(name); it != jobs_.end()) it->second.ending = false;
}

boost::asio::awaitable<void> Reaper::FinishDrain(std::string node) {
  const store::Revision version = drains_.at(node).version;
  auto none_left =
      co_await EndAll(v1::ListRequestAll(), node, std::string(model::cause::kDrained), {});
  if (none_left.ok() && *none_left) {
    std::vector<store::Condition> conditions = {{DrainKey(node), version}};
    std::vector<store::Write> writes = {{DrainKey(node), std::nullopt, 0}};
    auto done = co_await store_.Commit(std::move(conditions), std::move(writes), Soon());
    if (done.ok()) log::Info("router.drained", {{"node", node}});
  }
  if (const auto it = drains_.find(node); it != drains_.end()) it->second.ending = false;
}

Task<bool> Reaper::EndAll(v1::ListRequestAll request, std::string node, std::string cause,
                          std::optional<std::string> project) {
  request.set_page_size(kPage);
  bool none_left = true;
  do {
    Result<v1::ListPage> page = v1::ListPage();
    if (node.empty()) {
      page = co_await edge_.List(request, Deadline::After(kEndTime));
    } else {
      const NodePtr found = edge_.nodes().Find(node);
      // A dead one has nothing left.
      if (found == nullptr || found->dead()) co_return true;
      page = co_await found->api->List(request, Deadline::After(kEndTime));
    }
    if (!page.ok()) co_return std::move(page).error();
    none_left &= page->missing_nodes_size() == 0;
    auto ended = co_await EndPage(*page, cause, project);
    if (!ended.ok()) co_return std::move(ended).error();
    none_left &= *ended;
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  co_return none_left;
}

// True: there was nothing to end.
Task<bool> Reaper::EndPage(const v1::ListPage& page, const std::string& cause,
                           const std::optional<std::string>& project) {
  bool nothing = true;
  for (const v1::SandboxRecord& record : page.records()) {
    const auto& labels = record.spec().labels();
    const auto keep = labels.find(std::string(kKeepLabel));
    if (cause == model::cause::kJobEnded && keep != labels.end() && keep->second == "true")
      continue;
    // A project below may have a job of that name, too.
    if (project.has_value() && record.project() != *project) continue;
    nothing = false;
    v1::DeleteRequest request;
    request.set_id(record.id());
    request.set_who("cluster");
    request.set_cause(cause);
    auto ended = co_await edge_.Delete(std::move(request), Deadline::After(kEndTime));
    if (ended.ok()) ended_.Add();
    if (!ended.ok() && ended.error().code() == Code::kCancelled) co_return std::move(ended).error();
    // What does not end now is there at the next look.
  }
  co_return nothing;
}

}  // namespace dsec::router

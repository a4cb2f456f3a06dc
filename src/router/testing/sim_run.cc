// SPDX-License-Identifier: Apache-2.0
#include "router/testing/sim_run.h"

#include <time.h>

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "iam/layout.h"
#include "iam/snapshot.h"
#include "router/testing/sim_cluster.h"

namespace dsec::router::testing {
namespace {

using runtime::Deadline;
using runtime::testing::VirtualNow;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kStep{10};
constexpr seconds kClientPatience{12};
constexpr milliseconds kClientPause{500};
constexpr int kMaxTries = 40;
constexpr size_t kMaxViolations = 50;
constexpr std::string_view kProject = "root/p";

double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Who may create in the project: one service with one key, as Admin would have written it.
struct People {
  std::shared_ptr<const iam::Snapshot> snapshot;
  std::string key;

  People() {
    const iam::ProjectPath root;
    const iam::ProjectPath project = *iam::ProjectPath::Parse(kProject, "project");
    iam::Snapshot::Entries entries;
    const auto put = [&](const std::string& name, const auto& message) {
      entries[name] = {message.SerializeAsString(), 1};
    };
    v1::IamProject top;
    top.set_uid("u0");
    put(iam::layout::Project(root), top);
    v1::IamProject below;
    below.set_uid("u1");
    below.set_parent_uid("u0");
    put(iam::layout::Project(project), below);
    v1::IamPrincipal principal;
    principal.set_uid("u2");
    principal.set_kind(v1::IAM_SERVICE);
    principal.set_project(std::string(kProject));
    principal.set_project_uid("u1");
    put(iam::layout::Principal("trainer"), principal);
    v1::IamGrant grant;
    grant.set_principal_uid("u2");
    grant.set_project_uid("u1");
    grant.set_role("developer");
    grant.set_granter("root");
    put(iam::layout::Grant(project, "trainer"), grant);
    const iam::KeyText text = iam::NewKey();
    const iam::KeyDigest digest = iam::DigestOf(text.secret);
    v1::IamKey owned;
    owned.set_principal("trainer");
    owned.set_principal_uid("u2");
    owned.set_maker("trainer");
    owned.set_maker_uid("u2");
    owned.set_secret_sha256(std::string(digest.begin(), digest.end()));
    put(iam::layout::ApiKey(text.id), owned);
    snapshot = iam::Snapshot::Build(entries, 1);
    key = text.Text();
  }
};

// One create as its client sees it, over all its tries.
struct Op {
  std::string id;
  MonoTime asked;
  MonoTime sent;
  int tries = 0;
  bool waiting = false;  // for the answer of the last try
  bool done = false;
  bool deleted = false;      // its client wants it gone
  bool delete_told = false;  // and was told that it is
  std::optional<Error> failed;
  std::string sandbox;
};
using OpPtr = std::shared_ptr<Op>;

class Run {
 public:
  explicit Run(const SimRunOptions& options)
      : options_(options), rng_(options.seed), sim_(ClusterOf(options)) {}

  SimRunResult Go();

 private:
  SimClusterOptions ClusterOf(const SimRunOptions& options);
  void Violation(std::string text) {
    if (result_.violations.size() < kMaxViolations) result_.violations.push_back(std::move(text));
  }
  void At(std::chrono::nanoseconds in, std::function<void()> act) {
    agenda_.emplace(VirtualNow() + in, std::move(act));
  }
  milliseconds Between(int64_t low, int64_t high) {
    return milliseconds(low + static_cast<int64_t>(rng_.Below(static_cast<uint64_t>(high - low))));
  }
  size_t AnyApi();
  void Arrive(uint64_t count);
  void Send(const OpPtr& op);
  boost::asio::awaitable<void> Try(ClusterEdge& edge, OpPtr op, int number);
  void Answered(const OpPtr& op, int number, Result<v1::SandboxView> made);
  void LookAfterClients();
  void EndOld(uint64_t count);
  void Inject();
  void DeleteOp(const OpPtr& op, int tries);
  void Heal();
  void ComeBack(const std::string& id, bool machine);
  void LookAtNodes();
  void LookAtQuota();
  void Check();
  void CheckAnswers();
  void Measure();

  const SimRunOptions options_;
  SimRunResult result_;
  Rng rng_;
  People people_;
  std::vector<OpPtr> ops_;
  std::deque<OpPtr> open_;
  std::vector<OpPtr> again_;  // to be sent again
  std::vector<double> latencies_;
  std::multimap<MonoTime, std::function<void()>> agenda_;
  std::map<std::string, MonoTime> silent_since_;  // nodes that may be declared dead
  std::set<std::string> counted_dead_;
  std::set<std::string> short_faults_;  // nodes that may not
  std::set<std::string> died_;
  std::vector<std::string> old_;
  size_t next_old_ = 0;
  SimCluster sim_;
};

SimClusterOptions Run::ClusterOf(const SimRunOptions& options) {
  SimClusterOptions cluster;
  cluster.nodes = options.nodes;
  cluster.apiservers = options.apiservers;
  cluster.watchers = options.watchers;
  cluster.node.capacity = options.capacity;
  cluster.node.create_time = options.create_time;
  cluster.node.create_jitter = options.create_time;
  cluster.node.forgetful = options.forgetful_nodes;
  cluster.seed = options.seed;
  if (options.quota != 0) {
    cluster.quota = true;
    const uint64_t limit = options.quota;
    cluster.node.limits = [limit](const iam::ProjectPath&) {
      iam::Limits limits;
      limits[iam::Resource::kLive] = limit;
      return std::optional(limits);
    };
  }
  return cluster;
}

size_t Run::AnyApi() {
  while (true) {
    const size_t api = rng_.Below(sim_.api_count());
    if (sim_.api(api).edge != nullptr) return api;
  }
}

void Run::Arrive(uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    auto op = std::make_shared<Op>();
    op->id = fmt::format("r{}", result_.asked++);
    op->asked = VirtualNow();
    ops_.push_back(op);
    open_.push_back(op);
    Send(op);
  }
}

void Run::Send(const OpPtr& op) {
  op->sent = VirtualNow();
  op->waiting = true;
  if (op->tries++ > 0) ++result_.sent_again;
  SimCluster::Api& api = sim_.api(AnyApi());
  runtime::internal::StartDetached(sim_.world().at(api.process), Try(*api.edge, op, op->tries));
}

boost::asio::awaitable<void> Run::Try(ClusterEdge& edge, OpPtr op, int number) {
  // As a request comes in: the key, what it may do, then the create.
  const int64_t now = UnixMillis(Clock::System().Wall());
  const auto project = iam::ProjectPath::FromRecord(kProject);
  auto caller = iam::Authenticate(people_.snapshot, iam::KeyDigest{}, people_.key, now);
  if (!caller.ok() || !caller->May(iam::Right::kSandboxCreate, *project)) {
    Violation("the key was refused");
    co_return;
  }
  auto made = co_await SimCluster::CreateAndDeliver(
      edge, sim_.Request(op->id, std::string(kProject)), Deadline::After(seconds(10)));
  Answered(op, number, std::move(made));
}

void Run::Answered(const OpPtr& op, int number, Result<v1::SandboxView> made) {
  result_.digest = result_.digest * 1'099'511'628'211u ^
                   static_cast<uint64_t>(VirtualNow().time_since_epoch().count()) ^
                   (made.ok() ? 1 : 2);
  if (made.ok()) {
    const std::string& id = made->record().id();
    if (!op->sandbox.empty() && op->sandbox != id)
      Violation(fmt::format("{} was answered with {} and with {}", op->id, op->sandbox, id));
    if (made->record().request_id() != op->id)
      Violation(fmt::format("{} was answered with the sandbox of {}", op->id,
                            made->record().request_id()));
    if (op->sandbox.empty()) {
      ++result_.made;
      latencies_.push_back(
          std::chrono::duration<double, std::milli>(VirtualNow() - op->asked).count());
    }
    op->sandbox = id;
    op->done = true;
    return;
  }
  // An earlier try, given up since.
  if (number != op->tries) return;
  op->waiting = false;
  const Error& error = made.error();
  const bool again = Retriable(error.code()) && op->tries < kMaxTries;
  if (again) {
    again_.push_back(op);
    return;
  }
  if (op->done) return;
  op->done = true;
  op->failed = error;
  if (!op->deleted) ++result_.failed[std::string(error.reason())];
}

void Run::LookAfterClients() {
  const MonoTime now = VirtualNow();
  // The process that was asked may be gone with the question.
  for (size_t i = open_.size(); i > 0; --i) {
    OpPtr op = std::move(open_.front());
    open_.pop_front();
    if (op->done) {
      if (op->failed.has_value() || op->deleted) continue;
      if (static_cast<double>(rng_.Below(1'000'000)) < options_.repeats * 1e6) {
        ++result_.repeated;
        At(Between(1, 5'000), [this, op] { Send(op); });
      }
      continue;
    }
    if (op->waiting && now - op->sent > kClientPatience && op->tries < kMaxTries) Send(op);
    open_.push_back(std::move(op));
  }
  for (OpPtr& op : std::exchange(again_, {})) {
    if (!op->done) At(kClientPause, [this, op] { Send(op); });
  }
}

void Run::EndOld(uint64_t count) {
  for (uint64_t i = 0; i < count && next_old_ < old_.size(); ++i) {
    const std::string& id = old_[next_old_++];
    sim_.node(NodeOf(SandboxId(id))->str()).End(id, "ttl");
  }
}

void Run::Inject() {
  const size_t which = rng_.Below(sim_.node_count());
  SimNode& node = sim_.node(which);
  const std::string id = node.id();
  const bool free = node.link() == SimNode::Link::kUp && !silent_since_.contains(id) &&
                    !short_faults_.contains(id);
  const auto count = [this](const char* kind) { ++result_.injected[kind]; };
  const auto for_a_while = [&](const char* kind, SimNode::Link link, milliseconds time) {
    count(kind);
    short_faults_.insert(id);
    node.SetLink(link);
    At(time, [&node] { node.SetLink(SimNode::Link::kUp); });
    At(time + seconds(10), [this, id] { short_faults_.erase(id); });
  };
  switch (options_.only_nodes ? 4 + rng_.Below(4) : rng_.Below(12)) {
    case 0: {
      count("apiserver killed");
      sim_.KillApi(AnyApi());
      sim_.AddApi();
      break;
    }
    case 1: {
      count("watcher killed");
      for (size_t i = 0; i < sim_.watch_count(); ++i) {
        if (sim_.watch(i).watcher == nullptr) continue;
        sim_.KillWatcher(i);
        break;
      }
      sim_.AddWatcher();
      break;
    }
    case 2: {
      count("apiserver stopped");
      const auto process = sim_.api(AnyApi()).process;
      sim_.world().Pause(process);
      At(Between(500, 6'000), [this, process] { sim_.world().Continue(process); });
      break;
    }
    case 3: {
      count("watcher stopped");
      const size_t last = sim_.watch_count() - 1;
      const auto process = sim_.watch(last).process;
      sim_.world().Pause(process);
      At(Between(500, 15'000), [this, process] { sim_.world().Continue(process); });
      break;
    }
    case 4:
      if (free) for_a_while("node stopped", SimNode::Link::kHangs, Between(500, 5'000));
      break;
    case 5:
      if (free) for_a_while("node daemon restarted", SimNode::Link::kRefuses, Between(500, 4'000));
      break;
    case 6:
    case 7: {
      // A fifth of the nodes at most: more than half must be heard.
      if (!free || silent_since_.size() * 5 > sim_.node_count()) break;
      const bool machine = rng_.Below(2) == 0;
      count(machine ? "machine lost" : "node cut off");
      silent_since_[id] = VirtualNow();
      died_.insert(id);
      node.SetLink(SimNode::Link::kHangs);
      if (machine) At(milliseconds(500), [&node] { node.LoseAll(); });
      At(Between(14'000, 30'000), [this, id, machine] { ComeBack(id, machine); });
      break;
    }
    case 8: {
      count("apiserver without store");
      iam::testing::AwayStore* const store = sim_.api(AnyApi()).store.get();
      store->SetAway(true);
      At(Between(200, 4'000), [store] { store->SetAway(false); });
      break;
    }
    case 9:
      count("answers of the store lost");
      sim_.api(AnyApi()).store->LoseAnswers(2);
      break;
    case 10:
      count("answers of a node lost");
      node.LoseAnswers(3);
      break;
    default: {
      if (open_.empty()) break;
      count("create deleted");
      const OpPtr op = open_[rng_.Below(open_.size())];
      if (op->done) break;
      op->deleted = true;
      ++result_.deleted;
      DeleteOp(op, 8);
    }
  }
}

// As a client that wants it gone: again, until it is told so.
void Run::DeleteOp(const OpPtr& op, int tries) {
  if (op->delete_told || tries == 0) return;
  auto work = [](ClusterEdge& edge, OpPtr of) -> boost::asio::awaitable<void> {
    auto done = co_await edge.DeleteByRequest(std::string(kProject), of->id, "owner",
                                              Deadline::After(seconds(10)));
    of->delete_told |= done.ok();
  };
  SimCluster::Api& api = sim_.api(AnyApi());
  runtime::internal::StartDetached(sim_.world().at(api.process), work(*api.edge, op));
  At(seconds(12), [this, op, tries] { DeleteOp(op, tries - 1); });
}

// A machine that has lost all joins as a new one, when the old one is dead.
void Run::ComeBack(const std::string& id, bool machine) {
  if (machine && sim_.Record(id).state() != v1::NODE_DEAD) {
    At(seconds(1), [this, id, machine] { ComeBack(id, machine); });
    return;
  }
  sim_.node(id).SetLink(SimNode::Link::kUp);
  // A death that was on its way at this moment counts.
  At(seconds(3), [this, id] {
    if (sim_.Record(id).state() == v1::NODE_DEAD) sim_.Rejoin(id);
    At(seconds(10), [this, id] {
      silent_since_.erase(id);
      counted_dead_.erase(id);
    });
  });
}

void Run::LookAtNodes() {
  const auto dead = [this](const std::string& id) {
    return sim_.Record(id).state() == v1::NODE_DEAD;
  };
  for (const auto& [id, since] : silent_since_) {
    if (counted_dead_.contains(id) || !dead(id)) continue;
    counted_dead_.insert(id);
    ++result_.deaths;
    result_.detection_s.push_back(std::chrono::duration<double>(VirtualNow() - since).count());
  }
  for (const NodePtr& node : sim_.api(AnyApi()).edge->nodes().All()) {
    // An apiserver that was asleep shows what has passed: the store says whether it is so.
    if (!node->dead() || counted_dead_.contains(node->id()) || silent_since_.contains(node->id()))
      continue;
    if (!dead(node->id())) continue;
    counted_dead_.insert(node->id());
    ++result_.false_deaths;
    Violation(fmt::format("{} was declared dead and was not", node->id()));
  }
}

void Run::LookAtQuota() {
  if (options_.quota == 0) return;
  uint64_t live = 0;
  for (size_t i = 0; i < sim_.node_count(); ++i) live += sim_.node(i).charged();
  result_.most_live_of_quota = std::max(result_.most_live_of_quota, live);
  // What a node that was cut off still runs is no longer charged: the rest must fit.
  uint64_t cut = 0;
  for (const auto& [id, since] : silent_since_) cut += sim_.node(id).charged();
  if (live - cut > options_.quota)
    Violation(fmt::format("{} live of a quota of {}", live - cut, options_.quota));
}

void Run::Heal() {
  for (size_t i = 0; i < sim_.node_count(); ++i) {
    const std::string& id = sim_.node(i).id();
    sim_.node(i).SetLink(SimNode::Link::kUp);
    if (sim_.Record(id).state() == v1::NODE_DEAD) sim_.Rejoin(id);
  }
}

void Run::Measure() {
  uint64_t most = 0;
  for (size_t i = 0; i < sim_.node_count(); ++i) {
    result_.live += sim_.node(i).live();
    most = std::max<uint64_t>(most, sim_.node(i).live());
  }
  result_.imbalance = static_cast<double>(most) * static_cast<double>(sim_.node_count()) /
                      static_cast<double>(std::max<uint64_t>(result_.live, 1));
}

SimRunResult Run::Go() {
  const double cpu = CpuSeconds();
  const MonoTime begun = VirtualNow();
  if (options_.quota != 0) {
    for (const char* path : {"root", "root/p"}) {
      v1::IamLedger ledger;
      iam::Limits limits;
      if (std::string_view(path) == kProject) limits[iam::Resource::kLive] = options_.quota;
      limits.Into(*ledger.mutable_limits());
      const auto key = iam::layout::Ledger(*iam::ProjectPath::Parse(path, "project"));
      DSEC_CHECK(sim_.world()
                     .Await(sim_.main(), sim_.store().Put(key, ledger.SerializeAsString(),
                                                          std::nullopt, 0, Deadline::Never()))
                     .ok());
    }
  }
  for (size_t i = 0; i < sim_.node_count() && options_.preload > 0; ++i) {
    sim_.node(i).Preload(options_.preload, "root/old");
    for (const auto& [id, sandbox] : sim_.node(i).sandboxes()) old_.push_back(id);
  }
  rng_.Shuffle(std::span(old_));
  if (!sim_.RunUntilReady()) Violation("the cluster was not ready after 30 s");
  sim_.world().RunFor(seconds(2));
  double due = 0;
  const MonoTime load_begun = VirtualNow();
  MonoTime next_fault = load_begun + options_.fault_every;
  MonoTime next_look = load_begun;
  uint64_t burst_left = options_.burst;
  while (VirtualNow() - load_begun < options_.time) {
    due += options_.rate * std::chrono::duration<double>(kStep).count();
    auto now_due = static_cast<uint64_t>(due);
    due -= static_cast<double>(now_due);
    if (options_.steady) EndOld(now_due);
    if (burst_left > 0) {
      const auto share = std::min<uint64_t>(
          burst_left, options_.burst * kStep.count() / options_.burst_over.count() + 1);
      burst_left -= share;
      now_due += share;
    }
    Arrive(now_due);
    sim_.world().RunFor(kStep);
    while (!agenda_.empty() && agenda_.begin()->first <= VirtualNow()) {
      auto act = std::move(agenda_.begin()->second);
      agenda_.erase(agenda_.begin());
      act();
    }
    if (options_.faults && VirtualNow() >= next_fault) {
      next_fault += options_.fault_every;
      Inject();
    }
    LookAfterClients();
    if (VirtualNow() >= next_look) {
      next_look += milliseconds(100);
      LookAtNodes();
      LookAtQuota();
    }
  }
  Measure();
  const MonoTime settled = VirtualNow() + options_.settle;
  while (VirtualNow() < settled || (!agenda_.empty() && VirtualNow() < settled + options_.settle)) {
    sim_.world().RunFor(milliseconds(100));
    while (!agenda_.empty() && agenda_.begin()->first <= VirtualNow()) {
      auto act = std::move(agenda_.begin()->second);
      agenda_.erase(agenda_.begin());
      act();
    }
    LookAfterClients();
    LookAtNodes();
    LookAtQuota();
    const bool calm = agenda_.empty() &&
                      std::all_of(open_.begin(), open_.end(), [](auto& op) { return op->done; });
    // Without faults there is nothing to wait for but the clients.
    if (!options_.faults && calm) break;
  }
  Heal();
  sim_.world().RunFor(seconds(5));
  Check();
  std::sort(latencies_.begin(), latencies_.end());
  if (!latencies_.empty()) {
    result_.p50_ms = latencies_[latencies_.size() / 2];
    result_.p99_ms = latencies_[latencies_.size() * 99 / 100];
    result_.worst_ms = latencies_.back();
  }
  result_.cpu_s = CpuSeconds() - cpu;
  result_.virtual_s = std::chrono::duration<double>(VirtualNow() - begun).count();
  result_.store_commits = sim_.store().commits();
  return std::move(result_);
}

void Run::Check() {
  std::map<std::string, OpPtr> by_id;
  for (const OpPtr& op : ops_) {
    by_id.emplace(op->id, op);
    if (!op->done && options_.quota == 0)
      Violation(fmt::format("{} has no answer after {} tries", op->id, op->tries));
  }
  std::map<std::string, std::string> owners;  // request -> live sandbox
  for (size_t i = 0; i < sim_.node_count(); ++i) {
    for (const auto& [id, sandbox] : sim_.node(i).sandboxes()) {
      if (!sandbox->live() || sandbox->request_key.empty()) continue;
      const std::string request = sandbox->request_key.substr(kProject.size() + 1);
      const auto [it, first] = owners.emplace(request, id);
      if (!first)
        Violation(fmt::format("{} lives twice, as {} and as {}", request, it->second, id));
      const OpPtr& op = by_id.at(request);
      if (op->delete_told) {
        Violation(fmt::format("{} was deleted and lives as {}", request, id));
      } else if (op->deleted) {
        Violation(fmt::format("{} could not be deleted", request));
      } else if (op->sandbox != id && options_.faults) {
        Violation(fmt::format("{} lives and nobody was told ({})", id, request));
      }
    }
  }
  CheckAnswers();
}

// What clients were told is true, or its end is.
void Run::CheckAnswers() {
  SimCluster::Api& api = sim_.api(AnyApi());
  size_t looked = 0;
  for (const OpPtr& op : ops_) {
    if (op->sandbox.empty() || op->deleted) continue;
    const std::string node = NodeOf(SandboxId(op->sandbox))->str();
    if (!died_.contains(node) && ++looked > options_.looked_at) continue;
    const auto view = sim_.world().Await(
        api.process, api.edge->Get(SandboxId(op->sandbox), Deadline::After(seconds(5))));
    if (!view.ok()) {
      Violation(fmt::format("{} ({}): {}", op->sandbox, op->id, view.error().ToString()));
      continue;
    }
    v1::EventsRequest request;
    request.set_id(op->sandbox);
    request.set_max_events(1000);
    const auto events =
        sim_.world().Await(api.process, api.edge->Events(request, Deadline::After(seconds(5))));
    size_t ends = 0;
    if (events.ok()) {
      for (const v1::Event& event : events->events()) ends += event.type() == "ended" ? 1 : 0;
    }
    const bool ended = view->record().ended_unix_ms() != 0;
    if (!events.ok() || ends != (ended ? 1 : 0)) {
      Violation(fmt::format("{} has {} ends in state {}", op->sandbox, ends,
                            static_cast<int>(view->record().state())));
    }
    if (!ended) continue;
    if (view->record().termination().cause() == "node_lost") {
      ++result_.told_and_lost;
      if (!died_.contains(node))
        Violation(fmt::format("{} is lost and {} never died", op->sandbox, node));
      continue;
    }
    Violation(fmt::format("{} was told and has ended by {}", op->sandbox,
                          view->record().termination().cause()));
  }
}

}  // namespace

SimRunResult RunSim(const SimRunOptions& options) {
  log::Configure({.level = log::Level::kError, .sink = [](std::string_view) {}});
  auto run = std::make_unique<Run>(options);
  SimRunResult result = run->Go();
  run.reset();
  log::Configure({});
  return result;
}

}  // namespace dsec::router::testing

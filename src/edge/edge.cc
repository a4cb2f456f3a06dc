// SPDX-License-Identifier: Apache-2.0
#include "edge/edge.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "base/log.h"
#include "model/lifecycle.h"

namespace dsec::edge {
namespace {

constexpr size_t kStoreQueue = 1 << 16;
constexpr size_t kAdoptionsAtOnce = 64;
constexpr std::chrono::milliseconds kRoomRetry{200};
// The wall clock may be set: nobody sleeps longer than this for a wall-clock deadline.
constexpr std::chrono::milliseconds kTimerMax{1000};
// Bound on what a failing store makes us keep of one sandbox.
// The events of a short command go into one write, which begins after its result has left.
constexpr std::chrono::milliseconds kEmitDelay{10};
constexpr size_t kMaxUnsaved = 1000;

Result<std::string> ReadBootId(const std::string& proc_root) {
  const std::string path = proc_root + "/sys/kernel/random/boot_id";
  std::ifstream file(path);
  std::string id;
  if (!std::getline(file, id) || id.empty()) {
    return Error(Code::kFailedPrecondition, "edge.boot_id", fmt::format("cannot read {}", path));
  }
  return id;
}

// The boot id under which the store was opened last; empty at first.
std::string LastBootId(const std::string& path) {
  std::ifstream file(path);
  std::string id;
  std::getline(file, id);
  return id;
}

Result<void> SaveBootId(const std::string& path, const std::string& id) {
  std::ofstream file(path, std::ios::trunc);
  file << id << "\n";
  file.close();
  if (!file) return Error(Code::kUnavailable, "store.io", fmt::format("cannot write {}", path));
  return Ok();
}

Result<std::unique_ptr<RecordStore>> OpenStore(const EdgeOptions& options,
                                               const std::string& boot_id) {
  const std::string path = options.state_dir + "/edge.db";
  const std::string boot_path = options.state_dir + "/boot_id";
  const bool rebooted = LastBootId(boot_path) != boot_id;
  auto store = RecordStore::Open(path);
  // A crash of the host may leave a torn file, since nothing is synced. The whole of it is read
  // only then.
  if (store.ok() && rebooted) {
    if (auto verified = (*store)->Verify(); !verified.ok()) store = std::move(verified).error();
  }
  if (!store.ok() && store.error().reason() == "store.corrupt" && rebooted) {
    log::Error("edge.store_set_aside", {{"path", path}, {"error", store.error()}});
    std::error_code error;
    std::filesystem::rename(path, path + ".damaged", error);
    if (error)
      return Error(Code::kUnavailable, "store.io",
                   fmt::format("rename {}: {}", path, error.message()));
    std::filesystem::remove(path + "-wal", error);
    store = RecordStore::Open(path);
  }
  if (!store.ok()) {
    if (store.error().reason() == "store.corrupt") {
      return std::move(store).Context(
          "the records of this node are damaged; `dsec purge` ends all of its sandboxes "
          "and starts afresh");
    }
    return store;
  }
  DSEC_TRY_VOID(SaveBootId(boot_path, boot_id));
  return store;
}

// Whether a project is another or lies below it; the root's name in records is empty.
bool Below(std::string_view project, std::string_view above) {
  return above.empty() || (project.starts_with(above) &&
                           (project.size() == above.size() || project[above.size()] == '/'));
}

}  // namespace

bool Matches(const v1::SandboxRecord& record, const v1::ListRequestAll& request) {
  const auto& states = request.states();
  if (states.empty()) {
    if (model::IsTerminal(record.state()) && !request.include_ended()) return false;
  } else if (std::find(states.begin(), states.end(), record.state()) == states.end()) {
    return false;
  }
  if (!request.name().empty() && record.spec().name() != request.name()) return false;
  if (!request.project().empty() && record.project() != request.project()) return false;
  const auto holds = [&](const std::string& above) { return Below(record.project(), above); };
  if (!request.within().empty() &&
      std::none_of(request.within().begin(), request.within().end(), holds)) {
    return false;
  }
  if (std::any_of(request.not_within().begin(), request.not_within().end(), holds)) return false;
  const auto& labels = record.spec().labels();
  return std::all_of(request.labels().begin(), request.labels().end(), [&](const auto& wanted) {
    const auto it = labels.find(wanted.first);
    return it != labels.end() && it->second == wanted.second;
  });
}

bool WantsEnded(const v1::ListRequestAll& request) {
  const auto& states = request.states();
  if (states.empty()) return request.include_ended();
  return std::any_of(states.begin(), states.end(),
                     [](int state) { return model::IsTerminal(static_cast<v1::State>(state)); });
}

Result<std::unique_ptr<Edge>> Edge::Open(EdgeOptions options, runtime::Shards& shards,
                                         Backends backends) {
  DSEC_TRY(auto boot_id, ReadBootId(options.proc_root));
  DSEC_TRY(auto store, OpenStore(options, boot_id));
  std::unique_ptr<Edge> edge(
      new Edge(std::move(options), shards, std::move(backends), std::move(store)));
  edge->boot_id_ = std::move(boot_id);
  return edge;
}

Edge::Edge(EdgeOptions options, runtime::Shards& shards, Backends backends,
           std::unique_ptr<RecordStore> store)
    : options_(std::move(options)),
      shards_(shards),
      backends_(std::move(backends)),
      metrics_(*options_.metrics),
      store_(std::move(store)),
      quota_lines_(options_.admission.max_waiting, kRoomRetry),
      room_queue_("capacity.queue", options_.admission.max_waiting, kRoomRetry),
      turns_("capacity.creates", options_.admission.creates_at_once,
             options_.admission.max_waiting),
      adoptions_("capacity.adoptions", kAdoptionsAtOnce, SIZE_MAX),
      admission_(
          options_.admission,
          [this] { return ReadHostMeters(options_.proc_root, options_.disk_paths); },
          *options_.clock,
          [this] {
            if (let_go_) return;
            metrics_.live.Set(static_cast<double>(admission_.live()));
            room_queue_.Poke();
          }),
      timer_wake_(std::make_shared<runtime::AsyncEvent>()),
      store_thread_(std::make_unique<runtime::BlockingPool>("store", 1, kStoreQueue)) {}

Edge::~Edge() { LetGo(); }

void Edge::LetGo() {
  stopping_ = true;
  // What is destroyed from here on must not wake anything: its shard may be gone before it.
  let_go_ = true;
  quota_lines_.Close();
  room_queue_.Close();
  turns_.Close();
  adoptions_.Close();
  reconcile_.reset();
  store_thread_.reset();
  registry_.Clear();
}

runtime::Task<void> Edge::Stop(runtime::Deadline deadline) {
  stopping_ = true;
  boost::asio::post(shards_.at(0), [wake = timer_wake_] { wake->Set(); });
  for (const SandboxPtr& sandbox : registry_.All()) {
    boost::asio::post(sandbox->executor(), [sandbox] {
      if (sandbox->ticket != nullptr) sandbox->ticket->Cancel();
      sandbox->Changed();
    });
  }
  if (reconcile_ != nullptr) reconcile_->Stop();
  auto closed = std::make_shared<runtime::AsyncEvent>();
  const auto here = co_await boost::asio::this_coro::executor;
  (void)runtime::Spawn(watchers_, here, CloseCalls(closed));
  auto waited = co_await closed->Wait(deadline);
  if (!waited.ok()) {
    log::Warn("edge.stop_incomplete", {{"calls", calls_.count()}});
  }
  // Events written without waiting stand in the queue before this.
  auto nothing = []() -> Result<void> { return Ok(); };
  co_return co_await store_thread_->Run(std::move(nothing), deadline);
}

boost::asio::awaitable<void> Edge::CloseCalls(std::shared_ptr<runtime::AsyncEvent> closed) {
  co_await calls_.Close();
  closed->Set();
}

Result<sandbox::SandboxBackend*> Edge::BackendFor(v1::Backend kind) const {
  const auto it = backends_.find(kind == v1::BACKEND_UNSPECIFIED ? v1::BACKEND_CONTAINER : kind);
  if (it == backends_.end()) {
    return Error(Code::kFailedPrecondition, "backend.unavailable",
                 fmt::format("this node has no backend {}", model::BackendName(kind)))
        .WithField("backend");
  }
  return it->second;
}

runtime::Task<Edge::SandboxPtr> Edge::FindLive(SandboxId id) {
  if (auto sandbox = registry_.Find(id.str())) co_return sandbox;
  DSEC_CO_TRY(const auto record, co_await FindEnded(id.str()));
  co_return GoneError(record.termination());
}

runtime::Task<v1::SandboxRecord> Edge::FindEnded(std::string id) {
  auto find = [this, id] { return store_->Find(id); };
  auto found = co_await store_thread_->Run(std::move(find), runtime::Deadline::Never());
  if (!found.ok()) co_return std::move(found).error();
  if (!found->has_value()) co_return NotFoundError(id);
  co_return **std::move(found);
}

v1::SandboxView Edge::ViewOf(const Sandbox& sandbox) const {
  v1::SandboxView view;
  *view.mutable_record() = sandbox.View();
  return view;
}

runtime::Task<void> Edge::Save(SandboxPtr sandbox, std::vector<v1::Event> events) {
  auto record = sandbox->record();
  return SaveBy(std::move(sandbox), std::move(record), std::move(events), false);
}

runtime::Task<void> Edge::SaveNew(SandboxPtr sandbox, std::vector<v1::Event> events) {
  auto record = sandbox->record();
  return SaveBy(std::move(sandbox), std::move(record), std::move(events), true);
}

runtime::Task<void> Edge::SaveBy(SandboxPtr sandbox,
                                 std::shared_ptr<const v1::SandboxRecord> record,
                                 std::vector<v1::Event> events, bool fresh) {
  if (!sandbox->unsaved.empty()) {
    events.insert(events.begin(), std::make_move_iterator(sandbox->unsaved.begin()),
                  std::make_move_iterator(sandbox->unsaved.end()));
    sandbox->unsaved.clear();
  }
  const auto shared = std::make_shared<const std::vector<v1::Event>>(std::move(events));
  auto write = [this, shared, record, fresh]() -> Result<void> {
    const auto start = std::chrono::steady_clock::now();
    auto written = fresh ? store_->Insert(*record, *shared) : store_->Save(*record, *shared);
    metrics_.record_write_seconds.Observe(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    if (!written.ok()) {
      metrics_.record_write_failures.Add();
      return written;
    }
    metrics_.events.Add(shared->size());
    if (!shared->empty()) hub_.Announce(record->id());
    return written;
  };
  auto written = co_await store_thread_->Run(std::move(write), runtime::Deadline::Never());
  if (!written.ok() && written.error().code() != Code::kCancelled) {
    auto& unsaved = sandbox->unsaved;
    unsaved.insert(unsaved.begin(), shared->begin(), shared->end());
    if (unsaved.size() > kMaxUnsaved) {
      log::Error("edge.events_lost",
                 {{"sandbox_id", sandbox->id()}, {"count", unsaved.size() - kMaxUnsaved}});
      unsaved.resize(kMaxUnsaved);
    }
  }
  co_return written;
}

void Edge::Emit(const SandboxPtr& sandbox, v1::Event event, bool soon) {
  sandbox->unsaved.push_back(std::move(event));
  if (!soon) {
    (void)runtime::Spawn(watchers_, sandbox->executor(), SaveLater(sandbox));
    return;
  }
  if (sandbox->flush_due) return;
  sandbox->flush_due = runtime::Spawn(watchers_, sandbox->executor(), FlushLater(sandbox));
}

boost::asio::awaitable<void> Edge::FlushLater(SandboxPtr sandbox) {
  (void)co_await runtime::SleepUntil(runtime::Deadline::After(kEmitDelay));
  sandbox->flush_due = false;
  (void)co_await Flush(sandbox);
}

runtime::Task<void> Edge::Flush(SandboxPtr sandbox) {
  // What somebody else has taken is in front of us in the queue of the store.
  if (sandbox->unsaved.empty()) co_return Ok();
  auto saved = co_await Save(sandbox, {});
  if (!saved.ok())
    log::Error("edge.event_not_saved", {{"sandbox_id", sandbox->id()}, {"error", saved.error()}});
  co_return saved;
}

boost::asio::awaitable<void> Edge::SaveLater(SandboxPtr sandbox) {
  auto saved = co_await Save(sandbox, {});
  if (!saved.ok())
    log::Error("edge.record_not_saved", {{"sandbox_id", sandbox->id()}, {"error", saved.error()}});
}

// --- time ---

void Edge::Arm(const SandboxPtr& sandbox) {
  if (!sandbox->activity.has_value()) return;
  sandbox->Touch(sandbox->activity->last_ms());
  const int64_t due = sandbox->activity->Due();
  if (due == 0 || (sandbox->armed_ms != 0 && sandbox->armed_ms <= due)) return;
  sandbox->armed_ms = due;
  if (due_.Push(due, sandbox)) {
    boost::asio::post(shards_.at(0), [wake = timer_wake_] { wake->Set(); });
  }
}

void Edge::RunDue() {
  for (const SandboxPtr& sandbox : due_.PopDue(NowMs())) {
    boost::asio::post(sandbox->executor(), [this, sandbox] { OnDue(sandbox); });
  }
}

void Edge::OnDue(const SandboxPtr& sandbox) {
  sandbox->armed_ms = 0;
  if (stopping() || !sandbox->activity.has_value() || sandbox->state() != v1::STATE_RUNNING) return;
  const Activity::Verdict verdict = sandbox->activity->Check(NowMs());
  if (!verdict.end.empty()) {
    v1::Termination termination = NewTermination(verdict.end, "edge", "");
    termination.set_limit(static_cast<uint64_t>(verdict.limit_ms));
    BeginStop(sandbox, std::move(termination), std::chrono::milliseconds(0));
    return;
  }
  for (const std::string& op_id : verdict.disconnected) {
    (void)runtime::Spawn(calls_, sandbox->executor(), KillDisconnected(sandbox, op_id));
  }
  Arm(sandbox);
}

boost::asio::awaitable<void> Edge::RunTimers() {
  const auto wake = timer_wake_;
  while (!stopping()) {
    const auto next = due_.Next();
    auto deadline = runtime::Deadline::Never();
    if (next.has_value()) {
      const std::chrono::milliseconds wait(std::max<int64_t>(*next - NowMs(), 0));
      deadline = runtime::Deadline::After(std::min(wait, kTimerMax));
    }
    auto woken = co_await wake->Wait(deadline);
    if (!woken.ok() && woken.error().code() == Code::kCancelled) co_return;
    wake->Reset();
    RunDue();
  }
}

// --- calls that need no agent ---

runtime::Task<v1::SandboxView> Edge::Get(SandboxId id, runtime::Deadline) {
  v1::SandboxView view;
  if (const auto sandbox = registry_.Find(id.str())) {
    co_return co_await runtime::On(sandbox->executor(), GetHere(sandbox));
  }
  DSEC_CO_TRY(*view.mutable_record(), co_await FindEnded(id.str()));
  co_return view;
}

runtime::Task<std::string> Edge::ProjectOf(SandboxId id) {
  if (const auto sandbox = registry_.Find(id.str())) co_return sandbox->record()->project();
  DSEC_CO_TRY(const auto record, co_await FindEnded(id.str()));
  co_return record.project();
}

runtime::Task<v1::SandboxView> Edge::GetHere(SandboxPtr sandbox) {
  v1::SandboxView view = ViewOf(*sandbox);
  if (sandbox->activity.has_value())
    view.set_execs_running(sandbox->activity->RunningExecs().size());
  co_return view;
}

runtime::Task<v1::ListPage> Edge::List(v1::ListRequestAll request, runtime::Deadline deadline) {
  constexpr size_t kChunk = 200;
  const size_t page_size = request.page_size() == 0 ? 100 : request.page_size();
  if (page_size > 1000) {
    co_return Error(Code::kInvalidArgument, "list.page_size",
                    fmt::format("{} is not in 1..1000", page_size))
        .WithField("page_size");
  }
  if (!request.page_token().empty() && !ParseSandboxId(request.page_token()).ok()) {
    co_return Error(Code::kInvalidArgument, "list.page_token",
                    "is not a token that a list gave out")
        .WithField("page_token");
  }
  // One more than the page tells whether there is a next one. What ends between the two reads is in
  // both.
  std::map<std::string, v1::SandboxRecord> found;
  std::string after = request.page_token();
  for (bool more = true; more && found.size() <= page_size;) {
    const auto chunk = registry_.After(after, kChunk);
    for (const SandboxPtr& sandbox : chunk) {
      if (Matches(*sandbox->record(), request)) found.emplace(sandbox->id(), sandbox->View());
      if (found.size() > page_size) break;
    }
    more = chunk.size() == kChunk;
    if (more) after = chunk.back()->id();
  }
  if (WantsEnded(request)) {
    size_t ended = 0;
    after = request.page_token();
    for (bool more = true; more && ended <= page_size;) {
      if (deadline.Expired())
        co_return Error(Code::kDeadlineExceeded, "list.deadline", "the list took too long");
      auto read = [this, after] { return store_->EndedAfter(after, kChunk); };
      auto chunk = co_await store_thread_->Run(std::move(read), deadline);
      if (!chunk.ok()) co_return std::move(chunk).error();
      more = chunk->size() == kChunk;
      if (more) after = chunk->back().id();
      for (v1::SandboxRecord& record : *chunk) {
        if (!Matches(record, request)) continue;
        ++ended;
        found.insert_or_assign(record.id(), std::move(record));
      }
    }
  }
  v1::ListPage page;
  for (auto& [id, record] : found) {
    if (static_cast<size_t>(page.records_size()) == page_size) {
      page.set_next_page_token(page.records().rbegin()->id());
      break;
    }
    *page.add_records() = std::move(record);
  }
  co_return page;
}

runtime::Task<v1::SandboxView> Edge::Renew(v1::RenewRequest request, runtime::Deadline deadline) {
  runtime::GatePass pass(calls_);
  if (!pass) co_return StoppingError();
  DSEC_CO_TRY(auto sandbox, co_await FindLive(SandboxId(request.id())));
  const auto executor = sandbox->executor();
  co_return co_await runtime::On(executor,
                                 RenewHere(std::move(sandbox), std::move(request), deadline));
}

runtime::Task<v1::SandboxView> Edge::RenewHere(SandboxPtr sandbox, v1::RenewRequest request,
                                               runtime::Deadline deadline) {
  DSEC_CO_TRY_VOID(co_await AgentOf(sandbox, false, deadline));
  const int64_t now = NowMs();
  v1::SandboxSpec spec = sandbox->record()->spec();
  if (request.has_ttl_ms()) spec.set_ttl_ms(request.ttl_ms());
  if (request.has_idle_ms()) spec.set_idle_ms(request.idle_ms());
  // The rules for the two are those of a create; what Normalize fills in for 0 is not wanted: here
  // 0 means none.
  v1::SandboxSpec checked = spec;
  DSEC_CO_TRY(auto* const backend, BackendFor(spec.backend()));
  DSEC_CO_TRY_VOID(backend->Normalize(checked));
  Activity& activity = *sandbox->activity;
  const int64_t expires =
      request.has_ttl_ms()
          ? (request.ttl_ms() == 0 ? 0 : now + static_cast<int64_t>(request.ttl_ms()))
          : sandbox->record()->expires_unix_ms();
  activity.SetTtl(static_cast<int64_t>(spec.ttl_ms()), expires);
  activity.SetIdle(static_cast<int64_t>(spec.idle_ms()));
  activity.CallBegan(now);
  activity.CallEnded(now);
  sandbox->Change([&](v1::SandboxRecord& record) {
    record.mutable_spec()->set_ttl_ms(spec.ttl_ms());
    record.mutable_spec()->set_idle_ms(spec.idle_ms());
    record.set_expires_unix_ms(expires);
    record.set_claim_until_unix_ms(0);
  });
  Arm(sandbox);
  v1::Event event = sandbox->NewEvent("renewed", now);
  event.set_detail(fmt::format("ttl_ms={} idle_ms={}", spec.ttl_ms(), spec.idle_ms()));
  std::vector<v1::Event> events{std::move(event)};
  auto saved = co_await Save(sandbox, std::move(events));
  if (!saved.ok()) co_return std::move(saved).error();
  co_return ViewOf(*sandbox);
}

runtime::Task<v1::Usage> Edge::Stats(SandboxId id, runtime::Deadline) {
  if (const auto sandbox = registry_.Find(id.str())) {
    co_return co_await runtime::On(sandbox->executor(), StatsHere(sandbox));
  }
  DSEC_CO_TRY(const auto record, co_await FindEnded(id.str()));
  co_return record.final_usage();
}

runtime::Task<v1::Usage> Edge::StatsHere(SandboxPtr sandbox) {
  const auto instance = sandbox->instance;
  if (instance == nullptr) co_return sandbox->record()->final_usage();
  co_return co_await instance->ReadUsage();
}

runtime::Task<v1::EventsReply> Edge::Events(v1::EventsRequest request, runtime::Deadline deadline) {
  const auto wait = runtime::Deadline::After(
      std::chrono::milliseconds(std::min<uint64_t>(request.wait_ms(), 600'000)));
  const auto until = deadline.Sooner(wait);
  const uint64_t limit =
      request.max_events() == 0 ? 100 : std::min<uint64_t>(request.max_events(), 1000);
  const std::string id = request.id();
  EventHub::Subscription subscription(hub_, id, co_await boost::asio::this_coro::executor);
  while (true) {
    // Looked at before the events are read: the last event of a sandbox is saved before it leaves
    // the registry.
    const auto sandbox = id.empty() ? nullptr : registry_.Find(id);
    const bool live = id.empty() || sandbox != nullptr;
    if (sandbox != nullptr) {
      // Whoever saw an effect finds its event. A failure is logged, and those on record are
      // answered.
      (void)co_await runtime::On(sandbox->executor(), Flush(sandbox));
    }
    const uint64_t after = request.after_seq();
    auto read = [this, id, after, limit] { return store_->Events(id, after, limit); };
    auto events = co_await store_thread_->Run(std::move(read), runtime::Deadline::Never());
    if (!events.ok()) co_return std::move(events).error();
    if (events->empty() && !live) DSEC_CO_TRY_VOID(co_await FindEnded(id));
    if (!events->empty() || !live || stopping() || until.Expired()) {
      v1::EventsReply reply;
      reply.set_next_seq(after);
      for (v1::Event& event : *events) {
        reply.set_next_seq(id.empty() ? event.node_seq() : event.seq());
        *reply.add_events() = std::move(event);
      }
      co_return reply;
    }
    auto woken = co_await subscription.Wait(until);
    if (!woken.ok() && woken.error().code() == Code::kCancelled) co_return std::move(woken).error();
  }
}

runtime::Task<v1::NodeInfo> Edge::Node(runtime::Deadline) {
  DSEC_CO_TRY(const auto meters, admission_.Measure());
  v1::NodeInfo info;
  info.set_node_id(options_.node_id.str());
  info.set_version(options_.version);
  for (const auto& [kind, backend] : backends_) {
    for (v1::Capability& capability : backend->Capabilities())
      *info.add_capabilities() = std::move(capability);
  }
  info.set_live(admission_.live());
  info.set_capacity(options_.admission.max_sandboxes);
  info.set_memory_total_bytes(meters.memory_total_bytes);
  info.set_memory_available_bytes(meters.memory_available_bytes);
  info.set_scratch_free_bytes(meters.disk_free_bytes);
  info.set_psi_memory_some_avg10(meters.psi_memory_some_avg10);
  info.set_psi_cpu_some_avg10(meters.psi_cpu_some_avg10);
  info.set_cpus(std::thread::hardware_concurrency());
  co_return info;
}

}  // namespace dsec::edge

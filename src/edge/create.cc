// SPDX-License-Identifier: Apache-2.0
#include <boost/asio/post.hpp>
#include <mutex>
#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "base/utf8.h"
#include "edge/edge.h"
#include "model/lifecycle.h"

namespace dsec::edge {
namespace {

constexpr size_t kMaxPrincipal = 256;
constexpr std::chrono::milliseconds kQuotaTime{5'000};  // of asking the store for a slice

Result<void> CheckText(std::string_view text, std::string_view field) {
  if (text.size() > kMaxPrincipal || !IsUtf8(text)) {
    return Error(Code::kInvalidArgument, "create.text",
                 fmt::format("{} must be UTF-8 of at most {} bytes", field, kMaxPrincipal))
        .WithField(std::string(field));
  }
  return Ok();
}

Result<void> CheckCreate(const v1::CreateRequest& request, const NodeId& node) {
  DSEC_TRY_VOID(ParseOpId(request.request_id(), "request_id"));
  DSEC_TRY_VOID(CheckText(request.principal(), "principal"));
  DSEC_TRY_VOID(CheckText(request.project(), "project"));
  if (request.sandbox_id().empty()) return Ok();
  DSEC_TRY(const auto id, ParseSandboxId(request.sandbox_id()));
  DSEC_TRY(const auto owner, NodeOf(id));
  if (owner != node) {
    return Error(
               Code::kInvalidArgument, "create.sandbox_id",
               fmt::format("{} is an id of node {}, this is {}", id.str(), owner.str(), node.str()))
        .WithField("sandbox_id");
  }
  return Ok();
}

Error RequestReused(const v1::SandboxRecord& record) {
  return Error(Code::kAlreadyExists, "create.request_id_reused",
               fmt::format("request_id was used before, with another body, for {}", record.id()))
      .WithField("request_id");
}

void AddPhase(v1::SandboxRecord& record, std::string_view name, MonoTime start) {
  v1::PhaseTime* phase = record.add_phases();
  phase->set_phase(std::string(name));
  phase->set_micros(static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                              std::chrono::steady_clock::now() - start)
                                              .count()));
}

Activity::Rules RulesOf(const v1::SandboxRecord& record) {
  return {.expires_ms = record.expires_unix_ms(),
          .idle_ms = static_cast<int64_t>(record.spec().idle_ms()),
          .claim_until_ms = record.claim_until_unix_ms(),
          .ttl_waits_for_exec = record.spec().ttl_waits_for_exec(),
          .ttl_extension_ms = static_cast<int64_t>(record.spec().ttl_extension_ms())};
}

}  // namespace

// Lets the backend write the record for as long as its Create runs and not a moment longer: a
// helper thread that outlives the deadline of the create must not overwrite what came after it.
struct CreateJournal {
  std::mutex mutex;
  bool open = true;

  void Close() {
    std::lock_guard lock(mutex);
    open = false;
  }
};

// The reply of a create on its way to a client.
class Edge::Delivery final : public Claim {
 public:
  Delivery(Edge* edge, SandboxPtr sandbox) : edge_(edge), sandbox_(std::move(sandbox)) {}
  ~Delivery() override {
    if (edge_->let_go_) return;
    boost::asio::post(sandbox_->executor(),
                      [edge = edge_, sandbox = sandbox_, delivered = delivered_] {
                        edge->ClaimSettled(sandbox, delivered);
                      });
  }
  void Delivered() override { delivered_ = true; }

 private:
  Edge* const edge_;
  const SandboxPtr sandbox_;
  bool delivered_ = false;
};

runtime::Task<Created> Edge::Create(v1::CreateRequest request, runtime::Deadline deadline) {
  runtime::GatePass pass(calls_);
  if (!pass) co_return StoppingError();
  DSEC_CO_TRY_VOID(CheckCreate(request, options_.node_id));
  const uint64_t fences = fences_.load();
  std::string digest = CreateDigest(request);
  const std::string request_key = RequestKey(request.project(), request.request_id());
  if (auto holder = registry_.FindRequest(request_key)) {
    co_return co_await Join(std::move(holder), std::move(digest), true, deadline);
  }
  const std::string request_id = request.request_id();
  auto find = [this, request_key] { return store_->FindByRequest(request_key); };
  auto known = co_await store_thread_->Run(std::move(find), runtime::Deadline::Never());
  if (!known.ok()) co_return std::move(known).error();
  // One that is on record as live entered the registry, or ended, while we looked.
  if (known->has_value() && (*known)->ended_unix_ms() != 0) {
    if ((*known)->request_digest() != digest) co_return RequestReused(**known);
    Created created;
    *created.view.mutable_record() = **std::move(known);
    created.view.set_existed(true);
    co_return created;
  }

  DSEC_CO_TRY(auto* const backend, BackendFor(request.spec().backend()));
  DSEC_CO_TRY_VOID(backend->Normalize(*request.mutable_spec()));
  v1::SandboxRecord record;
  record.set_id(request.sandbox_id().empty() ? NewSandboxId(options_.node_id, *options_.clock).str()
                                             : request.sandbox_id());
  record.set_request_id(request_id);
  record.set_request_digest(digest);
  *record.mutable_spec() = std::move(*request.mutable_spec());
  record.set_state(v1::STATE_PENDING);
  record.set_created_unix_ms(NowMs());
  record.set_project(request.project());
  record.set_next_event_seq(1);
  const auto executor = shards_.For(record.id());
  auto sandbox = std::make_shared<Sandbox>(executor, std::move(record));
  sandbox->ticket = std::make_shared<FairQueue::Ticket>(executor, request.project());
  if (fences_.load() != fences) co_return FencedError();
  DSEC_CO_TRY(auto holder, registry_.Enter(sandbox));
  if (holder == sandbox) {
    const auto room_by = runtime::Deadline::After(
        std::chrono::milliseconds(std::min<uint64_t>(request.capacity_wait_ms(), 3'600'000)));
    if (fences_.load() != fences) {
      // Entered at the very moment of a fence, which may not have seen it, and somebody may have
      // joined it already: runs before the create, and dooms it.
      boost::asio::post(executor, [this, sandbox] {
        BeginStop(sandbox, FencedTermination("the node has a new epoch"),
                  std::chrono::milliseconds(0));
      });
    }
    if (!runtime::Spawn(calls_, executor, RunCreate(sandbox, room_by))) {
      registry_.Remove(*sandbox);
      co_return StoppingError();
    }
  }
  const bool existed = holder != sandbox;
  co_return co_await Join(std::move(holder), std::move(digest), existed, deadline);
}

runtime::Task<Created> Edge::Join(SandboxPtr sandbox, std::string digest, bool existed,
                                  runtime::Deadline deadline) {
  const auto record = sandbox->record();
  if (record->request_digest() != digest) co_return RequestReused(*record);
  const auto executor = sandbox->executor();
  co_return co_await runtime::On(executor, JoinHere(std::move(sandbox), existed, deadline));
}

runtime::Task<Created> Edge::JoinHere(SandboxPtr sandbox, bool existed,
                                      runtime::Deadline deadline) {
  {
    ++sandbox->joiners;
    const OnExit leave([&sandbox] { --sandbox->joiners; });
    while (!sandbox->create_done) {
      auto woken = co_await sandbox->WaitChange(deadline);
      if (!woken.ok() && woken.error().code() == Code::kDeadlineExceeded) {
        co_return Error(
            Code::kDeadlineExceeded, "create.deadline",
            fmt::format("{} is not ready yet; the create goes on: repeat the request_id",
                        sandbox->id()));
      }
      if (!woken.ok()) co_return std::move(woken).error();
    }
  }
  if (sandbox->create_error.has_value()) co_return *sandbox->create_error;
  Created created;
  created.view = ViewOf(*sandbox);
  created.view.set_existed(existed);
  if (!sandbox->ended) {
    ++sandbox->claims;
    created.claim = std::make_unique<Delivery>(this, sandbox);
    co_await LiftClaim(sandbox);
  }
  co_return created;
}

void Edge::ClaimSettled(const SandboxPtr& sandbox, bool delivered) {
  --sandbox->claims;
  sandbox->delivered |= delivered;
  if (sandbox->delivered || sandbox->claims > 0 || sandbox->joiners > 0 ||
      sandbox->state() != v1::STATE_RUNNING) {
    return;
  }
  SetClaim(sandbox, NowMs() + options_.claim_grace.count());
}

void Edge::SetClaim(const SandboxPtr& sandbox, int64_t until_ms) {
  sandbox->activity->SetClaim(until_ms);
  sandbox->Change([&](v1::SandboxRecord& record) { record.set_claim_until_unix_ms(until_ms); });
  Arm(sandbox);
  (void)runtime::Spawn(watchers_, sandbox->executor(), SaveLater(sandbox));
}

boost::asio::awaitable<void> Edge::LiftClaim(SandboxPtr sandbox) {
  if (!sandbox->activity.has_value() || sandbox->record()->claim_until_unix_ms() == 0) co_return;
  sandbox->activity->SetClaim(0);
  sandbox->Change([](v1::SandboxRecord& record) { record.set_claim_until_unix_ms(0); });
  Arm(sandbox);
  auto saved = co_await Save(sandbox, {});
  if (!saved.ok()) {
    log::Error("edge.record_not_saved", {{"sandbox_id", sandbox->id()}, {"error", saved.error()}});
  }
}

boost::asio::awaitable<void> Edge::RunCreate(SandboxPtr sandbox, runtime::Deadline room_by) {
  const MonoTime start = std::chrono::steady_clock::now();
  auto made = co_await MakeSandbox(sandbox, room_by);
  if (!made.ok()) {
    metrics_.Creates(made.error().reason()).Add();
    co_await EndCreate(sandbox, std::move(made).error());
    co_return;
  }
  metrics_.Creates("ok").Add();
  metrics_.create_seconds.Observe(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  const auto record = sandbox->record();
  for (const v1::PhaseTime& phase : record->phases()) {
    metrics_.CreatePhase(phase.phase()).Observe(static_cast<double>(phase.micros()) * 1e-6);
  }
  log::Info("sandbox.running",
            {{"sandbox_id", sandbox->id()}, {"request_id", record->request_id()}});
}

iam::Amounts Edge::AmountsOf(const v1::SandboxRecord& record) {
  const v1::Limits& limits = record.spec().limits();
  return {{1, 0, limits.cpu_millis(), limits.memory_bytes(), limits.disk_bytes()}};
}

// Charges the sandbox to its project, and waits for that in a line of the project.
runtime::Task<void> Edge::TakeQuota(SandboxPtr sandbox, runtime::Deadline room_by) {
  iam::QuotaKeeper& quota = *options_.quota;
  const auto record = sandbox->record();
  DSEC_CO_TRY(const auto project, iam::ProjectPath::FromRecord(record->project()));
  iam::Amounts amounts = AmountsOf(*record);
  amounts[iam::Resource::kCreating] = 1;
  if (!quota_lines_.Waits(record->project())) {
    auto taken = co_await quota.Reserve(project, amounts, runtime::Deadline::After(kQuotaTime));
    if (taken.ok()) {
      sandbox->charge = *std::move(taken);
      co_return Ok();
    }
    const bool waits = taken.error().code() == Code::kResourceExhausted && !room_by.Expired();
    if (!waits) co_return std::move(taken).error();
  }
  FairQueue::Take take = [&]() -> Result<void> {
    DSEC_TRY(sandbox->charge, quota.TryReserve(project, amounts));
    return Ok();
  };
  auto entered = co_await quota_lines_.Enter(record->project(), sandbox->ticket, take, room_by);
  co_return entered;
}

runtime::Task<void> Edge::MakeSandbox(SandboxPtr sandbox, runtime::Deadline room_by) {
  if (options_.quota != nullptr) {
    const MonoTime quota_start = std::chrono::steady_clock::now();
    auto charged = co_await TakeQuota(sandbox, room_by);
    if (!charged.ok()) {
      if (charged.error().code() == Code::kResourceExhausted)
        metrics_.Refusals(charged.error().reason()).Add();
      co_return charged;
    }
    sandbox->Change([&](v1::SandboxRecord& record) { AddPhase(record, "quota", quota_start); });
  }
  const MonoTime start = std::chrono::steady_clock::now();
  FairQueue::Take take = [this, &sandbox]() -> Result<void> {
    DSEC_TRY(sandbox->place, admission_.TryEnter());
    return Ok();
  };
  metrics_.waiting_for_room.Add(1);
  auto entered = co_await room_queue_.Enter(sandbox->ticket, std::move(take), room_by);
  metrics_.waiting_for_room.Add(-1);
  if (!entered.ok()) {
    if (entered.error().code() == Code::kResourceExhausted)
      metrics_.Refusals(entered.error().reason()).Add();
    co_return entered;
  }
  metrics_.live.Set(static_cast<double>(admission_.live()));
  const auto turn_by = runtime::Deadline::After(options_.create_queue_timeout);
  metrics_.waiting_for_turn.Add(1);
  auto turn = co_await turns_.Acquire(sandbox->ticket, turn_by);
  metrics_.waiting_for_turn.Add(-1);
  if (!turn.ok()) {
    if (turn.error().code() == Code::kResourceExhausted)
      metrics_.Refusals(turn.error().reason()).Add();
    co_return std::move(turn).error();
  }
  sandbox->ticket = nullptr;

  v1::SandboxRecord made;
  std::vector<v1::Event> events;
  events.push_back(sandbox->NewEvent("created", sandbox->record()->created_unix_ms()));
  sandbox->Change([&](v1::SandboxRecord& record) {
    AddPhase(record, "admission", start);
    (void)model::Move(record, v1::STATE_STARTING);
  });
  events.push_back(sandbox->NewEvent("state", NowMs()));
  const MonoTime record_start = std::chrono::steady_clock::now();
  auto inserted = co_await SaveNew(sandbox, std::move(events));
  if (!inserted.ok() && inserted.error().reason() == "store.constraint") {
    co_return Error(
        Code::kUnavailable, "create.raced",
        "a sandbox of the same request_id ended at this very moment: repeat the request");
  }
  if (!inserted.ok()) co_return inserted;
  sandbox->recorded = true;
  DSEC_CO_FAULT_POINT("edge.create.after_insert");
  made = *sandbox->record();
  AddPhase(made, "record", record_start);

  // Runs on whatever thread the backend works on. Nobody else writes this record before the create
  // has come back.
  const auto gate = std::make_shared<CreateJournal>();
  sandbox::Journal journal = [this, sandbox,
                              gate](const v1::SandboxRecord& record) -> Result<void> {
    if (sandbox->doomed())
      return Error(Code::kCancelled, "create.deleted", "the sandbox is to be deleted");
    DSEC_FAULT_POINT("edge.create.before_journal");
    std::lock_guard lock(gate->mutex);
    if (!gate->open) return Error(Code::kCancelled, "create.over", "the create has been given up");
    DSEC_TRY_VOID(store_->Save(record, {}));
    DSEC_FAULT_POINT("edge.create.after_journal");
    return Ok();
  };
  DSEC_CO_TRY(auto* const backend, BackendFor(made.spec().backend()));
  const auto allowed = backend->CreateTime(options_.create_timeout);
  auto instance =
      co_await backend->Create(made, std::move(journal), runtime::Deadline::After(allowed));
  gate->Close();
  sandbox->place.Settle();
  sandbox->charge.Settle();
  // What exists on the host by now must be known to what removes it.
  sandbox->Change([&](v1::SandboxRecord& record) { record = made; });
  if (!instance.ok()) {
    co_return std::move(instance).error().Context("create {} within {} ms", sandbox->id(),
                                                  allowed.count());
  }
  if (sandbox->doomed())
    co_return Error(Code::kCancelled, "create.deleted", "the sandbox is to be deleted");
  DSEC_CO_FAULT_POINT("edge.create.before_running");

  const int64_t now = NowMs();
  sandbox->Change([&](v1::SandboxRecord& record) {
    (void)model::Move(record, v1::STATE_RUNNING);
    if (record.spec().ttl_ms() != 0)
      record.set_expires_unix_ms(now + static_cast<int64_t>(record.spec().ttl_ms()));
    record.set_last_activity_unix_ms(now);
    if (sandbox->joiners == 0) record.set_claim_until_unix_ms(now + options_.claim_grace.count());
  });
  std::vector<v1::Event> running;
  running.push_back(sandbox->NewEvent("state", now));
  auto saved = co_await Save(sandbox, std::move(running));
  if (!saved.ok()) co_return saved;
  DSEC_CO_FAULT_POINT("edge.create.after_running");
  sandbox->create_done = true;
  Began(sandbox, *std::move(instance), now);
  sandbox->Changed();
  // Asked for while the last write was under way.
  if (sandbox->doomed()) BeginStop(sandbox, sandbox->stop, std::chrono::milliseconds(0));
  co_return Ok();
}

void Edge::Began(const SandboxPtr& sandbox, std::shared_ptr<sandbox::Instance> instance,
                 int64_t now_ms) {
  const auto record = sandbox->record();
  sandbox->instance = std::move(instance);
  sandbox->activity.emplace(RulesOf(*record), static_cast<int64_t>(record->spec().ttl_ms()),
                            now_ms);
  Arm(sandbox);
  (void)runtime::Spawn(watchers_, sandbox->executor(), Monitor(sandbox, sandbox->instance));
  if (record->spec().entrypoint_size() > 0) {
    (void)runtime::Spawn(watchers_, sandbox->executor(), FollowEntrypoint(sandbox));
  }
}

boost::asio::awaitable<void> Edge::EndCreate(SandboxPtr sandbox, Error error) {
  sandbox->ticket = nullptr;
  if (stopping() && error.code() == Code::kCancelled) error = StoppingError();
  if (sandbox->doomed()) {
    sandbox->create_error = GoneError(sandbox->stop);
  } else {
    sandbox->create_error = error;
    sandbox->stop = NewTermination(model::cause::kCreateFailed, "edge", error.ToString());
    sandbox->stop.set_reason(std::string(error.reason()));
    log::Warn("sandbox.create_failed", {{"sandbox_id", sandbox->id()},
                                        {"request_id", sandbox->record()->request_id()},
                                        {"error", error}});
  }
  if (!sandbox->recorded && !sandbox->doomed()) {
    // Nothing of it exists anywhere, and nothing of it remains.
    sandbox->place.Release();
    sandbox->charge.Release();
    registry_.Remove(*sandbox);
    sandbox->create_done = true;
    sandbox->ended = true;
    sandbox->Changed();
    co_return;
  }
  if (!sandbox->recorded) {
    std::vector<v1::Event> events;
    events.push_back(sandbox->NewEvent("created", sandbox->record()->created_unix_ms()));
    auto inserted = co_await SaveNew(sandbox, std::move(events));
    if (!inserted.ok())
      log::Error("edge.record_not_saved",
                 {{"sandbox_id", sandbox->id()}, {"error", inserted.error()}});
    sandbox->recorded = inserted.ok();
  }
  if (sandbox->recorded) {
    sandbox->Change([&](v1::SandboxRecord& record) {
      (void)model::Move(record, v1::STATE_STOPPING);
      *record.mutable_stop() = sandbox->stop;
    });
    std::vector<v1::Event> events;
    events.push_back(sandbox->NewEvent("state", NowMs()));
    auto saved = co_await Save(sandbox, std::move(events));
    if (!saved.ok())
      log::Error("edge.record_not_saved",
                 {{"sandbox_id", sandbox->id()}, {"error", saved.error()}});
    sandbox->stop_recorded = saved.ok();
    if (saved.ok() && !HoldsRequest(*sandbox->record())) registry_.FreeRequest(*sandbox);
  }
  sandbox->create_done = true;
  sandbox->Changed();
  const auto create_code = sandbox->doomed() ? std::nullopt : std::optional(error.code());
  co_await FinishStop(sandbox, create_code);
}

}  // namespace dsec::edge

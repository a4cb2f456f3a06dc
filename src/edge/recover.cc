// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "edge/edge.h"
#include "model/lifecycle.h"

namespace dsec::edge {
namespace {

constexpr std::chrono::milliseconds kAdoptRetry{1'000};
constexpr std::chrono::milliseconds kSweepTimeout{60'000};
constexpr std::chrono::milliseconds kCheckTimeout{5'000};
constexpr uint64_t kExpireBatch = 100;  // the store is locked for a batch: some milliseconds
// A disk with less than this left is full: no file system fills to the last byte.
constexpr uint64_t kDiskSlack = 1 << 20;

bool DiskIsFull(const v1::Usage& usage, const v1::Limits& limits) {
  return (limits.disk_bytes() != 0 && usage.disk_bytes() + kDiskSlack >= limits.disk_bytes()) ||
         (limits.disk_inodes() != 0 && usage.disk_inodes() >= limits.disk_inodes());
}

}  // namespace

Result<StartReport> Edge::Start() {
  DSEC_TRY(auto records, store_->Live());
  return runtime::BlockOn(shards_.at(0), StartHere(std::move(records)));
}

runtime::Task<StartReport> Edge::StartHere(std::vector<v1::SandboxRecord> records) {
  const MonoTime start = std::chrono::steady_clock::now();
  std::vector<SandboxPtr> recovered;
  for (v1::SandboxRecord& record : records) {
    const auto executor = shards_.For(record.id());
    auto sandbox = std::make_shared<Sandbox>(executor, std::move(record));
    sandbox->place = admission_.Readmit();
    if (options_.quota != nullptr) {
      DSEC_CO_TRY(const auto project, iam::ProjectPath::FromRecord(sandbox->record()->project()));
      sandbox->charge = options_.quota->Readmit(project, AmountsOf(*sandbox->record()));
    }
    sandbox->recorded = true;
    sandbox->create_done = true;
    sandbox->recovering = true;
    DSEC_CO_TRY(const auto holder, registry_.Enter(sandbox));
    if (holder != sandbox) {
      co_return Error(
          Code::kInternal, "store.corrupt",
          fmt::format("{} and {} have the same request_id", holder->id(), sandbox->id()));
    }
    recovered.push_back(std::move(sandbox));
  }
  metrics_.live.Set(static_cast<double>(admission_.live()));
  for (const SandboxPtr& sandbox : recovered) {
    (void)runtime::Spawn(watchers_, sandbox->executor(), Recover(sandbox));
  }
  StartReport report;
  for (const SandboxPtr& sandbox : recovered) {
    DSEC_CO_TRY_VOID(co_await runtime::On(sandbox->executor(), WaitRecovered(sandbox)));
    const bool running = sandbox->record()->state() == v1::STATE_RUNNING;
    const bool adopted = running && sandbox->adopted.load();
    ++(adopted ? report.adopted : running ? report.unanswered : report.ended);
  }
  metrics_.Adoptions("adopted").Add(report.adopted);
  metrics_.Adoptions("ended").Add(report.ended);
  metrics_.Adoptions("unanswered").Add(report.unanswered);
  DSEC_CO_TRY(const auto lines, co_await Sweep());
  report.repairs = lines.size();
  (void)runtime::Spawn(watchers_, shards_.at(0), RunTimers());
  reconcile_ = std::make_unique<runtime::Periodic>(shards_.at(0), "edge.reconcile",
                                                   options_.reconcile_period,
                                                   [this] { return ReconcileAndLog(); });
  log::Info("edge.started", {{"node_id", options_.node_id},
                             {"adopted", report.adopted},
                             {"ended", report.ended},
                             {"unanswered", report.unanswered},
                             {"repairs", report.repairs},
                             {"ms", std::chrono::duration_cast<std::chrono::milliseconds>(
                                        std::chrono::steady_clock::now() - start)
                                        .count()}});
  co_return report;
}

runtime::Task<void> Edge::WaitRecovered(SandboxPtr sandbox) {
  while (sandbox->recovering)
    DSEC_CO_TRY_VOID(co_await sandbox->WaitChange(runtime::Deadline::Never()));
  co_return Ok();
}

boost::asio::awaitable<void> Edge::Recover(SandboxPtr sandbox) {
  const auto record = sandbox->record();
  const auto settled = [&] {
    sandbox->recovering = false;
    sandbox->Changed();
  };
  const OnExit always(settled);
  if (record->state() == v1::STATE_STOPPING) {
    sandbox->stop = record->stop();
    sandbox->stop_recorded = true;
    settled();
    co_await FinishStop(sandbox, std::nullopt);
    co_return;
  }
  if (record->state() != v1::STATE_RUNNING) {
    // Killed in the middle of a create. Whoever waits for it repeats the request, which is free
    // again.
    sandbox->create_error = Error(Code::kUnavailable, "edge.restarted",
                                  "the daemon was restarted during the create: repeat the request");
    v1::Termination termination =
        NewTermination(model::cause::kCreateFailed, "edge", sandbox->create_error->message());
    termination.set_reason(std::string(sandbox->create_error->reason()));
    co_await RecoverByEnding(sandbox, std::move(termination));
    co_return;
  }
  if (record->boot_id() != boot_id_) {
    co_await RecoverByEnding(
        sandbox, NewTermination(model::cause::kHostRestarted, "edge", "the host was restarted"));
    co_return;
  }
  const auto patience = runtime::Deadline::After(options_.adopt_patience);
  while (sandbox->state() == v1::STATE_RUNNING && !stopping()) {
    auto adopted = co_await Adopt(sandbox);
    if (adopted.ok() || adopted.error().code() == Code::kCancelled) co_return;
    if (adopted.error().code() == Code::kGone || patience.Expired()) {
      BeginStop(sandbox,
                NewTermination(model::cause::kAgentDied, "edge", adopted.error().ToString()),
                std::chrono::milliseconds(0));
      co_return;
    }
    log::Warn("sandbox.adoption_failed",
              {{"sandbox_id", sandbox->id()}, {"error", adopted.error()}});
    settled();
    const auto again = runtime::Deadline::After(kAdoptRetry);
    while (!again.Expired() && !stopping()) {
      auto waited = co_await WaitUnlessDue(sandbox, again);
      if (!waited.ok()) co_return;
    }
  }
}

boost::asio::awaitable<void> Edge::RecoverByEnding(SandboxPtr sandbox,
                                                   v1::Termination termination) {
  sandbox->stop = std::move(termination);
  sandbox->Change([&](v1::SandboxRecord& record) {
    (void)model::Move(record, v1::STATE_STOPPING);
    *record.mutable_stop() = sandbox->stop;
  });
  std::vector<v1::Event> events;
  events.push_back(sandbox->NewEvent("state", NowMs()));
  auto saved = co_await Save(sandbox, std::move(events));
  if (!saved.ok())
    log::Error("edge.record_not_saved", {{"sandbox_id", sandbox->id()}, {"error", saved.error()}});
  sandbox->stop_recorded = saved.ok();
  if (saved.ok() && !HoldsRequest(*sandbox->record())) registry_.FreeRequest(*sandbox);
  sandbox->recovering = false;
  sandbox->Changed();
  co_await FinishStop(sandbox, std::nullopt);
}

runtime::Task<void> Edge::Adopt(SandboxPtr sandbox) {
  const auto ticket = std::make_shared<FairQueue::Ticket>(sandbox->executor());
  DSEC_CO_TRY(const auto permit, co_await adoptions_.Acquire(ticket, runtime::Deadline::Never()));
  DSEC_CO_TRY(auto* const backend, BackendFor(sandbox->record()->spec().backend()));
  const auto record = sandbox->record();
  const auto deadline = runtime::Deadline::After(options_.adopt_timeout);
  DSEC_CO_TRY(auto instance, co_await backend->Adopt(*record, deadline));
  const auto agent = instance->agent();
  if (agent == nullptr)
    co_return Error(Code::kUnavailable, "sandbox.unreachable", "its channel closed at once");
  const v1::Empty nothing;
  DSEC_CO_TRY(const auto execs, co_await agent->Call<v1::ListExecsReply>(
                                    kAetherService, "ListExecs", nothing, deadline));
  // Deleted while it was being adopted.
  if (sandbox->state() != v1::STATE_RUNNING) co_return Ok();

  const int64_t now = NowMs();
  if (record->claim_until_unix_ms() != 0) {
    sandbox->Change([&](v1::SandboxRecord& changed) {
      changed.set_claim_until_unix_ms(now + options_.claim_grace.count());
    });
  }
  Began(sandbox, std::move(instance), now);
  for (const v1::ExecSummary& exec : execs.execs()) {
    if (!exec.running() || !ParseOpId(exec.op_id(), "op_id").ok()) continue;
    sandbox->activity->ExecStarted(exec.op_id(), exec.detached(), now,
                                   options_.reattach_grace.count());
  }
  Arm(sandbox);
  std::vector<v1::Event> events;
  events.push_back(sandbox->NewEvent("adopted", now));
  auto saved = co_await Save(sandbox, std::move(events));
  if (!saved.ok())
    log::Error("edge.record_not_saved", {{"sandbox_id", sandbox->id()}, {"error", saved.error()}});
  sandbox->adopted = true;
  sandbox->Changed();
  co_return Ok();
}

// --- each minute ---

boost::asio::awaitable<void> Edge::ReconcileAndLog() {
  auto reconciled = co_await Reconcile();
  if (!reconciled.ok()) log::Error("edge.reconcile_failed", {{"error", reconciled.error()}});
}

runtime::Task<std::vector<std::string>> Edge::Reconcile() {
  auto swept = co_await Sweep();
  const int64_t now = NowMs();
  for (bool more = true; more && !stopping();) {
    auto expire = [this, now] { return store_->Expire(options_.retention, now, kExpireBatch); };
    auto expired = co_await store_thread_->Run(std::move(expire), runtime::Deadline::Never());
    if (!expired.ok()) co_return std::move(expired).error();
    more = *expired;
  }
  for (const SandboxPtr& sandbox : registry_.All()) {
    if (stopping()) break;
    auto checked = co_await runtime::On(sandbox->executor(), CheckUp(sandbox));
    if (!checked.ok())
      log::Warn("sandbox.check_failed",
                {{"sandbox_id", sandbox->id()}, {"error", checked.error()}});
  }
  co_return swept;
}

runtime::Task<std::vector<std::string>> Edge::Sweep() {
  std::vector<v1::SandboxRecord> live;
  for (const SandboxPtr& sandbox : registry_.All()) live.push_back(*sandbox->record());
  std::vector<std::string> all;
  for (const auto& [kind, backend] : backends_) {
    DSEC_CO_TRY(auto lines, co_await backend->Sweep(live, runtime::Deadline::After(kSweepTimeout)));
    for (std::string& line : lines) {
      log::Warn("host.repaired", {{"what", line}});
      metrics_.repairs.Add();
      v1::Event event;
      event.set_type("repaired");
      event.set_at_unix_ms(NowMs());
      event.set_detail(SafeText(line));
      auto append = [this, event] { return store_->AppendNodeEvent(event); };
      DSEC_CO_TRY_VOID(co_await store_thread_->Run(std::move(append), runtime::Deadline::Never()));
      hub_.Announce("");
      all.push_back(std::move(line));
    }
  }
  co_return all;
}

runtime::Task<void> Edge::CheckUp(SandboxPtr sandbox) {
  if (sandbox->state() != v1::STATE_RUNNING || sandbox->instance == nullptr) co_return Ok();
  const auto instance = sandbox->instance;
  DSEC_CO_TRY(const auto usage, co_await instance->ReadUsage());
  const auto full = DiskIsFull(usage, sandbox->record()->spec().limits());
  if (full && !sandbox->disk_full) {
    v1::Event event = sandbox->NewEvent("disk_full", NowMs());
    event.set_detail(fmt::format("{} bytes, {} inodes", usage.disk_bytes(), usage.disk_inodes()));
    Emit(sandbox, std::move(event));
  }
  sandbox->disk_full = full;
  if (!sandbox->activity.has_value() || sandbox->activity->RunningExecs().empty()) co_return Ok();
  const auto agent = instance->agent();
  if (agent == nullptr) co_return Ok();
  const v1::Empty nothing;
  DSEC_CO_TRY(auto execs,
              co_await agent->Call<v1::ListExecsReply>(kAetherService, "ListExecs", nothing,
                                                       runtime::Deadline::After(kCheckTimeout)));
  for (v1::ExecSummary& exec : *execs.mutable_execs()) {
    if (exec.running() || !ParseOpId(exec.op_id(), "op_id").ok()) continue;
    v1::ExecReply reply;
    reply.set_op_id(exec.op_id());
    reply.set_known(true);
    *reply.mutable_result() = std::move(*exec.mutable_result());
    NoteReply(sandbox, reply, std::nullopt);
  }
  co_return Ok();
}

}  // namespace dsec::edge

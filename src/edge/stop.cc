// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <utility>

#include "base/check.h"
#include "base/fault.h"
#include "base/log.h"
#include "edge/edge.h"
#include "model/lifecycle.h"

namespace dsec::edge {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRetryFirst{1'000};
constexpr milliseconds kRetryMax{60'000};
// How long past the grace aether may take to see the last process go.
constexpr milliseconds kShutdownSlack{1'000};

}  // namespace

v1::Termination Edge::NewTermination(std::string_view cause, std::string_view who,
                                     std::string_view message) const {
  v1::Termination termination;
  termination.set_cause(std::string(cause));
  termination.set_who(SafeText(who));
  termination.set_message(SafeText(message));
  termination.set_at_unix_ms(NowMs());
  return termination;
}

runtime::Task<v1::SandboxView> Edge::Delete(v1::DeleteRequest request, runtime::Deadline deadline) {
  runtime::GatePass pass(calls_);
  if (!pass) co_return StoppingError();
  const std::string cause =
      request.cause().empty() ? std::string(model::cause::kUserStop) : request.cause();
  if (!model::IsCause(cause)) {
    co_return Error(Code::kInvalidArgument, "delete.cause",
                    fmt::format("\"{}\" is not a cause", SafeText(cause)))
        .WithField("cause");
  }
  request.set_cause(cause);
  if (auto sandbox = registry_.Find(request.id())) {
    const auto executor = sandbox->executor();
    co_return co_await runtime::On(executor,
                                   DeleteHere(std::move(sandbox), std::move(request), deadline));
  }
  v1::SandboxView view;
  DSEC_CO_TRY(*view.mutable_record(), co_await FindEnded(request.id()));
  co_return view;
}

runtime::Task<v1::SandboxView> Edge::DeleteHere(SandboxPtr sandbox, v1::DeleteRequest request,
                                                runtime::Deadline deadline) {
  const milliseconds grace(std::min<uint64_t>(
      request.grace_ms(), static_cast<uint64_t>(options_.max_stop_grace.count())));
  BeginStop(sandbox, NewTermination(request.cause(), request.who(), ""), grace);
  // A sandbox that is stuck is tried again for whoever asks.
  ++sandbox->stop_requests;
  sandbox->stuck = false;
  sandbox->Changed();
  while (!sandbox->ended) {
    if (!request.wait() && sandbox->stop_recorded) break;
    if (sandbox->stuck) {
      co_return Error(Code::kDeadlineExceeded, "sandbox.stuck",
                      fmt::format("{} could not be removed yet; it is tried further: {}",
                                  sandbox->id(), sandbox->record()->stuck()));
    }
    auto woken = co_await sandbox->WaitChange(deadline);
    if (!woken.ok() && woken.error().code() == Code::kDeadlineExceeded) {
      co_return Error(Code::kDeadlineExceeded, "delete.deadline",
                      fmt::format("{} is stopping; it goes on without you", sandbox->id()));
    }
    if (!woken.ok()) co_return std::move(woken).error();
  }
  // A create that was refused at the same moment leaves no record.
  if (!sandbox->recorded) co_return NotFoundError(sandbox->id());
  co_return ViewOf(*sandbox);
}

void Edge::BeginStop(const SandboxPtr& sandbox, v1::Termination termination, milliseconds grace) {
  const auto stop_by = runtime::Deadline::After(grace);
  if (sandbox->ended) return;
  if (!sandbox->create_done) {
    if (sandbox->doomed()) return;
    sandbox->stop = std::move(termination);
    sandbox->Doom();
    if (sandbox->ticket != nullptr) sandbox->ticket->Cancel();
    return;
  }
  if (sandbox->state() == v1::STATE_STOPPING) {
    if (stop_by.at() < sandbox->stop_by.at()) {
      sandbox->stop_by = stop_by;
      sandbox->Changed();
    }
    return;
  }
  if (sandbox->state() != v1::STATE_RUNNING) return;
  sandbox->stop = std::move(termination);
  sandbox->stop_by = stop_by;
  sandbox->Change([&](v1::SandboxRecord& record) {
    (void)model::Move(record, v1::STATE_STOPPING);
    *record.mutable_stop() = sandbox->stop;
  });
  // Refused only while this daemon stops: the next one finds the sandbox as it was.
  (void)runtime::Spawn(calls_, sandbox->executor(), RunStop(sandbox));
}

boost::asio::awaitable<void> Edge::RunStop(SandboxPtr sandbox) {
  const MonoTime start = std::chrono::steady_clock::now();
  std::vector<v1::Event> events;
  events.push_back(sandbox->NewEvent("state", NowMs()));
  auto saved = co_await Save(sandbox, std::move(events));
  // Not a reason to let it live: without this entry a crash now would only blame the agent for the
  // end.
  if (!saved.ok())
    log::Error("edge.record_not_saved", {{"sandbox_id", sandbox->id()}, {"error", saved.error()}});
  sandbox->stop_recorded = saved.ok();
  sandbox->Changed();
  (void)fault::Point("edge.stop.after_record");
  if (sandbox->stop.cause() == model::cause::kUserStop) (void)co_await Quiesce(sandbox);
  if (const auto instance = sandbox->instance) {
    auto usage = co_await instance->ReadUsage();
    if (usage.ok()) {
      sandbox->Change(
          [&](v1::SandboxRecord& record) { *record.mutable_final_usage() = *std::move(usage); });
    }
  }
  co_await FinishStop(sandbox, std::nullopt);
  metrics_.stop_seconds.Observe(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

runtime::Task<void> Edge::Quiesce(SandboxPtr sandbox) {
  const auto instance = sandbox->instance;
  const auto agent = instance == nullptr ? nullptr : instance->agent();
  if (agent == nullptr) co_return Ok();
  // Without a grace and without anyone who reads how an exec ended there is nothing to ask aether
  // for.
  if (sandbox->stop_by.Expired() &&
      (!sandbox->activity.has_value() || sandbox->activity->Followers() == 0)) {
    co_return Ok();
  }
  (void)runtime::Spawn(watchers_, sandbox->executor(), CallShutdown(sandbox, agent));
  while (!sandbox->quiesced && !stopping()) {
    const auto by = runtime::Deadline::At(sandbox->stop_by.at() + kShutdownSlack);
    if (by.Expired()) break;
    DSEC_CO_TRY_VOID(co_await WaitUnlessDue(sandbox, by));
  }
  // Every exec has ended by "stop"; its followers come for the last bytes.
  const auto drained_by = runtime::Deadline::After(options_.stop_drain);
  while (sandbox->activity->Followers() > 0 && !drained_by.Expired() && !stopping()) {
    DSEC_CO_TRY_VOID(co_await WaitUnlessDue(sandbox, drained_by));
  }
  co_return Ok();
}

runtime::Task<void> Edge::WaitUnlessDue(SandboxPtr sandbox, runtime::Deadline by) {
  auto woken = co_await sandbox->WaitChange(by);
  if (!woken.ok() && woken.error().code() == Code::kDeadlineExceeded) co_return Ok();
  co_return woken;
}

boost::asio::awaitable<void> Edge::CallShutdown(SandboxPtr sandbox,
                                                std::shared_ptr<rpc::Channel> agent) {
  v1::ShutdownRequest request;
  const auto grace = std::chrono::duration_cast<milliseconds>(sandbox->stop_by.Remaining());
  request.set_grace_ms(static_cast<uint64_t>(grace.count()));
  const auto deadline = runtime::Deadline::After(grace + kShutdownSlack);
  auto done = co_await agent->Call<v1::Empty>(kAetherService, "Shutdown", request, deadline);
  if (!done.ok())
    log::Warn("sandbox.shutdown_failed", {{"sandbox_id", sandbox->id()}, {"error", done.error()}});
  sandbox->quiesced = true;
  sandbox->Changed();
}

runtime::Task<void> Edge::RemoveFromHost(SandboxPtr sandbox) {
  DSEC_CO_TRY(auto* const backend, BackendFor(sandbox->record()->spec().backend()));
  DSEC_CO_FAULT_POINT("edge.stop.before_destroy");
  const auto record = sandbox->record();
  DSEC_CO_TRY_VOID(
      co_await backend->Destroy(*record, runtime::Deadline::After(options_.destroy_timeout)));
  DSEC_CO_FAULT_POINT("edge.stop.after_destroy");
  co_return Ok();
}

boost::asio::awaitable<void> Edge::FinishStop(SandboxPtr sandbox, std::optional<Code> create_code) {
  bool counted = false;
  auto pause = kRetryFirst;
  const auto wait = [&]() { return std::min(std::exchange(pause, pause * 2), kRetryMax); };
  while (true) {
    auto removed = co_await RemoveFromHost(sandbox);
    if (removed.ok()) break;
    if (!std::exchange(counted, true)) metrics_.stuck.Add(1);
    log::Error("sandbox.stuck", {{"sandbox_id", sandbox->id()}, {"error", removed.error()}});
    const std::string why = SafeText(removed.error().ToString());
    if (sandbox->record()->stuck() != why) {
      sandbox->Change([&](v1::SandboxRecord& record) { record.set_stuck(why); });
      v1::Event event = sandbox->NewEvent("stuck", NowMs());
      event.set_detail(why);
      std::vector<v1::Event> events{std::move(event)};
      auto saved = co_await Save(sandbox, std::move(events));
      if (!saved.ok())
        log::Error("edge.record_not_saved",
                   {{"sandbox_id", sandbox->id()}, {"error", saved.error()}});
    }
    const uint64_t asked = sandbox->stop_requests;
    sandbox->stuck = true;
    sandbox->Changed();
    const auto until = runtime::Deadline::After(wait());
    while (!until.Expired() && sandbox->stop_requests == asked && !stopping()) {
      auto waited = co_await WaitUnlessDue(sandbox, until);
      if (!waited.ok()) co_return;
    }
    if (stopping()) co_return;
  }
  if (counted) metrics_.stuck.Add(-1);
  // Wakes whoever waits in a call to the agent.
  sandbox->instance = nullptr;

  const int64_t now = NowMs();
  v1::Event event = sandbox->NewEvent("ended", now);
  auto last = std::make_shared<v1::SandboxRecord>(*sandbox->record());
  last->clear_stuck();
  const auto terminated = model::Terminate(*last, sandbox->stop, create_code, now);
  DSEC_CHECK(terminated.ok());
  event.set_state(last->state());
  *event.mutable_termination() = last->termination();
  std::vector<v1::Event> events{std::move(event)};
  pause = kRetryFirst;
  while (true) {
    auto saved = co_await SaveBy(sandbox, last, std::move(events), !sandbox->recorded);
    if (saved.ok()) break;
    // The events are kept for the next attempt.
    log::Error("edge.end_not_saved", {{"sandbox_id", sandbox->id()}, {"error", saved.error()}});
    events.clear();
    const auto until = runtime::Deadline::After(wait());
    while (!until.Expired() && !stopping()) {
      auto waited = co_await WaitUnlessDue(sandbox, until);
      if (!waited.ok()) co_return;
    }
    if (stopping()) co_return;
  }
  sandbox->Publish(last);
  (void)fault::Point("edge.stop.after_end");
  registry_.Remove(*sandbox);
  sandbox->place.Release();
  sandbox->charge.Release();
  sandbox->ended = true;
  sandbox->activity.reset();
  sandbox->Changed();
  const v1::Termination& termination = last->termination();
  metrics_.Ends(termination.cause()).Add();
  log::Info("sandbox.ended", {{"sandbox_id", sandbox->id()},
                              {"cause", termination.cause()},
                              {"fault", model::FaultName(termination.fault())},
                              {"message", termination.message()}});
}

runtime::Task<void> Edge::StopSandboxes(milliseconds grace, runtime::Deadline deadline) {
  return EndAll(NewTermination(model::cause::kUserStop, "edge", "the node was stopped"), grace,
                deadline);
}

v1::Termination Edge::FencedTermination(std::string_view message) const {
  return NewTermination(model::cause::kNodeLost, "epoch", message);
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): as the calls that are coroutines
runtime::Task<void> Edge::Fence(std::string message, runtime::Deadline deadline) {
  // Before the registry is read: a Create enters there first and looks at this afterwards.
  ++fences_;
  return EndAll(FencedTermination(message), milliseconds(0), deadline);
}

runtime::Task<void> Edge::EndAll(v1::Termination termination, milliseconds grace,
                                 runtime::Deadline deadline) {
  v1::DeleteRequest request;
  request.set_who(termination.who());
  request.set_cause(termination.cause());
  request.set_grace_ms(static_cast<uint64_t>(grace.count()));
  request.set_wait(true);
  const auto sandboxes = registry_.All();
  for (const SandboxPtr& sandbox : sandboxes) {
    boost::asio::post(sandbox->executor(), [this, sandbox, termination, grace] {
      BeginStop(sandbox, termination, grace);
    });
  }
  // On this shard, too, before the deletes, whose termination says less.
  co_await boost::asio::post(co_await boost::asio::this_coro::executor, boost::asio::use_awaitable);
  Result<void> first = Ok();
  for (const SandboxPtr& sandbox : sandboxes) {
    request.set_id(sandbox->id());
    auto deleted = co_await Delete(request, deadline);
    // A create that was refused at this moment leaves nothing.
    if (!deleted.ok() && deleted.error().code() != Code::kNotFound && first.ok()) {
      first = std::move(deleted).error();
    }
  }
  co_return first;
}

boost::asio::awaitable<void> Edge::Monitor(SandboxPtr sandbox,
                                           std::shared_ptr<sandbox::Instance> instance) {
  auto end = co_await instance->WaitEnd();
  if (!end.ok() && end.error().code() == Code::kCancelled) co_return;
  if (stopping() || sandbox->state() != v1::STATE_RUNNING) co_return;
  const bool oom = end.ok() && end->oom;
  const std::string message = end.ok() ? end->message : end.error().ToString();
  v1::Termination termination =
      NewTermination(oom ? model::cause::kOom : model::cause::kAgentDied, "edge", message);
  if (oom) termination.set_limit(sandbox->record()->spec().limits().memory_bytes());
  BeginStop(sandbox, std::move(termination), milliseconds(0));
}

}  // namespace dsec::edge

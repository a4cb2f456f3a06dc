// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <boost/asio/post.hpp>
#include <csignal>
#include <limits>
#include <utility>

#include "base/log.h"
#include "edge/edge.h"
#include "model/lifecycle.h"

namespace dsec::edge {
namespace {

using std::chrono::milliseconds;

// How long a call whose channel broke waits to learn why.
constexpr milliseconds kLostPatience{5'000};
constexpr milliseconds kKillTimeout{5'000};
// The agent answers this long before the deadline of the call that waits for it.
constexpr milliseconds kWaitSlack{100};
constexpr milliseconds kEntrypointWait{60'000};
constexpr milliseconds kEntrypointPace{250};

uint64_t ClipWait(uint64_t wait_ms, runtime::Deadline deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline.Remaining());
  const auto most = left > 2 * kWaitSlack ? left - kWaitSlack : left / 2;
  return std::min(wait_ms, static_cast<uint64_t>(most.count()));
}

std::string_view KindName(v1::EndKind kind) {
  switch (kind) {
    case v1::END_EXITED:
      return "exited";
    case v1::END_SIGNALED:
      return "signaled";
    case v1::END_TIMEOUT:
      return "timeout";
    case v1::END_OOM_KILLED:
      return "oom_killed";
    case v1::END_SPAWN_ERROR:
      return "spawn_error";
    case v1::END_KILLED:
      return "killed";
    case v1::END_SANDBOX_ENDED:
      return "sandbox_ended";
    default:
      return "unknown";
  }
}

std::string EndText(const v1::ExecResult& result) {
  const std::string_view kind = KindName(result.kind());
  switch (result.kind()) {
    case v1::END_EXITED:
      return fmt::format("{} {}", kind, result.exit_code());
    case v1::END_SIGNALED:
      return fmt::format("{} {}", kind, result.signal());
    case v1::END_KILLED:
      return fmt::format("{} by {}", kind, SafeText(result.killed_by()));
    default:
      return std::string(kind);
  }
}

}  // namespace

// A client that follows one exec.
class Edge::Follower final : public Attachment {
 public:
  Follower(Edge* edge, SandboxPtr sandbox, std::string op_id, bool keep)
      : edge_(edge), sandbox_(std::move(sandbox)), op_id_(std::move(op_id)), keep_(keep) {}
  ~Follower() override {
    if (edge_->let_go_) return;
    boost::asio::post(sandbox_->executor(),
                      [edge = edge_, sandbox = sandbox_, op_id = op_id_, vanished = !finished_] {
                        edge->Detach(sandbox, op_id, vanished);
                      });
  }
  void Finish() override { finished_ = true; }

  const SandboxPtr& sandbox() const { return sandbox_; }
  const std::string& op_id() const { return op_id_; }
  bool keep() const { return keep_; }

 private:
  Edge* const edge_;
  const SandboxPtr sandbox_;
  const std::string op_id_;
  const bool keep_;
  bool finished_ = false;
};

runtime::Task<std::unique_ptr<Attachment>> Edge::Attach(SandboxId id, std::string op_id,
                                                        OnDisconnect rule,
                                                        runtime::Deadline deadline) {
  DSEC_CO_TRY_VOID(ParseOpId(op_id, "op_id"));
  DSEC_CO_TRY(auto sandbox, co_await FindLive(std::move(id)));
  const auto executor = sandbox->executor();
  co_return co_await runtime::On(executor,
                                 AttachHere(std::move(sandbox), std::move(op_id), rule, deadline));
}

runtime::Task<std::unique_ptr<Attachment>> Edge::AttachHere(SandboxPtr sandbox, std::string op_id,
                                                            OnDisconnect rule,
                                                            runtime::Deadline deadline) {
  // Also waits for an adoption under way: before that nobody counts followers.
  DSEC_CO_TRY_VOID(co_await AgentOf(sandbox, false, deadline));
  const bool keep = rule == OnDisconnect::kKeep;
  co_await LiftClaim(sandbox);
  if (!sandbox->activity.has_value()) co_return GoneError(sandbox->stop);
  sandbox->activity->Attach(op_id, keep, NowMs());
  metrics_.followers.Add(1);
  Arm(sandbox);
  co_return std::make_unique<Follower>(this, std::move(sandbox), std::move(op_id), keep);
}

void Edge::Detach(const SandboxPtr& sandbox, const std::string& op_id, bool vanished) {
  metrics_.followers.Add(-1);
  if (!sandbox->activity.has_value()) return;
  sandbox->activity->Detach(op_id, vanished, NowMs(), options_.disconnect_grace.count());
  Arm(sandbox);
  sandbox->Changed();
}

runtime::Task<v1::ExecReply> Edge::Exec(SandboxId id, v1::ExecRequest request, Attachment* follower,
                                        runtime::Deadline deadline) {
  DSEC_CO_TRY_VOID(ParseOpId(request.op_id(), "op_id"));
  if (request.request_digest().empty()) request.set_request_digest(ExecDigest(request));
  SandboxPtr sandbox;
  if (follower != nullptr) {
    const auto* known = static_cast<const Follower*>(follower);
    sandbox = known->sandbox();
    if (known->keep()) request.set_detached(true);
  } else {
    DSEC_CO_TRY(sandbox, co_await FindLive(std::move(id)));
  }
  const auto executor = sandbox->executor();
  co_return co_await runtime::On(
      executor, ExecHere(std::move(sandbox), std::move(request), follower != nullptr, deadline));
}

runtime::Task<v1::ExecReply> Edge::ExecHere(SandboxPtr sandbox, v1::ExecRequest request,
                                            bool followed, runtime::Deadline deadline) {
  const std::string op_id = request.op_id();
  const bool keep = request.detached();
  request.set_wait_ms(ClipWait(request.wait_ms(), deadline));
  auto reply = co_await CallAgent<v1::ExecReply>(sandbox, "Exec", std::move(request),
                                                 Counts::kActivity, followed, deadline);
  co_return Answer(sandbox, op_id, std::move(reply), followed, keep);
}

runtime::Task<v1::ExecReply> Edge::Poll(SandboxId id, v1::PollRequest request, Attachment* follower,
                                        runtime::Deadline deadline) {
  DSEC_CO_TRY_VOID(ParseOpId(request.op_id(), "op_id"));
  SandboxPtr sandbox;
  if (follower != nullptr) {
    sandbox = static_cast<const Follower*>(follower)->sandbox();
  } else {
    DSEC_CO_TRY(sandbox, co_await FindLive(std::move(id)));
  }
  const auto executor = sandbox->executor();
  co_return co_await runtime::On(
      executor, PollHere(std::move(sandbox), std::move(request), follower != nullptr, deadline));
}

runtime::Task<v1::ExecReply> Edge::PollHere(SandboxPtr sandbox, v1::PollRequest request,
                                            bool followed, runtime::Deadline deadline) {
  const std::string op_id = request.op_id();
  request.set_wait_ms(ClipWait(request.wait_ms(), deadline));
  auto reply = co_await CallAgent<v1::ExecReply>(sandbox, "Poll", std::move(request), Counts::kRead,
                                                 followed, deadline);
  co_return Answer(sandbox, op_id, std::move(reply), followed, std::nullopt);
}

Result<v1::ExecReply> Edge::Answer(const SandboxPtr& sandbox, const std::string& op_id,
                                   Result<v1::ExecReply> reply, bool followed,
                                   std::optional<bool> keep) {
  if (!reply.ok()) {
    const bool over = sandbox->ended || sandbox->state() == v1::STATE_STOPPING;
    if (followed && over && reply.error().code() == Code::kGone)
      return EndedReply(op_id, sandbox->stop);
    return reply;
  }
  // The agent does not get to speak about another exec.
  reply->set_op_id(op_id);
  NoteReply(sandbox, *reply, keep);
  return reply;
}

void Edge::NoteReply(const SandboxPtr& sandbox, const v1::ExecReply& reply,
                     std::optional<bool> keep) {
  if (!sandbox->activity.has_value()) return;
  const int64_t now = NowMs();
  const std::string& op_id = reply.op_id();
  const auto emit = [&](std::string_view type, std::string detail) {
    v1::Event event = sandbox->NewEvent(type, now);
    event.set_op_id(op_id);
    event.set_detail(std::move(detail));
    // Both events of a short command go into one write. A command that runs on is on record before
    // anything can happen to this process.
    Emit(sandbox, std::move(event), !reply.running());
  };
  if (keep.has_value()) {
    sandbox->activity->ExecStarted(op_id, *keep, now, 0);
    if (!reply.known()) {
      metrics_.execs.Add();
      emit("exec_started", "");
    }
  }
  if (!reply.running() && reply.has_result() && sandbox->activity->ExecEnded(op_id, now)) {
    const v1::ExecResult& result = reply.result();
    metrics_.ExecEnds(KindName(result.kind())).Add();
    if (result.oom_events() > 0) emit("oom", SafeText(result.oom_victim()));
    if (result.pids_limit_hit()) emit("pids_limit", "");
    emit("exec_ended", EndText(result));
  }
  Arm(sandbox);
}

boost::asio::awaitable<void> Edge::KillDisconnected(SandboxPtr sandbox, std::string op_id) {
  metrics_.disconnect_kills.Add();
  log::Info("exec.disconnected", {{"sandbox_id", sandbox->id()}, {"op_id", op_id}});
  v1::SignalRequest request;
  request.set_op_id(op_id);
  request.set_signal(SIGKILL);
  request.set_tree(true);
  request.set_killed_by("disconnect");
  auto killed = co_await CallAgent<v1::Empty>(sandbox, "Signal", std::move(request), Counts::kRead,
                                              false, runtime::Deadline::After(kKillTimeout));
  // Never started, or gone by itself.
  if (!killed.ok() && killed.error().code() != Code::kNotFound &&
      killed.error().code() != Code::kGone) {
    log::Warn("exec.disconnect_kill_failed",
              {{"sandbox_id", sandbox->id()}, {"op_id", op_id}, {"error", killed.error()}});
  }
}

runtime::Task<std::shared_ptr<rpc::Channel>> Edge::AgentOf(SandboxPtr sandbox, bool until_the_end,
                                                           runtime::Deadline deadline) {
  if (sandbox->ended) co_return GoneError(sandbox->stop);
  if (!until_the_end || sandbox->state() != v1::STATE_STOPPING)
    DSEC_CO_TRY_VOID(CheckRunning(*sandbox));
  // After a restart of this daemon it may not have been adopted yet.
  const auto by = deadline.Sooner(runtime::Deadline::After(kLostPatience));
  while (sandbox->instance == nullptr && sandbox->state() == v1::STATE_RUNNING && !by.Expired()) {
    DSEC_CO_TRY_VOID(co_await WaitUnlessDue(sandbox, by));
  }
  auto agent = sandbox->instance == nullptr ? nullptr : sandbox->instance->agent();
  if (agent == nullptr) co_return co_await WhyLost(sandbox, deadline);
  co_return agent;
}

boost::asio::awaitable<Error> Edge::WhyLost(SandboxPtr sandbox, runtime::Deadline deadline) {
  const auto by = deadline.Sooner(runtime::Deadline::After(kLostPatience));
  while (sandbox->state() == v1::STATE_RUNNING && !by.Expired()) {
    auto waited = co_await WaitUnlessDue(sandbox, by);
    if (!waited.ok()) co_return std::move(waited).error();
  }
  if (sandbox->ended || sandbox->state() == v1::STATE_STOPPING) co_return GoneError(sandbox->stop);
  co_return Error(Code::kUnavailable, "sandbox.unreachable",
                  fmt::format("the agent of {} does not answer", sandbox->id()));
}

template <typename Reply, typename Request>
runtime::Task<Reply> Edge::CallAgent(SandboxPtr sandbox, const char* method, Request request,
                                     Counts counts, bool until_the_end,
                                     runtime::Deadline deadline) {
  DSEC_CO_TRY(const auto agent, co_await AgentOf(sandbox, until_the_end, deadline));
  const bool counted = counts == Counts::kActivity && sandbox->activity.has_value();
  if (counted) {
    sandbox->activity->CallBegan(NowMs());
    sandbox->Touch(NowMs());
  }
  const OnExit end([&] {
    if (!counted || !sandbox->activity.has_value()) return;
    sandbox->activity->CallEnded(NowMs());
    Arm(sandbox);
  });
  if (counted) co_await LiftClaim(sandbox);
  auto reply = co_await agent->template Call<Reply>(kAetherService, method, request, deadline);
  if (!reply.ok() && reply.error().code() != Code::kCancelled && agent->closed()) {
    co_return co_await WhyLost(sandbox, deadline);
  }
  co_return reply;
}

template <typename Reply, typename Request>
runtime::Task<Reply> Edge::Forward(SandboxId id, const char* method, Request request, Counts counts,
                                   runtime::Deadline deadline) {
  DSEC_CO_TRY(auto sandbox, co_await FindLive(std::move(id)));
  const auto executor = sandbox->executor();
  co_return co_await runtime::On(
      executor,
      CallAgent<Reply>(std::move(sandbox), method, std::move(request), counts, false, deadline));
}

template <typename Request>
runtime::Task<void> Edge::ForwardVoid(SandboxId id, const char* method, Request request,
                                      Counts counts, runtime::Deadline deadline) {
  auto reply =
      co_await Forward<v1::Empty>(std::move(id), method, std::move(request), counts, deadline);
  if (!reply.ok()) co_return std::move(reply).error();
  co_return Ok();
}

runtime::Task<v1::StdinReply> Edge::WriteStdin(SandboxId id, v1::StdinRequest request,
                                               runtime::Deadline deadline) {
  return Forward<v1::StdinReply>(std::move(id), "WriteStdin", std::move(request), Counts::kActivity,
                                 deadline);
}
runtime::Task<void> Edge::Signal(SandboxId id, v1::SignalRequest request,
                                 runtime::Deadline deadline) {
  return ForwardVoid(std::move(id), "Signal", std::move(request), Counts::kActivity, deadline);
}
runtime::Task<void> Edge::Resize(SandboxId id, v1::ResizeRequest request,
                                 runtime::Deadline deadline) {
  return ForwardVoid(std::move(id), "Resize", std::move(request), Counts::kActivity, deadline);
}
runtime::Task<void> Edge::Ack(SandboxId id, v1::AckRequest request, runtime::Deadline deadline) {
  return ForwardVoid(std::move(id), "Ack", std::move(request), Counts::kRead, deadline);
}
runtime::Task<v1::ListExecsReply> Edge::ListExecs(SandboxId id, runtime::Deadline deadline) {
  return Forward<v1::ListExecsReply>(std::move(id), "ListExecs", v1::Empty(), Counts::kRead,
                                     deadline);
}
runtime::Task<v1::ListSessionsReply> Edge::ListSessions(SandboxId id, runtime::Deadline deadline) {
  return Forward<v1::ListSessionsReply>(std::move(id), "ListSessions", v1::Empty(), Counts::kRead,
                                        deadline);
}
runtime::Task<void> Edge::CloseSession(SandboxId id, v1::SessionRequest request,
                                       runtime::Deadline deadline) {
  return ForwardVoid(std::move(id), "CloseSession", std::move(request), Counts::kActivity,
                     deadline);
}
runtime::Task<v1::FileInfo> Edge::StatFile(SandboxId id, v1::PathRequest request,
                                           runtime::Deadline deadline) {
  return Forward<v1::FileInfo>(std::move(id), "Stat", std::move(request), Counts::kActivity,
                               deadline);
}
runtime::Task<v1::ListReply> Edge::ListFiles(SandboxId id, v1::ListRequest request,
                                             runtime::Deadline deadline) {
  return Forward<v1::ListReply>(std::move(id), "List", std::move(request), Counts::kActivity,
                                deadline);
}
runtime::Task<v1::ReadReply> Edge::ReadFile(SandboxId id, v1::ReadRequest request,
                                            runtime::Deadline deadline) {
  return Forward<v1::ReadReply>(std::move(id), "ReadFile", std::move(request), Counts::kActivity,
                                deadline);
}
runtime::Task<v1::WriteReply> Edge::WriteFile(SandboxId id, v1::WriteRequest request,
                                              runtime::Deadline deadline) {
  return Forward<v1::WriteReply>(std::move(id), "WriteFile", std::move(request), Counts::kActivity,
                                 deadline);
}
runtime::Task<void> Edge::Mkdir(SandboxId id, v1::MkdirRequest request,
                                runtime::Deadline deadline) {
  return ForwardVoid(std::move(id), "Mkdir", std::move(request), Counts::kActivity, deadline);
}
runtime::Task<void> Edge::Move(SandboxId id, v1::MoveRequest request, runtime::Deadline deadline) {
  return ForwardVoid(std::move(id), "Move", std::move(request), Counts::kActivity, deadline);
}
runtime::Task<void> Edge::Remove(SandboxId id, v1::RemoveRequest request,
                                 runtime::Deadline deadline) {
  return ForwardVoid(std::move(id), "Remove", std::move(request), Counts::kActivity, deadline);
}
runtime::Task<void> Edge::Chmod(SandboxId id, v1::ChmodRequest request,
                                runtime::Deadline deadline) {
  return ForwardVoid(std::move(id), "Chmod", std::move(request), Counts::kActivity, deadline);
}
runtime::Task<v1::WatchReply> Edge::Watch(SandboxId id, v1::WatchRequest request,
                                          runtime::Deadline deadline) {
  request.set_wait_ms(ClipWait(request.wait_ms(), deadline));
  return Forward<v1::WatchReply>(std::move(id), "Watch", std::move(request), Counts::kActivity,
                                 deadline);
}
runtime::Task<v1::PullArchiveReply> Edge::PullArchive(SandboxId id, v1::PullArchiveRequest request,
                                                      runtime::Deadline deadline) {
  return Forward<v1::PullArchiveReply>(std::move(id), "PullArchive", std::move(request),
                                       Counts::kActivity, deadline);
}
runtime::Task<v1::PushArchiveReply> Edge::PushArchive(SandboxId id, v1::PushArchiveRequest request,
                                                      runtime::Deadline deadline) {
  return Forward<v1::PushArchiveReply>(std::move(id), "PushArchive", std::move(request),
                                       Counts::kActivity, deadline);
}

boost::asio::awaitable<void> Edge::FollowEntrypoint(SandboxPtr sandbox) {
  v1::PollRequest poll;
  poll.set_op_id(std::string(kEntrypointOp));
  // Past whatever it may write: only its end answers early.
  poll.set_stdout_offset(std::numeric_limits<int64_t>::max());
  poll.set_stderr_offset(std::numeric_limits<int64_t>::max());
  poll.set_wait_ms(static_cast<uint64_t>(kEntrypointWait.count()));
  v1::ExecRequest start;
  start.set_op_id(std::string(kEntrypointOp));
  for (const std::string& item : sandbox->record()->spec().entrypoint()) start.add_argv(item);
  start.set_detached(true);
  start.set_request_digest(ExecDigest(start));
  bool started = false;
  v1::ExecReply reply;
  while (true) {
    const auto next = runtime::Deadline::After(kEntrypointPace);
    const auto deadline = runtime::Deadline::After(kEntrypointWait + 2 * kKillTimeout);
    Result<v1::ExecReply> answer = reply;
    if (started) {
      answer = co_await PollHere(sandbox, poll, false, deadline);
    } else {
      answer = co_await ExecHere(sandbox, start, false, deadline);
    }
    if (sandbox->state() != v1::STATE_RUNNING || stopping()) co_return;
    if (answer.ok() && !answer->running()) {
      reply = *std::move(answer);
      break;
    }
    if (!answer.ok()) {
      if (answer.error().code() == Code::kCancelled) co_return;
      if (!started && answer.error().code() == Code::kInvalidArgument) {
        // It can never start, however often it is asked for.
        v1::Termination refused =
            NewTermination(model::cause::kEntrypointExit, "edge",
                           fmt::format("entrypoint: {}", answer.error().message()));
        refused.set_exit_code(-1);
        BeginStop(sandbox, std::move(refused), milliseconds(0));
        co_return;
      }
      log::Warn("sandbox.entrypoint_unknown",
                {{"sandbox_id", sandbox->id()}, {"error", answer.error()}});
    }
    started = started || answer.ok();
    // An agent that answers too early does not get to keep this loop busy.
    auto paused = co_await runtime::SleepUntil(next);
    if (!paused.ok()) co_return;
  }
  const v1::ExecResult& result = reply.result();
  const bool oom = result.kind() == v1::END_OOM_KILLED;
  v1::Termination termination =
      NewTermination(oom ? model::cause::kOom : model::cause::kEntrypointExit, "edge",
                     fmt::format("entrypoint: {} {}", EndText(result), result.message()));
  // As a shell would say it: a signal is not an exit code of 0.
  termination.set_exit_code(result.kind() == v1::END_EXITED     ? result.exit_code()
                            : result.kind() == v1::END_SIGNALED ? 128 + result.signal()
                                                                : -1);
  if (oom) termination.set_limit(sandbox->record()->spec().limits().memory_bytes());
  BeginStop(sandbox, std::move(termination), milliseconds(0));
}

}  // namespace dsec::edge

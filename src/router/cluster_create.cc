// SPDX-License-Identifier: Apache-2.0
// Creates over a cluster, and deletes by their request (docs/design/cluster.md, section 4).
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "edge/edge.h"
#include "model/lifecycle.h"
#include "router/cluster_edge.h"

namespace dsec::router {

using edge::Created;
using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kFirstPause{100};
constexpr milliseconds kLongestPause{1'000};
constexpr auto kForgetTime = std::chrono::seconds(2);
constexpr auto kEndTime = std::chrono::seconds(60);
constexpr uint64_t kMaxWaitMs = 3'600'000;

bool Silent(const Error& error) {
  // A later epoch there than here: what is known here of the node is about to change.
  return error.code() == Code::kUnavailable || error.code() == Code::kDeadlineExceeded ||
         error.reason() == "edge.epoch_stale";
}

// The node has not begun it and will not.
bool Refused(const Error& error, bool unanswered) {
  const std::string_view reason = error.reason();
  if (error.code() == Code::kResourceExhausted) return !reason.starts_with("quota.");
  if (reason == "capacity.unknown") return true;
  return reason == "edge.stopping" && !unanswered;
}

Error DeletedError(const std::string& who) {
  return Error(Code::kGone, "create.deleted",
               fmt::format("the request was deleted by {}", who.empty() ? "its owner" : who));
}

placement::Backend BackendOf(v1::Backend backend) {
  switch (backend) {
    case v1::BACKEND_FNCALL:
      return placement::kFnCall;
    case v1::BACKEND_MICROVM:
      return placement::kMicroVm;
    case v1::BACKEND_FULLVM:
      return placement::kFullVm;
    default:
      return placement::kContainer;
  }
}

}  // namespace

// One create on its way.
struct ClusterEdge::Creating {
  v1::CreateRequest request;
  Deadline deadline = Deadline::Never();
  Deadline room_by = Deadline::Never();
  iam::ProjectPath project;
  std::string key;
  std::string digest;
  std::vector<std::string> excluded;  // have refused it since the last wait for room

  NodePtr node;
  placement::Overlay::Ticket ticket = 0;
  RequestState state;
  bool enrolled = false;    // by this call: nobody else has to do with it so far
  bool lost = false;        // made once, on a node that has died since
  bool unanswered = false;  // the present node was asked and has not answered
};

// A claim holds the way to its node open.
class ClusterEdge::HeldClaim final : public edge::Claim {
 public:
  HeldClaim(std::shared_ptr<edge::EdgeApi> api, std::unique_ptr<edge::Claim> claim)
      : api_(std::move(api)), claim_(std::move(claim)) {}
  void Delivered() override { claim_->Delivered(); }

 private:
  const std::shared_ptr<edge::EdgeApi> api_;
  const std::unique_ptr<edge::Claim> claim_;
};

placement::Demand ClusterEdge::DemandOf(const v1::SandboxSpec& spec) const {
  placement::Demand demand = options_.expected;
  if (spec.limits().memory_bytes() != 0)
    demand.memory_bytes = std::min(demand.memory_bytes, spec.limits().memory_bytes());
  if (spec.limits().disk_bytes() != 0)
    demand.disk_bytes = std::min(demand.disk_bytes, spec.limits().disk_bytes());
  return demand;
}

Task<Created> ClusterEdge::Create(v1::CreateRequest request, Deadline deadline) {
  runtime::GatePass pass(gate_);
  if (!pass) co_return edge::StoppingError();
  DSEC_CO_TRY_VOID(ParseOpId(request.request_id(), "request_id"));
  Creating creating;
  DSEC_CO_TRY(creating.project, iam::ProjectPath::FromRecord(request.project()));
  creating.key = RequestKey(creating.project, request.request_id());
  creating.digest = edge::CreateDigest(request);
  creating.deadline = deadline;
  creating.room_by =
      Deadline::After(milliseconds(std::min<uint64_t>(request.capacity_wait_ms(), kMaxWaitMs)));
  creating.request = std::move(request);
  const MonoTime begun = std::chrono::steady_clock::now();

  const auto here = co_await boost::asio::this_coro::executor;
  auto turn = std::make_shared<edge::FairQueue::Ticket>(here, creating.project.str());
  edge::FairQueue::Take take = [this]() -> Result<void> {
    if (creating_.load() >= options_.creates_at_once) {
      return Error(Code::kResourceExhausted, "create.too_many",
                   fmt::format("{} creates are under way here", creating_.load()));
    }
    ++creating_;
    return Ok();
  };
  auto entered = co_await door_.Enter(std::move(turn), std::move(take), deadline);
  if (!entered.ok()) co_return std::move(entered).error();
  struct Leave {
    ClusterEdge& edge;
    ~Leave() {
      --edge.creating_;
      if (edge.door_.waiting() > 0) edge.door_.Poke();
    }
  } const leave{*this};

  auto made = co_await CreateIn(creating);
  if (!made.ok()) {
    options_.metrics
        ->GetCounter("dsec_router_create_failures_total", "Creates that failed, by reason",
                     {{"reason", std::string(made.error().reason())}})
        .Add();
    co_return std::move(made).error();
  }
  creates_.Add();
  create_seconds_.Observe(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
  KeepProject(made->view.record().id(), made->view.record().project());
  co_return made;
}

Task<Created> ClusterEdge::CreateIn(Creating& creating) {
  auto chosen = co_await ChooseNode(creating);
  if (!chosen.ok()) {
    // It may have been made when there was room.
    auto known = co_await requests_.Read(creating.key, creating.deadline);
    if (!known.ok() || !known->has_value()) co_return std::move(chosen).error();
  }
  auto enrolled = co_await Enroll(creating);
  while (enrolled.ok()) {
    if (creating.lost) co_return co_await LostAnswer(creating);
    auto asked = co_await AskNode(creating);
    if (!asked.ok()) co_return co_await GiveUp(creating, std::move(asked).error());
    if (!asked->has_value()) continue;
    const std::string sandbox_id = creating.state.record.sandbox_id();
    auto finished = co_await Finish(creating, **std::move(asked));
    // Somebody has moved it to another node meanwhile: what is there is the answer.
    if (!finished.ok() && finished.error().reason() == "create.moved") continue;
    co_return finished;
  }
  load_.Fail(creating.ticket);
  co_return std::move(enrolled).error();
}

Task<void> ClusterEdge::ChooseNode(Creating& creating) {
  placement::Request wanted;
  wanted.backend = BackendOf(creating.request.spec().backend());
  wanted.each = DemandOf(creating.request.spec());
  wanted.project = creating.project.str();
  bool first = true;
  edge::FairQueue::Take take = [&]() -> Result<void> {
    // Who has waited may go back to a node that refused it before.
    if (!std::exchange(first, false)) creating.excluded.clear();
    DSEC_TRY(Load::Choice choice, load_.Choose(wanted, creating.excluded));
    creating.node = std::move(choice.node);
    creating.ticket = choice.ticket;
    return Ok();
  };
  const auto here = co_await boost::asio::this_coro::executor;
  auto ticket = std::make_shared<edge::FairQueue::Ticket>(here, creating.project.str());
  auto entered = co_await room_.Enter(std::move(ticket), std::move(take),
                                      creating.room_by.Sooner(creating.deadline));
  co_return entered;
}

// Puts on record which node is asked, or finds that somebody else has. Also for the next node,
// when the one before has refused or is dead: then `state` is what was on record.
Task<void> ClusterEdge::Enroll(Creating& creating) {
  while (true) {
    RequestState now;
    if (creating.ticket != 0) {
      v1::RequestRecord record;
      record.set_digest(creating.digest);
      record.set_node_id(creating.node->id());
      record.set_epoch(creating.node->record.epoch());
      record.set_sandbox_id(NewSandboxId(NodeId(creating.node->id()), *options_.clock).str());
      auto written = co_await requests_.Write(creating.key, std::move(record),
                                              creating.state.version, creating.deadline);
      if (!written.ok()) co_return std::move(written).error();
      if (written->written) {
        creating.enrolled |= creating.state.version == 0;
        creating.state = std::move(written->now);
        creating.unanswered = false;
        co_return Ok();
      }
      now = std::move(written->now);
      load_.Fail(std::exchange(creating.ticket, 0));
    } else {
      auto read = co_await requests_.Read(creating.key, creating.deadline);
      if (!read.ok()) co_return std::move(read).error();
      if (read->has_value()) now = **std::move(read);
    }
    creating.enrolled = false;
    if (now.version != 0 && now.record.deleted()) co_return DeletedError(now.record.who());
    if (now.version != 0 && now.record.digest() != creating.digest) {
      co_return Error(Code::kAlreadyExists, "create.request_id_reused",
                      fmt::format("request_id was used before, with another body, for {}",
                                  now.record.sandbox_id()))
          .WithField("request_id");
    }
    creating.state = std::move(now);
    if (creating.state.version != 0) {
      const NodePtr node = nodes_.Find(creating.state.record.node_id());
      const bool lives =
          node != nullptr && !node->dead() && node->record.epoch() == creating.state.record.epoch();
      creating.lost = !lives && creating.state.record.ready();
      if (lives || creating.lost) {
        creating.node = node;
        creating.unanswered = true;  // by whoever asked it
        co_return Ok();
      }
    }
    // Nothing is there, or what never was made can no longer be.
    DSEC_CO_TRY_VOID(co_await ChooseNode(creating));
  }
}

// None: another node is to be asked.
Task<std::optional<Created>> ClusterEdge::AskNode(Creating& creating) {
  milliseconds pause = kFirstPause;
  bool wait_for_quota = false;
  while (true) {
    v1::CreateRequest request = creating.request;
    request.set_sandbox_id(creating.state.record.sandbox_id());
    // The wait for room is here, among all nodes; the one for quota is at the node.
    request.set_capacity_wait_ms(
        wait_for_quota
            ? static_cast<uint64_t>(
                  std::chrono::duration_cast<milliseconds>(creating.room_by.Remaining()).count())
            : 0);
    const std::shared_ptr<edge::EdgeApi> api = creating.node->api;
    auto made = co_await api->Create(std::move(request),
                                     creating.deadline.Sooner(Deadline::After(options_.attempt)));
    if (made.ok()) {
      if (made->claim != nullptr)
        made->claim = std::make_unique<HeldClaim>(api, std::move(made->claim));
      co_return std::optional<Created>(*std::move(made));
    }
    Error error = std::move(made).error();
    if (Refused(error, creating.unanswered)) {
      load_.Fail(std::exchange(creating.ticket, 0));
      creating.excluded.push_back(creating.node->id());
      auto moved = co_await MoveOn(creating);
      if (!moved.ok()) co_return std::move(moved).error();
      co_return std::optional<Created>();
    }
    if (error.code() == Code::kResourceExhausted && !wait_for_quota &&
        !creating.room_by.Expired()) {
      wait_for_quota = true;
      continue;
    }
    if (!Silent(error)) co_return error;
    creating.unanswered = true;
    asked_again_.Add();
    const NodePtr now = nodes_.Find(creating.node->id());
    if (now == nullptr || now->dead() || now->record.epoch() != creating.node->record.epoch()) {
      load_.Fail(std::exchange(creating.ticket, 0));
      auto moved = co_await MoveOn(creating);
      if (!moved.ok()) co_return std::move(moved).error();
      co_return std::optional<Created>();
    }
    creating.node = now;
    if (creating.deadline.Expired()) {
      co_return Error(Code::kDeadlineExceeded, "create.deadline",
                      fmt::format("{} is not ready yet; the create goes on: repeat the request_id",
                                  creating.state.record.sandbox_id()));
    }
    auto slept = co_await runtime::SleepUntil(creating.deadline.Sooner(Deadline::After(pause)));
    if (!slept.ok()) co_return std::move(slept).error();
    pause = std::min(pause * 2, kLongestPause);
  }
}

Task<void> ClusterEdge::MoveOn(Creating& creating) {
  moved_.Add();
  // Made already, and told to somebody: it is lost, and nothing comes in its place.
  if (creating.state.record.ready()) {
    creating.lost = true;
    co_return Ok();
  }
  DSEC_CO_TRY_VOID(co_await ChooseNode(creating));
  auto enrolled = co_await Enroll(creating);
  co_return enrolled;
}

Task<Created> ClusterEdge::Finish(Creating& creating, Created made) {
  const std::string sandbox_id = made.view.record().id();
  if (creating.state.record.ready() && creating.state.record.sandbox_id() == sandbox_id)
    co_return made;
  v1::RequestRecord record = creating.state.record;
  record.set_ready(true);
  record.set_sandbox_id(sandbox_id);
  auto written =
      co_await requests_.Write(creating.key, record, creating.state.version, creating.deadline);
  if (!written.ok()) co_return std::move(written).error();
  if (written->written) co_return made;
  const RequestState& now = written->now;
  // Its lease has ended, or another apiserver has just put the same there.
  if (now.version == 0 || (!now.record.deleted() && now.record.sandbox_id() == sandbox_id))
    co_return made;
  (void)runtime::Spawn(gate_, co_await boost::asio::this_coro::executor,
                       EndDeleted(sandbox_id, now.record.who()));
  if (now.record.deleted()) co_return DeletedError(now.record.who());
  creating.state = now;
  creating.node = nodes_.Find(now.record.node_id());
  creating.unanswered = true;
  if (creating.node == nullptr || creating.node->dead()) {
    creating.lost = true;
  }
  co_return Error(Code::kConflict, "create.moved", "another apiserver has moved the request");
}

// The request goes free again when no sandbox can have come of it.
Task<Created> ClusterEdge::GiveUp(Creating& creating, Error error) {
  load_.Fail(std::exchange(creating.ticket, 0));
  const bool definite = !Silent(error) && error.code() != Code::kCancelled &&
                        error.code() != Code::kGone && error.code() != Code::kConflict;
  if (creating.enrolled && definite && !creating.state.record.ready()) {
    // What stays there only sends a repeat to the same node first.
    (void)co_await requests_.Forget(creating.key, creating.state.version,
                                    Deadline::After(kForgetTime));
  }
  co_return error;
}

Task<Created> ClusterEdge::LostAnswer(Creating& creating) {
  const SandboxId id(creating.state.record.sandbox_id());
  LostOfNode::One lost = Unmirrored(id, MadeAt(id));
  if (const NodePtr node = nodes_.Find(creating.state.record.node_id()); node != nullptr) {
    auto book = co_await lost_.Of(node, creating.deadline);
    if (!book.ok()) co_return std::move(book).error();
    const auto it = (*book)->sandboxes.find(id.str());
    lost =
        it != (*book)->sandboxes.end() ? it->second : Unmirrored(id, (*book)->last_death_unix_ms);
  }
  Created created;
  *created.view.mutable_record() = RecordOf(lost);
  created.view.mutable_record()->set_project(creating.request.project());
  created.view.mutable_record()->set_request_id(creating.request.request_id());
  created.view.set_existed(true);
  co_return created;
}

boost::asio::awaitable<void> ClusterEdge::EndDeleted(std::string sandbox_id, std::string who) {
  v1::DeleteRequest request;
  request.set_id(sandbox_id);
  request.set_who(who.empty() ? "router" : who);
  const Deadline deadline = Deadline::After(kEndTime);
  milliseconds pause = kFirstPause;
  while (true) {
    auto ended = co_await Delete(request, deadline);
    if (ended.ok() || !Silent(ended.error())) co_return;
    if (deadline.Expired()) break;
    auto slept = co_await runtime::SleepUntil(deadline.Sooner(Deadline::After(pause)));
    if (!slept.ok()) co_return;
    pause = std::min(pause * 2, kLongestPause);
  }
  // Nobody claims it, so that its edge ends it.
  log::Warn("router.not_ended", {{"sandbox_id", sandbox_id}});
}

Task<void> ClusterEdge::DeleteByRequest(std::string project, std::string request_id,
                                        std::string who, Deadline deadline) {
  runtime::GatePass pass(gate_);
  if (!pass) co_return edge::StoppingError();
  DSEC_CO_TRY_VOID(ParseOpId(request_id, "request_id"));
  DSEC_CO_TRY(const auto path, iam::ProjectPath::FromRecord(project));
  const std::string key = RequestKey(path, request_id);
  auto known = co_await requests_.Read(key, deadline);
  if (!known.ok()) co_return std::move(known).error();
  RequestState now = known->value_or(RequestState());
  while (!now.record.deleted()) {
    v1::RequestRecord record = now.record;
    record.set_deleted(true);
    record.set_who(who);
    auto written = co_await requests_.Write(key, std::move(record), now.version, deadline);
    if (!written.ok()) co_return std::move(written).error();
    now = std::move(written->now);
  }
  if (now.record.sandbox_id().empty()) co_return Ok();
  v1::DeleteRequest request;
  request.set_id(now.record.sandbox_id());
  request.set_who(who);
  request.set_wait(true);
  auto ended = co_await Delete(std::move(request), deadline);
  // Not there yet: whoever makes it finds what was just written.
  if (ended.ok() || ended.error().code() == Code::kNotFound) co_return Ok();
  co_return std::move(ended).error();
}

}  // namespace dsec::router

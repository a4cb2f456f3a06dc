// SPDX-License-Identifier: Apache-2.0
#include "router/cluster_edge.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "cluster/node_record.h"
#include "edge/edge.h"
#include "runtime/shards.h"
#include "watcher/layout.h"

namespace dsec::router {

using edge::Attachment;
using runtime::Deadline;
using runtime::Task;

namespace {

constexpr auto kStoreTime = std::chrono::seconds(5);
constexpr std::chrono::milliseconds kRoomRetry{250};
constexpr std::chrono::milliseconds kDoorRetry{1'000};

Deadline Soon() { return Deadline::After(kStoreTime); }

bool Silent(const Error& error) {
  // A later epoch there than here: what is known here of the node is about to change.
  return error.code() == Code::kUnavailable || error.code() == Code::kDeadlineExceeded ||
         error.reason() == "edge.epoch_stale";
}

Error Gone(const LostOfNode::One& lost) { return edge::GoneError(RecordOf(lost).termination()); }

v1::SandboxView ViewOf(const LostOfNode::One& lost) {
  v1::SandboxView view;
  *view.mutable_record() = RecordOf(lost);
  return view;
}

}  // namespace

// The follower at the node, and the way to it held open.
class ClusterEdge::Follower final : public Attachment {
 public:
  Follower(std::shared_ptr<edge::EdgeApi> api, std::unique_ptr<Attachment> at_node)
      : api_(std::move(api)), at_node_(std::move(at_node)) {}
  void Finish() override { at_node_->Finish(); }
  // Null where it is not from: the follower has vanished there with the way to the node.
  Attachment* At(const Way& api) { return api == api_ ? at_node_.get() : nullptr; }

 private:
  const std::shared_ptr<edge::EdgeApi> api_;
  const std::unique_ptr<Attachment> at_node_;
};

// Whoever calls gives back what Attach gave.
Attachment* ClusterEdge::AtNode(Attachment* follower, const Way& api) {
  return follower == nullptr ? nullptr : static_cast<Follower*>(follower)->At(api);
}

ClusterEdge::ClusterEdge(store::Store& store, runtime::Executor executor, ClusterOptions options)
    : store_(store),
      executor_(executor),
      options_(std::move(options)),
      nodes_(options_.edge_of, options_.dead),
      load_(nodes_, options_.watcher_of, options_.load, [this] { room_.Poke(); }),
      lost_(store, executor),
      requests_(store, executor, options_.requests),
      door_("create.too_many", options_.max_waiting, kDoorRetry),
      room_("capacity.queue_full", options_.max_waiting, kRoomRetry),
      creates_(options_.metrics->GetCounter("dsec_router_creates_total", "Creates answered")),
      moved_(options_.metrics->GetCounter("dsec_router_creates_moved_total",
                                          "Times that a create went on to another node")),
      asked_again_(options_.metrics->GetCounter(
          "dsec_router_creates_unanswered_total",
          "Times that a node did not answer a create and was asked again")),
      create_seconds_(options_.metrics->GetHistogram("dsec_router_create_seconds",
                                                     "From the call to the answer of a create",
                                                     metrics::LatencyBounds())) {}

ClusterEdge::~ClusterEdge() {
  door_.Close();
  room_.Close();
}

void ClusterEdge::Start() {
  const auto run = [this](boost::asio::awaitable<void> work) {
    running_.push_back(runtime::SpawnCancellable(gate_, executor_, std::move(work)));
  };
  const auto follow = [&](std::string_view prefix, std::function<void(store::Update)> apply) {
    run(store::Follow(store_, store::KeyRange::Prefix(std::string(prefix)), std::string(prefix),
                      std::move(apply)));
  };
  follow(cluster::kNodePrefix, [this](const store::Update& update) {
    if (nodes_.Apply(update)) load_.OnNodes();
    ready_.Set();
  });
  follow(watcher::layout::kWatch, [this](const store::Update& update) { load_.OnWatch(update); });
  follow("place/", [this](const store::Update& update) { load_.OnPlaces(update); });
  run(load_.Follow());
  run(KeepPlace());
}

Task<void> ClusterEdge::WaitReady(Deadline deadline) {
  return runtime::On(executor_, ready_.Wait(deadline));
}

Task<void> ClusterEdge::Stop() {
  for (const runtime::Running& one : running_) one.Cancel();
  co_await gate_.Close();
  DSEC_CO_TRY_VOID(co_await requests_.Stop());
  DSEC_CO_TRY_VOID(co_await lost_.Stop());
  if (lease_ == 0) co_return Ok();
  auto revoked = co_await store_.Revoke(lease_, Soon());
  co_return revoked;
}

// That it places sandboxes, for the others that do.
boost::asio::awaitable<void> ClusterEdge::KeepPlace() {
  v1::PlaceRecord record;
  record.set_instance(options_.instance);
  while (true) {
    if (lease_ != 0) {
      auto kept = co_await store_.KeepAlive(lease_, Soon());
      if (!kept.ok() && kept.error().reason() == "store.lease") lease_ = 0;
    }
    if (lease_ == 0) {
      auto granted = co_await store_.Grant(options_.lease, Soon());
      if (granted.ok()) {
        auto put = co_await store_.Put("place/" + options_.instance, record.SerializeAsString(),
                                       std::nullopt, *granted, Soon());
        if (put.ok()) lease_ = *granted;
      }
    }
    auto slept = co_await runtime::SleepUntil(Deadline::After(options_.lease / 3));
    if (!slept.ok()) co_return;
  }
}

// --- where a sandbox is ---

Task<ClusterEdge::Target> ClusterEdge::Find(SandboxId id, Deadline deadline) {
  const auto owner = NodeOf(id);
  if (!owner.ok()) co_return edge::NotFoundError(id.str());
  Target target;
  target.node = nodes_.Find(owner->str());
  if (target.node == nullptr) {
    if (nodes_.known()) co_return edge::NotFoundError(id.str());
    co_return Error(Code::kUnavailable, "cluster.not_read", "the nodes have not been read yet");
  }
  if (!target.node->died_before()) co_return target;
  auto book = co_await lost_.Of(target.node, deadline.Sooner(Soon()));
  if (!book.ok()) {
    // A node that lives has ended what its earlier lives had, and says so itself.
    if (target.node->dead()) co_return std::move(book).error();
    co_return target;
  }
  const auto it = (*book)->sandboxes.find(id.str());
  if (it != (*book)->sandboxes.end()) {
    target.lost = it->second;
  } else if (target.node->dead()) {
    const int64_t made = MadeAt(id);
    if (made == 0 || made > (*book)->last_death_unix_ms) co_return edge::NotFoundError(id.str());
    target.lost = Unmirrored(id, (*book)->last_death_unix_ms);
  }
  co_return target;
}

Task<std::optional<LostOfNode::One>> ClusterEdge::LostSince(SandboxId id, NodePtr node, Error error,
                                                            Deadline deadline) {
  const NodePtr now = nodes_.Find(node->id());
  if (now == nullptr) co_return std::optional<LostOfNode::One>();
  const bool died = now->record.epoch() != node->record.epoch() || now->dead();
  const bool unknown = error.code() == Code::kNotFound && now->died_before();
  if (!(Silent(error) && died) && !unknown) co_return std::optional<LostOfNode::One>();
  auto book = co_await lost_.Of(now, deadline.Sooner(Soon()));
  if (!book.ok()) co_return std::optional<LostOfNode::One>();
  const auto it = (*book)->sandboxes.find(id.str());
  if (it != (*book)->sandboxes.end()) co_return std::optional(it->second);
  const int64_t made = MadeAt(id);
  if (made == 0 || made > (*book)->last_death_unix_ms) co_return std::optional<LostOfNode::One>();
  co_return std::optional(Unmirrored(id, (*book)->last_death_unix_ms));
}

template <typename Reply, typename Call, typename OfLost>
Task<Reply> ClusterEdge::RouteAny(SandboxId id, Call call, OfLost of_lost, Deadline deadline) {
  runtime::GatePass pass(gate_);
  if (!pass) co_return edge::StoppingError();
  DSEC_CO_TRY(const Target target, co_await Find(id, deadline));
  if (target.lost.has_value()) co_return of_lost(*target.lost);
  auto reply = co_await call(target.node->api);
  if (reply.ok()) co_return reply;
  auto lost = co_await LostSince(id, target.node, reply.error(), deadline);
  if (lost.ok() && lost->has_value()) co_return of_lost(**lost);
  co_return std::move(reply).error();
}

template <typename Reply, typename Call>
Task<Reply> ClusterEdge::Route(SandboxId id, Call call, Deadline deadline) {
  const auto gone = [](const LostOfNode::One& lost) -> Result<Reply> { return Gone(lost); };
  return RouteAny<Reply>(std::move(id), std::move(call), gone, deadline);
}

// --- calls that an ended sandbox answers, too ---

Task<v1::SandboxView> ClusterEdge::Get(SandboxId id, Deadline deadline) {
  const auto call = [id, deadline](const Way& api) { return api->Get(id, deadline); };
  return RouteAny<v1::SandboxView>(
      id, call, [](const LostOfNode::One& lost) -> Result<v1::SandboxView> { return ViewOf(lost); },
      deadline);
}

Task<v1::SandboxView> ClusterEdge::Delete(v1::DeleteRequest request, Deadline deadline) {
  const SandboxId id(request.id());
  auto call = [request = std::move(request), deadline](const Way& api) {
    return api->Delete(request, deadline);
  };
  return RouteAny<v1::SandboxView>(
      id, std::move(call),
      [](const LostOfNode::One& lost) -> Result<v1::SandboxView> { return ViewOf(lost); },
      deadline);
}

Task<v1::Usage> ClusterEdge::Stats(SandboxId id, Deadline deadline) {
  const auto call = [id, deadline](const Way& api) { return api->Stats(id, deadline); };
  // The last figures have died with the node.
  return Route<v1::Usage>(id, call, deadline);
}

Task<v1::EventsReply> ClusterEdge::Events(v1::EventsRequest request, Deadline deadline) {
  if (request.id().empty()) return EventsOfAll(std::move(request), deadline);
  const SandboxId id(request.id());
  const uint64_t after = request.after_seq();
  auto call = [request = std::move(request), deadline](const Way& api) {
    return api->Events(request, deadline);
  };
  const auto of_lost = [after](const LostOfNode::One& lost) -> Result<v1::EventsReply> {
    v1::EventsReply reply;
    v1::Event event = TerminalEventOf(lost);
    reply.set_next_seq(std::max(after, event.seq()));
    if (event.seq() > after) *reply.add_events() = std::move(event);
    return reply;
  };
  return RouteAny<v1::EventsReply>(id, std::move(call), of_lost, deadline);
}

Task<std::string> ClusterEdge::ProjectOf(SandboxId id) {
  if (auto known = KnownProject(id.str())) co_return *std::move(known);
  const auto call = [id](const Way& api) { return api->ProjectOf(id); };
  const auto of_lost = [](const LostOfNode::One& lost) -> Result<std::string> {
    return lost.sandbox.project();
  };
  auto project = co_await RouteAny<std::string>(id, call, of_lost, Soon());
  if (project.ok()) KeepProject(id.str(), *project);
  co_return project;
}

std::optional<std::string> ClusterEdge::KnownProject(const std::string& id) const {
  std::lock_guard lock(projects_mutex_);
  const auto it = projects_.find(id);
  if (it == projects_.end()) return std::nullopt;
  return it->second;
}

void ClusterEdge::KeepProject(const std::string& id, const std::string& project) {
  std::lock_guard lock(projects_mutex_);
  if (!projects_.emplace(id, project).second) return;
  projects_order_.push_back(id);
  while (projects_.size() > options_.projects_kept) {
    projects_.erase(projects_order_.front());
    projects_order_.pop_front();
  }
}

// --- calls of one that runs ---

Task<std::unique_ptr<Attachment>> ClusterEdge::Attach(SandboxId id, std::string op_id,
                                                      edge::OnDisconnect rule, Deadline deadline) {
  Way way;
  const auto call = [&](const Way& api) {
    way = api;
    return api->Attach(id, op_id, rule, deadline);
  };
  auto attached = co_await Route<std::unique_ptr<Attachment>>(id, call, deadline);
  if (!attached.ok()) co_return std::move(attached).error();
  std::unique_ptr<Attachment> follower =
      std::make_unique<Follower>(std::move(way), *std::move(attached));
  co_return follower;
}

Task<v1::ExecReply> ClusterEdge::Exec(SandboxId id, v1::ExecRequest request, Attachment* follower,
                                      Deadline deadline) {
  auto call = [id, request = std::move(request), follower, deadline](const Way& api) mutable {
    return api->Exec(id, std::move(request), AtNode(follower, api), deadline);
  };
  return Route<v1::ExecReply>(id, std::move(call), deadline);
}

Task<v1::ExecReply> ClusterEdge::Poll(SandboxId id, v1::PollRequest request, Attachment* follower,
                                      Deadline deadline) {
  auto call = [id, request = std::move(request), follower, deadline](const Way& api) mutable {
    return api->Poll(id, std::move(request), AtNode(follower, api), deadline);
  };
  return Route<v1::ExecReply>(id, std::move(call), deadline);
}

Task<v1::SandboxView> ClusterEdge::Renew(v1::RenewRequest request, Deadline deadline) {
  const SandboxId id(request.id());
  auto call = [request = std::move(request), deadline](const Way& api) {
    return api->Renew(request, deadline);
  };
  return Route<v1::SandboxView>(id, std::move(call), deadline);
}

Task<v1::PackReply> ClusterEdge::Pack(SandboxId id, v1::PackRequest request,
                                      edge::PackProgressFn progress, Deadline deadline) {
  auto call = [id, request = std::move(request), progress = std::move(progress),
               deadline](const Way& api) { return api->Pack(id, request, progress, deadline); };
  return Route<v1::PackReply>(id, std::move(call), deadline);
}

// The request moves on to the node: some have megabytes.
#define DSEC_ROUTE(name, request_type, reply_type)                                            \
  Task<reply_type> ClusterEdge::name(SandboxId id, request_type request, Deadline deadline) { \
    auto call = [id, request = std::move(request), deadline](const Way& api) mutable {        \
      return api->name(id, std::move(request), deadline);                                     \
    };                                                                                        \
    return Route<reply_type>(id, std::move(call), deadline);                                  \
  }

DSEC_ROUTE(FirstTouch, v1::FirstTouchRequest, v1::FirstTouchReply)
DSEC_ROUTE(WriteStdin, v1::StdinRequest, v1::StdinReply)
DSEC_ROUTE(Signal, v1::SignalRequest, void)
DSEC_ROUTE(Resize, v1::ResizeRequest, void)
DSEC_ROUTE(Ack, v1::AckRequest, void)
DSEC_ROUTE(CloseSession, v1::SessionRequest, void)
DSEC_ROUTE(StatFile, v1::PathRequest, v1::FileInfo)
DSEC_ROUTE(ListFiles, v1::ListRequest, v1::ListReply)
DSEC_ROUTE(ReadFile, v1::ReadRequest, v1::ReadReply)
DSEC_ROUTE(WriteFile, v1::WriteRequest, v1::WriteReply)
DSEC_ROUTE(Mkdir, v1::MkdirRequest, void)
DSEC_ROUTE(Move, v1::MoveRequest, void)
DSEC_ROUTE(Remove, v1::RemoveRequest, void)
DSEC_ROUTE(Chmod, v1::ChmodRequest, void)
DSEC_ROUTE(Watch, v1::WatchRequest, v1::WatchReply)
DSEC_ROUTE(PullArchive, v1::PullArchiveRequest, v1::PullArchiveReply)
DSEC_ROUTE(PushArchive, v1::PushArchiveRequest, v1::PushArchiveReply)
#undef DSEC_ROUTE

Task<v1::ListExecsReply> ClusterEdge::ListExecs(SandboxId id, Deadline deadline) {
  const auto call = [id, deadline](const Way& api) { return api->ListExecs(id, deadline); };
  return Route<v1::ListExecsReply>(id, call, deadline);
}

Task<v1::ListSessionsReply> ClusterEdge::ListSessions(SandboxId id, Deadline deadline) {
  const auto call = [id, deadline](const Way& api) { return api->ListSessions(id, deadline); };
  return Route<v1::ListSessionsReply>(id, call, deadline);
}

}  // namespace dsec::router

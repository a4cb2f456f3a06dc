// SPDX-License-Identifier: Apache-2.0
#include "cluster/routed_edge.h"

#include <algorithm>
#include <utility>

#include "base/id.h"
#include "base/log.h"
#include "runtime/async_event.h"

namespace dsec::cluster {
namespace {

using runtime::Deadline;
using runtime::Task;
using std::chrono::seconds;

constexpr seconds kReadTime{10};
constexpr seconds kWatchTime{30};
constexpr seconds kRetry{1};
constexpr uint32_t kPage = 1000;

// FNV-1a, 64 bits (datatracker.ietf.org/doc/draft-eastlake-fnv): the same on every machine.
uint64_t HashOf(std::string_view text) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : text) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 1099511628211ull;
  }
  return hash;
}

// Keeps the edge for as long as the call that it was asked for lasts.
template <typename T>
Task<T> Held(std::shared_ptr<edge::EdgeApi> edge, Task<T> call) {
  auto reply = co_await std::move(call);
  edge.reset();
  co_return std::move(reply);
}

template <typename T>
Task<T> Refused(Error error) {
  co_return error;
}

}  // namespace

Task<std::unique_ptr<NodeTable>> NodeTable::Open(store::Store& store, runtime::Executor home,
                                                 Dialler dial) {
  std::unique_ptr<NodeTable> table(new NodeTable(store, std::move(dial)));
  auto loaded = co_await runtime::On(home, table->Load());
  if (!loaded.ok()) co_return std::move(loaded).error();
  table->follower_ = runtime::SpawnCancellable(table->work_, home, table->Follow());
  co_return std::move(table);
}

boost::asio::awaitable<void> NodeTable::Stop() {
  follower_.Cancel();
  co_await work_.Close();
}

void NodeTable::Put(Nodes& nodes, const std::string& key, const std::optional<std::string>& value) {
  const std::string id = key.substr(kNodePrefix.size());
  if (!value) {
    nodes.erase(id);
    return;
  }
  auto record = ParseNodeRecord(*value);
  if (!record.ok() || record->node_id() != id) {
    log::Error("cluster.bad_record",
               {{"key", key}, {"error", record.ok() ? "another id" : record.error().ToString()}});
    return;
  }
  auto& epoch = epochs_[id];
  if (epoch == nullptr) epoch = std::make_shared<Epoch>();
  epoch->value = record->epoch();
  Node& node = nodes[id];
  if (node.edge == nullptr || node.record.address() != record->address()) {
    auto edge = dial_(record->address(), id, [epoch] { return epoch->value.load(); });
    if (!edge.ok()) {
      log::Error("cluster.bad_record", {{"key", key}, {"error", edge.error()}});
      nodes.erase(id);
      return;
    }
    node.edge = *std::move(edge);
  }
  node.record = *std::move(record);
}

void NodeTable::Publish(Nodes nodes) {
  auto next = std::make_shared<const Nodes>(std::move(nodes));
  const std::lock_guard lock(mutex_);
  nodes_.swap(next);
}

Task<void> NodeTable::Load() {
  Nodes nodes;
  const auto old = Now();
  std::optional<store::Revision> revision;
  store::KeyRange range = store::KeyRange::Prefix(std::string(kNodePrefix));
  for (bool more = true; more;) {
    auto page = co_await store_.Range(range, kPage, Deadline::After(kReadTime));
    if (!page.ok()) co_return std::move(page).error();
    // The watch goes on from the first page: it may tell again what later pages had.
    if (!revision) revision = page->revision;
    for (const store::Entry& entry : page->entries) {
      const std::string id = entry.key.substr(kNodePrefix.size());
      if (const auto known = old->find(id); known != old->end()) nodes[id] = known->second;
      Put(nodes, entry.key, entry.value);
    }
    more = page->more && !page->entries.empty();
    if (more) range.begin = page->entries.back().key + '\0';
  }
  next_ = *revision;
  Publish(std::move(nodes));
  co_return Ok();
}

boost::asio::awaitable<void> NodeTable::Follow() {
  const store::KeyRange range = store::KeyRange::Prefix(std::string(kNodePrefix));
  for (;;) {
    auto changes = co_await store_.Watch(range, next_, Deadline::After(kWatchTime));
    if (changes.ok()) {
      next_ = changes->next;
      if (changes->changes.empty()) continue;
      Nodes nodes = *Now();
      for (const store::Change& change : changes->changes) Put(nodes, change.key, change.value);
      Publish(std::move(nodes));
      continue;
    }
    if (changes.error().code() == Code::kCancelled) co_return;
    log::Warn("cluster.watch_failed", {{"error", changes.error()}});
    auto slept = co_await runtime::SleepUntil(Deadline::After(kRetry));
    if (!slept.ok()) co_return;
    auto loaded = co_await Load();
    if (!loaded.ok() && loaded.error().code() == Code::kCancelled) co_return;
  }
}

Result<std::shared_ptr<edge::EdgeApi>> RoutedEdge::Of(const SandboxId& id) const {
  DSEC_TRY(const NodeId node, NodeOf(id));
  const auto nodes = table_.Now();
  const auto found = nodes->find(node.str());
  if (found == nodes->end()) return edge::NotFoundError(id.str());
  return found->second.edge;
}

#define DSEC_ROUTED(Reply, Name, Request)                                                       \
  Task<Reply> RoutedEdge::Name(SandboxId id, Request request, Deadline deadline) {              \
    auto edge = Of(id);                                                                         \
    if (!edge.ok()) return Refused<Reply>(std::move(edge).error());                             \
    edge::EdgeApi& to = **edge;                                                                 \
    return Held<Reply>(*std::move(edge), to.Name(std::move(id), std::move(request), deadline)); \
  }
DSEC_ROUTED_CALLS(DSEC_ROUTED)
#undef DSEC_ROUTED

#define DSEC_ROUTED_BY_ID(Reply, Name)                                      \
  Task<Reply> RoutedEdge::Name(SandboxId id, Deadline deadline) {           \
    auto edge = Of(id);                                                     \
    if (!edge.ok()) return Refused<Reply>(std::move(edge).error());         \
    edge::EdgeApi& to = **edge;                                             \
    return Held<Reply>(*std::move(edge), to.Name(std::move(id), deadline)); \
  }
DSEC_ROUTED_BY_ID(v1::SandboxView, Get)
DSEC_ROUTED_BY_ID(v1::Usage, Stats)
DSEC_ROUTED_BY_ID(v1::ListExecsReply, ListExecs)
DSEC_ROUTED_BY_ID(v1::ListSessionsReply, ListSessions)
#undef DSEC_ROUTED_BY_ID

#define DSEC_ROUTED_BY_FIELD(Reply, Name, Request)                               \
  Task<Reply> RoutedEdge::Name(Request request, Deadline deadline) {             \
    auto edge = Of(SandboxId(request.id()));                                     \
    if (!edge.ok()) return Refused<Reply>(std::move(edge).error());              \
    edge::EdgeApi& to = **edge;                                                  \
    return Held<Reply>(*std::move(edge), to.Name(std::move(request), deadline)); \
  }
DSEC_ROUTED_BY_FIELD(v1::SandboxView, Delete, v1::DeleteRequest)
DSEC_ROUTED_BY_FIELD(v1::SandboxView, Renew, v1::RenewRequest)
#undef DSEC_ROUTED_BY_FIELD

Task<std::string> RoutedEdge::ProjectOf(SandboxId id) {
  auto edge = Of(id);
  if (!edge.ok()) return Refused<std::string>(std::move(edge).error());
  edge::EdgeApi& to = **edge;
  return Held<std::string>(*std::move(edge), to.ProjectOf(std::move(id)));
}

Task<v1::EventsReply> RoutedEdge::Events(v1::EventsRequest request, Deadline deadline) {
  if (request.id().empty()) {
    return Refused<v1::EventsReply>(
        Error(Code::kFailedPrecondition, "cluster.node_events",
              "a cluster has no one stream of the events of all nodes"));
  }
  auto edge = Of(SandboxId(request.id()));
  if (!edge.ok()) return Refused<v1::EventsReply>(std::move(edge).error());
  edge::EdgeApi& to = **edge;
  return Held<v1::EventsReply>(*std::move(edge), to.Events(std::move(request), deadline));
}

Task<edge::Created> RoutedEdge::Create(v1::CreateRequest request, Deadline deadline) {
  std::shared_ptr<edge::EdgeApi> edge;
  if (!request.sandbox_id().empty()) {
    auto named = Of(SandboxId(request.sandbox_id()));
    if (!named.ok()) return Refused<edge::Created>(std::move(named).error());
    edge = *std::move(named);
  } else {
    std::vector<std::shared_ptr<edge::EdgeApi>> joined;
    for (const auto& [id, node] : *table_.Now()) {
      if (node.record.state() == v1::NODE_JOINED) joined.push_back(node.edge);
    }
    if (joined.empty()) {
      return Refused<edge::Created>(
          Error(Code::kUnavailable, "cluster.no_node", "no node is joined"));
    }
    edge = joined[HashOf(request.project() + '\0' + request.request_id()) % joined.size()];
  }
  edge::EdgeApi& to = *edge;
  return Held<edge::Created>(std::move(edge), to.Create(std::move(request), deadline));
}

Task<v1::ListPage> RoutedEdge::List(v1::ListRequestAll request, Deadline deadline) {
  // The token: the node that is read, and its own token.
  std::string node_id;
  if (!request.page_token().empty()) {
    const std::string token = request.page_token();
    const size_t colon = token.find(':');
    node_id = token.substr(0, colon);
    if (colon == std::string::npos || !ParseNodeId(node_id).ok()) {
      co_return Error(Code::kInvalidArgument, "list.page_token", "page_token is not of this list")
          .WithField("page_token");
    }
    request.set_page_token(token.substr(colon + 1));
  }
  const auto nodes = table_.Now();
  v1::ListPage page;
  const uint32_t wanted = request.page_size();
  for (auto node = nodes->lower_bound(node_id); node != nodes->end(); ++node) {
    if (node->first != node_id) request.clear_page_token();
    const auto have = static_cast<uint32_t>(page.records_size());
    if (wanted != 0 && have >= wanted) {
      page.set_next_page_token(node->first + ":");
      break;
    }
    if (wanted != 0) request.set_page_size(wanted - have);
    auto part = co_await node->second.edge->List(request, deadline);
    if (!part.ok()) co_return std::move(part).error();
    for (auto& record : *part->mutable_records()) *page.add_records() = std::move(record);
    if (!part->next_page_token().empty()) {
      page.set_next_page_token(node->first + ":" + part->next_page_token());
      break;
    }
  }
  co_return page;
}

Task<v1::NodeInfo> RoutedEdge::Node(Deadline deadline) {
  v1::NodeInfo sum;
  const auto nodes = table_.Now();
  std::optional<Error> failed;
  for (const auto& [id, node] : *nodes) {
    auto info = co_await node.edge->Node(deadline.Sooner(Deadline::After(seconds(3))));
    if (!info.ok()) {
      failed = std::move(info).error();
      continue;
    }
    sum.set_version(info->version());
    sum.set_live(sum.live() + info->live());
    sum.set_capacity(sum.capacity() + info->capacity());
    sum.set_memory_available_bytes(sum.memory_available_bytes() + info->memory_available_bytes());
    sum.set_scratch_free_bytes(sum.scratch_free_bytes() + info->scratch_free_bytes());
    sum.set_cpus(sum.cpus() + info->cpus());
    sum.set_memory_total_bytes(sum.memory_total_bytes() + info->memory_total_bytes());
    sum.set_node_id(sum.node_id().empty() ? id : sum.node_id() + "," + id);
    if (sum.capabilities().empty()) *sum.mutable_capabilities() = info->capabilities();
  }
  if (sum.node_id().empty()) {
    if (failed) co_return *failed;
    co_return Error(Code::kUnavailable, "cluster.no_node", "no node is joined");
  }
  co_return sum;
}

Task<v1::PackReply> RoutedEdge::Pack(SandboxId id, v1::PackRequest request,
                                     edge::PackProgressFn progress, Deadline deadline) {
  auto edge = Of(id);
  if (!edge.ok()) return Refused<v1::PackReply>(std::move(edge).error());
  edge::EdgeApi& to = **edge;
  return Held<v1::PackReply>(
      *std::move(edge), to.Pack(std::move(id), std::move(request), std::move(progress), deadline));
}

namespace {

// An attachment may not outlive its EdgeApi.
class HeldAttachment final : public edge::Attachment {
 public:
  HeldAttachment(std::shared_ptr<edge::EdgeApi> edge, std::unique_ptr<edge::Attachment> inner)
      : edge_(std::move(edge)), inner_(std::move(inner)) {}
  void Finish() override { inner_->Finish(); }
  edge::Attachment* inner() const { return inner_.get(); }

 private:
  const std::shared_ptr<edge::EdgeApi> edge_;
  const std::unique_ptr<edge::Attachment> inner_;
};

edge::Attachment* InnerOf(edge::Attachment* follower) {
  return follower == nullptr ? nullptr : static_cast<HeldAttachment*>(follower)->inner();
}

}  // namespace

Task<std::unique_ptr<edge::Attachment>> RoutedEdge::Attach(SandboxId id, std::string op_id,
                                                           edge::OnDisconnect rule,
                                                           Deadline deadline) {
  auto edge = Of(id);
  if (!edge.ok()) co_return std::move(edge).error();
  auto inner = co_await (*edge)->Attach(std::move(id), std::move(op_id), rule, deadline);
  if (!inner.ok()) co_return std::move(inner).error();
  std::unique_ptr<edge::Attachment> held =
      std::make_unique<HeldAttachment>(*std::move(edge), *std::move(inner));
  co_return std::move(held);
}

Task<v1::ExecReply> RoutedEdge::Exec(SandboxId id, v1::ExecRequest request,
                                     edge::Attachment* follower, Deadline deadline) {
  auto edge = Of(id);
  if (!edge.ok()) return Refused<v1::ExecReply>(std::move(edge).error());
  edge::EdgeApi& to = **edge;
  return Held<v1::ExecReply>(
      *std::move(edge), to.Exec(std::move(id), std::move(request), InnerOf(follower), deadline));
}

Task<v1::ExecReply> RoutedEdge::Poll(SandboxId id, v1::PollRequest request,
                                     edge::Attachment* follower, Deadline deadline) {
  auto edge = Of(id);
  if (!edge.ok()) return Refused<v1::ExecReply>(std::move(edge).error());
  edge::EdgeApi& to = **edge;
  return Held<v1::ExecReply>(
      *std::move(edge), to.Poll(std::move(id), std::move(request), InnerOf(follower), deadline));
}

}  // namespace dsec::cluster

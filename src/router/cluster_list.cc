// SPDX-License-Identifier: Apache-2.0
// What is gathered from many nodes: lists, events, sums.
#include <algorithm>
#include <charconv>
#include <utility>

#include "base/log.h"
#include "edge/edge.h"
#include "router/cluster_edge.h"

namespace dsec::router {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;

namespace {

constexpr uint32_t kMaxPage = 1000;
constexpr uint32_t kDefaultPage = 100;
// Of a cursor that holds the place in each node's events: it travels in a query.
constexpr size_t kMaxCursorNodes = 400;
constexpr size_t kMaxCursor = 32 << 10;

Error BadCursor(std::string_view rule) {
  return Error(Code::kInvalidArgument, "events.cursor", fmt::format("cursor: {}", rule))
      .WithField("cursor");
}

// "n1=12,n2=3".
Result<std::map<std::string, uint64_t>> ParseCursor(std::string_view text) {
  std::map<std::string, uint64_t> cursor;
  if (text.size() > kMaxCursor) return BadCursor("is not one that was given out");
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string_view item = text.substr(0, comma);
    text.remove_prefix(std::min(comma + 1, text.size()));
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) return BadCursor("is not one that was given out");
    const auto node = ParseNodeId(item.substr(0, equals));
    uint64_t seq = 0;
    const auto [end, error] = std::from_chars(item.data() + equals + 1, item.end(), seq);
    if (!node.ok() || error != std::errc() || end != item.end())
      return BadCursor("is not one that was given out");
    cursor[node->str()] = seq;
  }
  return cursor;
}

std::string WriteCursor(const std::map<std::string, uint64_t>& cursor) {
  std::string text;
  for (const auto& [node, seq] : cursor)
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", node, seq);
  return text;
}

}  // namespace

// What one node has said.
struct ClusterEdge::Part {
  NodePtr node;
  std::optional<Result<v1::ListPage>> page;
  std::optional<Result<v1::EventsReply>> events;
  runtime::AsyncEvent done;  // the page is there
};

boost::asio::awaitable<void> ClusterEdge::ListNode(std::shared_ptr<Part> part,
                                                   v1::ListRequestAll request, Deadline deadline) {
  auto page = co_await PageOf(part->node, std::move(request), deadline);
  part->page.emplace(std::move(page));
  part->done.Set();
}

// What lives there, as the node says, and what has died with its earlier lives.
Task<v1::ListPage> ClusterEdge::PageOf(NodePtr node, v1::ListRequestAll request,
                                       Deadline deadline) {
  std::map<std::string, v1::SandboxRecord> found;
  std::string token;
  if (!node->dead()) {
    auto page = co_await node->api->List(request, deadline);
    if (!page.ok()) co_return std::move(page).error();
    for (v1::SandboxRecord& record : *page->mutable_records()) {
      std::string id = record.id();
      found.insert_or_assign(std::move(id), std::move(record));
    }
    token = page->next_page_token();
  }
  if (node->died_before() && edge::WantsEnded(request)) {
    auto book = co_await lost_.Of(node, deadline);
    if (!book.ok()) co_return std::move(book).error();
    auto it = (*book)->sandboxes.upper_bound(request.page_token());
    for (; it != (*book)->sandboxes.end(); ++it) {
      // What the node has not told yet comes with the next page.
      if (!token.empty() && it->first > token) break;
      v1::SandboxRecord record = RecordOf(it->second);
      if (edge::Matches(record, request)) found.insert_or_assign(it->first, std::move(record));
    }
  }
  v1::ListPage page;
  for (auto& [id, record] : found) {
    if (static_cast<uint32_t>(page.records_size()) == request.page_size()) {
      token = page.records().rbegin()->id();
      break;
    }
    *page.add_records() = std::move(record);
  }
  page.set_next_page_token(token);
  co_return page;
}

// Ids sort by node first, so a list is those of the nodes one after the other.
Task<v1::ListPage> ClusterEdge::List(v1::ListRequestAll request, Deadline deadline) {
  runtime::GatePass pass(gate_);
  if (!pass) co_return edge::StoppingError();
  const uint32_t page_size = request.page_size() == 0 ? kDefaultPage : request.page_size();
  if (page_size > kMaxPage) {
    co_return Error(Code::kInvalidArgument, "list.page_size",
                    fmt::format("{} is not in 1..{}", page_size, kMaxPage))
        .WithField("page_size");
  }
  std::string first_node;
  if (!request.page_token().empty()) {
    const auto owner = ParseSandboxId(request.page_token()).ok()
                           ? NodeOf(SandboxId(request.page_token()))
                           : Result<NodeId>(edge::NotFoundError(request.page_token()));
    if (!owner.ok()) {
      co_return Error(Code::kInvalidArgument, "list.page_token",
                      "is not a token that a list gave out")
          .WithField("page_token");
    }
    first_node = owner->str();
  }
  auto nodes = nodes_.All();
  std::erase_if(nodes, [&](const NodePtr& node) { return node->id() < first_node; });
  v1::ListPage page;
  const auto here = co_await boost::asio::this_coro::executor;
  for (size_t begin = 0; begin < nodes.size(); begin += options_.list_at_once) {
    std::vector<std::shared_ptr<Part>> parts;
    std::vector<runtime::Running> running;
    runtime::Gate gate;
    const size_t end = std::min(nodes.size(), begin + options_.list_at_once);
    const Deadline patience = deadline.Sooner(Deadline::After(options_.list_patience));
    for (size_t i = begin; i < end; ++i) {
      auto part = std::make_shared<Part>();
      part->node = nodes[i];
      v1::ListRequestAll one = request;
      one.set_page_size(page_size - static_cast<uint32_t>(page.records_size()));
      if (nodes[i]->id() != first_node) one.clear_page_token();
      parts.push_back(part);
      running.push_back(
          runtime::SpawnCancellable(gate, here, ListNode(part, std::move(one), patience)));
    }
    auto full = co_await TakePages(parts, end == nodes.size(), page_size, page);
    // Those that are not needed any more are not waited for.
    for (const runtime::Running& one : running) one.Cancel();
    co_await gate.Close();
    if (!full.ok()) co_return std::move(full).error();
    if (*full) break;
  }
  co_return page;
}

// The pages of some nodes in their order, each as soon as it is there. True: the page is complete.
Task<bool> ClusterEdge::TakePages(const std::vector<std::shared_ptr<Part>>& parts, bool last_nodes,
                                  uint32_t page_size, v1::ListPage& page) {
  for (size_t i = 0; i < parts.size(); ++i) {
    Part& part = *parts[i];
    auto waited = co_await part.done.Wait(Deadline::Never());
    if (!waited.ok()) co_return std::move(waited).error();
    if (!part.page->ok()) {
      const Error& error = part.page->error();
      if (error.code() == Code::kInvalidArgument) co_return error;
      log::Debug("router.list", {{"node", part.node->id()}, {"error", error}});
      page.add_missing_nodes(part.node->id());
      continue;
    }
    v1::ListPage& of_node = **part.page;
    for (v1::SandboxRecord& record : *of_node.mutable_records()) {
      if (static_cast<uint32_t>(page.records_size()) == page_size) {
        page.set_next_page_token(page.records().rbegin()->id());
        co_return true;
      }
      *page.add_records() = std::move(record);
    }
    if (!of_node.next_page_token().empty()) {
      page.set_next_page_token(of_node.next_page_token());
      co_return true;
    }
    const bool more = !last_nodes || i + 1 < parts.size();
    if (static_cast<uint32_t>(page.records_size()) == page_size && more) {
      page.set_next_page_token(page.records().rbegin()->id());
      co_return true;
    }
  }
  co_return false;
}

boost::asio::awaitable<void> ClusterEdge::EventsOfNode(std::shared_ptr<Part> part,
                                                       v1::EventsRequest request,
                                                       std::shared_ptr<Gathering> gathering,
                                                       Deadline deadline) {
  auto reply = co_await part->node->api->Events(std::move(request), deadline);
  const bool some = reply.ok() && reply->events_size() > 0;
  part->events.emplace(std::move(reply));
  --gathering->left;
  if (gathering->left == 0 || (some && gathering->first_is_enough)) gathering->done.Set();
}

// Asks every node for what comes after the cursor. With a wait it ends when the first has
// something, else when all have answered.
Task<std::vector<std::shared_ptr<ClusterEdge::Part>>> ClusterEdge::GatherEvents(
    const std::vector<NodePtr>& nodes, const std::map<std::string, uint64_t>& cursor,
    uint32_t limit, milliseconds wait, Deadline deadline) {
  const auto here = co_await boost::asio::this_coro::executor;
  auto gathering = std::make_shared<Gathering>();
  gathering->left = nodes.size();
  gathering->first_is_enough = wait.count() > 0;
  const Deadline until = deadline.Sooner(Deadline::After(wait + options_.list_patience));
  std::vector<std::shared_ptr<Part>> parts;
  std::vector<runtime::Running> running;
  runtime::Gate gate;
  for (const NodePtr& node : nodes) {
    auto part = std::make_shared<Part>();
    part->node = node;
    v1::EventsRequest one;
    const auto place = cursor.find(node->id());
    one.set_after_seq(place == cursor.end() ? 0 : place->second);
    one.set_max_events(limit);
    one.set_wait_ms(static_cast<uint64_t>(wait.count()));
    parts.push_back(part);
    running.push_back(runtime::SpawnCancellable(
        gate, here, EventsOfNode(part, std::move(one), gathering, until)));
  }
  if (!nodes.empty()) (void)co_await gathering->done.Wait(until);
  for (const runtime::Running& one : running) one.Cancel();
  co_await gate.Close();
  co_return parts;
}

Task<v1::EventsReply> ClusterEdge::EventsOfAll(v1::EventsRequest request, Deadline deadline) {
  runtime::GatePass pass(gate_);
  if (!pass) co_return edge::StoppingError();
  if (!request.node().empty()) {
    const NodePtr node = nodes_.Find(request.node());
    if (node == nullptr) {
      co_return Error(Code::kNotFound, "node.unknown",
                      fmt::format("there is no node {}", edge::SafeText(request.node())))
          .WithField("node");
    }
    if (node->dead())
      co_return Error(Code::kUnavailable, "node.dead", fmt::format("{} is dead", node->id()));
    request.clear_node();
    auto reply = co_await node->api->Events(std::move(request), deadline);
    co_return reply;
  }
  DSEC_CO_TRY(auto cursor, ParseCursor(request.cursor()));
  auto nodes = nodes_.All();
  std::erase_if(nodes, [](const NodePtr& node) { return node->dead(); });
  if (nodes.size() > kMaxCursorNodes) {
    co_return Error(
        Code::kFailedPrecondition, "events.too_many_nodes",
        fmt::format("of more than {} nodes events are asked for node by node", kMaxCursorNodes))
        .WithField("node");
  }
  const auto until = deadline.Sooner(
      Deadline::After(milliseconds(std::min<uint64_t>(request.wait_ms(), 600'000))));
  const uint32_t limit =
      request.max_events() == 0 ? 100 : std::min<uint32_t>(request.max_events(), 1000);
  while (true) {
    DSEC_CO_TRY(auto parts, co_await GatherEvents(nodes, cursor, limit, milliseconds(0), deadline));
    v1::EventsReply reply;
    std::vector<std::pair<const v1::EventsReply*, int>> heads;
    for (const auto& part : parts) {
      if (part->events.has_value() && part->events->ok()) {
        heads.emplace_back(&**part->events, 0);
      } else {
        reply.add_missing_nodes(part->node->id());
      }
    }
    // Among nodes in order of time, of one node in its own order.
    const auto later = [](const auto& a, const auto& b) {
      if (b.second == b.first->events_size()) return false;
      if (a.second == a.first->events_size()) return true;
      return a.first->events(a.second).at_unix_ms() > b.first->events(b.second).at_unix_ms();
    };
    std::make_heap(heads.begin(), heads.end(), later);
    while (!heads.empty() && static_cast<uint32_t>(reply.events_size()) < limit) {
      std::pop_heap(heads.begin(), heads.end(), later);
      auto& [of_node, next] = heads.back();
      if (next == of_node->events_size()) break;
      const v1::Event& event = of_node->events(next++);
      *reply.add_events() = event;
      const auto owner = NodeOf(SandboxId(event.sandbox_id()));
      if (owner.ok()) cursor[owner->str()] = event.node_seq();
      std::push_heap(heads.begin(), heads.end(), later);
    }
    if (reply.events_size() > 0 || until.Expired()) {
      reply.set_next_cursor(WriteCursor(cursor));
      co_return reply;
    }
    const auto wait = std::chrono::ceil<milliseconds>(until.Remaining());
    DSEC_CO_TRY(parts, co_await GatherEvents(nodes, cursor, limit, wait, until));
  }
}

Task<v1::NodeInfo> ClusterEdge::Node(Deadline) {
  v1::NodeInfo info;
  info.set_node_id(options_.cluster);
  info.set_version(DSEC_VERSION);
  std::map<std::string, v1::NodeStatus> statuses;
  for (v1::NodeStatus& status : load_.Statuses()) {
    std::string id = status.node_id();
    statuses.insert_or_assign(std::move(id), std::move(status));
  }
  for (const NodePtr& node : nodes_.All()) {
    if (node->dead()) continue;
    const auto it = statuses.find(node->id());
    if (it == statuses.end() || !it->second.measured()) {
      info.set_capacity(info.capacity() + node->record.capacity());
      info.set_memory_total_bytes(info.memory_total_bytes() + node->record.memory_total_bytes());
      continue;
    }
    const v1::NodeStatus& status = it->second;
    info.set_live(info.live() + status.live());
    info.set_capacity(info.capacity() + status.capacity());
    info.set_memory_total_bytes(info.memory_total_bytes() + status.memory_total_bytes());
    info.set_memory_available_bytes(info.memory_available_bytes() +
                                    status.memory_available_bytes());
    info.set_scratch_free_bytes(info.scratch_free_bytes() + status.scratch_free_bytes());
  }
  co_return info;
}

}  // namespace dsec::router

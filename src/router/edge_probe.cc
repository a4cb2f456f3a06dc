// SPDX-License-Identifier: Apache-2.0
#include "router/edge_probe.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/clock.h"
#include "router/lost.h"

namespace dsec::router {

using runtime::Deadline;
using runtime::Task;

namespace {

constexpr uint32_t kPage = 1000;
constexpr int kEventPages = 10;      // a probe
constexpr int kMaxPages = 200;       // of a list; a mirror takes half of that
constexpr size_t kGets = 4;          // more are listed
constexpr int64_t kSkewMs = 60'000;  // between the clocks of this machine and an apiserver

v1::LostSandbox Of(const v1::SandboxRecord& record) {
  v1::LostSandbox sandbox;
  sandbox.set_id(record.id());
  sandbox.set_project(record.project());
  *sandbox.mutable_labels() = record.spec().labels();
  sandbox.set_name(record.spec().name());
  sandbox.set_backend(record.spec().backend());
  sandbox.set_state(record.state());
  sandbox.set_last_event_seq(std::max<uint64_t>(record.next_event_seq(), 1) - 1);
  sandbox.set_created_unix_ms(record.created_unix_ms());
  sandbox.set_request_id(record.request_id());
  sandbox.set_request_digest(record.request_digest());
  return sandbox;
}

// Live ones with an id after `token`, up to `last` (empty: all).
Task<std::vector<v1::LostSandbox>> Listed(edge::EdgeApi& api, std::string token, std::string last,
                                          Deadline deadline) {
  std::vector<v1::LostSandbox> all;
  for (int i = 0; i < kMaxPages; ++i) {
    v1::ListRequestAll request;
    request.set_page_size(kPage);
    request.set_page_token(token);
    auto page = co_await api.List(std::move(request), deadline);
    if (!page.ok()) co_return std::move(page).error();
    for (const v1::SandboxRecord& record : page->records()) {
      if (!last.empty() && record.id() > last) co_return all;
      all.push_back(Of(record));
    }
    token = page->next_page_token();
    if (token.empty()) break;
  }
  co_return all;
}

}  // namespace

std::shared_ptr<edge::EdgeApi> EdgeProbe::WayTo(const v1::NodeRecord& node) {
  std::lock_guard lock(mutex_);
  Way& way = ways_[node.node_id()];
  if (way.api == nullptr || way.epoch != node.epoch() || way.address != node.address())
    way = {node.epoch(), node.address(), edge_of_(node), 0};
  return way.api;
}

int64_t EdgeProbe::ListedAt(const std::string& node) const {
  std::lock_guard lock(mutex_);
  const auto it = ways_.find(node);
  return it == ways_.end() ? 0 : it->second.listed_ms;
}

void EdgeProbe::SetListed(const std::string& node, int64_t at_ms) {
  std::lock_guard lock(mutex_);
  ways_[node].listed_ms = at_ms;
}

Task<watcher::Seen> EdgeProbe::Probe(v1::NodeRecord node, uint64_t place, Deadline deadline) {
  const std::shared_ptr<edge::EdgeApi> api = WayTo(node);
  watcher::Seen seen;
  DSEC_CO_TRY(seen.info, co_await api->Node(deadline));
  if (place == 0) {
    seen.whole = true;
    SetListed(node.node_id(), UnixMillis(Clock::System().Wall()));
    DSEC_CO_TRY(seen.changed, co_await Listed(*api, "", "", deadline));
  }
  const int64_t young = ListedAt(node.node_id()) - kSkewMs;
  std::set<std::string> created;
  // A place is one more than the last event that was read.
  uint64_t seq = place == 0 ? 0 : place - 1;
  bool more = true;
  for (int i = 0; i < kEventPages && more; ++i) {
    v1::EventsRequest request;
    request.set_after_seq(seq);
    request.set_max_events(kPage);
    auto reply = co_await api->Events(std::move(request), deadline);
    if (!reply.ok()) co_return std::move(reply).error();
    for (const v1::Event& event : reply->events()) {
      if (event.type() == "ended") {
        created.erase(event.sandbox_id());
        seen.ended.push_back(event.sandbox_id());
        continue;
      }
      if (event.type() == "created" && MadeAt(SandboxId(event.sandbox_id())) >= young)
        created.insert(event.sandbox_id());
      v1::LostSandbox step;  // of one that is known
      step.set_id(event.sandbox_id());
      step.set_state(event.state());
      step.set_last_event_seq(event.seq());
      seen.changed.push_back(std::move(step));
    }
    more = static_cast<uint32_t>(reply->events_size()) == kPage;
    seq = std::max(seq, reply->next_seq());
  }
  seen.next = seq + 1;
  std::vector<v1::LostSandbox> full;
  if (created.size() > kGets) {
    // The list begins after its token: the first one is asked for by itself.
    auto listed = co_await Listed(*api, *created.begin(), *created.rbegin(), deadline);
    if (!listed.ok()) co_return std::move(listed).error();
    full = *std::move(listed);
  }
  size_t gets = 0;
  for (const std::string& id : created) {
    if (gets++ >= (created.size() > kGets ? 1 : kGets)) break;
    auto view = co_await api->Get(SandboxId(id), deadline);
    if (!view.ok() && view.error().code() != Code::kNotFound) co_return std::move(view).error();
    if (view.ok() && view->record().ended_unix_ms() == 0) full.push_back(Of(view->record()));
  }
  // Whole ones first: the steps that follow are of those.
  seen.changed.insert(seen.changed.begin(), std::make_move_iterator(full.begin()),
                      std::make_move_iterator(full.end()));
  co_return seen;
}

}  // namespace dsec::router

// SPDX-License-Identifier: Apache-2.0
#include "router/lost.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "model/lifecycle.h"
#include "runtime/shards.h"
#include "watcher/layout.h"

namespace dsec::router {

using runtime::Deadline;
using runtime::Task;

namespace {

constexpr std::string_view kCrockford = "0123456789abcdefghjkmnpqrstvwxyz";
constexpr size_t kUlid = 26;
constexpr size_t kUlidTime = 10;

v1::Termination TerminationOf(const LostOfNode::One& lost) {
  v1::Termination termination;
  termination.set_cause(std::string(model::cause::kNodeLost));
  termination.set_fault(v1::FAULT_INFRASTRUCTURE);
  termination.set_message("its node was declared dead");
  termination.set_who("watcher");
  termination.set_at_unix_ms(lost.died_unix_ms);
  return termination;
}

}  // namespace

int64_t MadeAt(const SandboxId& id) {
  if (id.str().size() < kUlid) return 0;
  int64_t ms = 0;
  for (const char c : id.str().substr(id.str().size() - kUlid, kUlidTime)) {
    const size_t digit = kCrockford.find(c);
    if (digit == std::string_view::npos) return 0;
    ms = ms << 5 | static_cast<int64_t>(digit);
  }
  return ms;
}

v1::SandboxRecord RecordOf(const LostOfNode::One& lost) {
  v1::SandboxRecord record;
  record.set_id(lost.sandbox.id());
  record.set_request_id(lost.sandbox.request_id());
  record.set_request_digest(lost.sandbox.request_digest());
  record.set_project(lost.sandbox.project());
  record.mutable_spec()->set_name(lost.sandbox.name());
  record.mutable_spec()->set_backend(lost.sandbox.backend());
  *record.mutable_spec()->mutable_labels() = lost.sandbox.labels();
  record.set_state(v1::STATE_LOST);
  *record.mutable_termination() = TerminationOf(lost);
  record.set_created_unix_ms(lost.sandbox.created_unix_ms());
  record.set_ended_unix_ms(lost.died_unix_ms);
  record.set_next_event_seq(lost.sandbox.last_event_seq() + 2);
  return record;
}

v1::Event TerminalEventOf(const LostOfNode::One& lost) {
  v1::Event event;
  event.set_sandbox_id(lost.sandbox.id());
  event.set_seq(lost.sandbox.last_event_seq() + 1);
  event.set_at_unix_ms(lost.died_unix_ms);
  event.set_type("ended");
  event.set_state(v1::STATE_LOST);
  *event.mutable_termination() = TerminationOf(lost);
  return event;
}

LostOfNode::One Unmirrored(const SandboxId& id, int64_t died_unix_ms) {
  LostOfNode::One lost;
  lost.sandbox.set_id(id.str());
  lost.sandbox.set_created_unix_ms(MadeAt(id));
  lost.died_unix_ms = died_unix_ms;
  return lost;
}

LostBook::LostBook(store::Store& store, runtime::Executor executor)
    : store_(store), executor_(std::move(executor)) {}

LostBook::~LostBook() = default;

Task<void> LostBook::Stop() {
  co_await gate_.Close();
  co_return Ok();
}

Task<std::shared_ptr<const LostOfNode>> LostBook::Of(NodePtr node, Deadline deadline) {
  if (!node->died_before()) co_return std::make_shared<const LostOfNode>();
  auto book = co_await runtime::On(executor_, OfHere(std::move(node), deadline));
  co_return book;
}

Task<std::shared_ptr<const LostOfNode>> LostBook::OfHere(NodePtr node, Deadline deadline) {
  runtime::GatePass pass(gate_);
  if (!pass) co_return Error(Code::kUnavailable, "edge.stopping", "this daemon is being stopped");
  auto& slot = kept_[node->id()];
  if (slot == nullptr) slot = std::make_shared<Kept>();
  const std::shared_ptr<Kept> kept = slot;
  kept->used = ++uses_;
  const uint64_t epoch = node->record.epoch();
  while (kept->book == nullptr || kept->book->before_epoch < epoch) {
    if (kept->reading) {
      auto waited = co_await kept->read.Wait(deadline);
      if (!waited.ok()) co_return std::move(waited).error();
      continue;
    }
    kept->reading = true;
    kept->read.Reset();
    auto read = co_await Read(node, deadline);
    kept->reading = false;
    if (read.ok()) kept->book = *read;
    kept->read.Set();
    if (!read.ok()) co_return std::move(read).error();
  }
  while (kept_.size() > kNodesKept) {
    const auto oldest = std::min_element(kept_.begin(), kept_.end(), [](auto& a, auto& b) {
      return a.second->used < b.second->used;
    });
    kept_.erase(oldest);
  }
  co_return kept->book;
}

Task<std::shared_ptr<const LostOfNode>> LostBook::Read(NodePtr node, Deadline deadline) {
  auto book = std::make_shared<LostOfNode>();
  book->before_epoch = node->record.epoch();
  // Only the parts that the death itself names count: others are from watchers that died before it.
  std::string epoch_prefix;
  uint32_t parts = 0;
  int64_t died = 0;
  auto range = store::KeyRange::Prefix(watcher::layout::LostOf(node->id()));
  for (bool more = true; more;) {
    auto page = co_await store_.Range(range, 100, deadline);
    if (!page.ok()) co_return std::move(page).error();
    more = page->more;
    for (const store::Entry& entry : page->entries) {
      range.begin = entry.key + '\0';
      const size_t slash = entry.key.rfind('/');
      const std::string prefix = entry.key.substr(0, slash + 1);
      if (prefix != epoch_prefix) {
        epoch_prefix = prefix;
        parts = 0;
      }
      v1::LostPart part;
      if (!part.ParseFromString(entry.value)) {
        log::Error("router.lost_damaged", {{"key", entry.key}});
        continue;
      }
      const uint64_t number = std::strtoull(entry.key.c_str() + slash + 1, nullptr, 10);
      if (number == 0) {
        parts = part.parts();
        died = part.died_unix_ms();
        book->last_death_unix_ms = std::max(book->last_death_unix_ms, died);
      }
      if (number >= parts) continue;
      for (v1::LostSandbox& sandbox : *part.mutable_sandboxes()) {
        std::string id = sandbox.id();
        book->sandboxes.emplace(std::move(id), LostOfNode::One{std::move(sandbox), died});
      }
    }
  }
  co_return std::shared_ptr<const LostOfNode>(std::move(book));
}

}  // namespace dsec::router

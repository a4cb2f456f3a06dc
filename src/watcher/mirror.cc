// SPDX-License-Identifier: Apache-2.0
#include "watcher/mirror.h"

#include <algorithm>

#include "base/id.h"
#include "base/utf8.h"

namespace dsec::watcher {
namespace {

constexpr int kPartSandboxes = 1000;
constexpr size_t kPartBytes = 512 << 10;

// Only what has become of one that is known.
bool Step(const v1::LostSandbox& sandbox) { return sandbox.created_unix_ms() == 0; }

bool Short(const std::string& text) { return text.size() <= Mirror::kMaxText && IsUtf8(text); }

bool Bounded(const v1::LostSandbox& sandbox) {
  const auto labels = [](const auto& label) { return Short(label.first) && Short(label.second); };
  return Short(sandbox.project()) && Short(sandbox.name()) && Short(sandbox.request_id()) &&
         sandbox.request_digest().size() <= Mirror::kMaxText &&
         sandbox.labels().size() <= Mirror::kMaxLabels &&
         std::all_of(sandbox.labels().begin(), sandbox.labels().end(), labels);
}

}  // namespace

bool Mirror::Take(v1::LostSandbox sandbox) {
  const auto id = ParseSandboxId(sandbox.id());
  if (!id.ok() || !Bounded(sandbox)) return false;
  const auto owner = NodeOf(*id);
  if (!owner.ok() || owner->str() != node_) return false;
  const auto known = sandboxes_.find(sandbox.id());
  if (known != sandboxes_.end()) {
    // An older word of the same sandbox may come later.
    if (sandbox.last_event_seq() < known->second.last_event_seq()) return true;
    if (Step(sandbox)) {
      known->second.set_state(sandbox.state());
      known->second.set_last_event_seq(sandbox.last_event_seq());
    } else {
      known->second = std::move(sandbox);
    }
    return true;
  }
  if (Step(sandbox)) return true;
  if (sandboxes_.size() >= kMaxSandboxes) return false;
  std::string key = sandbox.id();
  sandboxes_.emplace(std::move(key), std::move(sandbox));
  return true;
}

bool Mirror::Apply(Seen seen, uint64_t asked) {
  // Several questions are under way at once: this one may be from before the events began anew.
  if (!seen.whole && (!known_ || asked > place_)) return false;
  if (!seen.whole && seen.next < place_) {
    place_ = 0;
    known_ = false;
    return false;
  }
  if (seen.whole) {
    sandboxes_.clear();
    known_ = true;
  }
  place_ = seen.next;
  bool all = true;
  for (v1::LostSandbox& sandbox : seen.changed) all &= Take(std::move(sandbox));
  for (const std::string& id : seen.ended) sandboxes_.erase(id);
  return all;
}

std::vector<v1::LostPart> Mirror::Parts() const {
  std::vector<const v1::LostSandbox*> all;
  all.reserve(sandboxes_.size());
  for (const auto& [id, sandbox] : sandboxes_) all.push_back(&sandbox);
  std::sort(all.begin(), all.end(), [](const auto* a, const auto* b) { return a->id() < b->id(); });
  std::vector<v1::LostPart> parts(1);
  size_t bytes = 0;
  for (const v1::LostSandbox* sandbox : all) {
    const size_t size = sandbox->ByteSizeLong() + 8;
    if (parts.back().sandboxes_size() == kPartSandboxes ||
        (bytes + size > kPartBytes && parts.back().sandboxes_size() > 0)) {
      parts.emplace_back();
      bytes = 0;
    }
    bytes += size;
    *parts.back().add_sandboxes() = *sandbox;
  }
  return parts;
}

}  // namespace dsec::watcher

// SPDX-License-Identifier: Apache-2.0
#include "placement/choose.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace dsec::placement {
namespace {

enum class Pool { kOwn, kCloud };

// One decision under way.
class Chooser {
 public:
  Chooser(const Overlay& overlay, const Request& request, const Options& options, Rng& rng)
      : overlay_(overlay),
        snapshot_(overlay.snapshot()),
        request_(request),
        options_(options),
        rng_(rng) {
    std::sort(excluded_.begin(), excluded_.end());
  }

  Decision Run();

 private:
  struct Candidate {
    size_t node = 0;
    uint32_t given = 0;
    double load = 0;  // if it takes one more
    uint64_t tie = 0;
  };
  static bool Fuller(const Candidate& a, const Candidate& b) {
    return a.load != b.load ? a.load > b.load : a.tie > b.tie;
  }

  // kCount: it may be taken.
  Refusal Check(size_t node, Pool pool, bool owned) const;
  bool Fits(size_t node, uint32_t given) const;
  double Load(size_t node, uint32_t given) const;
  bool HasLabels(size_t node) const;
  void Place(uint32_t count, Pool pool, bool owned);
  std::vector<Candidate> Sample(size_t wanted, Pool pool, bool owned);
  std::vector<Candidate> Scan(Pool pool, bool owned);
  Candidate Make(size_t node);
  void Spread(std::vector<Candidate> candidates, uint32_t count);
  uint32_t GivenTo(size_t node) const;
  void CountRefusals();
  uint32_t CloudCount();

  const Overlay& overlay_;
  const Snapshot& snapshot_;
  const Request& request_;
  const Options& options_;
  Rng& rng_;
  std::vector<size_t> excluded_ = request_.excluded;
  Decision decision_;
  std::map<size_t, uint32_t> given_;  // by this decision
  uint32_t left_ = request_.count;
};

bool Chooser::HasLabels(size_t node) const {
  const auto& labels = snapshot_.node(node).labels;
  return std::all_of(request_.labels.begin(), request_.labels.end(), [&](const auto& wanted) {
    const auto it = labels.find(wanted.first);
    return it != labels.end() && it->second == wanted.second;
  });
}

Refusal Chooser::Check(size_t node, Pool pool, bool owned) const {
  const Snapshot::Hot& hot = snapshot_.hot(node);
  if ((hot.backends & request_.backend) == 0) return Refusal::kState;
  if (hot.cloud != (pool == Pool::kCloud)) return Refusal::kPool;
  if (hot.owned != owned || (owned && snapshot_.node(node).owner != request_.project))
    return Refusal::kOwner;
  // A node becomes a project's own only while it is empty.
  if (request_.isolate && !owned && (hot.used.sandboxes > 0 || overlay_.on(node).sandboxes > 0))
    return Refusal::kOwner;
  if (!request_.labels.empty() && !HasLabels(node)) return Refusal::kLabels;
  if (!excluded_.empty() && std::binary_search(excluded_.begin(), excluded_.end(), node))
    return Refusal::kExcluded;
  return Fits(node, GivenTo(node)) ? Refusal::kCount : Refusal::kFull;
}

// By what this instance knows for sure.
bool Chooser::Fits(size_t node, uint32_t given) const {
  const Snapshot::Hot& view = snapshot_.hot(node);
  const Demand& pending = overlay_.on(node);
  const uint64_t more = uint64_t{given} + 1;
  const auto fits = [&](uint64_t capacity, uint64_t used, uint64_t own, uint64_t each) {
    return capacity == 0 || used + own + more * each <= capacity;
  };
  return uint64_t{view.used.sandboxes} + pending.sandboxes + more <= view.capacity.sandboxes &&
         fits(view.capacity.memory_bytes, view.used.memory_bytes, pending.memory_bytes,
              request_.each.memory_bytes) &&
         fits(view.capacity.disk_bytes, view.used.disk_bytes, pending.disk_bytes,
              request_.each.disk_bytes);
}

double Chooser::Load(size_t node, uint32_t given) const {
  const Snapshot::Hot& hot = snapshot_.hot(node);
  const Demand& pending = overlay_.on(node);
  const double instances = snapshot_.instances();
  const double more = static_cast<double>(given) + 1;
  double load = (hot.used.sandboxes + instances * (pending.sandboxes + more)) /
                std::max(hot.capacity.sandboxes, 1u);
  const auto add = [&](uint64_t capacity, uint64_t used, uint64_t own, uint64_t each) {
    if (capacity == 0 || each == 0) return;
    const double sum = static_cast<double>(used) +
                       instances * (static_cast<double>(own) + more * static_cast<double>(each));
    load = std::max(load, sum / static_cast<double>(capacity));
  };
  add(hot.capacity.memory_bytes, hot.used.memory_bytes, pending.memory_bytes,
      request_.each.memory_bytes);
  add(hot.capacity.disk_bytes, hot.used.disk_bytes, pending.disk_bytes, request_.each.disk_bytes);
  return load;
}

uint32_t Chooser::GivenTo(size_t node) const {
  if (given_.empty()) return 0;
  const auto it = given_.find(node);
  return it == given_.end() ? 0 : it->second;
}

Chooser::Candidate Chooser::Make(size_t node) {
  const uint32_t given = GivenTo(node);
  return {node, given, Load(node, given), rng_.Next()};
}

std::vector<Chooser::Candidate> Chooser::Scan(Pool pool, bool owned) {
  std::vector<Candidate> found;
  for (size_t node = 0; node < snapshot_.size(); ++node) {
    if (Check(node, pool, owned) == Refusal::kCount) found.push_back(Make(node));
  }
  return found;
}

// `wanted` different nodes that may be taken, at random; all of them when there are not many more.
// Few tries find them unless few may be taken, and then all are looked at.
std::vector<Chooser::Candidate> Chooser::Sample(size_t wanted, Pool pool, bool owned) {
  std::vector<Candidate> found;
  if (wanted * 2 < snapshot_.size()) {
    std::unordered_set<size_t> seen;
    const bool few = wanted <= 16;  // then a walk is quicker than a set
    for (size_t tries = 0; tries < wanted * 4 && found.size() < wanted; ++tries) {
      const size_t node = rng_.Below(snapshot_.size());
      const bool again = few ? std::any_of(found.begin(), found.end(),
                                           [&](const Candidate& c) { return c.node == node; })
                             : !seen.insert(node).second;
      if (!again && Check(node, pool, owned) == Refusal::kCount) found.push_back(Make(node));
    }
    if (found.size() == wanted) return found;
  }
  found = Scan(pool, owned);
  if (found.size() > wanted) {
    std::partial_sort(found.begin(), found.begin() + static_cast<ptrdiff_t>(wanted), found.end(),
                      [](const Candidate& a, const Candidate& b) { return a.tie < b.tie; });
    found.resize(wanted);
  }
  return found;
}

// One after the other to the least loaded.
void Chooser::Spread(std::vector<Candidate> heap, uint32_t count) {
  std::make_heap(heap.begin(), heap.end(), Fuller);
  while (count > 0 && !heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), Fuller);
    Candidate& least = heap.back();
    least.given = ++given_[least.node];
    --count;
    --left_;
    if (Fits(least.node, least.given)) {
      least.load = Load(least.node, least.given);
      std::push_heap(heap.begin(), heap.end(), Fuller);
    } else {
      heap.pop_back();
    }
  }
}

void Chooser::Place(uint32_t count, Pool pool, bool owned) {
  count = std::min(count, left_);
  if (count == 0) return;
  const size_t wanted =
      std::min<size_t>(size_t{count} * std::max(options_.sample, 1u), snapshot_.size());
  const uint32_t before = left_;
  Spread(Sample(wanted, pool, owned), count);
  const uint32_t placed = before - left_;
  // The sample was too full for all of them.
  if (placed < count && wanted < snapshot_.size()) Spread(Scan(pool, owned), count - placed);
}

// How many of the request go to the cloud pool.
uint32_t Chooser::CloudCount() {
  if (!request_.in_cloud_set || request_.backend != kContainer || !snapshot_.has_cloud() ||
      snapshot_.use() <= options_.cloud_threshold)
    return 0;
  uint32_t cloud = 0;
  const auto bound = static_cast<uint64_t>(options_.cloud_share * 1'000'000);
  for (uint32_t i = 0; i < request_.count; ++i) cloud += rng_.Below(1'000'000) < bound ? 1 : 0;
  return cloud;
}

void Chooser::CountRefusals() {
  const Pool pool = Pool::kOwn;
  for (size_t node = 0; node < snapshot_.size(); ++node) {
    const bool owned = request_.isolate && snapshot_.hot(node).owned;
    const Refusal why = Check(node, pool, owned);
    if (why != Refusal::kCount) ++decision_.refused[static_cast<size_t>(why)];
  }
}

Decision Chooser::Run() {
  if (request_.isolate) Place(left_, Pool::kOwn, true);
  Place(CloudCount(), Pool::kCloud, false);
  Place(left_, Pool::kOwn, false);
  // Rather there than nowhere.
  if (left_ > 0 && request_.in_cloud_set && request_.backend == kContainer)
    Place(left_, Pool::kCloud, false);
  for (const auto& [node, count] : given_) decision_.placed.push_back({node, count});
  decision_.missing = left_;
  if (left_ > 0) CountRefusals();
  return std::move(decision_);
}

}  // namespace

Decision Choose(const Overlay& overlay, const Request& request, const Options& options, Rng& rng) {
  return Chooser(overlay, request, options, rng).Run();
}

}  // namespace dsec::placement

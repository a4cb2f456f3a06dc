// SPDX-License-Identifier: Apache-2.0
#include "placement/overlay.h"

#include <utility>

namespace dsec::placement {

Overlay::Overlay(Options options, std::shared_ptr<const Snapshot> snapshot)
    : options_(options), snapshot_(std::move(snapshot)), on_(snapshot_->size(), Demand{0, 0, 0}) {}

Overlay::Ticket Overlay::Add(size_t node, const Demand& demand, MonoTime now) {
  placements_.push_back({node, demand, now});
  on_[node] += demand;
  ++pending_;
  return first_ + placements_.size() - 1;
}

void Overlay::Fail(Ticket ticket) {
  if (ticket < first_ || ticket - first_ >= placements_.size()) return;
  Placement& placement = placements_[ticket - first_];
  if (!placement.counts) return;
  placement.counts = false;
  --pending_;
  if (placement.node != kNone) on_[placement.node] -= placement.demand;
}

void Overlay::Renumber(const Snapshot& next) {
  std::vector<size_t> index(snapshot_->size());
  for (size_t i = 0; i < index.size(); ++i)
    index[i] = next.Find(snapshot_->node(i).id).value_or(kNone);
  for (Placement& placement : placements_) {
    if (placement.node != kNone) placement.node = index[placement.node];
  }
}

void Overlay::Use(std::shared_ptr<const Snapshot> snapshot, MonoTime now) {
  while (!placements_.empty()) {
    const Placement& oldest = placements_.front();
    const bool shown = oldest.at + options_.settle <= snapshot->taken();
    if (oldest.counts && !shown && oldest.at + options_.forget > now) break;
    pending_ -= oldest.counts ? 1 : 0;
    placements_.pop_front();
    ++first_;
  }
  if (!snapshot->SameNodes(*snapshot_)) Renumber(*snapshot);
  snapshot_ = std::move(snapshot);
  on_.assign(snapshot_->size(), Demand{0, 0, 0});
  for (const Placement& placement : placements_) {
    if (placement.counts && placement.node != kNone) on_[placement.node] += placement.demand;
  }
}

}  // namespace dsec::placement

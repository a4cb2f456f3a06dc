// SPDX-License-Identifier: Apache-2.0
#include "disk/extent.h"

#include <algorithm>
#include <limits>

namespace dsec::disk {

Extent Clip(const Extent& extent, uint64_t first, uint64_t end) {
  Extent part = extent;
  part.first = std::max(extent.first, first);
  part.count = static_cast<uint32_t>(std::min(extent.end(), end) - part.first);
  if (!part.zero) part.place += part.first - extent.first;
  return part;
}

void Append(std::vector<Extent>& extents, const Extent& extent) {
  if (!extents.empty()) {
    Extent& last = extents.back();
    const bool follows =
        last.end() == extent.first && last.zero == extent.zero &&
        (last.zero || (last.layer == extent.layer && last.place + last.count == extent.place));
    if (follows && uint64_t{last.count} + extent.count <= std::numeric_limits<uint32_t>::max()) {
      last.count += extent.count;
      return;
    }
  }
  extents.push_back(extent);
}

void Walk(std::span<const Extent> sorted, uint64_t first, uint64_t end,
          const std::function<void(const Extent&)>& found,
          const std::function<void(uint64_t first, uint64_t end)>& gap) {
  auto at = std::ranges::upper_bound(sorted, first, {}, &Extent::first);
  if (at != sorted.begin() && std::prev(at)->end() > first) --at;
  for (; first < end && at != sorted.end() && at->first < end; ++at) {
    if (at->first > first) gap(first, at->first);
    const Extent part = Clip(*at, first, end);
    found(part);
    first = part.end();
  }
  if (first < end) gap(first, end);
}

std::vector<Extent> Overlay(std::span<const Extent> upper, std::span<const Extent> lower) {
  std::vector<Extent> all;
  all.reserve(upper.size() + lower.size());
  size_t below = 0;
  uint64_t done = 0;  // what is in front of it is decided
  const auto take_below = [&](uint64_t end) {
    while (below < lower.size() && lower[below].first < end) {
      const Extent& extent = lower[below];
      if (extent.end() > done && std::max(extent.first, done) < end)
        Append(all, Clip(extent, done, end));
      if (extent.end() > end) break;  // its rest comes later
      ++below;
    }
    done = end;
  };
  for (const Extent& extent : upper) {
    take_below(extent.first);
    Append(all, extent);
    done = extent.end();
  }
  take_below(std::numeric_limits<uint64_t>::max());
  return all;
}

std::vector<Extent> WithoutZeros(std::vector<Extent> extents) {
  std::erase_if(extents, [](const Extent& extent) { return extent.zero; });
  return extents;
}

void ExtentMap::Insert(const Extent& extent) {
  if (extent.count == 0) return;
  map_.emplace(extent.first, extent);
  if (!extent.zero) live_ += extent.count;
}

void ExtentMap::Erase(std::map<uint64_t, Extent>::iterator at) {
  if (!at->second.zero) live_ -= at->second.count;
  map_.erase(at);
}

void ExtentMap::Put(const Extent& extent, const std::function<void(const Extent&)>& dead) {
  if (extent.count == 0) return;
  auto at = map_.upper_bound(extent.first);
  if (at != map_.begin() && std::prev(at)->second.end() > extent.first) --at;
  while (at != map_.end() && at->second.first < extent.end()) {
    const Extent old = at->second;
    const auto next = std::next(at);
    Erase(at);
    at = next;
    if (old.first < extent.first) Insert(Clip(old, old.first, extent.first));
    if (old.end() > extent.end()) Insert(Clip(old, extent.end(), old.end()));
    if (!old.zero) dead(Clip(old, extent.first, extent.end()));
  }
  Insert(extent);
}

std::vector<Extent> ExtentMap::Find(uint64_t first, uint64_t end) const {
  std::vector<Extent> all;
  auto at = map_.upper_bound(first);
  if (at != map_.begin() && std::prev(at)->second.end() > first) --at;
  for (; at != map_.end() && at->second.first < end; ++at)
    Append(all, Clip(at->second, first, end));
  return all;
}

std::vector<Extent> ExtentMap::All() const {
  std::vector<Extent> all;
  all.reserve(map_.size());
  for (const auto& [first, extent] : map_) Append(all, extent);
  return all;
}

}  // namespace dsec::disk

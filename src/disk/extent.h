// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

// Where the sectors of a disk are. Pure values, no I/O.
namespace dsec::disk {

inline constexpr uint32_t kSectorBytes = 512;

// `count` sectors of the disk from `first` on are zero, or the sectors from `place` on in the file
// of a layer.
struct Extent {
  uint64_t first = 0;
  uint64_t place = 0;
  uint32_t count = 0;
  uint16_t layer = 0;  // run-time: index in a chain, oldest 0
  bool zero = false;

  uint64_t end() const { return first + count; }
  bool operator==(const Extent&) const = default;
};

// Layers in one chain; their numbers fit Extent::layer.
inline constexpr size_t kMaxLayers = 1024;

// The part of `extent` within [first, end), which it meets.
Extent Clip(const Extent& extent, uint64_t first, uint64_t end);
// Adds at the end, or makes the last one longer when it goes on there.
void Append(std::vector<Extent>& extents, const Extent& extent);

// `upper` over `lower`, both sorted and without overlaps; so is the result.
std::vector<Extent> Overlay(std::span<const Extent> upper, std::span<const Extent> lower);
// Without extents that say zero: of a chain that has nothing below.
std::vector<Extent> WithoutZeros(std::vector<Extent> extents);
// Calls for each part of [first, end) in order: `found` where a sorted array has something, `gap`
// where it has not.
void Walk(std::span<const Extent> sorted, uint64_t first, uint64_t end,
          const std::function<void(const Extent&)>& found,
          const std::function<void(uint64_t first, uint64_t end)>& gap);

// A sorted map that is written to. Not thread-safe.
class ExtentMap {
 public:
  // Replaces what was there; `dead` gets each part with a place that nothing names any more.
  void Put(const Extent& extent, const std::function<void(const Extent&)>& dead);
  // What there is in [first, end), clipped, in order.
  std::vector<Extent> Find(uint64_t first, uint64_t end) const;
  std::vector<Extent> All() const;
  size_t size() const { return map_.size(); }
  uint64_t live_sectors() const { return live_; }  // that have a place

 private:
  void Insert(const Extent& extent);
  void Erase(std::map<uint64_t, Extent>::iterator at);
  std::map<uint64_t, Extent> map_;  // by first
  uint64_t live_ = 0;
};

}  // namespace dsec::disk

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

// The keys of watchers in the store (docs/design/cluster.md, section 2).
namespace dsec::watcher::layout {

inline constexpr std::string_view kWatch = "watch/";
inline constexpr std::string_view kLeader = "watch/leader";
inline constexpr std::string_view kSeen = "watch/seen/";
inline constexpr std::string_view kLost = "lost/";

inline std::string Seen(std::string_view watcher) { return fmt::format("{}{}", kSeen, watcher); }
// All epochs of a node.
inline std::string LostOf(std::string_view node) { return fmt::format("{}{}/", kLost, node); }
// Fixed width, so that parts and epochs are in order of their numbers.
inline std::string LostEpoch(std::string_view node, uint64_t epoch) {
  return fmt::format("{}{}/{:020}/", kLost, node, epoch);
}
inline std::string LostPart(std::string_view node, uint64_t epoch, uint32_t part) {
  return fmt::format("{}{:06}", LostEpoch(node, epoch), part);
}

}  // namespace dsec::watcher::layout

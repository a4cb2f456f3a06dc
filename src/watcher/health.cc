// SPDX-License-Identifier: Apache-2.0
#include "watcher/health.h"

#include <algorithm>

namespace dsec::watcher {

using std::chrono::milliseconds;

void Health::SetNodes(std::span<const std::string> nodes, MonoTime now) {
  std::map<std::string, MonoTime> next;
  for (const std::string& node : nodes) {
    const auto known = heard_.find(node);
    next.emplace(node, known == heard_.end() ? now : known->second);
  }
  heard_ = std::move(next);
}

bool Health::Tick(MonoTime now) {
  const bool slept = ticked_ && now - last_tick_ > options_.longest_tick;
  if (slept) {
    for (auto& [node, heard] : heard_) heard = now;
  }
  ticked_ = true;
  last_tick_ = now;
  return !slept;
}

void Health::Heard(const std::string& node, MonoTime now) {
  const auto it = heard_.find(node);
  if (it != heard_.end()) it->second = std::max(it->second, now);
}

milliseconds Health::SilenceOf(MonoTime since, MonoTime now) const {
  return std::chrono::duration_cast<milliseconds>(std::max(now, since) - since);
}

Health::State Health::StateOf(const std::string& node, MonoTime now) const {
  const auto it = heard_.find(node);
  const bool silent = it != heard_.end() && SilenceOf(it->second, now) >= options_.suspect_after;
  return silent ? State::kSuspect : State::kAlive;
}

std::map<std::string, milliseconds> Health::Silent(MonoTime now) const {
  std::map<std::string, milliseconds> silent;
  for (const auto& [node, heard] : heard_) {
    const milliseconds silence = SilenceOf(heard, now);
    if (silence >= options_.agree_after) silent.emplace(node, silence);
  }
  return silent;
}

std::vector<std::string> Health::Dead(std::span<const Testimony> others, size_t registered,
                                      MonoTime now) const {
  const auto hears = [&](const auto& entry) {
    return SilenceOf(entry.second, now) < options_.heard_within;
  };
  const auto heard = static_cast<size_t>(std::count_if(heard_.begin(), heard_.end(), hears));
  if (heard * 2 <= heard_.size()) return {};
  const size_t watchers = std::max(registered, others.size() + 1);
  std::vector<std::string> dead;
  for (const auto& [node, since] : heard_) {
    if (SilenceOf(since, now) < options_.dead_after) continue;
    const auto agrees = [&](const Testimony& other) {
      const auto it = other.silent.find(node);
      return it != other.silent.end() && it->second >= options_.agree_after;
    };
    const auto votes = 1 + static_cast<size_t>(std::count_if(others.begin(), others.end(), agrees));
    if (votes * 2 > watchers) dead.push_back(node);
  }
  return dead;
}

}  // namespace dsec::watcher

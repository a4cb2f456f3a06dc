// SPDX-License-Identifier: Apache-2.0
#include "warmup/forecast.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace dsec::warmup {
namespace {

using std::chrono::nanoseconds;

// Of at least one value.
template <typename T>
T Median(std::vector<T> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void Forecast::Note(const std::string& name, std::span<const std::string> layers, MonoTime now) {
  const auto found = projects_.find(name);
  if (found == projects_.end() && projects_.size() >= options_.max_projects) MakeRoom();
  Project& project = projects_[name];
  Settle(project, now);
  if (!project.now) project.now = Burst{now, 0, {}};
  Burst& burst = *project.now;
  ++burst.count;
  project.last = now;
  for (const std::string& layer : layers) {
    const auto known = burst.layers.find(layer);
    if (known != burst.layers.end()) {
      ++known->second;
    } else if (burst.layers.size() < options_.max_layers) {
      burst.layers.emplace(layer, 1);
    }
  }
  if (!project.hint) return;
  if (!std::exchange(project.hint_came, true)) ++figures_.came;
  ++figures_.creations;
  const auto& named = project.hint->layers;
  const bool covered = std::ranges::all_of(
      layers, [&](const auto& layer) { return std::ranges::find(named, layer) != named.end(); });
  if (covered) ++figures_.covered;
}

// Ends what has ended by `now`: a burst, and the time of a hint.
void Forecast::Settle(Project& project, MonoTime now) {
  if (project.now && now - project.last > options_.pause) Finish(project);
  if (project.hint && !project.hint_came && now > project.hint->until) {
    ++figures_.missed;
    project.hint.reset();
  }
}

void Forecast::Finish(Project& project) {
  Burst burst = *std::exchange(project.now, std::nullopt);
  if (std::exchange(project.hint_came, false)) project.hint.reset();
  // Single creations between bursts are not part of the rhythm.
  if (burst.count < options_.min_count) return;
  project.bursts.push_back(std::move(burst));
  if (project.bursts.size() > kBursts) project.bursts.pop_front();
  project.told = false;
}

std::optional<Forecast::Rhythm> Forecast::RhythmOf(const Project& project) const {
  if (project.bursts.size() < 3) return std::nullopt;
  std::vector<nanoseconds> times;
  for (size_t i = 1; i < project.bursts.size(); ++i)
    times.push_back(project.bursts[i].start - project.bursts[i - 1].start);
  const nanoseconds period = Median(times);
  for (nanoseconds& time : times) time = time > period ? time - period : period - time;
  const nanoseconds spread = Median(times);
  if (static_cast<double>(spread.count()) > options_.regular * static_cast<double>(period.count()))
    return std::nullopt;
  return Rhythm{period, spread};
}

Hint Forecast::Foresee(const std::string& name, const Project& project,
                       const Rhythm& rhythm) const {
  Hint hint;
  hint.project = name;
  hint.expected =
      project.bursts.back().start + std::chrono::duration_cast<MonoTime::duration>(rhythm.period);
  hint.until = hint.expected + options_.lead +
               std::chrono::duration_cast<MonoTime::duration>(2 * rhythm.spread);
  std::vector<uint32_t> counts;
  std::map<std::string_view, std::pair<size_t, uint64_t>> used;  // by layer: bursts, creations
  for (const Burst& burst : project.bursts) {
    counts.push_back(burst.count);
    for (const auto& [layer, count] : burst.layers) {
      ++used[layer].first;
      used[layer].second += count;
    }
  }
  hint.sandboxes = Median(std::move(counts));
  std::vector<std::pair<uint64_t, std::string_view>> order;
  for (const auto& [layer, use] : used) {
    if (use.first * 2 >= project.bursts.size()) order.emplace_back(use.second, layer);
  }
  std::ranges::sort(order, [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  if (order.size() > options_.max_layers) order.resize(options_.max_layers);
  for (const auto& [creations, layer] : order) hint.layers.emplace_back(layer);
  return hint;
}

std::vector<Hint> Forecast::Due(MonoTime now) {
  std::vector<Hint> due;
  for (auto& [name, project] : projects_) {
    Settle(project, now);
    // Not while one goes on: it may be the one that is expected.
    if (project.told || project.now) continue;
    const std::optional<Rhythm> rhythm = RhythmOf(project);
    if (!rhythm) continue;
    Hint hint = Foresee(name, project, *rhythm);
    if (now < hint.expected - options_.lead -
                  std::chrono::duration_cast<MonoTime::duration>(rhythm->spread))
      continue;
    project.told = true;
    if (now > hint.until) continue;  // asked too late: the job may have ended
    ++figures_.hints;
    project.hint = hint;
    due.push_back(std::move(hint));
  }
  return due;
}

void Forecast::MakeRoom() {
  const auto quietest = std::ranges::min_element(
      projects_, std::less<>(), [](const auto& entry) { return entry.second.last; });
  if (quietest != projects_.end()) projects_.erase(quietest);
}

}  // namespace dsec::warmup

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"

namespace dsec::warmup {

struct ForecastOptions {
  // A burst ends with the first pause longer than this.
  std::chrono::milliseconds pause{20'000};
  // Fewer creations are no burst.
  uint32_t min_count = 4;
  // Bursts are regular when the times between their starts differ from the median by no more than
  // this part of it, by their own median.
  double regular = 0.25;
  // What has to be ready is told so long before it is expected.
  std::chrono::milliseconds lead{10'000};
  // Layers that a hint may name, and that are counted of one burst.
  size_t max_layers = 128;
  // Of more projects those are forgotten that have been quiet longest.
  size_t max_projects = 256;
};

// What to prepare for the next burst of a project.
struct Hint {
  std::string project;
  MonoTime expected;
  MonoTime until;                   // nobody has come by then: it may be let go
  uint32_t sandboxes = 0;           // that the burst will ask for
  std::vector<std::string> layers;  // the most used first
};

// Foresees the bursts of creations of each project from its earlier ones: a training job asks for
// as many sandboxes at each of its steps, over the same bases and toolkits, at nearly equal times.
// Pure: time comes with each call. Not thread-safe.
//
// There is a forecast once three bursts have come at regular times. It holds the median time and
// size, and the layers that at least half of the bursts remembered have used.
class Forecast {
 public:
  struct Figures {
    uint64_t hints = 0;
    uint64_t came = 0;       // hints whose burst came in time
    uint64_t missed = 0;     // hints that nobody came for
    uint64_t creations = 0;  // in bursts that were hinted
    uint64_t covered = 0;    // of these, with no layer that the hint had not named
  };

  explicit Forecast(ForecastOptions options) : options_(options) {}

  // A creation was asked for, over these layers.
  void Note(const std::string& project, std::span<const std::string> layers, MonoTime now);
  // What is to be prepared from now on; each forecast is told once.
  std::vector<Hint> Due(MonoTime now);
  const Figures& figures() const { return figures_; }
  size_t projects() const { return projects_.size(); }

 private:
  static constexpr size_t kBursts = 5;  // remembered of a project
  struct Burst {
    MonoTime start;
    uint32_t count = 0;
    std::map<std::string, uint32_t, std::less<>> layers;  // creations with it
  };
  struct Project {
    std::deque<Burst> bursts;  // complete ones, oldest first
    std::optional<Burst> now;  // one that goes on, of whatever size
    MonoTime last;             // creation
    bool told = false;         // the forecast of the next burst
    std::optional<Hint> hint;  // told, and not yet over
    bool hint_came = false;
  };
  struct Rhythm {
    std::chrono::nanoseconds period;
    std::chrono::nanoseconds spread;
  };

  void Settle(Project& project, MonoTime now);
  void Finish(Project& project);
  std::optional<Rhythm> RhythmOf(const Project& project) const;
  Hint Foresee(const std::string& name, const Project& project, const Rhythm& rhythm) const;
  void MakeRoom();

  const ForecastOptions options_;
  std::map<std::string, Project> projects_;
  Figures figures_;
};

}  // namespace dsec::warmup

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"

namespace dsec::watcher {

struct HealthOptions {
  std::chrono::milliseconds suspect_after{3'000};
  std::chrono::milliseconds dead_after{8'000};
  // What another watcher must have seen of a silence to agree with it.
  std::chrono::milliseconds agree_after{5'000};
  // A node that answered so recently is heard.
  std::chrono::milliseconds heard_within{3'000};
  // Ticks further apart than this mean that the watcher itself was not awake.
  std::chrono::milliseconds longest_tick{1'000};
};

// What one watcher has told the others, at most `heard_within` ago.
struct Testimony {
  std::string watcher;
  std::map<std::string, std::chrono::milliseconds> silent;  // by node; who is missing was heard
};

// What one watcher knows of the life of nodes from its own probes, and when it may say that one is
// dead. Pure: time comes with each call. Not thread-safe.
//
// A node is silent since its last answer, or since it was first listed. The silence of a time in
// which the watcher itself slept does not count: it begins anew for every node. So neither a paused
// node that goes on before `dead_after` nor a paused watcher makes a death.
class Health {
 public:
  enum class State { kAlive, kSuspect };

  explicit Health(HealthOptions options) : options_(options) {}

  // The nodes that are joined and not dead. Those that were known stay as they are.
  void SetNodes(std::span<const std::string> nodes, MonoTime now);
  // To be called at least every `longest_tick`. False: the watcher had been asleep.
  bool Tick(MonoTime now);
  // A node has answered a probe that was sent after the last sleep. Unknown nodes are ignored.
  void Heard(const std::string& node, MonoTime now);

  State StateOf(const std::string& node, MonoTime now) const;
  // For the other watchers: who has been silent for `agree_after` or longer.
  std::map<std::string, std::chrono::milliseconds> Silent(MonoTime now) const;

  // Who may be declared dead: silent for `dead_after` by this watcher, while it hears more than
  // half of all nodes, and more than half of the watchers (this one and those that have testified)
  // find it silent, too. `registered`: watchers that there are, this one included; those without a
  // testimony count as who have heard the node.
  std::vector<std::string> Dead(std::span<const Testimony> others, size_t registered,
                                MonoTime now) const;

 private:
  std::chrono::milliseconds SilenceOf(MonoTime since, MonoTime now) const;

  const HealthOptions options_;
  std::map<std::string, MonoTime> heard_;  // by node
  MonoTime last_tick_{};
  bool ticked_ = false;
};

}  // namespace dsec::watcher

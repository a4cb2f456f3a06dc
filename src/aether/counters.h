// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "aether/loop.h"
#include "os/unique_fd.h"

namespace dsec::aether {

// What the kernel counts for the whole sandbox. An exec compares the values at its end with those
// at its start.
struct Counts {
  uint64_t oom_kills = 0;
  uint64_t forks_denied = 0;
  uint64_t throttled_usec = 0;
};

// Reads these counters where this host has them: v1 directories of the code, or the code's v2
// directory.
class Counters {
 public:
  // Directories may be -1: then the v2 one is used. They are borrowed.
  Counters(int code_v2, int memory_v1, int pids_v1, int cpu_v1);
  Counts Read() const;

  // `on_pressure` is called when the sandbox has hit its memory limit and the kernel is about to
  // choose a victim, `on_kill` when the counter has gone up. False where only v2 is there: its
  // cgroups tell for each exec.
  bool WatchOom(Loop& loop, std::function<void()> on_pressure, std::function<void()> on_kill);

 private:
  void OnOom();
  void Recheck();

  os::UniqueFd oom_;
  bool oom_v1_ = false;
  os::UniqueFd pids_;
  os::UniqueFd cpu_;
  bool cpu_v1_ = false;
  int memory_v1_;

  Loop* loop_ = nullptr;
  os::UniqueFd event_;
  FdWatch watch_;
  Timer recheck_;
  int rechecks_ = 0;
  uint64_t last_kills_ = 0;
  std::function<void()> on_pressure_;
  std::function<void()> on_kill_;
};

}  // namespace dsec::aether

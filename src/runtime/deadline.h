// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "base/clock.h"

namespace dsec::runtime {

// A point in monotonic time by which something must have happened; a value, passed down through
// every call that waits.
class Deadline {
 public:
  static Deadline Never() { return Deadline(MonoTime::max()); }
  static Deadline At(MonoTime at) { return Deadline(at); }
  // Durations too long for the clock mean never; negative ones have passed.
  static Deadline After(std::chrono::nanoseconds duration) {
    const MonoTime now = std::chrono::steady_clock::now();
    return Deadline(duration < MonoTime::max() - now ? now + duration : MonoTime::max());
  }

  MonoTime at() const { return at_; }
  bool never() const { return at_ == MonoTime::max(); }
  bool Expired() const { return !never() && std::chrono::steady_clock::now() >= at_; }
  // Zero once expired; nanoseconds::max() for never.
  std::chrono::nanoseconds Remaining() const {
    if (never()) return std::chrono::nanoseconds::max();
    const MonoTime now = std::chrono::steady_clock::now();
    return now < at_ ? at_ - now : std::chrono::nanoseconds::zero();
  }
  Deadline Sooner(Deadline other) const { return other.at_ < at_ ? other : *this; }

 private:
  explicit Deadline(MonoTime at) : at_(at) {}
  MonoTime at_;
};

}  // namespace dsec::runtime

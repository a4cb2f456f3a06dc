// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

namespace dsec {

using MonoTime = std::chrono::steady_clock::time_point;
using WallTime = std::chrono::system_clock::time_point;

// Source of time; injected so that tests move it by hand. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual MonoTime Mono() const = 0;
  virtual WallTime Wall() const = 0;

  static Clock& System();
};

// A clock that stands still until a test moves it.
class FakeClock : public Clock {
 public:
  MonoTime Mono() const override { return mono_; }
  WallTime Wall() const override { return wall_; }
  void Advance(std::chrono::nanoseconds by) {
    mono_ += std::chrono::duration_cast<MonoTime::duration>(by);
    wall_ += std::chrono::duration_cast<WallTime::duration>(by);
  }

 private:
  MonoTime mono_ = MonoTime(std::chrono::hours(1));
  WallTime wall_ = WallTime(std::chrono::hours(24 * 365 * 50));
};

// Milliseconds since the Unix epoch, as the API and records carry time.
int64_t UnixMillis(WallTime time);

}  // namespace dsec

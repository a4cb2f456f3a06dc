// SPDX-License-Identifier: Apache-2.0
#include "base/clock.h"

namespace dsec {
namespace {

class SystemClock : public Clock {
 public:
  MonoTime Mono() const override { return std::chrono::steady_clock::now(); }
  WallTime Wall() const override { return std::chrono::system_clock::now(); }
};

}  // namespace

Clock& Clock::System() {
  static SystemClock clock;
  return clock;
}

int64_t UnixMillis(WallTime time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count();
}

}  // namespace dsec

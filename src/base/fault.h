// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string_view>

#include "base/result.h"

// Named places in the code where a test can make something go wrong. While none is armed a point
// costs one relaxed atomic load.
//
// A specification is a list separated by ';' of  name=action[*count][%probability]
//   error:ENAME   the function returns Error::FromErrno(ENAME, "fault.injected", ...)
//   kill          SIGKILL to this process
//   delay:50ms    stalls the calling thread (ns, us, ms, s)
//   block         stalls the calling thread until the point is disarmed or armed anew
// count: acts that many times, then no more; probability: of each pass, 0..1. The actions delay and
// block stall a whole shard when the point lies in a coroutine.
namespace dsec::fault {

// Adds the points of `spec` to those armed, replacing equal names; all of it or, when
// kInvalidArgument "fault.invalid", nothing.
Result<void> Arm(std::string_view spec);
// Arms what the environment variable DSEC_FAULTS says, if it is set.
Result<void> ArmFromEnv();
void Disarm(std::string_view name);
void DisarmAll();

// How often the action of `name` has fired since the process began; kept after disarming.
uint64_t Fired(std::string_view name);
// Waits until the action of `name` has fired `count` times in all; false after `timeout`. A blocked
// thread counts as fired.
bool WaitFired(std::string_view name, uint64_t count, std::chrono::milliseconds timeout);

namespace internal {
extern std::atomic<bool> any_armed;
Result<void> Pass(std::string_view name);
}  // namespace internal

inline Result<void> Point(std::string_view name) {
  if (!internal::any_armed.load(std::memory_order_relaxed)) return {};
  return internal::Pass(name);
}

}  // namespace dsec::fault

// In a function that returns Result<...>; the second form in a coroutine.
#define DSEC_FAULT_POINT(name) DSEC_TRY_VOID(::dsec::fault::Point(name))
#define DSEC_CO_FAULT_POINT(name) DSEC_CO_TRY_VOID(::dsec::fault::Point(name))

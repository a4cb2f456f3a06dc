// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "runtime/deadline.h"
#include "runtime/task.h"
#include "sandbox/isolators/slot_name.h"
#include "spawn/spawner.h"

namespace dsec::sandbox {

// A slot with its processes, waiting for a launch.
struct ReadySlot {
  SlotName name;
  spawn::SlotProcess process;
};

struct SlotPoolOptions {
  uint32_t indices = 0;  // 0 ... indices-1
  uint32_t ready = 0;    // made ahead of use
  uint32_t threads = 2;  // that make slots
  const Clock* clock = &Clock::System();
};

// Hands out slots, and sees to it that no index ever has two owners. A few are made ahead; a Take
// that finds none has one made for it. Makers work for those who wait before they fill up the pool,
// and fill it up in one go once it is half empty: on cgroup v1 the first of some slots holds up
// every fork and exit of the host for a grace period of RCU (percpu_down_write of
// cgroup_threadgroup_rwsem), so the commands of a sandbox that was just made would suffer from the
// slot that replaces its own. Thread-safe.
//
// An index is free, or owned by one name made here, or foreign: found on the host at the start,
// with an owner of an earlier process or none. It becomes free by Release alone, which its caller
// calls when nothing of that name is left on the host.
class SlotPool final : public SlotIndices {
 public:
  struct Hooks {
    // Both block and run on the pool's threads. `make` leaves what it has made to `remove` when it
    // fails.
    std::function<Result<ReadySlot>(const SlotName&)> make;
    // Nothing of the slot is left afterwards.
    std::function<Result<void>(const SlotName&)> remove;
  };

  // `found`: the names on the host.
  SlotPool(const SlotPoolOptions& options, Hooks hooks, const std::vector<SlotName>& found);
  // Removes the slots that nobody has taken. No Take may be under way.
  ~SlotPool() override;
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // kResourceExhausted "capacity.slots" when every index is taken; errors of `make`;
  // kDeadlineExceeded.
  runtime::Task<ReadySlot> Take(runtime::Deadline deadline);
  // A ready one or nothing; never waits.
  std::optional<ReadySlot> TryTake();
  // Makes a foreign name an owned one; false when it is not there.
  bool Adopt(const SlotName& name) override;
  Result<SlotName> Reserve(SlotKind kind) override;
  void Release(const SlotName& name) override;

  // Names that this process has made or adopted and not released.
  std::set<SlotName> Owned() const;
  std::set<SlotName> Foreign() const override;
  size_t ready() const;

 private:
  struct Waiter;
  struct State;
  static void RunMaker(const std::shared_ptr<State>& state);
  const std::shared_ptr<State> state_;
};

}  // namespace dsec::sandbox

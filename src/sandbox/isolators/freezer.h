// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/clock.h"
#include "base/result.h"
#include "os/unique_fd.h"
#include "sandbox/isolators/slot_name.h"

namespace dsec::sandbox {

// The code of a slot, standing still (cgroup.freeze of v2, which cgroup.kill overrides). The agent
// runs on. Blocking.
class FrozenCode {
 public:
  // `top`: node_dir in v2. Returns when every process stands. kUnavailable "pack.not_frozen" when
  // some did not by the deadline (they wait in the kernel); kNotFound when the slot is gone. After
  // an error the code runs.
  static Result<FrozenCode> Freeze(int top, const SlotName& slot, MonoTime deadline);
  // Lets the code of a slot run again, whoever froze it. Missing: ok.
  static Result<void> Thaw(int top, const SlotName& slot);

  FrozenCode(FrozenCode&&) = default;
  FrozenCode& operator=(FrozenCode&&) = delete;
  ~FrozenCode();  // as Thaw, which is logged when it fails
  // Once.
  Result<void> Thaw();

 private:
  explicit FrozenCode(os::UniqueFd code) : code_(std::move(code)) {}
  os::UniqueFd code_;
};

}  // namespace dsec::sandbox

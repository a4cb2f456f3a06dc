// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"

namespace dsec::sandbox {

// Host ids of slots: slot n owns id_base + n*65536 ... +65535 (root of the sandbox is the first)
// and agent_uid_base + n. The defaults lie in the one range that no convention claims: above what
// systemd gives to containers (up to 0x6FFFFFFF, systemd.io/UIDS-GIDS) and below 2^31, where
// programs begin to misread ids.
struct IdPlan {
  uint32_t id_base = 0x70000000;
  uint32_t agent_uid_base = 0x7fff0000;
  uint32_t slots = 4095;

  static constexpr uint32_t kIdsPerSlot = 65536;
  uint32_t IdBase(uint32_t slot) const { return id_base + slot * kIdsPerSlot; }
  uint32_t AgentUid(uint32_t slot) const { return agent_uid_base + slot; }

  // kInvalidArgument "ids.range": the plan overlaps itself or leaves the ids there are.
  // kFailedPrecondition "ids.overlap": an account, group or subordinate range of the host lies in
  // it; the message names file and line. `root` is put before /etc.
  Result<void> Check(const std::string& root = "") const;
};

}  // namespace dsec::sandbox

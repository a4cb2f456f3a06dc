// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sandbox/isolators/cgroup_tree.h"
#include "sandbox/isolators/ids.h"
#include "sandbox/isolators/slot_name.h"
#include "sandbox/isolators/views.h"
#include "spawn/spawner.h"

namespace dsec::sandbox {

// What the backends of one node have in common. All of it is thread-safe.
struct NodeParts {
  const IdPlan& ids;
  CgroupTree& tree;
  Views& views;
  spawn::Spawner& spawner;
  SlotIndices& indices;
};

}  // namespace dsec::sandbox

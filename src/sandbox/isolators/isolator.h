// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "dsec/v1/edge.pb.h"
#include "dsec/v1/model.pb.h"
#include "model/spec.h"
#include "os/unique_fd.h"
#include "sandbox/isolators/cgroup_tree.h"
#include "sandbox/isolators/scratch.h"
#include "sandbox/isolators/slot_name.h"
#include "spawn/plan.h"

namespace dsec::sandbox {

// One use of a slot as isolators see it. Everything below its slot name and its scratch name
// belongs to it alone.
struct Subject {
  SlotName slot;
  std::string scratch;  // empty while the slot has no sandbox
  v1::Limits limits;
};

// What a slot is made of, gathered from the isolators. The plan borrows the descriptors.
struct SlotParts {
  spawn::SlotPlan plan;
  SlotCgroups cgroups;
};

// What a sandbox is launched with.
struct LaunchParts {
  int user_ns = -1;    // borrowed: B of the slot
  uint32_t owner = 0;  // host id of the sandbox's root
  spawn::LaunchPlan plan;
  std::vector<os::UniqueFd> views;  // one for each of plan.views
  ScratchLayer scratch;
};

// A limit that has stopped something since an earlier look.
struct LimitHit {
  std::string_view limit;  // "memory", "pids", "disk"
  uint64_t times = 0;
};

// Says what is in use: everything else that bears a name of this node's is nobody's. Asked after
// the host has been looked at, so that what was made meanwhile is not taken for an orphan.
struct Owned {
  std::function<bool(const SlotName&)> slot;
  std::function<bool(const std::string&)> scratch;
};

// One concern of isolation. The life of what an isolator keeps for one subject:
//
//   Isolate   before the slot has processes: what they are born into
//   Prepare   the slot becomes a sandbox: its limits, mounts and settings; before any code of it
//   runs Usage, Watch, Update    while it runs, any number of times, at once with each other
//   Cleanup   its processes are gone. Once or more, also after a failed or missing Isolate or
//   Prepare; when it has
//             succeeded nothing of the subject is left
//   Recover   at the start of a daemon and each minute: finds what is left of subjects that nobody
//   owns, and cleans it up
//
// Thread-safe for different subjects; blocking; called from pool threads. Nothing is kept in memory
// for a subject, so that a restarted daemon can go on at any point.
class Isolator {
 public:
  virtual ~Isolator() = default;
  virtual std::string_view name() const = 0;
  virtual std::vector<v1::Capability> Capabilities() const { return {}; }
  // Lowers `policy` to what this host can hold.
  virtual void Restrict(model::LimitsPolicy&) const {}

  virtual Result<void> Isolate(const Subject&, SlotParts&) { return Ok(); }
  virtual Result<void> Prepare(const Subject&, LaunchParts&) { return Ok(); }
  // Brings a running sandbox to subject.limits. kResourceExhausted when it uses more than that and
  // cannot give it back.
  virtual Result<void> Update(const Subject&) { return Ok(); }
  // Adds its figures; of things that are gone they stay 0.
  virtual Result<void> Usage(const Subject&, v1::Usage&) { return Ok(); }
  // Adds what has been stopped between two readings. Pure.
  virtual void Watch(const v1::Limits&, const v1::Usage& /*before*/, const v1::Usage& /*now*/,
                     std::vector<LimitHit>&) const {}
  // kDeadlineExceeded when something would not go.
  virtual Result<void> Cleanup(const Subject&, MonoTime /*deadline*/) { return Ok(); }
  // One line for each thing that was found and removed.
  virtual Result<std::vector<std::string>> Recover(const Owned&, MonoTime /*deadline*/) {
    return std::vector<std::string>();
  }
};

using Isolators = std::vector<std::unique_ptr<Isolator>>;

}  // namespace dsec::sandbox

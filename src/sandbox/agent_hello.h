// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "dsec/v1/aether.pb.h"
#include "dsec/v1/model.pb.h"
#include "rpc/channel.h"
#include "runtime/deadline.h"
#include "runtime/task.h"
#include "sandbox/isolators/cgroup_tree.h"

namespace dsec::sandbox {

// What the backends with an agent have in common.

// Adds phases to a record, each from the end of the one before.
class PhaseClock {
 public:
  void Done(v1::SandboxRecord& record, std::string_view phase) {
    const MonoTime now = Clock::System().Mono();
    v1::PhaseTime* item = record.add_phases();
    item->set_phase(std::string(phase));
    item->set_micros(static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::microseconds>(now - last_).count()));
    last_ = now;
  }

 private:
  MonoTime last_ = Clock::System().Mono();
};

// What an agent is told of its sandbox.
v1::HelloRequest HelloOf(const v1::SandboxRecord& record, std::string token);

// Says Hello; without a good answer the channel is closed.
runtime::Task<std::shared_ptr<rpc::Channel>> SayHello(std::shared_ptr<rpc::Channel> channel,
                                                      v1::HelloRequest hello,
                                                      runtime::Deadline deadline);

// What CgroupTree::WaitGone does, without a thread.
runtime::Task<void> WaitGone(const DyingSlot& dying, runtime::Deadline deadline);

}  // namespace dsec::sandbox

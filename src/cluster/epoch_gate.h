// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "runtime/async_event.h"
#include "runtime/blocking_pool.h"
#include "runtime/deadline.h"
#include "runtime/gate.h"
#include "runtime/task.h"

namespace dsec::cluster {

// What an edge asks before it does anything for a caller (docs/design/cluster.md, section 3). One
// shard.
class EpochGate {
 public:
  virtual ~EpochGate() = default;
  // The caller knows the node by `epoch`. Lower than the own one: kFailedPrecondition
  // "edge.epoch_stale". Higher: everything of the epochs before is ended, the new one is on disk,
  // and only then this is ok; kUnavailable "edge.fencing" as long as that has not come about.
  // Over kMaxEpoch: kInvalidArgument "edge.epoch".
  virtual runtime::Task<void> Check(uint64_t epoch, runtime::Deadline deadline) = 0;
  // Whether this is the epoch, now. What a Check allowed must ask again after every wait.
  virtual bool Serves(uint64_t epoch) const = 0;
  // 0: the node never was in a cluster.
  virtual uint64_t epoch() const = 0;
};

// kFailedPrecondition "edge.epoch_stale".
Error StaleEpochError(uint64_t theirs, uint64_t own);

// The real one. Its state is the file `path`: the epoch, and the one that it is about to take while
// it ends the sandboxes of those before. So a daemon that is killed in the middle goes on with that
// at its next start (Resume), before it serves anybody.
class FencingGate final : public EpochGate {
 public:
  // Ends every sandbox of the node.
  using Fence = std::function<runtime::Task<void>(std::string message, runtime::Deadline deadline)>;

  // kInternal "edge.epoch_damaged" for a file that is not of ours: which epoch the node had is not
  // known then, so it must not serve.
  static Result<std::unique_ptr<FencingGate>> Open(std::string path, runtime::Executor home,
                                                   Fence fence);
  // Stop must have returned, or the shards must have been stopped.
  ~FencingGate() override;

  runtime::Task<void> Check(uint64_t epoch, runtime::Deadline deadline) override;
  bool Serves(uint64_t epoch) const override { return fencing_ == 0 && epoch == epoch_; }
  uint64_t epoch() const override { return epoch_; }
  // Ends what a fence that was interrupted had begun.
  runtime::Task<void> Resume(runtime::Deadline deadline);
  // Ends a fence under way, which goes on at the next start, and waits for that.
  boost::asio::awaitable<void> Stop();

 private:
  FencingGate(std::string path, runtime::Executor home, Fence fence);
  // Carries one fence to its end, whoever goes away meanwhile.
  boost::asio::awaitable<void> RunFence();
  runtime::Task<void> FenceOnce();
  runtime::Task<void> Write(uint64_t epoch, uint64_t fencing);

  const std::string path_;
  const runtime::Executor home_;
  const Fence fence_;
  uint64_t epoch_ = 0;
  uint64_t fencing_ = 0;  // the epoch that comes; 0: none
  bool running_ = false;  // RunFence
  std::optional<Error> last_error_;
  runtime::AsyncEvent changed_;
  runtime::Running fence_work_;
  runtime::BlockingPool disk_;
  runtime::Gate gate_;
};

}  // namespace dsec::cluster

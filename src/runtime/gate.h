// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/task.h"

namespace dsec::runtime {

namespace internal {
struct Remote;
}

// Counts the work that uses something, so that the something can be closed: no new work enters,
// what runs is awaited. Thread-safe. Must be empty when it is destroyed, which Close or the end of
// the shards brings about.
class Gate {
 public:
  Gate() = default;
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  // False once closed; otherwise Leave must follow.
  bool Enter();
  void Leave();
  // Closes and returns when nothing is inside, in spite of cancellation. Any number of callers, on
  // any shard.
  boost::asio::awaitable<void> Close();
  bool closed() const;
  size_t count() const;

 private:
  struct Waiter;
  mutable std::mutex mutex_;
  bool closed_ = false;
  size_t count_ = 0;
  std::vector<std::shared_ptr<Waiter>> waiters_;
};

// One entry, left on destruction. Empty when the gate was closed.
class GatePass {
 public:
  explicit GatePass(Gate& gate) : gate_(gate.Enter() ? &gate : nullptr) {}
  GatePass(GatePass&& other) noexcept : gate_(std::exchange(other.gate_, nullptr)) {}
  GatePass& operator=(GatePass&&) = delete;
  ~GatePass() {
    if (gate_ != nullptr) gate_->Leave();
  }
  explicit operator bool() const { return gate_ != nullptr; }

 private:
  Gate* gate_;
};

// Starts `work` on `executor`, detached and counted by the gate. Any thread. False, with `work`
// destroyed unstarted, when the gate is closed.
bool Spawn(Gate& gate, Executor executor, boost::asio::awaitable<void> work);

// A coroutine that was started by SpawnCancellable; empty when it was not.
class Running {
 public:
  Running() = default;
  explicit Running(std::shared_ptr<internal::Remote> remote) : remote_(std::move(remote)) {}
  explicit operator bool() const { return remote_ != nullptr; }
  // Any thread, at any time, also when it has ended. task.h says what the coroutine sees.
  void Cancel() const;

 private:
  std::shared_ptr<internal::Remote> remote_;
};

// As Spawn.
Running SpawnCancellable(Gate& gate, Executor executor, boost::asio::awaitable<void> work);

}  // namespace dsec::runtime

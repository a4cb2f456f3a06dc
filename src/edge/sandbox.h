// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dsec/v1/model.pb.h"
#include "edge/activity.h"
#include "edge/admission.h"
#include "edge/fair_queue.h"
#include "iam/quota_keeper.h"
#include "runtime/async_event.h"
#include "runtime/task.h"
#include "sandbox/backend.h"

namespace dsec::edge {

// One sandbox of this node from its admission to its end. It belongs to one shard: what is public
// here and not said to be for any thread is touched on that shard alone.
class Sandbox {
 public:
  Sandbox(runtime::Executor executor, v1::SandboxRecord record)
      : id_(record.id()),
        executor_(std::move(executor)),
        record_(std::make_shared<const v1::SandboxRecord>(std::move(record))) {}

  // --- any thread ---
  const std::string& id() const { return id_; }
  const runtime::Executor& executor() const { return executor_; }
  // The record as last changed; never null.
  std::shared_ptr<const v1::SandboxRecord> record() const {
    std::lock_guard lock(record_mutex_);
    return record_;
  }
  // Its record with the time of the last activity.
  v1::SandboxRecord View() const;
  // It is to end although its create has not: the create makes no further thing on the host.
  bool doomed() const { return doomed_.load(std::memory_order_relaxed); }

  // --- own shard ---
  v1::State state() const { return record_->state(); }
  // Changes a copy and publishes it.
  template <typename F>
  void Change(F change) {
    auto next = std::make_shared<v1::SandboxRecord>(*record_);
    change(*next);
    Publish(std::move(next));
  }
  // An event with the next seq, about the state as it is now. To be saved together with the record.
  v1::Event NewEvent(std::string_view type, int64_t now_ms);
  void Doom() { doomed_.store(true, std::memory_order_relaxed); }

  // Wakes all who wait for a change of this object; they look again at what they wait for.
  void Changed() {
    changed_.Set();
    changed_.Reset();
  }
  runtime::Task<void> WaitChange(runtime::Deadline deadline) { return changed_.Wait(deadline); }

  // Set from RUNNING on, until its end.
  std::shared_ptr<sandbox::Instance> instance;
  std::optional<Activity> activity;
  void Touch(int64_t now_ms) { last_activity_ms_.store(now_ms, std::memory_order_relaxed); }

  Admission::Place place;
  iam::QuotaKeeper::Charge charge;  // of its project; both from admission to the end

  // The create.
  bool recorded = false;     // the record is in the store
  bool create_done = false;  // RUNNING was reached, or create_error says why not
  std::optional<Error> create_error;
  std::shared_ptr<FairQueue::Ticket> ticket;  // while it stands in line
  uint32_t joiners = 0;                       // calls that wait for it
  uint32_t claims = 0;                        // replies on their way
  bool delivered = false;                     // one has arrived

  // The end.
  v1::Termination stop;  // meaningful once stopping
  bool stop_recorded = false;
  bool quiesced = false;                                   // nothing of the code inside is left
  runtime::Deadline stop_by = runtime::Deadline::Never();  // end of the grace
  bool stuck = false;                                      // the last attempt to remove it failed
  uint64_t stop_requests = 0;  // each makes a stuck one try again at once
  bool ended = false;          // the terminal event is recorded

  // The recovery after a restart of this daemon: true until its first attempt has come to
  // something.
  bool recovering = false;
  std::atomic<bool> adopted = false;  // any thread

  bool disk_full = false;  // an event has said so, and it still is

  // Events that wait for the next write, also those whose write has failed.
  std::vector<v1::Event> unsaved;
  bool flush_due = false;  // a FlushLater will look at them

  // Time at which it stands in the queue of deadlines; 0 when it does not.
  int64_t armed_ms = 0;

  void Publish(std::shared_ptr<const v1::SandboxRecord> next) {
    std::lock_guard lock(record_mutex_);
    record_.swap(next);
  }

 private:
  const std::string id_;
  const runtime::Executor executor_;
  mutable std::mutex record_mutex_;
  std::shared_ptr<const v1::SandboxRecord> record_;  // written on the shard only
  std::atomic<int64_t> last_activity_ms_ = 0;
  std::atomic<bool> doomed_ = false;
  runtime::AsyncEvent changed_;
};

// Executes `function` on destruction.
template <typename F>
class OnExit {
 public:
  explicit OnExit(F function) : function_(std::move(function)) {}
  OnExit(const OnExit&) = delete;
  OnExit& operator=(const OnExit&) = delete;
  ~OnExit() { function_(); }

 private:
  F function_;
};

}  // namespace dsec::edge

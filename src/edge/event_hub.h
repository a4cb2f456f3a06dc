// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/async_event.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::edge {

// Tells those who wait for events that there are new ones; the events themselves are read from the
// store. Thread-safe.
class EventHub {
 public:
  // Interest in the events of one sandbox, or of the node (empty id), from its making on. Made,
  // used and destroyed on one shard.
  class Subscription {
   public:
    Subscription(EventHub& hub, std::string id, runtime::Executor executor);
    ~Subscription();
    Subscription(const Subscription&) = delete;
    Subscription& operator=(const Subscription&) = delete;
    // Ok when events were announced since the last Wait returned ok or the subscription was made.
    runtime::Task<void> Wait(runtime::Deadline deadline);

   private:
    friend class EventHub;
    struct Waiter {
      explicit Waiter(runtime::Executor on) : executor(std::move(on)) {}
      const runtime::Executor executor;
      runtime::AsyncEvent news;
    };
    EventHub& hub_;
    const std::string id_;
    const std::shared_ptr<Waiter> waiter_;
  };

  // Events of the sandbox (or, empty, of the node itself) have been committed. Any thread.
  void Announce(std::string_view id);

 private:
  using Waiters = std::vector<std::shared_ptr<Subscription::Waiter>>;
  void AnnounceLocked(const std::string& id);

  std::mutex mutex_;
  std::unordered_map<std::string, Waiters> topics_;
};

}  // namespace dsec::edge

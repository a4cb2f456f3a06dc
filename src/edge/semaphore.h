// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "edge/fair_queue.h"

namespace dsec::edge {

// `permits` things of one kind, handed out in order of arrival over all shards. Must outlive its
// permits.
class Semaphore {
 public:
  class Permit {
   public:
    Permit() = default;
    Permit(Permit&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)) {}
    Permit& operator=(Permit&& other) noexcept {
      std::swap(owner_, other.owner_);
      return *this;
    }
    ~Permit() {
      if (owner_ != nullptr) owner_->Return();
    }

   private:
    friend class Semaphore;
    explicit Permit(Semaphore* owner) : owner_(owner) {}
    Semaphore* owner_ = nullptr;
  };

  // `reason` is that of kResourceExhausted, at the deadline or when more than `max_waiting` stand
  // in line.
  Semaphore(std::string_view reason, size_t permits, size_t max_waiting)
      : reason_(reason), queue_(reason, max_waiting, std::chrono::hours(1)), permits_(permits) {}

  runtime::Task<Permit> Acquire(std::shared_ptr<FairQueue::Ticket> ticket,
                                runtime::Deadline deadline);
  size_t waiting() const { return queue_.waiting(); }
  void Close() { queue_.Close(); }

 private:
  Result<void> Take();
  void Return();

  const std::string_view reason_;
  FairQueue queue_;
  std::mutex mutex_;
  size_t permits_;
};

}  // namespace dsec::edge

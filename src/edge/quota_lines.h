// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "edge/fair_queue.h"

namespace dsec::edge {

// Those who wait for quota, a line a project: one that is at its limit holds up nobody else.
// Thread-safe.
class QuotaLines {
 public:
  // `max_waiting` and `retry` of each line, as FairQueue takes them.
  QuotaLines(size_t max_waiting, std::chrono::milliseconds retry)
      : max_waiting_(max_waiting), retry_(retry) {}

  // As FairQueue::Enter, with reason "quota.queue".
  runtime::Task<void> Enter(std::string project, std::shared_ptr<FairQueue::Ticket> ticket,
                            FairQueue::Take take, runtime::Deadline deadline);
  bool Waits(const std::string& project) const;
  void Poke();
  void Close();

 private:
  struct Line {
    Line(size_t max_waiting, std::chrono::milliseconds retry)
        : queue("quota.queue", max_waiting, retry) {}
    FairQueue queue;
    size_t users = 0;
  };
  class User;

  const size_t max_waiting_;
  const std::chrono::milliseconds retry_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::map<std::string, std::shared_ptr<Line>> lines_;  // those with users
};

}  // namespace dsec::edge

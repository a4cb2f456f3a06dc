// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <vector>

namespace dsec::edge {

// Things that want to be looked at when a wall-clock time has come. An entry is not taken back: the
// one who is looked at too early enters itself again. Thread-safe; holds nothing alive.
template <typename T>
class DueQueue {
 public:
  // True when it is now the first in the queue.
  bool Push(int64_t due_ms, std::weak_ptr<T> item) {
    std::lock_guard lock(mutex_);
    const bool first = entries_.empty() || due_ms < entries_.top().due_ms;
    entries_.push({due_ms, std::move(item)});
    return first;
  }

  std::vector<std::shared_ptr<T>> PopDue(int64_t now_ms) {
    std::vector<std::shared_ptr<T>> due;
    std::lock_guard lock(mutex_);
    while (!entries_.empty() && entries_.top().due_ms <= now_ms) {
      if (auto item = entries_.top().item.lock()) due.push_back(std::move(item));
      entries_.pop();
    }
    return due;
  }

  std::optional<int64_t> Next() const {
    std::lock_guard lock(mutex_);
    if (entries_.empty()) return std::nullopt;
    return entries_.top().due_ms;
  }

 private:
  struct Entry {
    int64_t due_ms;
    std::weak_ptr<T> item;
    bool operator<(const Entry& other) const { return due_ms > other.due_ms; }
  };
  mutable std::mutex mutex_;
  std::priority_queue<Entry> entries_;
};

}  // namespace dsec::edge

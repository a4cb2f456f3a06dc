// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

namespace dsec::aether {

// Bytes of memory that all kept output of the sandbox may take. When it is full, `reclaim` is asked
// to free some (it drops finished output that nobody has read yet, oldest first, and flags it).
class MemoryBudget {
 public:
  explicit MemoryBudget(size_t limit) : limit_(limit) {}
  void set_reclaim(std::function<bool(size_t)> reclaim) { reclaim_ = std::move(reclaim); }
  bool Take(size_t bytes);
  void Give(size_t bytes) { used_ -= bytes; }
  size_t used() const { return used_; }
  size_t limit() const { return limit_; }

 private:
  size_t limit_;
  size_t used_ = 0;
  std::function<bool(size_t)> reclaim_;
};

// What is kept of one output stream: every byte while no more than `cap` came; then the first half
// of the cap and the last half, with a hole between that is counted. Memory grows with what is
// kept, never with what was written. Where the budget is empty the stream keeps what it has room
// for and counts the rest as dropped.
class OutputStream {
 public:
  OutputStream(uint64_t cap, MemoryBudget& budget);
  ~OutputStream() { Free(); }
  OutputStream(const OutputStream&) = delete;
  OutputStream& operator=(const OutputStream&) = delete;

  void Append(std::string_view data);
  // Gives all memory back; every byte counts as dropped from then on.
  void Free();

  struct Piece {
    uint64_t offset = 0;   // in the stream, of data[0]
    uint64_t skipped = 0;  // dropped bytes that lie just before it
    std::string_view data;
  };
  // What a reader who has seen everything before `offset` gets next: at most three pieces and
  // `max_bytes` bytes. Valid until the next change. `next` is the offset to ask for then.
  struct View {
    std::vector<Piece> pieces;
    uint64_t next = 0;
  };
  View Read(uint64_t offset, uint64_t max_bytes) const;

  uint64_t total() const { return total_; }
  uint64_t kept() const { return head_.size + tail_.size; }
  uint64_t dropped() const { return total_ - kept(); }
  // True once bytes are being lost: reading on costs time and keeps only the last part.
  bool overflowing() const { return dropped() > 0; }

 private:
  struct Buffer {
    char* data = nullptr;
    size_t size = 0;
    size_t capacity = 0;
  };
  // Room for `wanted` bytes, at most `limit`; returns what there is.
  size_t Grow(Buffer& buffer, size_t wanted, size_t limit);
  void AppendTail(std::string_view data);
  uint64_t tail_start() const { return total_ - tail_.size; }

  MemoryBudget& budget_;
  size_t head_limit_;
  size_t tail_limit_;
  Buffer head_;
  Buffer tail_;            // a ring once it is full
  size_t tail_first_ = 0;  // index of the oldest byte in it
  uint64_t total_ = 0;
};

}  // namespace dsec::aether

// SPDX-License-Identifier: Apache-2.0
#include "aether/output_store.h"

#include <algorithm>
#include <cstring>

namespace dsec::aether {
namespace {

constexpr size_t kFirstCapacity = 1024;

}  // namespace

bool MemoryBudget::Take(size_t bytes) {
  if (used_ + bytes > limit_ && reclaim_) reclaim_(used_ + bytes - limit_);
  if (used_ + bytes > limit_) return false;
  used_ += bytes;
  return true;
}

OutputStream::OutputStream(uint64_t cap, MemoryBudget& budget)
    : budget_(budget), head_limit_(cap - cap / 2), tail_limit_(cap / 2) {}

size_t OutputStream::Grow(Buffer& buffer, size_t wanted, size_t limit) {
  wanted = std::min(wanted, limit);
  if (wanted <= buffer.capacity) return wanted;
  size_t capacity = std::min(std::max({wanted, buffer.capacity * 2, kFirstCapacity}), limit);
  if (!budget_.Take(capacity - buffer.capacity)) return buffer.capacity;
  char* data = static_cast<char*>(std::realloc(buffer.data, capacity));
  if (data == nullptr) {
    budget_.Give(capacity - buffer.capacity);
    return buffer.capacity;
  }
  buffer.data = data;
  buffer.capacity = capacity;
  return wanted;
}

void OutputStream::Append(std::string_view data) {
  if (total_ == head_.size && !data.empty()) {  // nothing has gone past the head yet
    size_t room = Grow(head_, head_.size + data.size(), head_limit_);
    size_t taken = std::min(room - head_.size, data.size());
    if (taken > 0) std::memcpy(head_.data + head_.size, data.data(), taken);
    head_.size += taken;
    total_ += taken;
    data.remove_prefix(taken);
  }
  if (!data.empty()) AppendTail(data);
}

void OutputStream::AppendTail(std::string_view data) {
  total_ += data.size();
  size_t room = tail_.capacity;
  if (tail_.size + data.size() > tail_.capacity && tail_.capacity < tail_limit_) {
    // Growing happens only before the ring has wrapped, because it wraps at its limit or where the
    // budget ended it.
    if (tail_first_ == 0) room = Grow(tail_, tail_.size + data.size(), tail_limit_);
    if (room < std::min(tail_.size + data.size(), tail_limit_)) tail_limit_ = tail_.capacity;
  }
  if (tail_.capacity == 0) return;
  // The ring's modulus is what is filled for good: while it still grows nothing wraps.
  size_t ring = tail_limit_;
  if (data.size() >= ring) {
    data.remove_prefix(data.size() - ring);
    std::memcpy(tail_.data, data.data(), ring);
    tail_.size = ring;
    tail_first_ = 0;
    return;
  }
  size_t end = (tail_first_ + tail_.size) % ring;
  size_t first = std::min(data.size(), ring - end);
  std::memcpy(tail_.data + end, data.data(), first);
  std::memcpy(tail_.data, data.data() + first, data.size() - first);
  size_t size = tail_.size + data.size();
  if (size > ring) {
    tail_first_ = (tail_first_ + (size - ring)) % ring;
    size = ring;
  }
  tail_.size = size;
}

void OutputStream::Free() {
  budget_.Give(head_.capacity + tail_.capacity);
  std::free(head_.data);
  std::free(tail_.data);
  head_ = {};
  tail_ = {};
  tail_first_ = 0;
  head_limit_ = 0;
  tail_limit_ = 0;
}

OutputStream::View OutputStream::Read(uint64_t offset, uint64_t max_bytes) const {
  View view;
  view.next = std::min(offset, total_);
  auto add = [&](uint64_t start, std::string_view data) {
    if (data.empty() || max_bytes == 0) return;
    data = data.substr(0, max_bytes);
    max_bytes -= data.size();
    uint64_t skipped = start - view.next;
    if (!view.pieces.empty() && skipped == 0 &&
        view.pieces.back().data.data() + view.pieces.back().data.size() == data.data()) {
      view.pieces.back().data = {view.pieces.back().data.data(),
                                 view.pieces.back().data.size() + data.size()};
    } else {
      view.pieces.push_back({start, skipped, data});
    }
    view.next = start + data.size();
  };
  if (view.next < head_.size) {
    add(view.next, std::string_view(head_.data + view.next, head_.size - view.next));
  }
  if (view.next >= head_.size && tail_.size > 0) {
    uint64_t start = std::max(view.next, tail_start());
    size_t skip = static_cast<size_t>(start - tail_start());
    if (skip < tail_.size) {
      size_t ring = std::max(tail_limit_, tail_.size);
      size_t begin = (tail_first_ + skip) % ring;
      size_t size = tail_.size - skip;
      size_t first = std::min(size, ring - begin);
      add(start, std::string_view(tail_.data + begin, first));
      if (size > first) add(start + first, std::string_view(tail_.data, size - first));
    }
  }
  if (max_bytes > 0 && view.next < total_ && tail_.size == 0) {
    // Nothing kept lies past this point: what remains up to the end was dropped for good.
    view.pieces.push_back({total_, total_ - view.next, {}});
    view.next = total_;
  }
  return view;
}

}  // namespace dsec::aether

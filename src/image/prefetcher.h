// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "image/layer_trace.h"
#include "os/unique_fd.h"

namespace dsec::image {

struct PrefetchOptions {
  size_t requests = 2;                  // at once, on threads of their own; 0: none at all
  uint64_t bytes_per_s = 128ull << 20;  // of what was not in the page cache
  uint64_t request_bytes = 1 << 20;     // no more than the readahead of the mounts
  size_t layers = 64;                   // whose traces may wait
  // Nothing is read ahead while less than this part of the memory is available (MemAvailable),
  // which is when new pages push out those in use, or tasks wait longer than so much of the time.
  double memory_available_min = 0.125;
  double psi_memory_max = 10;  // per cent, `some avg10`
  // The same of I/O. Its own waiting counts there, so only looked at after ten seconds without any.
  double psi_io_max = 80;
  std::string proc = "/proc";
};

// Reads ahead what traces name, through the mounts that sandboxes use, so that it is in the very
// page cache that they read from.
//
// Each request is done by one of a few threads that nobody else needs; a root that hangs stops
// these and nothing more. A request waits, a tenth of a second at most, while layers are being
// mounted (Foreground). A layer's turn ends with its last use: what a request holds of the layer
// keeps it from being removed for as long as the kernel reads. Of one layer no more is read than
// half of the free memory, or a sixteenth of the available. Thread-safe.
class Prefetcher {
 public:
  explicit Prefetcher(const PrefetchOptions& options);
  ~Prefetcher();  // Close
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  bool wanted() const;
  // `layer` keeps its mount (O_PATH) and expires with its last use.
  void Add(std::weak_ptr<const os::UniqueFd> layer, const LayerTrace& trace);
  // Drops what waits; requests under way go on.
  void Close();
  // Until no request is under way; false: not within `patience`.
  bool Wait(std::chrono::milliseconds patience) const;

  // While it lives, requests wait a moment before they begin.
  class Foreground {
   public:
    explicit Foreground(Prefetcher& prefetcher);
    ~Foreground();
    Foreground(const Foreground&) = delete;
    Foreground& operator=(const Foreground&) = delete;

   private:
    Prefetcher& prefetcher_;
  };

  struct Figures {
    uint64_t layers = 0;         // added
    uint64_t read_bytes = 0;     // read ahead
    uint64_t present_bytes = 0;  // were in the page cache when their turn came
    uint64_t dropped_bytes =
        0;  // not read: the last use ended, an error, too little memory, too many layers
    uint64_t waiting_bytes = 0;  // of what has been added, now
    uint64_t held_back = 0;      // requests that waited for want of memory or for pressure
  };
  Figures figures() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // of the threads too
};

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/id.h"
#include "base/result.h"
#include "image/layer_trace.h"
#include "os/unique_fd.h"

namespace dsec::image {

// Records which pages of some EROFS mounts are read for the first time, in order, as the kernel
// tells it: the tracepoints erofs_read_folio and erofs_readahead, filtered to these mounts, in an
// instance of tracefs of its own. Pages that are in the page cache already are not read, so the
// mounts must be new and nobody else's, and without readahead (MountLayerApart).
//
// Memory is bounded: in the kernel by the buffers, whose overflow loses events and is counted, here
// by kMaxTraceParts. The instance is a folder of tracefs named after the sandbox; what a death
// leaves of it records nothing that anybody reads, and Sweep removes it. Thread-safe.
class TouchRecorder {
 public:
  // Kept small on hosts with many CPUs: each has a buffer of its own, 512 KiB here.
  static constexpr size_t kAtOnce = 4;

  // kFailedPrecondition "trace.unavailable": no tracefs, or a kernel without these tracepoints.
  static Result<void> Check();
  // `sandbox` names the instance. kResourceExhausted "trace.too_many" beyond kAtOnce of a process.
  static Result<std::unique_ptr<TouchRecorder>> Begin(const SandboxId& sandbox,
                                                      const std::vector<dev_t>& devices);
  ~TouchRecorder();  // ends it
  TouchRecorder(const TouchRecorder&) = delete;
  TouchRecorder& operator=(const TouchRecorder&) = delete;

  // Nothing that happens from now on is recorded.
  Result<void> Stop();
  bool stopped();

  // Whole pages of one inode.
  struct Touch {
    uint64_t nid = 0;  // the number of the inode in EROFS
    uint64_t page = 0;
    uint64_t pages = 0;
  };
  struct Touches {
    std::vector<std::vector<Touch>> devices;  // in the order of Begin
    uint64_t lost = 0;                        // events that the kernel had no room for
    bool truncated = false;                   // beyond kMaxTraceParts
  };
  // What has happened until now.
  Result<Touches> Read();

  // Removes the instances of sandboxes of this node that are not of this process, one line for
  // each. No other process may be recording for the node.
  static Result<std::vector<std::string>> Sweep(const NodeId& node);

 private:
  struct File {
    RangeSet seen;
    size_t last = SIZE_MAX;  // the part of Device::touches that may grow
  };
  struct Device {
    std::vector<Touch> touches;
    std::unordered_map<uint64_t, File> files;  // by nid
  };
  TouchRecorder() = default;
  Result<void> Enable();
  void Follow();
  Result<void> Drain();
  void Take(std::string_view line);
  void Add(Device& device, uint64_t nid, uint64_t page, uint64_t pages);
  Result<uint64_t> Lost() const;

  os::UniqueFd tracefs_;
  std::string name_;
  os::UniqueFd instance_;
  os::UniqueFd pipe_;
  os::UniqueFd stop_;  // eventfd
  std::mutex mutex_;
  std::string rest_;                    // of a line that was cut
  std::map<uint64_t, Device> devices_;  // by the kernel's number
  std::vector<uint64_t> order_;
  size_t parts_ = 0;
  bool truncated_ = false;
  bool stopped_ = false;
  std::thread follower_;
};

// The names of what was touched, found by a walk through `mount` (O_PATH); of a file with several
// names the first. What is no regular file is left out, and what lies beyond the bounds of a trace.
Result<LayerTrace> NameTouches(int mount, const std::vector<TouchRecorder::Touch>& touches);

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/result.h"
#include "os/unique_fd.h"
#include "sandbox/isolators/view_content.h"

namespace dsec::sandbox {

// One detached mount and the place it is put on.
struct ViewMount {
  std::string target;  // "/sys", "/proc/cpuinfo", ...
  os::UniqueFd mount;
};

// Makes the views of sandboxes. All sandboxes of one shape share one small read-only tmpfs; each
// has mounts of it with its own id mapping, so that the files belong to its root. Thread-safe;
// blocks for some tens of microseconds, for a new shape a millisecond.
class Views {
 public:
  // Reads the facts below `root` (empty: the host). The trees are attached to folders made in
  // `attach`; empty: nowhere, and then mounts are taken of a detached tree, which needs Linux 6.15.
  static Result<std::unique_ptr<Views>> Open(const std::string& root = "",
                                             const std::string& attach = "");
  explicit Views(HostFacts facts, std::string attach = "")
      : facts_(std::move(facts)), attach_(std::move(attach)) {}

  // `user_ns`: the sandbox's user namespace.
  Result<std::vector<ViewMount>> For(const ViewShape& shape, int user_ns);

 private:
  struct Entry {
    ViewShape shape;
    std::shared_ptr<const os::UniqueFd> tree;  // detached tmpfs
  };
  Result<std::shared_ptr<const os::UniqueFd>> TreeFor(const ViewShape& shape);

  const HostFacts facts_;
  const std::string attach_;
  std::mutex mutex_;
  std::list<Entry> entries_;  // the last used first
  uint64_t attached_ = 0;
};

}  // namespace dsec::sandbox

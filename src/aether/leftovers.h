// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "aether/cgroup.h"
#include "aether/pipes.h"

namespace dsec::aether {

// What outlives the execs that started it: processes in their cgroup, which is removed when the
// last one is gone, and the read ends of pipes that such processes still hold. Those are read on
// and dropped, so that a daemon that prints is neither stopped nor killed; only kMaxReaders are,
// the oldest beyond that are closed.
class Leftovers {
 public:
  static constexpr size_t kMaxReaders = 64;

  explicit Leftovers(Loop& loop) : loop_(loop) {}
  // Each may be null.
  void Add(std::unique_ptr<ExecCgroup> cgroup, std::unique_ptr<StreamReader> out,
           std::unique_ptr<StreamReader> err);
  void AddReader(std::unique_ptr<StreamReader> reader);
  void Kill();
  // Calls back once no cgroup with processes is left.
  void WhenGone(std::function<void()> callback);

 private:
  void Sweep();

  Loop& loop_;
  std::list<std::unique_ptr<ExecCgroup>> cgroups_;
  std::list<std::unique_ptr<StreamReader>> readers_;
  Timer sweep_;
  std::function<void()> when_gone_;
};

}  // namespace dsec::aether

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "aether/loop.h"
#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::aether {

struct CpuTimes {
  uint64_t user_usec = 0;
  uint64_t system_usec = 0;
  uint64_t throttled_usec = 0;
};

// Value of `key` in a "key value" file of the kernel, 0 when it is not there.
uint64_t KernelValue(std::string_view text, std::string_view key);

// The v2 cgroup of one exec: slot/code/<name>. Made here, removed by the destructor if nothing
// lives in it (Remove tells).
class ExecCgroup {
 public:
  // `slot` must outlive it.
  static Result<std::unique_ptr<ExecCgroup>> Create(int slot, const std::string& name);
  ~ExecCgroup() { Remove(); }
  ExecCgroup(const ExecCgroup&) = delete;
  ExecCgroup& operator=(const ExecCgroup&) = delete;

  int fd() const { return dir_.get(); }
  // SIGKILL to everything in it, forks in flight included (cgroup.kill, Linux 5.14).
  Result<void> Kill() const;
  // Pids as pid namespace A numbers them.
  std::vector<int> Processes() const;
  // Moves a process here.
  Result<void> Enter(int pid) const;
  CpuTimes Cpu() const;
  // A value of a file that exists only where the controller is on v2; 0 otherwise.
  uint64_t Value(const char* file, std::string_view key) const;
  bool Has(const char* file) const;
  // False also when it cannot be read any more.
  bool Populated() const;
  // Calls back from the loop once nothing lives in it. One waiter; a new one replaces it.
  void WhenEmpty(Loop& loop, Loop::Callback callback);
  void StopWaiting();
  // True when it is gone.
  bool Remove();

 private:
  ExecCgroup(int slot, std::string path) : slot_(slot), path_(std::move(path)) {}

  int slot_;
  std::string path_;
  os::UniqueFd dir_;
  os::UniqueFd events_;
  FdWatch watch_;
  Timer already_;
};

}  // namespace dsec::aether

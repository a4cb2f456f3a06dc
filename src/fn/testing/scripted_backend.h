// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/async_event.h"
#include "runtime/shards.h"
#include "sandbox/fn_backend.h"

namespace dsec::fn::testing {

// Workers in memory whose programs are scripts, a line each:
//   echo TEXT      writes TEXT and a newline       stdin        writes its input
//   args           writes its arguments            cat PATH     writes a file, ends with 1 if none
//   env NAME       writes a variable               write PATH TEXT  makes a file
//   exit N         ends                            verdict NAME ends so: CPU, WALL, MEMORY, OUTPUT
//   wait NAME      until Release(NAME)             yield        lets others go on
//   die, break     the worker dies, or is broken   dirty        the worker is dirty afterwards
//   nothing        the worker gives no verdict
// The program is the code, or the file ./NAME of argv[0]. A compiler is argv[0] "/bin/cc": it does
// the lines that begin with "cc " and leaves the others as the file prog. argv[0] "/bin/gone" does
// not exist.
//
// It holds the engine to the contract: one run at a time on a worker, none on one that is over, all
// limits set, one waiter for its end, everything on the shard that made it.
class ScriptedBackend final : public sandbox::FnBackend {
 public:
  struct Ran {
    std::string worker;
    std::vector<std::string> argv;
    std::vector<std::string> files;  // their paths
    std::vector<std::string> devices;
    v1::FnLimits limits;
    std::string base;
  };

  ScriptedBackend() = default;
  ~ScriptedBackend() override;

  std::string_view name() const override { return "scripted"; }
  std::vector<v1::Capability> Capabilities() const override { return {}; }
  runtime::Task<v1::FnEnvironment> Resolve(v1::FnEnvironment environment,
                                           runtime::Deadline deadline) override;
  Result<v1::FnLimits> Normalize(v1::FnLimits limits, std::string_view prefix) const override;
  runtime::Task<std::unique_ptr<sandbox::FnWorker>> MakeWorker(sandbox::FnWorkerSpec spec,
                                                               runtime::Deadline deadline) override;
  runtime::Task<std::vector<std::string>> Sweep(const std::vector<v1::SandboxRecord>& live,
                                                runtime::Deadline deadline) override;

  // --- what tests do ---
  void SetLayers(std::set<std::string> names);
  void Release(const std::string& name);
  // Waits until `count` runs in all have come to "wait NAME".
  void AwaitWaiting(const std::string& name, size_t count);
  void FailMakes(size_t count, const Error& error);
  void HoldMakes(bool hold);
  // Ends a worker's process; false when there is none of that name.
  bool Kill(const std::string& worker);
  std::vector<std::string> Alive() const;

  size_t made() const;
  size_t makes_tried() const;
  size_t resolved() const;
  size_t most_alive() const;
  std::vector<Ran> runs() const;

 private:
  friend class ScriptedWorker;
  struct Shared;
  const std::shared_ptr<Shared> shared_ = MakeShared();
  static std::shared_ptr<Shared> MakeShared();
};

}  // namespace dsec::fn::testing

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "dsec/v1/aether.pb.h"
#include "edge/event_hub.h"
#include "runtime/blocking_pool.h"
#include "sandbox/backend.h"

namespace dsec::edge::testing {

// A host in memory: for each sandbox the things that exist for it and an agent that keeps execs. It
// outlives the backends and edges that use it, as a real one does. Thread-safe.
//
// An exec's argv says what it does: "exit N" ends at once; "echo TEXT" writes and ends with 0;
// anything else runs until FinishExec, a signal or the end of its agent.
class FakeHost {
 public:
  FakeHost() = default;
  // A host in the same state, for what would have happened after a crash at this moment.
  std::unique_ptr<FakeHost> Clone() const;

  // --- what tests look at and do ---
  // "agent sb-...", "cgroup s3", "scratch sb-...": sorted.
  std::vector<std::string> Things() const;
  size_t agents() const;
  uint64_t Starts(std::string_view id, std::string_view op_id) const;
  bool Running(std::string_view id, std::string_view op_id) const;
  std::string KilledBy(std::string_view id, std::string_view op_id) const;
  void FinishExec(std::string_view id, std::string_view op_id, int exit_code);
  void KillAgent(std::string_view id, bool oom);
  void KillAllAgents();
  void SetBootId(std::string boot_id);
  // Something that nobody owns.
  void Plant(std::string_view thing);
  // Until lifted: Destroy fails as stuck, Adopt and calls are not answered.
  void SetStuck(std::string_view id, bool stuck);
  void SetSilent(std::string_view id, bool silent);
  // Shutdown is answered, and execs end by it, only after this.
  void HoldShutdown(bool hold);
  void SetUsage(const v1::Usage& usage);

 private:
  friend class FakeBackend;
  friend class FakeInstance;
  friend class FakeChannel;

  struct Exec {
    std::string digest;
    bool running = true;
    bool detached = false;
    uint64_t starts = 1;
    std::string output;
    v1::ExecResult result;
  };
  struct Box {
    uint32_t slot = 0;
    uint64_t generation = 0;
    bool cgroup = false;
    bool scratch = false;
    bool agent = false;
    bool oom = false;
    int32_t pid = 0;
    std::map<std::string, Exec, std::less<>> execs;
  };
  struct State {
    std::map<std::string, Box, std::less<>> boxes;
    std::set<std::string, std::less<>> planted, stuck, silent;
    uint64_t next_generation = 1;
    int32_t next_pid = 1000;
    bool hold_shutdown = false;
    std::string boot_id = "boot-1";
    v1::Usage usage;
  };
  void End(Exec& exec, v1::EndKind kind, std::string killed_by, int exit_code);
  void KillLocked(std::string_view id, bool oom);
  bool Alive(std::string_view id) const;
  bool Silent(std::string_view id) const;
  bool ShutdownHeld() const;
  Result<v1::ExecReply> Reply(std::string_view id, std::string_view op_id, uint64_t offset,
                              bool known);

  mutable std::mutex mutex_;
  State state_;
  EventHub changes_;  // of a sandbox's agent and execs
};

// Passes "fake.create.step" before each thing that it makes. Its threads run the journal.
class FakeBackend final : public sandbox::SandboxBackend {
 public:
  explicit FakeBackend(FakeHost& host, size_t threads = 4)
      : host_(host), pool_("fake", threads, 10'000) {}

  std::string_view name() const override { return "fake"; }
  std::vector<v1::Capability> Capabilities() const override;
  Result<void> Normalize(v1::SandboxSpec& spec) const override;
  runtime::Task<std::shared_ptr<sandbox::Instance>> Create(v1::SandboxRecord& record,
                                                           sandbox::Journal journal,
                                                           runtime::Deadline deadline) override;
  runtime::Task<std::shared_ptr<sandbox::Instance>> Adopt(const v1::SandboxRecord& record,
                                                          runtime::Deadline deadline) override;
  runtime::Task<void> Destroy(const v1::SandboxRecord& record, runtime::Deadline deadline) override;
  runtime::Task<std::vector<std::string>> Sweep(const std::vector<v1::SandboxRecord>& live,
                                                runtime::Deadline deadline) override;

 private:
  Result<void> Make(v1::SandboxRecord& record, const sandbox::Journal& journal);

  FakeHost& host_;
  std::mutex mutex_;
  std::set<std::string, std::less<>> making_;
  runtime::BlockingPool pool_;
};

}  // namespace dsec::edge::testing

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "os/file.h"
#include "os/process.h"
#include "spawn/agent_abi.h"
#include "spawn/spawner.h"

namespace dsec::spawn::testing {

// Why these tests cannot run here, or nothing.
std::optional<std::string> WhatIsMissing();

// The cgroup directories of one slot in every hierarchy, made as the edge makes them. The
// destructor kills what is in them and removes them.
class SlotCgroups {
 public:
  static Result<std::unique_ptr<SlotCgroups>> Create(uint32_t agent_uid, uint32_t id_base);
  ~SlotCgroups();
  // Number of processes below the slot's v2 directory, and waits until there are none.
  Result<std::vector<pid_t>> Processes() const;
  Result<bool> WaitEmpty(MonoTime deadline) const;
  Result<void> Kill() const;

  std::string v2_path;
  os::UniqueFd slot_dir, agent_dir, init_dir;
  std::vector<std::string> v1_paths;
  std::vector<os::UniqueFd> v1_procs;
  os::UniqueFd memory_dir, pids_dir, cpu_dir;
};

struct ExecSpec {
  std::vector<std::string> argv;
  std::vector<std::string> env = {"PATH=/bin"};
  std::string cwd = "/";
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::vector<uint32_t> groups;
  std::vector<abi::ExecRlimit> rlimits;
  std::string input;
  std::optional<std::string>
      script;  // passed as the contract says; argv follows {"sh", "/proc/self/fd/3"}
  int program = -1;
  int cgroup = -1;
  int tty = -1;  // slave: becomes 0, 1 and 2
};

struct ExecResult {
  std::optional<abi::ExecFailure> failure;
  int wait_status = -1;
  pid_t pid = 0;
  std::string out, err;
  uint64_t max_rss_bytes = 0;
  bool Exited(int code) const;
};

struct RunningExec {
  uint64_t id = 0;
  os::UniqueFd status, out, err;
};

// A slot with the test agent in it, and the test in the agent's place towards init.
class Sandbox {
 public:
  static Result<std::unique_ptr<Sandbox>> MakeSlot(Spawner& spawner);
  ~Sandbox();

  // A tmpfs with the guest program at /bin/guest, owned by the sandbox's root.
  Result<os::UniqueFd> NewRoot();
  // The host's own system below a writable layer, as an image would be: id-mapped lower, overlay,
  // all mounts detached. kFailedPrecondition where the host's root file system allows no id-mapped
  // mount.
  Result<os::UniqueFd> NewHostImageRoot();
  // Launches with `root` (or a NewRoot) and connects.
  Result<LaunchReport> Launch(const LaunchPlan& plan, os::UniqueFd root = {},
                              const std::vector<os::UniqueFd>& views = {});
  static LaunchPlan DefaultPlan();
  std::string socket_path() const { return dir_->path() + "/sock"; }

  // Asks the test agent.
  Result<std::string> Ask(const std::string& request, std::vector<os::UniqueFd>* fds = nullptr);

  Result<RunningExec> Start(const ExecSpec& spec);
  Result<ExecResult> Finish(RunningExec& run);
  Result<ExecResult> Exec(const ExecSpec& spec);
  // /bin/guest with these arguments, as root.
  Result<ExecResult> Guest(std::vector<std::string> arguments);
  // First line that `run` prints.
  Result<std::string> ReadLine(RunningExec& run);
  Result<void> SignalAll(int signal);
  // Asks for a private file system; the answer is in `fs` and `fs_errno` once TakeMessage has seen
  // it.
  Result<void> MakeFs(uint64_t max_bytes, uint32_t max_inodes);
  std::optional<int> fs_errno;
  os::UniqueFd fs;
  // One message of init into `started`, `ended` or `fs`.
  Result<void> TakeMessage(MonoTime deadline);

  uint32_t agent_uid = 0;
  uint32_t id_base = 0;
  std::string token;
  std::unique_ptr<SlotCgroups> cgroups;
  SlotProcess process;
  int64_t make_usec = 0;  // how long MakeSlot took
  os::UniqueFd connection, channel, root, init_pidfd;
  std::map<uint64_t, abi::InitStarted> started;
  std::map<uint64_t, abi::InitEnded> ended;

 private:
  Sandbox() = default;
  Result<void> Connect();
  std::unique_ptr<os::TempDir> dir_;
  uint64_t next_id_ = 1;
};

// Each test binary lives in a mount namespace of its own, so that what others mount meanwhile does
// not show. Notes what the test process has open and mounted, and that nothing was added when the
// test ends. Starts one spawner for each test.
class SpawnTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite();
  void SetUp() override;
  void TearDown() override;
  // A launched sandbox, or a failed test and null.
  Sandbox* Launched(const LaunchPlan& plan = Sandbox::DefaultPlan());
  // A slot, or a failed test and null.
  Sandbox* Slot();

  std::unique_ptr<Spawner> spawner_;
  std::unique_ptr<Sandbox> sandbox_;

 private:
  std::set<std::string> mounts_before_;
  std::vector<int> fds_before_;
};

MonoTime In(int seconds);
SpawnerOptions TestSpawnerOptions();
std::string GuestPath();

}  // namespace dsec::spawn::testing

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dsec/v1/aether.pb.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "os/file.h"
#include "runtime/shards.h"
#include "sandbox/backends/container/container_backend.h"
#include "sandbox/testing/leak_check.h"

namespace dsec::sandbox::testing {

// A base layer with the host's own shell and core utilities, built once for the process.
class TestLayers {
 public:
  static Result<TestLayers*> Get();
  image::LayerStore& store() { return *store_; }
  image::LayerMounts& mounts() { return *mounts_; }
  // In a child of fork(2), which has none of the threads of its parent.
  void AfterFork();
  // A layer that holds one file.
  Result<void> AddLayer(image::LayerKind kind, const std::string& name, const std::string& path,
                        const std::string& content);
  // "test-python:1", a base with the host's interpreter; built when it is first asked for.
  Result<void> AddPython();
  Result<void> Remove(const std::string& ref) { return store_->Remove(ref); }

 private:
  void MakeMounts();

  std::optional<os::TempDir> dir_;
  std::unique_ptr<image::LayerStore> store_;
  std::unique_ptr<image::LayerMounts> mounts_;
  bool has_python_ = false;
};

// A node of its own (cgroups dsec-tsbox, ids of its own) on the real kernel, with the real spawner
// and agent. After each test everything that the process has on the host is compared with what was
// there before.
class ContainerTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  ContainerOptions Options() const;
  // A backend on the node's folders; the one there was is dropped first.
  void Open(uint32_t slot_pool_size = 0);
  v1::SandboxRecord NewRecord() const;
  Result<std::shared_ptr<Instance>> Create(v1::SandboxRecord& record);
  Result<std::shared_ptr<Instance>> Adopt(const v1::SandboxRecord& record);
  Result<void> Destroy(const v1::SandboxRecord& record, int seconds = 20);
  Result<std::vector<std::string>> Sweep(const std::vector<v1::SandboxRecord>& live);
  v1::Usage Usage(Instance& instance);
  // A record with an instance, or a failed test.
  std::shared_ptr<Instance> MustCreate(v1::SandboxRecord& record);

  struct Ran {
    v1::ExecResult result;
    std::string out;
    std::string err;
  };
  // Runs a script to its end; both streams whole.
  Result<Ran> Run(Instance& instance, const std::string& script, uint64_t timeout_ms = 60'000);
  // Starts a script and comes back when it has written `first` to stdout.
  Result<void> Start(Instance& instance, const std::string& op_id, const std::string& script,
                     const std::string& first);
  Result<v1::ExecReply> Call(Instance& instance, const v1::ExecRequest& request);
  Result<v1::ExecReply> Poll(Instance& instance, const v1::PollRequest& request);
  // What runs on the shard that the instances live on.
  template <typename T>
  Result<T> On(runtime::Task<T> task) {
    return runtime::BlockOn(shards_->at(0), std::move(task));
  }
  // Paths of the host.
  std::string CgroupPath(const std::string& hierarchy, const v1::SandboxRecord& record) const;
  std::string UpperPath(const v1::SandboxRecord& record, const std::string& path) const;

  static constexpr uint32_t kIdBase = 0x78000000;
  static constexpr uint32_t kAgentUidBase = 0x7ffe0000;
  static constexpr uint32_t kSlots = 256;

  HostState before_;
  TestLayers* layers_ = nullptr;
  std::optional<os::TempDir> dir_;
  std::unique_ptr<runtime::Shards> shards_;
  std::unique_ptr<ContainerBackend> backend_;
  std::vector<v1::SandboxRecord> journal_;  // every record that was saved
};

}  // namespace dsec::sandbox::testing

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/result.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "image/root_calls.h"
#include "sandbox/backends/container/container_backend.h"
#include "sandbox/backends/container/layer_recording.h"
#include "sandbox/backends/container/slot_pool.h"
#include "sandbox/fd_closer.h"
#include "sandbox/isolators/isolator.h"
#include "sandbox/isolators/views.h"
#include "sandbox/rootfs.h"
#include "spawn/spawner.h"

namespace dsec::sandbox {

// What the container backend does on the host, step by step. Everything blocks; thread-safe for
// different sandboxes.
class ContainerHost {
 public:
  ~ContainerHost();
  static Result<std::unique_ptr<ContainerHost>> Open(const ContainerOptions& options,
                                                     image::LayerStore* store,
                                                     image::LayerMounts* layers);

  const ContainerOptions& options() const { return options_; }
  const model::LimitsPolicy& policy() const { return policy_; }
  const std::vector<v1::Capability>& capabilities() const { return capabilities_; }
  const std::string& boot_id() const { return boot_id_; }
  // Why nothing can be created here at all; empty when it can.
  const std::string& unusable() const { return unusable_; }
  CgroupTree& tree() const { return *tree_; }
  Views& views() const { return *views_; }
  spawn::Spawner& spawner() const { return *spawner_; }
  std::string ScratchPath() const;
  std::string SocketPath(const SlotName& slot) const;
  // What the agent of a slot wants to see in Hello.
  std::string TokenOf(const SlotName& slot) const;
  static Subject SubjectOf(const v1::SandboxRecord& record);

  Result<void> StartSpawner();
  Result<ReadySlot> MakeSlot(const SlotName& slot);
  // Kills, waits and removes: for a slot without a sandbox.
  Result<void> RemoveSlot(const SlotName& slot, MonoTime deadline);

  struct Layers {
    std::shared_ptr<const HeldLayers> held;
    std::shared_ptr<LayerRecording> recording;  // null unless the spec asks for it
  };
  // Fills record.layer_ids from its spec and mounts them.
  Result<Layers> AcquireLayers(v1::SandboxRecord& record);
  Result<v1::FirstTouchReply> TakeFirstTouch(LayerRecording& recording,
                                             const v1::FirstTouchRequest& request) {
    return recording.Take(request, *store_);
  }
  // The layers of a sandbox that runs already, as many of them as can be had: its own root does not
  // depend on them.
  std::shared_ptr<const HeldLayers> HoldLayers(const v1::SandboxRecord& record);
  // Limits, writable layer, views.
  Result<LaunchParts> Prepare(const v1::SandboxRecord& record, int user_ns);
  Result<void> Launch(const HeldLayers& layers, LaunchParts& parts, int launch_socket,
                      runtime::Deadline deadline);

  // SIGKILL to everything of the sandbox.
  Result<DyingSlot> Kill(const v1::SandboxRecord& record);
  Error Stuck(const v1::SandboxRecord& record, const std::string& why) const;
  // After the death of its processes.
  Result<void> Cleanup(const v1::SandboxRecord& record, MonoTime deadline);
  // False when nothing of the slot is on the host.
  Result<os::PidFd> FindAgent(const v1::SandboxRecord& record) const;
  void ReadUsage(const Subject& subject, v1::Usage& usage);
  std::vector<LimitHit> Watch(const v1::Limits& limits, const v1::Usage& before,
                              const v1::Usage& now) const;

  // --- container_pack.cc ---
  // What stands still while a pack copies it, and is read after that.
  static std::string CopyOf(const std::string& scratch) { return scratch + "-pack"; }
  // `record` is of a sandbox that runs; `proceed` is asked throughout. Afterwards the layer's
  // limits are to be restored (RestoreDisk), once its copy is gone for good.
  Result<v1::PackReply> Pack(const v1::SandboxRecord& record, const v1::PackRequest& request,
                             const PackProgressFn& proceed);
  // Ends what a pack of an earlier process left: code that stands still, a copy.
  Result<void> EndPack(const v1::SandboxRecord& record);
  Result<void> RestoreDisk(const v1::SandboxRecord& record);

  // Every slot of which something is on the host.
  Result<std::vector<SlotName>> FindSlots() const;
  Result<std::vector<std::string>> Recover(const Owned& owned, MonoTime deadline);
  Result<void> RemoveRoots();

 private:
  explicit ContainerHost(const ContainerOptions& options);
  Result<std::shared_ptr<LayerRecording>> Record(const v1::SandboxRecord& record,
                                                 std::shared_ptr<const HeldLayers> layers);
  Result<void> OpenRunDir();
  Result<void> LoadKey();

  const ContainerOptions options_;
  image::LayerStore* store_ = nullptr;
  image::LayerMounts* layers_ = nullptr;
  std::string boot_id_;
  std::string key_;
  std::string unusable_;
  os::UniqueFd run_dir_;
  std::unique_ptr<CgroupTree> tree_;
  std::unique_ptr<Scratch> scratch_;
  std::unique_ptr<Views> views_;
  Isolators isolators_;  // in the order of Isolate and Prepare
  FdCloser closer_;
  image::RootThreads recording_ends_;  // of Record
  std::unique_ptr<spawn::Spawner> spawner_;
  model::LimitsPolicy policy_;
  std::vector<v1::Capability> capabilities_;
};

}  // namespace dsec::sandbox

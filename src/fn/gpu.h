// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "dsec/v1/fncall.pb.h"
#include "runtime/async_event.h"
#include "runtime/task.h"

namespace dsec::fn {

inline constexpr std::string_view kWholeGpu = "whole";
inline constexpr std::string_view kUnnamedMig = "mig";  // an instance whose profile nobody told

// "whole", "mig" or the name of a MIG profile ([<n>c.]<n>g.<n>gb[+attribute]).
bool IsGpuKind(std::string_view text);

// What is handed out: a GPU, or one compute instance of a GPU in MIG mode.
struct GpuDevice {
  std::string name;  // gpu0, gpu0/gi1/ci0
  std::string kind;
  std::vector<std::string> files;  // device files to open, those for all GPUs included
};

struct GpuInventory {
  std::vector<GpuDevice> devices;
  std::vector<std::string> problems;  // devices that cannot be handed out, one line each
};

// "gpu0/gi1=1g.10gb,gpu1/gi2=3g.40gb": profiles of GPU instances, which the driver tells by NVML
// alone and not in /proc.
Result<std::map<std::string, std::string>> ParseMigProfiles(std::string_view text);

// Reads <root>/dev/nvidia<N> and, for GPUs in MIG mode, <root>/proc/driver/nvidia/capabilities/
// gpu<N>/mig/gi<M>[/ci<K>]/access, whose DeviceFileMinor names /dev/nvidia-caps/nvidia-cap<minor>.
// The layout is that of docs.nvidia.com/datacenter/tesla/mig-user-guide/
// device-nodes-and-capabilities.html. A GPU with an instance is handed out by instances alone.
// Blocks on file systems in memory only. No driver: an empty inventory.
GpuInventory ReadGpus(const std::string& root, const std::map<std::string, std::string>& profiles);

// Hands devices out. An exclusive one has one holder, a shared one at most `shared_max`, and never
// both kinds at once. Served in order of arrival among the requests of one kind of device. One
// shard; must outlive its grants.
class GpuAllocator {
 public:
  class Grant {
   public:
    Grant() = default;
    Grant(Grant&& other) noexcept
        : owner_(std::exchange(other.owner_, nullptr)), held_(std::move(other.held_)) {}
    Grant& operator=(Grant&& other) noexcept {
      std::swap(owner_, other.owner_);
      std::swap(held_, other.held_);
      return *this;
    }
    ~Grant() {
      if (owner_ != nullptr) owner_->Return(held_);
    }
    // Of all its devices, each once.
    std::vector<std::string> Files() const;

   private:
    friend class GpuAllocator;
    Grant(GpuAllocator* owner, std::vector<size_t> held) : owner_(owner), held_(std::move(held)) {}
    GpuAllocator* owner_ = nullptr;
    std::vector<size_t> held_;
  };

  GpuAllocator(GpuInventory inventory, uint32_t shared_max);

  // kFailedPrecondition fn.gpu_missing with the field when the node could never serve it.
  Result<void> CheckPossible(const v1::FnGpuRequest& request) const;
  // CheckPossible holds and count is not 0.
  runtime::Task<Grant> Acquire(v1::FnGpuRequest request, runtime::Deadline deadline);
  // Wakes nobody any more.
  void Close() { closed_ = true; }

  struct Count {
    uint64_t total = 0;
    uint64_t free = 0;  // with no holder
  };
  std::map<std::string, Count> Counts() const;  // by kind
  size_t waiting() const { return waiting_.size(); }

 private:
  struct Use {
    uint32_t holders = 0;
    bool shared = false;
  };
  struct Waiter;

  bool TryTake(const v1::FnGpuRequest& request, std::vector<size_t>* taken);
  void Return(const std::vector<size_t>& held);
  void Serve();

  const GpuInventory inventory_;
  const uint32_t shared_max_;
  std::vector<Use> uses_;  // as inventory_.devices
  std::list<Waiter*> waiting_;
  bool closed_ = false;
};

}  // namespace dsec::fn

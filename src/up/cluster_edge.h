// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "edge/api.h"
#include "rpc/tls.h"
#include "runtime/shards.h"
#include "store/store.h"

namespace dsec::up {

// The EdgeApi that an apiserver of a cluster serves: the one place that knows which.
class ClusterEdges {
 public:
  virtual ~ClusterEdges() = default;
  virtual edge::EdgeApi& api() = 0;
  virtual runtime::Task<void> Stop() = 0;
};
// On shard 0. `store` and `shards` must outlive it.
runtime::Task<std::unique_ptr<ClusterEdges>> OpenClusterEdges(
    store::Store& store, runtime::Shards& shards, std::shared_ptr<const rpc::TlsHolder> tls);

}  // namespace dsec::up

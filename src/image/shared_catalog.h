// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "image/layer_store.h"
#include "image/node_lease.h"
#include "image/root_calls.h"

namespace dsec::image {

// The catalogue of a store as a daemon asks it: every call ends in bounded time, whatever the file
// system of the store does, with kUnavailable "layer.unreachable" if need be. The store is opened
// by its path at the first use and anew when something else has come to that path (a mount that
// went and came back). Thread-safe; blocks its caller, never longer than `patience`.
class SharedCatalog {
 public:
  // `seen`: the store has been there before, so it is not made when it is missing.
  explicit SharedCatalog(std::string root,
                         std::chrono::milliseconds patience = std::chrono::seconds(10),
                         bool seen = false);
  ~SharedCatalog();

  // Before the first use: what to ask for an id that the store does not have, or cannot be asked
  // for.
  void set_elsewhere(std::function<Result<LayerInfo>(const LayerId&)> elsewhere) {
    elsewhere_ = std::move(elsewhere);
  }

  // As LayerStore::Resolve. While the store does not answer, a name or id stands for what it stood
  // for when this object last heard of it: after a short wait, and without one while a call hangs.
  Result<LayerInfo> Resolve(std::string_view ref, LayerKind kind);
  // Several names or ids at once, of any kind; an answer for each, in their order.
  std::vector<Result<LayerInfo>> FindForUse(const std::vector<std::string>& refs);
  // As those of LayerStore; apart from Resolve, so that they do not hold it up.
  Result<LayerInfo> Find(std::string_view ref);
  Result<std::vector<LayerInfo>> List(const ListFilter& filter);
  // A removal that was begun may go on after "layer.unreachable".
  Result<void> Remove(std::string_view ref);
  // As that of LayerStore.
  Result<CollectReport> DeleteRemoved();
  // As that of LayerStore, apart from all others. "layer.unreachable" after `patience` or when
  // `stop` is asked for; what was begun goes on then.
  Result<CollectReport> Collect(const CollectOptions& options, std::chrono::milliseconds patience,
                                const std::stop_token& stop);
  // As ReadLeases and ForgetNode.
  Result<std::vector<Lease>> Leases();
  Result<void> Forget(std::string_view node);

 private:
  class Handle;
  template <typename T>
  Result<T> Ask(RootLane& lane, const std::shared_ptr<Handle>& handle,
                std::chrono::milliseconds patience, std::function<Result<T>(LayerStore&)> question);
  std::optional<LayerInfo> Recall(const std::string& ref) const;
  void Remember(const std::string& ref, const Result<LayerInfo>& answer);

  const std::chrono::milliseconds patience_;
  std::function<Result<LayerInfo>(const LayerId&)> elsewhere_;
  std::shared_ptr<Handle> names_;
  std::shared_ptr<Handle> rest_;
  std::shared_ptr<Handle> collection_;
  mutable std::mutex mutex_;
  std::map<std::string, LayerInfo> known_;  // by reference
  RootLane name_lane_;
  RootLane rest_lane_;
  RootLane collection_lane_;
};

}  // namespace dsec::image

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stop_token>
#include <string>
#include <vector>

#include "apiserver/layers_api.h"
#include "image/shared_catalog.h"
#include "runtime/blocking_pool.h"

namespace dsec::up {

// The node's layer store as the apiserver shows it, on threads of its own.
class LayerCatalog final : public apiserver::LayerCatalog {
 public:
  // `catalog` must outlive it.
  explicit LayerCatalog(image::SharedCatalog& catalog)
      : catalog_(catalog), pool_("layer_catalog", 2, 256), collection_("layer_collection", 1, 16) {}
  ~LayerCatalog() override { stop_.request_stop(); }
  runtime::Task<std::vector<apiserver::LayerView>> List(apiserver::LayerQuery query,
                                                        runtime::Deadline deadline) override;
  runtime::Task<apiserver::LayerView> Get(std::string ref, runtime::Deadline deadline) override;
  runtime::Task<void> Remove(std::string ref, runtime::Deadline deadline) override;
  runtime::Task<apiserver::CollectView> Collect(apiserver::CollectOrder order) override;
  runtime::Task<std::vector<apiserver::LayerNodeView>> Nodes(runtime::Deadline deadline) override;
  runtime::Task<void> ForgetNode(std::string node, runtime::Deadline deadline) override;

 private:
  image::SharedCatalog& catalog_;
  std::stop_source stop_;
  runtime::BlockingPool pool_;
  runtime::BlockingPool collection_;  // of its own, as it may take long
};

}  // namespace dsec::up

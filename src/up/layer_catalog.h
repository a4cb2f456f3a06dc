// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "apiserver/layers_api.h"
#include "image/layer_store.h"
#include "runtime/blocking_pool.h"

namespace dsec::up {

// The node's layer store as the apiserver shows it, on threads of its own.
class LayerCatalog final : public apiserver::LayerCatalog {
 public:
  // `store` must outlive it.
  explicit LayerCatalog(image::LayerStore& store) : store_(store), pool_("layer_catalog", 2, 256) {}
  runtime::Task<std::vector<apiserver::LayerView>> List(apiserver::LayerQuery query,
                                                        runtime::Deadline deadline) override;
  runtime::Task<apiserver::LayerView> Get(std::string ref, runtime::Deadline deadline) override;
  runtime::Task<void> Remove(std::string ref, runtime::Deadline deadline) override;

 private:
  image::LayerStore& store_;
  runtime::BlockingPool pool_;
};

}  // namespace dsec::up

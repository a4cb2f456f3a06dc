// SPDX-License-Identifier: Apache-2.0
#pragma once

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
      : catalog_(catalog), pool_("layer_catalog", 2, 256) {}
  runtime::Task<std::vector<apiserver::LayerView>> List(apiserver::LayerQuery query,
                                                        runtime::Deadline deadline) override;
  runtime::Task<apiserver::LayerView> Get(std::string ref, runtime::Deadline deadline) override;
  runtime::Task<void> Remove(std::string ref, runtime::Deadline deadline) override;

 private:
  image::SharedCatalog& catalog_;
  runtime::BlockingPool pool_;
};

}  // namespace dsec::up

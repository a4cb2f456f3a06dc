// SPDX-License-Identifier: Apache-2.0
#include "up/layer_catalog.h"

namespace dsec::up {
namespace {

apiserver::LayerView ViewOf(const image::LayerInfo& info) {
  apiserver::LayerView view;
  view.id = info.id.str();
  view.kind = std::string(image::KindName(info.kind));
  view.names = info.names;
  view.meta_bytes = info.meta_bytes;
  view.blob_bytes = info.blob_bytes;
  view.entries = info.entries;
  view.content_bytes = info.content_bytes;
  view.created_unix_ms = info.created_unix_ms;
  view.source = info.source;
  view.labels = info.labels;
  for (const LayerId& id : info.lower) view.lower.push_back(id.str());
  return view;
}

}  // namespace

runtime::Task<std::vector<apiserver::LayerView>> LayerCatalog::List(apiserver::LayerQuery query,
                                                                    runtime::Deadline deadline) {
  auto list = [this, query = std::move(query)]() -> Result<std::vector<apiserver::LayerView>> {
    image::ListFilter filter;
    if (!query.kind.empty()) {
      DSEC_TRY(filter.kind, image::ParseKind(query.kind));
    }
    filter.prefix = query.prefix;
    filter.labels = query.labels;
    filter.after = query.after;
    filter.limit = query.limit;
    DSEC_TRY(const std::vector<image::LayerInfo> found, catalog_.List(filter));
    std::vector<apiserver::LayerView> views;
    for (const image::LayerInfo& info : found) views.push_back(ViewOf(info));
    return views;
  };
  auto views = co_await pool_.Run(std::move(list), deadline);
  co_return views;
}

runtime::Task<apiserver::LayerView> LayerCatalog::Get(std::string ref, runtime::Deadline deadline) {
  auto find = [this, ref = std::move(ref)]() -> Result<apiserver::LayerView> {
    DSEC_TRY(const image::LayerInfo info, catalog_.Find(ref));
    return ViewOf(info);
  };
  auto view = co_await pool_.Run(std::move(find), deadline);
  co_return view;
}

runtime::Task<void> LayerCatalog::Remove(std::string ref, runtime::Deadline deadline) {
  auto remove = [this, ref = std::move(ref)] { return catalog_.Remove(ref); };
  auto removed = co_await pool_.Run(std::move(remove), deadline);
  co_return removed;
}

runtime::Task<apiserver::CollectView> LayerCatalog::Collect(apiserver::CollectOrder order) {
  const std::chrono::milliseconds time(order.timeout_ms);
  auto collect = [this, order, time]() -> Result<apiserver::CollectView> {
    image::CollectOptions options;
    options.unnamed_for = std::chrono::milliseconds(order.unnamed_for_ms);
    options.grace = std::chrono::milliseconds(order.grace_ms);
    options.dry_run = order.dry_run;
    DSEC_TRY(const image::CollectReport report, catalog_.Collect(options, time, stop_.get_token()));
    apiserver::CollectView view;
    for (const LayerId& id : report.removed) view.removed.push_back(id.str());
    for (const auto& [id, by] : report.in_use) view.in_use.push_back({id.str(), by});
    view.removed_bytes = report.removed_bytes;
    view.young = report.young;
    view.waiting = report.waiting;
    view.deleted = report.deleted;
    return view;
  };
  auto view = co_await collection_.Run(std::move(collect), runtime::Deadline::After(time));
  co_return view;
}

runtime::Task<std::vector<apiserver::LayerNodeView>> LayerCatalog::Nodes(
    runtime::Deadline deadline) {
  auto read = [this]() -> Result<std::vector<apiserver::LayerNodeView>> {
    DSEC_TRY(const auto leases, catalog_.Leases());
    std::vector<apiserver::LayerNodeView> views;
    for (const image::Lease& lease : leases) {
      views.push_back({lease.node, lease.epoch, lease.layers.size(), lease.renewed_unix_ms});
    }
    return views;
  };
  auto views = co_await pool_.Run(std::move(read), deadline);
  co_return views;
}

runtime::Task<void> LayerCatalog::ForgetNode(std::string node, runtime::Deadline deadline) {
  auto forget = [this, node = std::move(node)] { return catalog_.Forget(node); };
  auto forgotten = co_await pool_.Run(std::move(forget), deadline);
  co_return forgotten;
}

}  // namespace dsec::up

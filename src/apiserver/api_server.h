// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "apiserver/layers_api.h"
#include "base/metrics.h"
#include "edge/api.h"
#include "fn/fn_api.h"
#include "iam/audit_log.h"
#include "iam/directory.h"
#include "iam/quota_keeper.h"
#include "runtime/shards.h"

namespace dsec::apiserver {

struct ApiServerOptions {
  std::vector<std::string> listen;  // as http::Server::Start takes them
  std::string api_key;              // of the root principal; needs no store
  std::chrono::milliseconds default_exec_timeout{
      0};  // of attached commands that do not say; 0 = none
  metrics::Registry* registry = &metrics::Registry::Global();
  // Must outlive the server. Null: the routes of FnCall answer kFailedPrecondition fn.not_here.
  fn::FnApi* fn = nullptr;
  uint64_t fn_max_cpu_ms = 3'600'000;  // largest that a step may ask for
  // These must outlive the server. Null: the root key is the only one, and the routes of IAM answer
  // kFailedPrecondition iam.not_here; nothing is written down; no quotas are shown.
  iam::Directory* iam = nullptr;
  iam::AuditLog* audit = nullptr;
  iam::QuotaKeeper* quota = nullptr;
};

// The public HTTP API (api/openapi.yaml) over an EdgeApi. Holds no state about sandboxes.
class ApiServer {
 public:
  // `shards`, `edge` and `layers` must outlive it.
  static Result<std::unique_ptr<ApiServer>> Start(runtime::Shards& shards, edge::EdgeApi& edge,
                                                  LayerCatalog& layers, ApiServerOptions options);
  // Stop must have returned, or the shards must have been stopped.
  ~ApiServer();
  const std::vector<std::string>& addresses() const;
  // No new request; waits for those under way until the deadline. Streams end with an error record.
  // Once.
  runtime::Task<void> Stop(runtime::Deadline deadline);

 private:
  struct Impl;
  explicit ApiServer(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

// "METHOD /path/{name}" of every route, as api/openapi.yaml writes them; a test compares both.
std::vector<std::string> RouteNames();

}  // namespace dsec::apiserver
